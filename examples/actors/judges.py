"""Two actors: one scores texts, one asks it and remembers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from relax_rt.actors import Actor, idempotent, tell


class Judge(Actor):
    """Scores texts. Any of its copies will do, and twice does no harm."""

    max_concurrency = 16

    async def setup(self) -> None:
        self.ctx.log.info("here a model would be loaded")

    @idempotent
    async def score(self, text: str) -> float:
        await asyncio.sleep(0.01)
        return len(set(text.split())) / max(1, len(text.split()))

    async def words(self, text: str) -> AsyncIterator[str]:
        for word in text.split():
            await asyncio.sleep(0.05)
            yield word


class Clerk(Actor):
    """Keeps the tally: one process, one call after the other."""

    max_concurrency = 1

    async def setup(self) -> None:
        self.judge = self.ctx.actor("judge", Judge, timeout_s=30.0)
        self.scores: list[float] = []

    async def enter(self, text: str) -> float:
        self.scores.append(await self.judge.score(text))
        return self.scores[-1]

    @tell
    async def forget(self) -> None:
        self.scores.clear()

    @idempotent
    async def mean(self) -> float:
        return sum(self.scores) / max(1, len(self.scores))
