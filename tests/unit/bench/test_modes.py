"""What tools/bench/modes.py compares with: worked by hand where that can be done, and the contract's own limits."""

from __future__ import annotations

import asyncio
import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "bench"))

from modes_roles import SleepingEngine, SleepingRolloutSettings
from modes_times import PAPER, Pace, Pipeline, Shape, batch, cluster, gaps, makespan, stages

from relax_rt.roles.engines.base import Assembly, Chunk, Completion, GroupRequest, Partial
from relax_rt.transport.queue.api import VersionSpan
from relax_rt.transport.versions import VersionRecord
from relax_rt.transport.weights.manifest import Manifest, layout_of

EQUAL = Shape(median=100, sigma=0.0, most=1000, group=2, groups=4, engines=1, slots=4)
"""A batch is 8 sequences of 100 tokens on 4 slots: 200 tokens long, 800 in all."""
PACE = Pace(token_s=0.01, train_token_s=0.00125, publish_s=0.5, release_s=0.25, resume_s=0.75)
"""Generation 2 s, training 1 s, publication 0.5 s, change of turns 1 s."""


def step_s(bound: float, shape: Shape = EQUAL, pace: Pace = PACE, *, colocate: bool = False, count: int = 12) -> float:
    return statistics.fmean(gaps(Pipeline(shape, pace, bound, colocate=colocate).steps(count), 4))


def test_the_next_sequence_goes_to_the_slot_that_is_free_first() -> None:
    assert makespan([5, 3, 3, 3], 2) == 8
    assert makespan([5, 3, 3, 3], 4) == 5


@pytest.mark.parametrize(
    ("bound", "colocate", "seconds"),
    [
        (0, False, 2 + 1 + 0.5),
        (0, True, 2 + 1 + 0.5 + 1),
        # Generation is never idle: it is longer than the rest.
        (1, False, 2),
        (4, False, 2),
    ],
)
def test_pipeline_of_equal_lengths(bound: float, colocate: bool, seconds: float) -> None:
    assert step_s(bound, colocate=colocate) == pytest.approx(seconds)


def test_one_batch_ahead_is_not_enough_where_its_way_is_long() -> None:
    """A batch begins when the step but one before is published: two of them share generation, training, publication."""
    slow = Pace(token_s=0.01, train_token_s=0.00125, publish_s=2.0)
    assert step_s(1, pace=slow) == pytest.approx((2 + 1 + 2) / 2)
    assert step_s(2, pace=slow) == pytest.approx(2)


def test_the_longer_stage_bounds_every_pipeline() -> None:
    shape = Shape(groups=8, slots=8)
    pace = cluster(shape, PAPER["asynchronous"])
    longest = max(stages(shape, pace, range(12)))
    for bound in (0, 1, 2, 8, float("inf")):
        assert Pipeline(shape, pace, bound).steps(12)[-1] >= 12 * longest


def test_more_staleness_is_never_slower() -> None:
    shape = Shape(groups=8, slots=8)
    pace = cluster(shape, PAPER["asynchronous"])
    ends = [Pipeline(shape, pace, bound).steps(12)[-1] for bound in (0, 1, 2, 4)]
    assert ends == sorted(ends, reverse=True)


def test_the_pace_gives_the_papers_proportions() -> None:
    shape = Shape()
    pace = cluster(shape, PAPER["asynchronous"])
    own = {"colocate": step_s(0, shape, pace, colocate=True, count=64), "on-policy": step_s(0, shape, pace, count=64)}
    assert own == pytest.approx({name: PAPER[name] for name in own}, rel=0.01)
    tenth = pace.scaled(10)
    assert step_s(0, shape, tenth, count=12) == pytest.approx(step_s(0, shape, pace, count=12) / 10)


def test_lengths_are_the_samples_own() -> None:
    shape = Shape()
    assert batch(shape, 1)[0] == shape.lengths(shape.groups)
    assert shape.lengths(3) == Shape(engines=2, groups=4).lengths(3) != Shape(seed=2).lengths(3)
    assert max(map(max, batch(shape, 0))) <= shape.most


