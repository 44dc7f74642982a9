"""Completions of many held-out prompts from one engine, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from relax_rt.roles.rollout.engines.base import Assembly, Chunk, Completion, GroupRequest

if TYPE_CHECKING:
    from relax_rt.roles.data.items import PromptItem
    from relax_rt.roles.rollout.engines.base import Engine

PROGRESS_EVERY_S = 1.0
AT_A_TIME = 1024
"""Sequences in the engine at a time: more than any decodes together, and fewer than any lets wait."""
SEED_DOMAIN = 1 << 63
"""Keeps the evaluator's sample seeds apart from those of training, which have 63 bits."""

SampleSeed = Callable[[int, int, int], int]


def requests_of(
    items: Sequence[PromptItem],
    *,
    samples: int,
    together: int,
    seed: SampleSeed,
    temperature: float,
    max_new_tokens: int,
    stop_ids: frozenset[int],
) -> list[GroupRequest]:
    """Return requests for `samples` completions of each item, item by item.

    Args:
        together: most completions of one request.
        seed: of (item's number, sample, attempt), below 2^63.
    """
    found: list[GroupRequest] = []
    for number, item in enumerate(items):
        seeds = [seed(number, sample, 0) | SEED_DOMAIN for sample in range(samples)]
        for first in range(0, samples, together):
            request = GroupRequest(
                id=len(found),
                prompt=tuple(item.tokens),
                seeds=tuple(seeds[first : first + together]),
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
            )
            found.append(request)
    return found


class HeldOutSampler:
    """Has an engine complete requests, a bounded number of sequences at a time.

    Args:
        told: is called about once a second with the tokens generated since the last time.
    """

    def __init__(self, engine: Engine, told: Callable[[int], None]) -> None:
        self._engine, self._told = engine, told
        self._assembly = Assembly()
        self._done: dict[tuple[int, int], Completion] = {}
        self._news = asyncio.Event()
        self._awaited = 0

    def arrive(self, chunks: list[Chunk]) -> None:
        """Receive chunks; the callback given to `Engine.start`."""
        for chunk in chunks:
            completion = self._assembly.add(chunk)
            if completion is not None:
                self._done[completion.request, completion.member] = completion
        if len(self._done) >= self._awaited:
            self._news.set()

    async def complete(self, requests: Sequence[GroupRequest]) -> list[Completion]:
        """Return the completions in the order of the requests and of their members."""
        self._done.clear()
        waiting, submitted = deque(requests), 0
        total = sum(len(request.seeds) for request in requests)
        tokens = self._engine.load().tokens_generated
        while len(self._done) < total:
            self._news.clear()
            submitted += self._submit(waiting, submitted - len(self._done))
            # Half of them at a time, and all at the end.
            self._awaited = total if not waiting else max(1, submitted - AT_A_TIME // 2)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROGRESS_EVERY_S):
                    await self._news.wait()
            before, tokens = tokens, self._engine.load().tokens_generated
            self._told(tokens - before)
        found = [self._done[request.id, member] for request in requests for member in range(len(request.seeds))]
        self._done.clear()
        return found

    def _submit(self, waiting: deque[GroupRequest], under_way: int) -> int:
        """Submit what there is room for; return the number of sequences."""
        more: list[GroupRequest] = []
        count = 0
        while waiting and (under_way + count == 0 or under_way + count + len(waiting[0].seeds) <= AT_A_TIME):
            request = waiting.popleft()
            self._assembly.expect(request)
            more.append(request)
            count += len(request.seeds)
        if more:
            self._engine.submit(more)
        return count
