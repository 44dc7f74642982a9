"""The TransferQueue for code that runs in a thread beside the event loop: a training step, a blocking engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from relax_rt.transport.errors import DeadlineExceeded, Refused
from relax_rt.transport.queue.api import Admission, Failure, SampleKey
from relax_rt.transport.queue.client import LeasedBatch, NewSample, QueueClient
from relax_rt.transport.versions import VersionRecord

T = TypeVar("T")


class SyncQueue:
    """The methods of QueueClient, blocking. For any thread but the loop's own.

    Args:
        client: lives on `loop`.
        timeout_s: longest time that one call may take, besides its wait_s.
    """

    def __init__(self, client: QueueClient, loop: asyncio.AbstractEventLoop, *, timeout_s: float = 180.0) -> None:
        self._client, self._loop, self._timeout_s = client, loop, timeout_s

    def _run(self, work: Coroutine[Any, Any, T], wait_s: float = 0.0) -> T:
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            work.close()
            raise Refused("blocking call of the queue", why="it was made on the event loop", hint="use QueueClient")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self._timeout_s + wait_s)
        except FutureTimeout as error:
            future.cancel()
            raise DeadlineExceeded("call of the queue", why=f"no answer for {self._timeout_s + wait_s} s") from error
        except CancelledError as error:
            raise DeadlineExceeded("call of the queue", why="the event loop cancelled it: the role stops") from error

    def admit(self, engine_version: int, groups: int, *, wait_s: float) -> Admission:
        """See QueueClient.admit."""
        return self._run(self._client.admit(engine_version, groups, wait_s=wait_s), wait_s)

    def put_samples(self, samples: Sequence[NewSample]) -> None:
        """See QueueClient.put_samples."""
        self._run(self._client.put_samples(samples))

    def give_back(self, groups: Sequence[int], reason: str) -> None:
        """See QueueClient.give_back."""
        self._run(self._client.give_back(groups, reason))

    def take(self, task: str, *, samples: int = 0, groups: int = 0, wait_s: float) -> LeasedBatch:
        """See QueueClient.take."""
        return self._run(self._client.take(task, samples=samples, groups=groups, wait_s=wait_s), wait_s)

    def complete(
        self,
        task: str,
        batch: LeasedBatch,
        columns: Mapping[SampleKey, Mapping[str, Any]],
        failures: Sequence[Failure] = (),
    ) -> None:
        """See QueueClient.complete."""
        self._run(self._client.complete(task, batch, columns, failures))

    def abandon(self, batch: LeasedBatch, reason: str) -> None:
        """See QueueClient.abandon."""
        self._run(self._client.abandon(batch, reason))

    def trained(self, batch: LeasedBatch, step: int, weights: VersionRecord) -> None:
        """See QueueClient.trained."""
        self._run(self._client.trained(batch, step, weights))

    def committed(self, step: int, checkpoint: str) -> None:
        """See QueueClient.committed."""
        self._run(self._client.committed(step, checkpoint))

    def rollback(self, step: int, weights: VersionRecord) -> None:
        """See QueueClient.rollback."""
        self._run(self._client.rollback(step, weights))
