"""A stream of steps for the ranks of a trainer: all take the same lease, and each works on its part of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.api import Advice, Failure, SampleKey, Want
from relax_rt.transport.queue.batch import LeasedBatch, LeasedSample
from relax_rt.transport.queue.client import QueueClient
from relax_rt.transport.queue.loader.micro import MicroBatch
from relax_rt.transport.queue.loader.plan import Packing
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused
from relax_rt.transport.rpc.interface import did_you_mean

_SLICE_S = 1.0
"""The reason of a wait is asked for this often."""
MAX_PREFETCH = 64


class Step:
    """One rank's part of a step. Iterating over it gives the micro-batches.

    Attributes:
        index: its place in the stream.
        batch: the lease, which all ranks share.
        micro_batches: what this rank works on; the same for all replicas of a data-parallel group.
        tokens: of the whole step, over all data-parallel groups (to normalise a loss by).
    """

    def __init__(
        self, queue: QueueClient, task: str, index: int, batch: LeasedBatch, micro: list[MicroBatch], tokens: int
    ) -> None:
        self.index, self.batch, self.micro_batches, self.tokens = index, batch, micro, tokens
        self.finished = False
        self._queue, self._task = queue, task

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)

    @property
    def samples(self) -> list[LeasedSample]:
        """The samples of this rank."""
        return [sample for micro in self.micro_batches for sample in micro.samples]

    async def done(
        self,
        columns: Mapping[SampleKey, Mapping[str, Any]] | None = None,
        failures: Sequence[Failure] = (),
        *,
        version: int = -1,
    ) -> None:
        """This rank has done its part. The lease ends when all ranks have said so.

        Args:
            columns: new columns of this rank's samples. Of the replicas of a group one gives them.
            failures: samples on which the work cannot succeed; in training they end the lease for all ranks.
            version: the weights that the columns were computed with, for versioned fields.
        """
        # Also when this call is cancelled: the client carries it to its end.
        self.finished = True
        try:
            await self._queue.complete(self._task, self.batch, columns, failures, version=version)
        except Refused:
            self.finished = False
            raise

    async def trained(self, step: int, weights: VersionRecord, *, skipped: bool = False) -> Advice:
        """The optimizer step is done (see QueueClient.trained). One rank says so; the others say `done`."""
        advice = await self._queue.trained(self.batch, step, weights, skipped=skipped)
        self.finished = True
        return advice

    async def abandon(self, reason: str) -> None:
        """Give the step back undone, for all ranks."""
        self.finished = True
        await self._queue.abandon(self.batch, reason)


class StreamingLoader:
    """Steps of a task for one rank of a trainer, as an async iterator; use it as an async context manager.

    All ranks of a stream take its batches by index: the ledger chooses the batch of an index once and gives the same
    to each. Every rank then computes the same plan (see Packing) and works on its own part, so that the replicas of
    a data-parallel group (its tensor and pipeline ranks) get the same micro-batches, and different groups disjoint
    ones. While a step is worked on, the next ones are taken. Going on to the next step finishes the one before,
    unless that was done by hand; leaving on an error gives back what was not finished.

    mode `step`: one stream for all ranks; a batch is split over the data-parallel groups. mode `stream`: each
    data-parallel group has a stream of its own, for tasks without collectives between groups; the number of
    micro-batches is then alike only within a group.

    For the step task the ledger grants one lease at a time, because each update decides what is stale: taking ahead
    then waits for the step in hand to end.

    Args:
        queue: this rank's client (of a TransferQueue: its `client`); every rank is an incarnation of its own.
        task: what to take.
        dp_rank, dp_size: which data-parallel group this rank belongs to, of how many.
        replica, replicas: which rank of the group it is, of how many.
        samples: samples of a batch, at most; or
        groups: whole groups of a batch, exactly.
        tokens: tokens of a batch, at most; 0: any number.
        packing: how a batch becomes micro-batches.
        columns: names that the trainer reads: they are looked for, and their memory mapped, when a batch comes.
        length: column whose first dimension is a sample's number of tokens; empty: what its producer said.
        prefetch: batches taken ahead of the one worked on.
        stream: name of the stream, if the task's name will not do. A gang that starts anew takes another one, or
            `start_index`: a batch that has ended is not granted again.
        start_index: first batch to take.
        steps: number of batches after which the stream ends; None: it goes on.
        wait_s: how long a step is waited for before DeadlineExceeded.
        on_wait: gets the reason while `next` waits, and an empty string when it does not any more; for the role's
            progress. `waiting_on` has the reason also of taking ahead.

    Raises:
        Refused: ranks or sizes cannot be.
    """

    def __init__(
        self,
        queue: QueueClient,
        task: str,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        replica: int = 0,
        replicas: int = 1,
        samples: int = 0,
        groups: int = 0,
        tokens: int = 0,
        packing: Packing | None = None,
        columns: Sequence[str] = (),
        length: str = "",
        mode: Literal["step", "stream"] = "step",
        prefetch: int = 1,
        stream: str = "",
        start_index: int = 0,
        steps: int | None = None,
        wait_s: float = 600.0,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        what = f"loader of task '{task}'"
        if not (0 <= dp_rank < dp_size and 0 <= replica < replicas):
            raise Refused(what, why=f"rank {dp_rank} of {dp_size}, replica {replica} of {replicas} cannot be")
        if (samples < 1 and groups < 1) or min(samples, groups, tokens, start_index) < 0:
            raise Refused(
                what, why=f"{samples} samples, {groups} groups, {tokens} tokens from index {start_index} cannot be"
            )
        if mode not in ("step", "stream"):
            raise Refused(what, why=f"mode is {mode!r}", hint="one of step, stream")
        if not 0 <= prefetch <= MAX_PREFETCH:
            raise Refused(what, why=f"prefetch is {prefetch}, between 0 and {MAX_PREFETCH} batches are taken ahead")
        self._packing = packing or Packing()
        self._packing.check()
        self._queue, self._task = queue, task
        # In mode `stream` a batch belongs to one group as a whole: there is nothing to split.
        self._rank, self._ranks = (dp_rank, dp_size) if mode == "step" else (0, 1)
        name = stream or task
        self._want = Want(
            samples=samples,
            groups=groups,
            tokens=tokens,
            stream=name if mode == "step" else f"{name}/{dp_rank}",
            readers=replicas * self._ranks,
        )
        self._columns, self._length = tuple(columns), length
        self.wait_s, self._on_wait = wait_s, on_wait
        self.waiting_on = ""
        self._next = start_index
        self._end = None if steps is None else start_index + max(0, steps)
        self._room = asyncio.Semaphore(prefetch)
        self._asked = self._waited_for = False
        self._told = ""
        self._ready: deque[Step] = deque()
        self._arrived = asyncio.Event()
        self._current: Step | None = None
        self._fetching: asyncio.Task[None] | None = None

    @property
    def index(self) -> int:
        """Index of the step that `next` gives next."""
        return self._next

    async def __aenter__(self) -> Self:
        self._fetching = asyncio.create_task(self._fetch_all(self._next), name=f"loader of {self._task}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close("" if kind is None else f"the trainer failed: {kind.__name__}")

    async def close(self, reason: str = "") -> None:
        """Stop taking ahead, and give back what was not finished. The step in hand is given back as well."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching])
            if not self._fetching.cancelled():
                # `next` has raised it, or nobody waited for the step that it was about.
                self._fetching.exception()
        open_steps = [*([self._current] if self._current is not None else []), *self._ready]
        self._current = None
        self._ready.clear()
        for step in open_steps:
            if not step.finished:
                await step.abandon(reason or "the loader was closed")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Step:
        step = await self.next()
        if step is None:
            raise StopAsyncIteration
        return step

    async def next(self, wait_s: float | None = None) -> Step | None:
        """The next step, or None after the last. The step before is finished by it.

        Raises:
            DeadlineExceeded: none came in time; its reason says what is waited for. It may be called again.
            Refused: the queue will not give this batch, or it lacks a column, or a sample is over the token budget.
            Unreachable: the queue did not answer for the client's patience.
        """
        if self._fetching is None:
            raise Refused(f"loader of task '{self._task}'", why="it is not open", hint="use it with `async with`")
        if self._current is not None and not self._current.finished:
            await self._current.done()
        self._current = None
        if self._next == self._end:
            return None
        if not self._asked:
            self._asked = True
            self._room.release()
        step = await self._next_ready(self.wait_s if wait_s is None else wait_s)
        self._asked = False
        self._current = step
        self._next = step.index + 1
        return step

    async def _next_ready(self, wait_s: float) -> Step:
        if not self._ready:
            await self._wait(wait_s)
        if self._ready:
            step = self._ready.popleft()
            if not self._ready:
                self._arrived.clear()
            return step
        assert self._fetching is not None
        if self._fetching.done():
            self._fetching.result()
        raise DeadlineExceeded(
            f"step {self._next} of task '{self._task}'",
            why=f"none came within {wait_s} s: {self.waiting_on or 'its samples are being fetched'}",
        )

    async def _wait(self, wait_s: float) -> None:
        """For a step, or the end of the fetching. Only now is somebody waiting who would want to be told of it."""
        assert self._fetching is not None
        arriving = asyncio.ensure_future(self._arrived.wait())
        self._waited_for = True
        self._tell(self.waiting_on)
        try:
            await asyncio.wait([arriving, self._fetching], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            arriving.cancel()
            self._tell("")
            self._waited_for = False

    def _tell(self, reason: str) -> None:
        if self._waited_for and reason != self._told and self._on_wait is not None:
            self._told = reason
            self._on_wait(reason)

    # --- taking ahead

    async def _fetch_all(self, index: int) -> None:
        while index != self._end:
            await self._room.acquire()
            batch = await self._take(index)
            try:
                step = await self._step_of(index, batch)
            except BaseException:
                await asyncio.shield(self._queue.abandon(batch, "the loader could not make a step of it"))
                raise
            self._ready.append(step)
            self._arrived.set()
            index += 1

    async def _take(self, index: int) -> LeasedBatch:
        while True:
            want = msgspec.structs.replace(self._want, index=index)
            batch = await self._queue.take(self._task, want=want, wait_s=_SLICE_S)
            self._say(batch.waiting_on)
            if batch:
                return batch

    def _say(self, reason: str) -> None:
        if reason != self.waiting_on:
            self.waiting_on = reason
            self._tell(reason)

    async def _step_of(self, index: int, batch: LeasedBatch) -> Step:
        samples = batch.samples
        for sample in samples:
            self._check_columns(sample)
        lengths = [self._length_of(sample) for sample in samples]
        # Thousands of samples take a while, which the event loop must not wait for.
        groups, keys = [sample.key.group for sample in samples], [sample.key for sample in samples]
        plan = await self._queue.threads.run(lambda: self._packing.plan(lengths, groups, self._ranks, keys))
        for sample in (samples[at] for own in plan[self._rank] for at in own):
            for name in self._columns:
                # Maps the memory, so that the trainer finds it at hand.
                sample.place(name)
        micro = [
            MicroBatch([samples[at] for at in own], [lengths[at] for at in own], samples[0]) for own in plan[self._rank]
        ]
        return Step(self._queue, self._task, index, batch, micro, sum(lengths))

    def _check_columns(self, sample: LeasedSample) -> None:
        for name in self._columns:
            if name not in sample:
                raise Refused(
                    f"column '{name}' of sample {sample.key} of task '{self._task}'",
                    why="the sample has no such column",
                    hint=did_you_mean(name, sample.names),
                )

    def _length_of(self, sample: LeasedSample) -> int:
        if self._length:
            return len(sample[self._length])
        if sample.length < 0:
            raise Refused(
                f"length of sample {sample.key} of task '{self._task}'",
                why="no producer said how many tokens it has",
                hint="put it with length_field, or give the loader length=<column>",
            )
        return sample.length
