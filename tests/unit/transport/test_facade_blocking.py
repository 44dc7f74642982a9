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

from relax_rt.transport import TransferQueue
from relax_rt.transport.base.watch import NODE_ENV
from relax_rt.transport.queue import blocking
from relax_rt.transport.queue.blocking import CLOSE_TIMEOUT_S, BlockingQueue
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
            monkeypatch.setattr(blocking, "CLOSE_TIMEOUT_S", CLOSE_TIMEOUT_S)
            batch = near.take("t", samples=1, wait_s=30)
            found.extend(int(sample["x"][0]) for sample in batch.samples)
            near.done(batch)

        reader = threading.Thread(target=read)
        reader.start()
        monkeypatch.setenv(NODE_ENV, "far")
        with TransferQueue.connect(tmp_path / "queue", linger_s=60, on_wait=on_wait).blocking() as far:
            monkeypatch.delenv(NODE_ENV)
            memory = far._queue.client.arena._dir
            far.put([{"x": np.full(5000, 7, np.int32)}])
            monkeypatch.setattr(blocking, "CLOSE_TIMEOUT_S", 0.0)
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
        loop, ends = queue._running(), queue.__exit__

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
