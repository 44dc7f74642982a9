"""Parts of weights on their way to rank 0: threads over real gloo, each with a group of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from relax_rt.roles.training.backend.channel import WeightChannel  # noqa: E402
from relax_rt.transport.rpc.errors import RelaxError, Unreachable  # noqa: E402

END_S = 120
GATHER_S = 2.0


def meet(work: Callable[[WeightChannel], Any], world: int = 3, gather_s: float = GATHER_S) -> list[Any]:
    """What each rank's work answers, or the exception that it raises. A rank that fails is
    gone; the others leave when all are done: one that merely stands still is there."""
    store = torch.distributed.HashStore()
    found: list[Any] = [None] * world
    done = threading.Barrier(world)

    def rank(number: int) -> None:
        group: Any = dist.ProcessGroupGloo(store, number, world, timedelta(seconds=END_S))
        try:
            found[number] = work(WeightChannel(group, gather_s=gather_s))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            found[number] = error
            group.abort()
        done.wait(2 * END_S)

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * END_S)
        assert not thread.is_alive()
    return found


def gather(channel: WeightChannel, parts: int = 3, late_s: float = 0.6) -> list[int]:
    """All of rank 1, then all of rank 2; each receive is late."""
    got = []
    for rank in (1, 2):
        for part in range(parts):
            if channel.rank == 0:
                time.sleep(late_s)
                into = torch.zeros(4, dtype=torch.uint8)
                channel.receive(into, rank, f"part {part}")
                got.append(int(into[0]))
            elif channel.rank == rank:
                channel.send(torch.full((4,), 10 * rank + part, dtype=torch.uint8), f"part {part}")
    return got


def test_a_rank_waits_for_its_turn_longer_than_for_one_message() -> None:
    began = time.monotonic()
    found = meet(gather)
    assert found[0] == [10, 11, 12, 20, 21, 22], found
    assert time.monotonic() - began > 1.5 * GATHER_S


def test_a_rank_that_stands_still_is_named_by_rank_0_in_time() -> None:
    stood = threading.Event()

    def work(channel: WeightChannel) -> Any:
        if channel.rank == 2:
            stood.wait(END_S)
            return None
        try:
            return gather(channel, late_s=0.0)
        finally:
            if channel.rank == 0:
                stood.set()

    began = time.monotonic()
    found = meet(work)
    assert isinstance(found[0], Unreachable) and "part 0 from rank 2" in str(found[0]), found
    assert 0.9 * GATHER_S < time.monotonic() - began < END_S


@pytest.mark.parametrize("dies", [False, True], ids=["hangs", "dies"])
def test_a_rank_that_does_not_copy_its_part_is_named(dies: bool) -> None:
    heard = threading.Event()

    def work(channel: WeightChannel) -> None:
        try:
            with channel.copying(lambda: None):
                if channel.rank == 2:
                    if dies:
                        channel.group.abort()
                    heard.wait(END_S)
        finally:
            if channel.rank == 0:
                heard.set()

    found = meet(work)
    assert isinstance(found[0], Unreachable) and "copy of the weights from rank 2" in str(found[0]), found


def test_the_deadline_of_a_copy_begins_when_a_rank_takes_the_order() -> None:
    def work(channel: WeightChannel) -> str:
        if channel.rank == 2:
            time.sleep(2 * GATHER_S)
        with channel.copying(lambda: None):
            pass
        return "copied"

    assert meet(work) == ["copied"] * 3


def test_what_fails_on_one_rank_is_told_on_all() -> None:
    def work(channel: WeightChannel) -> None:
        with channel.copying(lambda: None):
            if channel.rank == 1:
                raise MemoryError("no room " + "x" * 2000)

    found = meet(work)
    assert isinstance(found[1], MemoryError)
    for rank in (0, 2):
        assert type(found[rank]) is RelaxError and "rank 1 could not copy" in str(found[rank]), found
        assert "MemoryError: no room" in str(found[rank])


def test_memory_that_does_not_suffice_is_no_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    def work(channel: WeightChannel) -> None:
        with channel.copying(lambda: None):
            time.sleep(0.2)
            for name in ("zeros", "empty", "tensor", "frombuffer"):
                monkeypatch.setattr(torch, name, full)

    for error in meet(work, world=2):
        assert type(error) is RuntimeError and "allocate" in str(error), error


def test_rows_of_all_ranks_come_to_each() -> None:
    def work(channel: WeightChannel) -> list[int]:
        rows = torch.arange(2 if channel.rank < 2 else 1)[:, None] + 10 * channel.rank
        return [int(row) for row in channel.whole(rows, 2)[:5, 0]]

    assert meet(work) == [[0, 1, 10, 11, 20]] * 3
