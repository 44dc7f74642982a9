"""An engine around the run's own: lengths are log-normal, whatever is sampled, and weights may wait for sequences."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from relax_rt.roles.rollout import engine_factory
from relax_rt.roles.rollout.engines.base import Chunk, GroupRequest

MEMBERS = 1 << 12
"""A member is a request of its own here; its number in ours is request * MEMBERS + member."""


def draw(seed: int, median: int, sigma: float, most: int) -> int:
    """Tokens of the sequence with this seed."""
    return max(1, min(round(random.Random(seed).lognormvariate(math.log(median), sigma)), most))


class LongTail:
    """Engine of rollout.engines.base. With `interruptible` false new weights wait until all sequences that were
    begun have ended, and nothing is begun meanwhile."""

    def __init__(self, inner: Any, median: int, sigma: float, most: int, interruptible: bool) -> None:
        self._inner, self._shape, self._interruptible = inner, (median, sigma, most), interruptible
        self.name = inner.name
        self._begun = 0
        self._empty = asyncio.Event()
        self._held: list[GroupRequest] | None = None
        self._singles_of: dict[int, GroupRequest] = {}
        self._taken_back: set[int] = set()
        self._sink: Callable[[list[Chunk]], None]
        self._members: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def start(self, sink: Callable[[list[Chunk]], None], on_failure: Callable[[BaseException], None]) -> None:
        self._sink = sink
        await self._inner.start(self._pass_on, on_failure)

    def _pass_on(self, chunks: list[Chunk]) -> None:
        told = []
        for chunk in chunks:
            request, member = divmod(chunk.request, MEMBERS)
            if chunk.finish_reason:
                self._begun -= 1
                one = self._singles_of.pop(chunk.request)
                if chunk.request in self._taken_back:
                    self._taken_back.remove(chunk.request)
                    assert self._held is not None and not chunk.tokens
                    self._held.append(one)
                    continue
            told.append(msgspec.structs.replace(chunk, request=request, member=member))
        if not self._begun:
            self._empty.set()
        self._sink(told)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        single = [one for request in requests for one in self._singles(request)]
        self._members.update({request.id: len(request.seeds) for request in requests})
        if self._held is not None:
            self._held += single
            return
        self._begin(single)

    def _begin(self, single: list[GroupRequest]) -> None:
        self._begun += len(single)
        self._singles_of.update((one.id, one) for one in single)
        self._inner.submit(single)

    def _singles(self, request: GroupRequest) -> list[GroupRequest]:
        found = []
        for member, seed in enumerate(request.seeds):
            had = request.partial(member)
            length = draw(seed, *self._shape)
            found.append(
                msgspec.structs.replace(
                    request,
                    id=request.id * MEMBERS + member,
                    seeds=(seed,),
                    stop_ids=frozenset(),
                    max_new_tokens=max(length, len(had.tokens) + 1 if had else 1),
                    partials=(had,) if had else (),
                )
            )
        return found

    def abort(self, request: int) -> None:
        numbers = {request * MEMBERS + member for member in range(self._members.pop(request, 0))}
        for number in numbers:
            self._taken_back.discard(number)
            self._inner.abort(number)
        ended = [one for one in self._held or [] if one.id in numbers]
        if self._held is not None:
            self._held = [one for one in self._held if one.id not in numbers]
        if ended:
            asyncio.get_running_loop().call_soon(self._sink, [_aborted(one) for one in ended])

    async def _take_back(self) -> None:
        """What waits for a slot in the engine has not begun: it waits here, and is begun with the new weights."""
        await self._inner.pause("what has not begun is taken back")
        self._taken_back = {sequence.request.id for sequence in self._inner._decoder.waiting}
        for number in self._taken_back:
            self._inner.abort(number)
        await self._inner.resume()

    async def commit(self, record: Any, kv: Any) -> Any:
        if not self._interruptible:
            self._held = []
            await self._take_back()
            while self._begun:
                self._empty.clear()
                await self._empty.wait()
        try:
            return await self._inner.commit(record, kv)
        finally:
            held, self._held = self._held, None
            if held:
                self._begin(held)


def _aborted(one: GroupRequest) -> Chunk:
    request, member = divmod(one.id, MEMBERS)
    had = one.partial(0)
    return Chunk(request, member, len(had.tokens) if had else 0, [], [], [], "abort")


def install() -> None:
    """Every rollout's engine of this process is such a one; the evaluator's is as it is."""
    shape = json.loads(os.environ["RELAX_LONG_TAIL"])
    make = engine_factory.make_engine

    def wrapped(ctx: Any, folder: Any, settings: Any) -> Any:
        made = make(ctx, folder, settings)
        return LongTail(made, **shape) if ctx.who.slot.startswith("rollout/") else made

    engine_factory.make_engine = wrapped
