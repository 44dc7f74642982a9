"""The TransferQueue for code that runs in a thread beside the event loop: a training step, a blocking engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.client import LeasedBatch, NewSample, QueueClient
from relax_rt.transport.queue.ledger.messages import Admission, Advice, Chosen, Failure, SampleKey, Want
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused

T = TypeVar("T")


def run_blocking(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, timeout_s: float) -> T:
    """Carry work out on a loop that runs in another thread, and wait for it.

    Raises:
        Refused: this is the loop's own thread.
        DeadlineExceeded: no result within timeout_s, or the loop stops.
    """
    try:
        running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        work.close()
        raise Refused("blocking call of the queue", why="it was made on the event loop", hint="use the async methods")
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result(min(timeout_s, threading.TIMEOUT_MAX))
    except FutureTimeout as error:
        if future.done():
            raise
        future.cancel()
        raise DeadlineExceeded("call of the queue", why=f"no answer for {timeout_s} s") from error
    except CancelledError as error:
        raise DeadlineExceeded("call of the queue", why="the event loop cancelled it: the role stops") from error


class SyncQueue:
    """The methods of QueueClient, blocking. For any thread but the loop's own.

    Args:
        client: lives on `loop`.
        timeout_s: longest time that one call may take, besides its wait_s.
    """

    def __init__(self, client: QueueClient, loop: asyncio.AbstractEventLoop, *, timeout_s: float = 180.0) -> None:
        self._client, self._loop, self._timeout_s = client, loop, timeout_s

    def _run(self, work: Coroutine[Any, Any, T], wait_s: float = 0.0) -> T:
        return run_blocking(work, self._loop, self._timeout_s + wait_s)

    def admit(self, engine_version: int, groups: int, *, wait_s: float) -> Admission:
        """See QueueClient.admit."""
        return self._run(self._client.admit(engine_version, groups, wait_s=wait_s), wait_s)

    def put_samples(self, samples: Sequence[NewSample]) -> None:
        """See QueueClient.put_samples."""
        self._run(self._client.put_samples(samples))

    def give_back(self, groups: Sequence[int], reason: str) -> None:
        """See QueueClient.give_back."""
        self._run(self._client.give_back(groups, reason))

    def take(
        self,
        task: str,
        *,
        samples: int = 0,
        groups: int = 0,
        tokens: int = 0,
        at_least: int = 0,
        wait_s: float,
        want: Want | None = None,
    ) -> LeasedBatch:
        """See QueueClient.take."""
        asked = want or Want(samples, groups, tokens, at_least=at_least)
        return self._run(self._client.take(task, wait_s=wait_s, want=asked), wait_s)

    def complete(
        self,
        task: str,
        batch: LeasedBatch,
        columns: Mapping[SampleKey, Mapping[str, Any]] | None = None,
        failures: Sequence[Failure] = (),
    ) -> None:
        """See QueueClient.complete."""
        self._run(self._client.complete(task, batch, columns, failures))

    def abandon(self, batch: LeasedBatch, reason: str) -> None:
        """See QueueClient.abandon."""
        self._run(self._client.abandon(batch, reason))

    def trained(
        self,
        batch: LeasedBatch | Sequence[LeasedBatch],
        step: int,
        weights: VersionRecord,
        *,
        skipped: bool = False,
    ) -> Advice:
        """See QueueClient.trained."""
        return self._run(self._client.trained(batch, step, weights, skipped=skipped))

    def filtered(self, batch: LeasedBatch, groups: Sequence[int], reason: str) -> LeasedBatch:
        """See QueueClient.filtered."""
        return self._run(self._client.filtered(batch, groups, reason))

    def ask(self, groups: int) -> None:
        """See QueueClient.ask."""
        self._run(self._client.ask(groups))

    def choose(self, items: Mapping[int, int]) -> Chosen:
        """See QueueClient.choose."""
        return self._run(self._client.choose(items))

    def flush(self) -> None:
        """See QueueClient.flush."""
        self._run(self._client.flush())

    def committed(self, step: int, checkpoint: str) -> None:
        """See QueueClient.committed."""
        self._run(self._client.committed(step, checkpoint))

    def rollback(self, step: int, weights: VersionRecord) -> None:
        """See QueueClient.rollback."""
        self._run(self._client.rollback(step, weights))
