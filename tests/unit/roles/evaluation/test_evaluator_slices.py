"""An evaluation of more completions than an engine lets wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relax_rt.roles.data.items import PromptItem
from relax_rt.roles.evaluation import sampling as evaluation_sampling
from relax_rt.roles.evaluation.sampling import SEED_DOMAIN, HeldOutSampler, requests_of
from relax_rt.roles.rollout.engines.base import Chunk, GroupRequest
from relax_rt.transport.rpc.errors import Refused


class Engine:
    """Takes no more than so many sequences at a time, and completes a few in each turn of the loop, newest first."""

    def __init__(self, limit: int) -> None:
        self.sampler: HeldOutSampler
        self.limit, self.tokens, self.most = limit, 0, 0
        self.held: list[tuple[int, int]] = []

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        more = [(one.id, member) for one in requests for member in range(len(one.seeds))]
        if len(self.held) + len(more) > self.limit:
            raise Refused("too many")
        if not self.held:
            asyncio.get_running_loop().call_soon(self.turn)
        self.held += more
        self.most = max(self.most, len(self.held))

    def turn(self) -> None:
        self.held, some = self.held[:-3], self.held[-3:]
        self.tokens += len(some)
        if self.held:
            asyncio.get_running_loop().call_soon(self.turn)
        self.sampler.on_chunks([Chunk(one, member, 0, [one, member], [-1.0, -1.0], [], "stop") for one, member in some])

    def load(self) -> Any:
        return SimpleNamespace(tokens_generated=self.tokens)


def items(count: int) -> list[PromptItem]:
    return [
        PromptItem(item=f"{i}", split="held_out", question="", answer="", metadata={}, messages=[], tokens=[1, i])
        for i in range(count)
    ]


def seed(number: int, sample: int, attempt: int) -> int:
    return 100 * number + sample


def requests(count: int, samples: int, together: int) -> list[GroupRequest]:
    return requests_of(
        items(count),
        samples=samples,
        together=together,
        seed=seed,
        temperature=1.0,
        max_new_tokens=4,
        stop_ids=frozenset([0]),
    )


@pytest.mark.parametrize(("count", "samples"), [(1, 1), (8, 1), (9, 1), (50, 1), (7, 3), (3, 8), (5, 20)])
async def test_completions_are_submitted_as_there_is_room(
    count: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_sampling, "MAX_SEQUENCES", 8)
    monkeypatch.setattr(evaluation_sampling, "PROGRESS_EVERY_S", 60.0)
    engine, told = Engine(8), []
    sampler = engine.sampler = HeldOutSampler(cast(Any, engine), told.append)
    asked = requests(count, samples, together=5)
    async with asyncio.timeout(120):
        for _ in range(2):
            done = await sampler.complete(asked)
            assert [(c.request, c.member) for c in done] == [(r.id, m) for r in asked for m in range(len(r.seeds))]
            assert all(c.tokens == [c.request, c.member] for c in done)
    assert 0 < engine.most <= 8 and sum(told) == engine.tokens == 2 * count * samples


def test_requests_hold_every_sample_of_every_item_once() -> None:
    asked = requests(3, samples=5, together=2)
    assert [len(one.seeds) for one in asked] == [2, 2, 1] * 3
    assert [one.prompt[1] for one in asked] == [0] * 3 + [1] * 3 + [2] * 3
    seeds = [s for one in asked for s in one.seeds]
    assert seeds == [SEED_DOMAIN | seed(i, s, 0) for i in range(3) for s in range(5)]
    assert [one.id for one in asked] == list(range(9))
