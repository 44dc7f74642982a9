"""The streaming loader for code that runs in a thread beside the event loop, as a training step does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.api import Advice, Failure, SampleKey
from relax_rt.transport.queue.batch import LeasedBatch, LeasedSample
from relax_rt.transport.queue.loader.micro import MicroBatch
from relax_rt.transport.queue.loader.streaming import Step, StreamingLoader
from relax_rt.transport.queue.sync import run_blocking

T = TypeVar("T")


class BlockingStep:
    """A Step whose calls block. Iterating over it gives the micro-batches."""

    def __init__(self, step: Step, loader: BlockingLoader) -> None:
        self._step, self._loader = step, loader

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self._step)

    def __len__(self) -> int:
        return len(self._step)

    @property
    def index(self) -> int:
        """See Step."""
        return self._step.index

    @property
    def tokens(self) -> int:
        """See Step."""
        return self._step.tokens

    @property
    def batch(self) -> LeasedBatch:
        """See Step."""
        return self._step.batch

    @property
    def samples(self) -> list[LeasedSample]:
        """See Step.samples."""
        return self._step.samples

    def done(
        self,
        columns: Mapping[SampleKey, Mapping[str, Any]] | None = None,
        failures: Sequence[Failure] = (),
        *,
        version: int = -1,
    ) -> None:
        """See Step.done."""
        self._loader.run(self._step.done(columns, failures, version=version))

    def trained(self, step: int, weights: VersionRecord, *, skipped: bool = False) -> Advice:
        """See Step.trained."""
        return self._loader.run(self._step.trained(step, weights, skipped=skipped))

    def abandon(self, reason: str) -> None:
        """See Step.abandon."""
        self._loader.run(self._step.abandon(reason))


class BlockingLoader:
    """A StreamingLoader as an iterator of steps; use it as a context manager, in any thread but the loop's own.

    Args:
        loader: not entered yet.
        loop: runs in another thread; the loader's client lives on it.
        timeout_s: longest time that one call may take, besides the time that a step is waited for.
    """

    def __init__(self, loader: StreamingLoader, loop: asyncio.AbstractEventLoop, *, timeout_s: float = 180.0) -> None:
        self._loader, self._loop, self._timeout_s = loader, loop, timeout_s

    def run(self, work: Coroutine[Any, Any, T], wait_s: float = 0.0) -> T:
        """Carry a call of the loader's loop out, and wait for it."""
        return run_blocking(work, self._loop, self._timeout_s + wait_s)

    def __enter__(self) -> Self:
        self.run(self._loader.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self.run(self._loader.__aexit__(*error))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BlockingStep:
        step = self.next()
        if step is None:
            raise StopIteration
        return step

    def next(self, wait_s: float | None = None) -> BlockingStep | None:
        """See StreamingLoader.next."""
        longest_s = self._loader.wait_s if wait_s is None else wait_s
        step = self.run(self._loader.next(wait_s), longest_s)
        return BlockingStep(step, self) if step is not None else None

    @property
    def index(self) -> int:
        """See StreamingLoader.index."""
        return self._loader.index

    @property
    def waiting_on(self) -> str:
        """Why the next step is not there yet; empty when nothing is waited for."""
        return self._loader.waiting_on
