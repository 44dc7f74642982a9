"""Actors as a user writes them: a file of their own, named in roles.toml."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from relax_rt.actors import Actor, idempotent, tell


class Reward(Actor):
    async def setup(self) -> None:
        self.seen: list[str] = []

    async def score(self, text: str) -> float:
        self.seen.append(text)
        return len(text) / 2

    @idempotent
    async def pid(self) -> int:
        return os.getpid()

    @idempotent
    async def ponder(self, wait_s: float) -> int:
        """The caller's deadline is extended by wait_s."""
        self.ctx.event("pondering", pid=os.getpid())
        try:
            await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            self.ctx.event("ponder_cancelled", pid=os.getpid())
            raise
        return os.getpid()

    async def spend(self) -> int:
        self.ctx.event("spending", pid=os.getpid())
        await asyncio.sleep(60)
        return os.getpid()

    @tell
    async def note(self, text: str) -> None:
        self.seen.append(text)

    async def tokens(self, prompt: str) -> AsyncIterator[str]:
        made = 0
        try:
            for word in prompt.split():
                made += 1
                yield word
        finally:
            self.ctx.event("tokens_ended", made=made)


class Asker(Actor):
    """Calls other actors from inside a run."""

    async def ask(self, text: str) -> float:
        return await self.ctx.actor("reward2", Reward).score(text)

    async def ask_slot(self, slot: str) -> int:
        return await self.ctx.actor(slot, Reward, timeout_s=120.0).pid()
