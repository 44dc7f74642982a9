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
MAX_SEQUENCES = 1024
"""Sequences submitted to the engine at a time: more than any engine decodes together, fewer than any refuses."""
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
        together: maximum number of completions of one request.
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
        on_tokens: called about once a second with the number of tokens generated since the last call.
    """

    def __init__(self, engine: Engine, on_tokens: Callable[[int], None]) -> None:
        self._engine, self._on_tokens = engine, on_tokens
        self._assembly = Assembly()
        self._done: dict[tuple[int, int], Completion] = {}
        self._arrived = asyncio.Event()
        self._wake_at = 0

    def on_chunks(self, chunks: list[Chunk]) -> None:
        """Receive chunks; the callback given to `Engine.start`."""
        for chunk in chunks:
            completion = self._assembly.add(chunk)
            if completion is not None:
                self._done[completion.request, completion.member] = completion
        if len(self._done) >= self._wake_at:
            self._arrived.set()

    async def complete(self, requests: Sequence[GroupRequest]) -> list[Completion]:
        """Return the completions in the order of the requests and of their members."""
        self._done.clear()
        waiting, submitted = deque(requests), 0
        total = sum(len(request.seeds) for request in requests)
        tokens = self._engine.load().tokens_generated
        while len(self._done) < total:
            self._arrived.clear()
            submitted += self._submit(waiting, submitted - len(self._done))
            # Wake up when half of them are done, and at the end when all are.
            self._wake_at = total if not waiting else max(1, submitted - MAX_SEQUENCES // 2)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROGRESS_EVERY_S):
                    await self._arrived.wait()
            before, tokens = tokens, self._engine.load().tokens_generated
            self._on_tokens(tokens - before)
        found = [self._done[request.id, member] for request in requests for member in range(len(request.seeds))]
        self._done.clear()
        return found

    def _submit(self, waiting: deque[GroupRequest], in_flight: int) -> int:
        """Submit what there is room for; return the number of sequences."""
        more: list[GroupRequest] = []
        count = 0
        while waiting and (in_flight + count == 0 or in_flight + count + len(waiting[0].seeds) <= MAX_SEQUENCES):
            request = waiting.popleft()
            self._assembly.expect(request)
            more.append(request)
            count += len(request.seeds)
        if more:
            self._engine.submit(more)
        return count