class Weights:
    """A version that is there at once."""

    def __init__(self, version: int) -> None:
        self.record = VersionRecord(version, version - 1, version)
        self.manifest = Manifest(version, 1, "w", layout_of([("w", "float32", (4,), 16)]), (), "")

    def copy_into(self, into: memoryview) -> None:
        into[:] = bytes(len(into))


class Caller:
    """Puts together what the engine says: a gap or a repetition is refused there."""

    def __init__(self) -> None:
        self.assembly, self.done, self.failed = Assembly(), dict[int, Completion](), list[BaseException]()
        self.some = asyncio.Event()

    def __call__(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if (one := self.assembly.add(chunk)) is not None:
                self.done[one.member] = one
        self.some.set()

    async def until(self, count: int) -> None:
        while len(self.done) < count:
            self.some.clear()
            await asyncio.wait_for(self.some.wait(), 30)


def covered(one: Completion) -> list[tuple[int, int]]:
    """Versions and their numbers of tokens; the spans lie end to end."""
    assert [s.start for s in one.versions] == [0, *(s.end for s in one.versions[:-1])]
    assert one.versions[-1].end == len(one.tokens) == len(one.logprobs)
    return [(s.version, s.end - s.start) for s in one.versions]


async def test_the_sleeping_engine_keeps_the_promises_of_an_engine() -> None:
    settings = SleepingRolloutSettings(max_sequences=2, token_s=1e-4)
    engine, caller = SleepingEngine(settings, lambda seed: seed), Caller()
    await engine.start(caller, caller.failed.append)
    try:
        await engine.prepare(Weights(1))
        await engine.commit(Weights(1).record, "keep")
        had = Partial((7,) * 10, (-1.0,) * 10, (VersionSpan(0, 10, 0, 0),))
        request = GroupRequest(
            id=1,
            prompt=(5,),
            seeds=(40, 90, 200, 5000),
            temperature=1.0,
            max_new_tokens=200,
            stop_ids=frozenset(),
            partials=(None, had, None, None),
            chunk_tokens=16,
        )
        caller.assembly.expect(request)
        engine.submit([request])
        assert (engine.load().waiting, engine.load().version) == (4, 1)
        await caller.until(3)
        await engine.prepare(Weights(2))
        await engine.commit(Weights(2).record, "keep")
        await caller.until(4)
        assert [len(caller.done[member].tokens) for member in range(4)] == [40, 90, 200, 200]
        assert [caller.done[member].finish_reason for member in range(4)] == ["stop", "stop", "length", "length"]
        assert covered(caller.done[0]) == [(1, 40)]
        assert covered(caller.done[1]) == [(0, 10), (1, 80)]
        assert {version for version, _ in covered(caller.done[3])} <= {1, 2}
        assert engine.load().running == engine.load().waiting == 0
    finally:
        await engine.close(5.0)
    assert not caller.failed


async def test_what_the_sleeping_engine_is_stopped_at_keeps_its_tokens() -> None:
    engine, caller = SleepingEngine(SleepingRolloutSettings(max_sequences=1, token_s=1e-3), lambda _: 100_000), Caller()
    await engine.start(caller, caller.failed.append)
    try:
        await engine.prepare(Weights(1))
        await engine.commit(Weights(1).record, "keep")
        request = GroupRequest(
            id=1, prompt=(5,), seeds=(1, 2), temperature=1.0, max_new_tokens=10**6, stop_ids=frozenset(), chunk_tokens=4
        )
        caller.assembly.expect(request)
        engine.submit([request])
        await asyncio.wait_for(caller.some.wait(), 30)
        engine.abort(1)
        await caller.until(2)
        assert {one.finish_reason for one in caller.done.values()} == {"abort"}
        assert covered(caller.done[0])[0][1] >= 4
        assert caller.done[1].tokens == []
        assert (engine.load().running, engine.load().waiting) == (0, 0)
    finally:
        await engine.close(5.0)
    assert not caller.failed
