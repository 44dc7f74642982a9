"""The TransferQueue for code without an event loop: it lives on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self

from relax_rt.transport.queue.batch import LeasedBatch
from relax_rt.transport.queue.facade import TransferQueue
from relax_rt.transport.queue.ledger.messages import Failure, SampleKey, Want
from relax_rt.transport.queue.offers import OFFER_WAIT_S
from relax_rt.transport.queue.sync import SyncQueue, run_blocking
from relax_rt.transport.rpc.errors import Refused

CLOSE_TIMEOUT_S = 30.0
"""Longest time for cleaning up, besides the time that leaving waits for readers."""
_BEGIN_S = 30.0
"""The loop does nothing else when it is to begin with entering or leaving."""


class BlockingQueue:
    """The methods of TransferQueue, blocking. Thread-safe; use it as a context manager.

    Args:
        queue: not entered yet.
        timeout_s: longest time that one call may take, besides its wait_s.
    """

    def __init__(self, queue: TransferQueue, *, timeout_s: float = 180.0) -> None:
        self._queue, self._timeout_s = queue, timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        # Before there is anything that a failure would leave: it may be open elsewhere.
        self._queue.check_unentered()
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="transfer-queue", daemon=True)
        self._thread.start()
        try:
            self._carry_out(self._queue.__aenter__(), self._timeout_s)
        except BaseException:
            # Also where it came in at the last moment; else there is nothing to leave.
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._running()
        if threading.current_thread() is self._thread:
            raise Refused(
                "leaving the queue", why="it was done on its own event loop", hint="leave it where you entered"
            )
        try:
            self._carry_out(self._queue.__aexit__(*exc), CLOSE_TIMEOUT_S + self._queue.linger_s)
        finally:
            self._stop()

    def _carry_out(self, work: Coroutine[Any, Any, object], timeout_s: float) -> None:
        """Enter or leave. Whatever ends the wait for it, it cleans up before the loop may stop."""
        loop = self._running()
        try:
            task = run_blocking(_begun(work), loop, _BEGIN_S)
        except Refused:
            work.close()  # it was never begun
            raise
        try:
            run_blocking(_result(task), loop, timeout_s)
        except BaseException:
            run_blocking(_ended(task), loop, 2 * CLOSE_TIMEOUT_S)
            raise

    def _stop(self) -> None:
        loop, thread = self._running(), self._thread
        self._loop = None
        assert thread is not None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_TIMEOUT_S)
        if not thread.is_alive():
            loop.close()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise Refused("call of a TransferQueue", why="it was not entered", hint="with queue.blocking() as queue")
        return self._loop

    def put(
        self,
        samples: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        *,
        group: bool = False,
        priorities: Sequence[float] | None = None,
        wait_s: float = OFFER_WAIT_S,
    ) -> list[SampleKey]:
        """See TransferQueue.put."""
        loop = self._running()
        work = self._queue.put(samples, group=group, priorities=priorities, wait_s=wait_s)
        return run_blocking(work, loop, self._timeout_s + wait_s)

    def take(
        self,
        task: str,
        *,
        samples: int = 0,
        groups: int = 0,
        tokens: int = 0,
        wait_s: float = 0.0,
        want: Want | None = None,
    ) -> LeasedBatch:
        """See TransferQueue.take."""
        loop = self._running()
        work = self._queue.take(task, samples=samples, groups=groups, tokens=tokens, wait_s=wait_s, want=want)
        return run_blocking(work, loop, self._timeout_s + wait_s)

    def done(
        self,
        batch: LeasedBatch,
        columns: Mapping[SampleKey, Mapping[str, Any]] | None = None,
        failures: Sequence[Failure] = (),
    ) -> None:
        """See TransferQueue.done."""
        loop = self._running()
        run_blocking(self._queue.done(batch, columns, failures), loop, self._timeout_s)

    def give_up(self, batch: LeasedBatch, reason: str) -> None:
        """See TransferQueue.give_up."""
        loop = self._running()
        run_blocking(self._queue.give_up(batch, reason), loop, self._timeout_s)

    @property
    def waiting_on(self) -> str:
        """See TransferQueue.waiting_on."""
        return self._queue.waiting_on

    def statistics(self) -> dict[str, Any]:
        """See TransferQueue.statistics."""
        loop = self._running()
        return run_blocking(self._queue.statistics(), loop, self._timeout_s)

    @property
    def steps(self) -> SyncQueue:
        """All that a client can do, for queues with prompts, steps and checkpoints (see QueueClient)."""
        return SyncQueue(self._queue.client, self._running(), timeout_s=self._timeout_s)


async def _begun(work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
    return asyncio.create_task(work)


async def _result(task: asyncio.Task[object]) -> None:
    """Cancelling this leaves the task alone."""
    await asyncio.wait([task])
    task.result()


async def _ended(task: asyncio.Task[object]) -> None:
    """Cancel it, and give it time to clean up."""
    task.cancel()
    await asyncio.wait([task], timeout=CLOSE_TIMEOUT_S)
