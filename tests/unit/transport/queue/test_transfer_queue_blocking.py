"""Entering and leaving a queue without an event loop: nothing is cut off while it waits, or cleans up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger_driver import policy
from test_broker import V1, sample

from relax_rt.transport import TransferQueue
from relax_rt.transport.base.liveness import NODE_ENV
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue import transfer_queue
from relax_rt.transport.queue.transfer_queue import CLOSE_TIMEOUT_S, BlockingQueue
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused


def test_leaving_another_node_waits_for_readers_for_as_long_as_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lingers = threading.Event()

    def on_wait(reason: str) -> None:
        if "others have yet to read" in reason:
            lingers.set()

    found: list[int] = []
    with TransferQueue.serve(tmp_path / "queue", {"t": ["x"]}, listen="tcp://127.0.0.1:0").blocking() as near:

        def read() -> None:
            assert lingers.wait(30)
            # Only the wait for readers was to do without it.
            monkeypatch.setattr(transfer_queue, "CLOSE_TIMEOUT_S", CLOSE_TIMEOUT_S)
            batch = near.lease("t", samples=1, wait_s=30)
            found.extend(int(sample["x"][0]) for sample in batch.samples)
            near.complete(batch)

        reader = threading.Thread(target=read)
        reader.start()
        monkeypatch.setenv(NODE_ENV, "far")
        with TransferQueue.connect(tmp_path / "queue", linger_s=60, on_wait=on_wait).blocking() as far:
            monkeypatch.delenv(NODE_ENV)
            memory = far._queue.client.arena._dir
            far.put([{"x": np.full(5000, 7, np.int32)}])
            monkeypatch.setattr(transfer_queue, "CLOSE_TIMEOUT_S", 0.0)
        reader.join(120)
    assert found == [7]
    assert not memory.exists()


class Slow:
    """What a queue is made of, as far as it matters here: its cleaning up takes more than one turn of the loop."""

    def __init__(self, *, entered: bool) -> None:
        self.told: list[str] = []
        self._entered = entered

    async def enter(self, stack: contextlib.AsyncExitStack) -> Any:
        self.told.append("in")
        stack.push_async_callback(self._clean_up)
        if self._entered:
            stack.push_async_callback(asyncio.Event().wait)
        else:
            await asyncio.Event().wait()

    async def _clean_up(self) -> None:
        await asyncio.sleep(0.1)
        self.told.append("out")


def test_steps_of_a_queue_of_prompts_block(tmp_path: Path) -> None:
    with TransferQueue.serve(tmp_path / "queue", policy=policy()).blocking() as queue:
        queue.rollback(0, V1)
        (ticket,) = queue.admit(1, 1, wait_s=1).tickets
        queue.put_samples([sample(ticket, member, 1) for member in range(2)])
        graded = queue.lease("reward", samples=4, wait_s=1)
        queue.complete(graded, {one.key: {"reward": 1.0} for one in graded.samples})
        queue.release(queue.lease("train", groups=1, wait_s=1), "once more")
        batch = queue.lease("train", groups=1, wait_s=1)
        queue.request_surplus(0)
        assert queue.assign_items({}).next_index == 1
        queue.complete_step(batch, 1, VersionRecord(2, 1, 1))
        queue.flush()
        queue.commit(1, "x")
        queue.release_groups([ticket.group], "none")
        assert queue.statistics()["broker"]["samples"]["freed"] == 2


def test_a_blocking_call_that_takes_too_long_ends(tmp_path: Path) -> None:
    queue = TransferQueue.serve(tmp_path / "queue", {"t": ["x"]}).blocking()
    with queue, pytest.raises(DeadlineExceeded):
        queue._running().run(asyncio.sleep(30), 0.05)


def test_leaving_that_takes_too_long_cleans_up() -> None:
    slow = Slow(entered=True)
    queue = TransferQueue(slow.enter)
    with pytest.raises(DeadlineExceeded), BlockingQueue(queue):
        # Its time is over at once.
        queue.linger_s = -CLOSE_TIMEOUT_S
    assert slow.told == ["in", "out"]


def test_entering_that_takes_too_long_cleans_up() -> None:
    slow = Slow(entered=False)
    with pytest.raises(DeadlineExceeded), BlockingQueue(TransferQueue(slow.enter), timeout_s=0.0):
        pass
    assert slow.told == ["in", "out"]


def loops() -> int:
    return sum(thread.name == "transfer-queue" for thread in threading.enumerate())


def test_entering_a_second_time_leaves_the_first_alone(tmp_path: Path) -> None:
    queue = TransferQueue.serve(tmp_path / "queue", {"train": ("x",)})
    with queue.blocking() as first:
        before = loops()
        with pytest.raises(Refused, match="it was entered before"), queue.blocking():
            pass
        assert loops() == before
        first.put([{"x": np.arange(3)}], wait_s=10)


def test_leaving_on_its_own_loop_is_refused_and_it_goes_on(tmp_path: Path) -> None:
    with TransferQueue.serve(tmp_path / "queue", {"train": ("x",)}).blocking() as queue:
        loop, ends = queue._running().loop, queue.__exit__

        async def leave() -> None:
            with pytest.raises(Refused, match="on its own event loop"):
                ends()

        asyncio.run_coroutine_threadsafe(leave(), loop).result(20)
        queue.put([{"x": np.arange(3)}], wait_s=10)


def test_leaving_one_that_was_not_entered_is_refused_and_says_so(recwarn: pytest.WarningsRecorder) -> None:
    queue = BlockingQueue(TransferQueue(Slow(entered=True).enter))
    with pytest.raises(Refused, match="it was not entered"):
        queue.__exit__()
    gc.collect()
    assert not recwarn.list
