"""The groups of a step, as the trainer collects them from a real queue: whole, in parts, and given back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from queue_parts import V2, World, world

from relax_rt.roles.base.sample import Sample, read_sample
from relax_rt.roles.training import collector as collecting
from relax_rt.roles.training.collector import Collector, release_leases
from relax_rt.roles.training.step import StepBatch
from relax_rt.transport.queue.batch import LeasedBatch
from relax_rt.transport.rpc.errors import Corrupt, Unreachable

SOON_S = 120


class Shown:
    """A role's progress: what it waits for."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def waiting(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "LEASE_WAIT_S", 0.0)


class LateQueue:
    """The queue, each take a second late."""

    def __init__(self, made: World, clock: dict[str, float]) -> None:
        self.made, self.clock = made, clock

    async def lease(self, *arguments: Any, **options: Any) -> LeasedBatch:
        self.clock["now"] += 1.0
        return await self.made.trainer.lease(*arguments, **options)


async def test_a_wait_of_many_calls_counts_from_the_first_of_them(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        clock, shown = {"now": 100.0}, Shown()
        queue: Any = LateQueue(made, clock)
        collector = Collector(queue, shown, groups=3, clock=lambda: clock["now"])  # type: ignore[arg-type]
        assert await collector.collect(1) is None
        await made.make(2, 1, 0)
        assert await collector.collect(1) is None
        await made.make(4, 1, 0)
        first = await collector.collect(1)
        assert first is not None and worked(first, clock) == (3.0, 5.0, 0.25)
        await made.trainer.complete_step(first.leases, 1, V2)
        second = await collector.collect(2)
        assert second is not None and worked(second, clock) == (1.0, 5.0, 0.25)
        assert [reason.partition(" ready")[0] for reason in shown.reasons] == [
            *("0 of 3 groups are", "2 of 3 groups are"),
            *("", ""),
        ]


def worked(batch: StepBatch, clock: dict[str, float]) -> tuple[float, ...]:
    """What the step's times are after training for 5 s and publishing for 0.25 s."""
    assert batch.full and batch.groups == 3
    clock["now"] += 5.0
    batch.timer.lap("train")
    clock["now"] += 0.25
    batch.timer.lap("publish")
    return tuple(batch.timer[what] for what in ("wait", "train", "publish"))


async def test_groups_come_in_parts_and_are_trained_together(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        shown = Shown()
        collector = Collector(made.trainer, shown, groups=3, parts=True)  # type: ignore[arg-type]
        groups = await made.make(1, 1, 0)
        first = await collector.collect(1)
        assert first is not None and (first.groups, first.full) == (1, False)
        assert await collector.collect(1) is None
        assert shown.reasons[-1].startswith("1 of 3 groups are there; ")
        groups += await made.make(2, 1, 0)
        batch = await collector.collect(1)
        assert batch is first and (batch.groups, batch.full, len(batch.leases)) == (3, True, 2)
        assert [s.meta.group for s in batch.samples] == [one.key.group for one in batch.leased]
        assert {one.key.group for one in batch.leased} == set(groups)
        assert len(batch.digests) == len(batch.samples) == 6
        await made.trainer.complete_step(batch.leases, 1, V2)
        account = await made.account()
        assert account["trained"] == 6 and "trained_twice" not in account
        assert await collector.collect(2) is None


async def test_what_was_taken_for_a_step_that_ends_is_given_back(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        collector = Collector(made.trainer, Shown(), groups=3, parts=True)  # type: ignore[arg-type]
        groups = []
        for _ in range(2):
            groups += await made.make(1, 1, 0)
            assert await collector.collect(1) is not None
        await collector.release("the run ends")
        assert made.trainer.leases == set()
        batch = await made.trainer.lease("train", groups=2, wait_s=0)
        assert {key.group for key in batch.keys} == set(groups)


async def test_a_lease_that_cannot_be_given_back_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(SOON_S), world(tmp_path) as made:
        groups, leases = [], []
        for lacking in (3, 2, 1):
            groups += await made.make(1, 1, 0)
            leases.append(await made.trainer.lease("train", groups=lacking, at_least=1, wait_s=0))
        assert [{key.group for key in lease.keys} for lease in leases] == [{group} for group in groups]
        abandon = made.trainer.release

        async def unwilling(lease: LeasedBatch, reason: str) -> None:
            if lease in (leases[0], leases[2]):
                raise Unreachable(f"the queue, for the lease of group {lease.keys[0].group}")
            await abandon(lease, reason)

        monkeypatch.setattr(made.trainer, "release", unwilling)
        with pytest.raises(Unreachable, match=f"of group {groups[0]}"):
            await release_leases(made.trainer, leases, "the trainer cannot go on")
        batch = await made.trainer.lease("train", groups=3, at_least=1, wait_s=0)
        assert {key.group for key in batch.keys} == {groups[1]}


async def test_a_lease_whose_payload_does_not_come_is_released_and_its_groups_come_again(tmp_path: Path) -> None:
    failures: list[Exception] = [Unreachable("payload of lease 1 at rank 1 on node b", why="its owner is dead")]

    def read(lease: LeasedBatch, begin: bool) -> tuple[list[Sample], dict[str, int]]:
        assert begin
        if failures:
            raise failures.pop()
        return [read_sample(one) for one in lease.samples], {"a": 5, "b": 7}

    async with world(tmp_path) as made:
        shown = Shown()
        collector = Collector(made.trainer, shown, groups=3, read_shares=read)  # type: ignore[arg-type]
        await made.make(3, 1, 0)
        assert await collector.collect(1) is None
        assert "rank 1 on node b" in collector.waiting_for and shown.reasons[-1] == collector.waiting_for
        batch = await collector.collect(1)
        assert batch is not None and batch.full and batch.received_bytes == {"a": 5, "b": 7}
        await made.trainer.complete_step(batch.leases, 1, V2)
        failures.append(Corrupt("block of slab x", why="it holds something else"))
        await made.make(3, 1, 0)
        with pytest.raises(Corrupt):
            await collector.collect(2)
        assert not made.trainer.leases
