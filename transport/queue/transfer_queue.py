"""The TransferQueue on its own: any processes, no supervisor, no RL, no torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from relax_rt.transport.base.portal import EventLoopThread
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.payload_fetcher import Fetcher
from relax_rt.transport.queue.batch import LeasedBatch
from relax_rt.transport.queue.client import NewSample, QueueClient
from relax_rt.transport.queue.hosting import CALL_TIMEOUT_S, BrokerFinder, Host, bind, join, keys_for, tasks_of
from relax_rt.transport.queue.ledger.messages import Admission, Failure, ItemsAssigned, Membership, SampleKey, StepReply
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits, SamplerSpec
from relax_rt.transport.queue.puts import PUT_WAIT_S
from relax_rt.transport.rpc.errors import Refused, RelaxError

CLOSE_TIMEOUT_S = 30.0
"""Longest time for cleaning up, besides the time that leaving waits for readers."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class Ends(msgspec.Struct, frozen=True):
    """Settings of one process's end of a queue; see TransferQueue.connect."""

    name: str = ""
    capacity_bytes: int = 256 << 20
    slab_bytes: int = 16 << 20
    warm_bytes: int = 0
    keys: str | Path | None = None
    patience_s: float = 120.0
    length_field: str = ""
    linger_s: float = 60.0
    on_wait: Callable[[str], None] | None = None


class TransferQueue:
    """Samples from producers to consumer tasks, through shared memory, with a journal behind them.

    One process serves the queue of a folder, any number of others connect to it::

        async with TransferQueue.serve("queue", tasks={"train": ["tokens", "reward"], "reward": ["tokens"]}) as queue:
            ...
        async with TransferQueue.connect("queue") as queue:
            await queue.put([{"tokens": np.arange(5)}])
            batch = await queue.lease("reward", samples=8, wait_s=10)
            await queue.complete(batch, {sample.key: {"reward": score(sample["tokens"])} for sample in batch.samples})

    A task sees a sample as soon as the fields that it needs are there. A sample is finished, and its memory is used
    again, when all tasks are done with it. If a consumer dies or is late, its samples are offered again.

    Make it with `serve` or `connect`, use it as a context manager: ``async with``, or ``with queue.blocking()`` for
    code without an event loop.
    """

    def __init__(self, enter: Callable[[contextlib.AsyncExitStack], Any]) -> None:
        self._enter = enter
        self._stack = contextlib.AsyncExitStack()
        self._client: QueueClient | None = None
        self.membership: Membership | None = None
        self.host: Host | None = None
        """The broker, when this process serves the queue."""
        self.linger_s = 0.0
        """Longest time that leaving waits until others have read the samples of this process (see connect)."""

    @classmethod
    def serve(
        cls,
        folder: str | Path,
        tasks: Mapping[str, Sequence[str]] | None = None,
        *,
        fields: Mapping[str, str] | None = None,
        samplers: Mapping[str, str | SamplerSpec] | None = None,
        capacity_bytes: int = 1 << 30,
        spill_bytes: int = 0,
        durable: bool = False,
        lease_s: float = 60.0,
        listen: str = "",
        length_field: str = "",
        policy: LedgerPolicy | None = None,
        limits: QueueLimits | None = None,
    ) -> Self:
        """Host the queue of a folder in this process, and be a client of it. Ends with the context.

        Args:
            folder: made if it is not there. What the queue held is in it again if its host was killed, or if payloads
                are durable; those in shared memory end with this context.
            tasks: the fields that each consumer task needs.
            fields: declared columns, as ``{"tokens": "int32[*]"}``; others are refused. Default: anything may be put.
            samplers: who chooses for a task, by short name or import path (see transport/queue/samplers).
            capacity_bytes: payload in shared memory from which on producers wait.
            spill_bytes: payload that may move to disk when memory fills.
            durable: payloads lie in files of the folder and outlive the host's processes.
            lease_s: a consumer that is silent for this long loses its samples.
            listen: tcp address for other nodes, as ``tcp://10.0.0.1:7000``; the folder's keys.json lets them in.
            length_field: the column whose length counts as a sample's tokens.
            policy, limits: everything else that the ledger can do; instead of the above.

        Raises:
            Refused: (on entering) another process serves the folder, or the settings cannot work.
        """
        if policy is None:
            specs = {
                task: spec if isinstance(spec, SamplerSpec) else SamplerSpec(spec)
                for task, spec in (samplers or {}).items()
            }
            policy = LedgerPolicy(tasks=tasks_of(tasks or {}), step_task="", samplers=specs, fields=dict(fields or {}))
        if limits is None:
            limits = QueueLimits(
                lease_s=lease_s, capacity_bytes=capacity_bytes, spill_bytes=spill_bytes, durable=durable
            )
        host = Host(Path(folder), policy, limits, listen=listen)
        queue = cls(lambda stack: queue._serve(stack, host, min(limits.capacity_bytes, 256 << 20), length_field))
        return queue

    async def _serve(
        self, stack: contextlib.AsyncExitStack, host: Host, memory_bytes: int, length_field: str
    ) -> QueueClient:
        await host.open()
        stack.push_async_callback(host.close)
        keeper = asyncio.create_task(host.keep())
        stack.push_async_callback(_cancelled, keeper)
        self.host = host
        ends = Ends(capacity_bytes=memory_bytes, length_field=length_field)
        return await self._connect(stack, str(host.folder), ends)

    @classmethod
    def connect(
        cls,
        where: str | Path,
        *,
        name: str = "",
        capacity_bytes: int = 256 << 20,
        slab_bytes: int = 16 << 20,
        warm_bytes: int = 0,
        keys: str | Path | None = None,
        patience_s: float = 120.0,
        length_field: str = "",
        linger_s: float = 60.0,
        on_wait: Callable[[str], None] | None = None,
    ) -> Self:
        """Use the queue of a folder on this node, or of a ``tcp://`` address on another one.

        Args:
            where: the folder, or the broker's tcp address.
            name: of this process in the queue, as ``reader/0``; a later one of the same name takes its place.
            capacity_bytes: of what this process puts, while others may still read it.
            slab_bytes: memory is made in pieces of this size; take it larger than a single put.
            warm_bytes: memory to make and pre-fault on entering (about a second a GiB): a first use costs page faults.
            keys: keys.json of the queue's folder, for tcp.
            patience_s: how long to wait for a broker that is not there (yet, or for a while).
            length_field: the column whose length counts as a sample's tokens.
            linger_s: on another node than the broker's, what this process puts lies in memory of its own: how long it
                waits on leaving until others have read it. What they have not is lost.
            on_wait: gets the reason of a wait, and an empty string when it ends.
        """
        ends = Ends(name, capacity_bytes, slab_bytes, warm_bytes, keys, patience_s, length_field, linger_s, on_wait)
        queue = cls(lambda stack: queue._connect(stack, str(where), ends))
        return queue

    async def _connect(self, stack: contextlib.AsyncExitStack, where: str, ends: Ends) -> QueueClient:
        curve = await asyncio.to_thread(keys_for, where, ends.keys)
        address = BrokerFinder(where, ends.patience_s)
        joined = await join(stack, ends.name, address, curve, ends.patience_s)
        membership = self.membership = joined.membership
        api = bind(stack, membership.who, address, curve, CALL_TIMEOUT_S)
        here = joined.memory is None
        fetcher: Fetcher | None = None
        if curve is not None:
            fetcher = Fetcher(curve)
            stack.push_async_callback(fetcher.close)
        client = QueueClient(
            api,
            membership.who,
            joined.memory or Path(membership.shm_dir),
            spill_dir=Path(membership.spill_dir) if here else None,
            slab_bytes=min(ends.slab_bytes, ends.capacity_bytes),
            capacity_bytes=ends.capacity_bytes,
            patience_s=ends.patience_s,
            fields=membership.fields,
            length_field=ends.length_field,
            max_sample_bytes=membership.max_sample_bytes,
            fetcher=fetcher,
            on_wait=ends.on_wait,
        )
        if ends.warm_bytes:
            await client.warm(ends.warm_bytes)
        await stack.enter_async_context(client)
        if joined.memory is not None:
            self.linger_s = ends.linger_s
            stack.push_async_callback(_linger, client, ends.linger_s)
        return client

    def check_unentered(self) -> None:
        """Raises Refused if it was entered before: it can be once."""
        if self._client is not None:
            raise Refused("entering a TransferQueue", why="it was entered before", hint="make another one")

    async def __aenter__(self) -> Self:
        self.check_unentered()
        async with contextlib.AsyncExitStack() as stack:
            self._client = await self._enter(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def blocking(self, *, timeout_s: float = 180.0) -> BlockingQueue:
        """The same queue for code without an event loop: ``with queue.blocking() as queue: queue.put(...)``."""
        return BlockingQueue(self, timeout_s=timeout_s)

    @property
    def client(self) -> QueueClient:
        """All that a client can do, also for queues with prompts, steps and checkpoints.

        Raises:
            Refused: the queue was not entered.
        """
        if self._client is None:
            raise Refused("call of a TransferQueue", why="it was not entered", hint="async with … as queue")
        return self._client

    async def put(
        self,
        samples: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        *,
        group: bool = False,
        priorities: Sequence[float] | None = None,
        wait_s: float = PUT_WAIT_S,
    ) -> list[SampleKey]:
        """Put samples; answers with their keys when the broker has journaled them (see QueueClient.put).

        samples: a list of samples, each a mapping from field to value; or columns, a mapping from field to an array
        [samples, …] or a list with a value for each sample, which is faster for many samples of one kind.
        group: they make one group, which tasks may lease as a whole; default: each is a group of its own.
        priorities: one for each sample, for the priority sampler; higher goes first.
        """
        return await self.client.put(samples, group=group, priorities=priorities, wait_s=wait_s)

    async def lease(
        self, task: str, *, samples: int = 0, groups: int = 0, tokens: int = 0, wait_s: float = 0.0
    ) -> LeasedBatch:
        """Lease up to `samples` samples, or exactly `groups` whole groups, that are ready for a task.

        Answers as soon as there are some; with none after wait_s (the batch is false, and `waiting_on` says why).

        Raises:
            Refused: there is no such task.
            Unreachable: the broker did not answer for patience_s.
        """
        return await self.client.lease(task, samples=samples, groups=groups, tokens=tokens, wait_s=wait_s)

    async def complete(
        self,
        batch: LeasedBatch,
        columns: Mapping[SampleKey, Mapping[str, Any]] | None = None,
        failures: Sequence[Failure] = (),
    ) -> None:
        """The task is done with a batch; `columns` are new ones for its samples.

        Arrays taken from the batch stay good for as long as anything refers to them.
        """
        await self.client.complete(batch, columns, failures)

    async def release(self, batch: LeasedBatch, reason: str) -> None:
        """Release a batch undone: its samples are offered again."""
        await self.client.release(batch, reason)

    @property
    def waiting_on(self) -> str:
        """Why a call of this process waits now; empty when none does."""
        return self.client.waiting_on

    async def statistics(self) -> dict[str, Any]:
        """Numbers of the broker (`broker`), and of this process's end (`client`)."""
        return {"broker": await self.client.api.statistics(), "client": msgspec.to_builtins(self.client.statistics())}


class BlockingQueue:
    """A TransferQueue and its client, blocking, on an event loop in a thread of its own.

    Thread-safe; use it as a context manager. Each method does what QueueClient's method of the same name does.

    Args:
        queue: not entered yet.
        timeout_s: longest time that one call may take, besides its wait_s.
    """

    def __init__(self, queue: TransferQueue, *, timeout_s: float = 180.0) -> None:
        self._queue, self._timeout_s = queue, timeout_s
        self._loop: EventLoopThread | None = None

    def __enter__(self) -> Self:
        # Before there is anything that a failure would leave: it may be open elsewhere.
        self._queue.check_unentered()
        self._loop = EventLoopThread("transfer-queue")
        try:
            self._loop.run_to_end(self._queue.__aenter__(), self._timeout_s)
        except BaseException:
            # Also where it came in at the last moment; else there is nothing to leave.
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        loop = self._running()
        if loop.is_current():
            raise Refused(
                "leaving the queue", why="it was done on its own event loop", hint="leave it where you entered"
            )
        try:
            loop.run_to_end(self._queue.__aexit__(*exc), CLOSE_TIMEOUT_S + self._queue.linger_s)
        finally:
            self._loop = None
            loop.stop()

    def _running(self) -> EventLoopThread:
        if self._loop is None:
            raise Refused("call of a TransferQueue", why="it was not entered", hint="with queue.blocking() as queue")
        return self._loop

    def _run(self, call: Callable[[QueueClient], Coroutine[Any, Any, T]], wait_s: float = 0.0) -> T:
        loop = self._running()
        return loop.run(call(self._queue.client), self._timeout_s + wait_s)

    @property
    def client(self) -> QueueClient:
        """The client, for what does not block."""
        return self._queue.client

    @property
    def waiting_on(self) -> str:
        """Why a call of this process waits now; empty when none does."""
        return self._queue.waiting_on

    def statistics(self) -> dict[str, Any]:
        """Numbers of the broker (`broker`), and of this process's end (`client`)."""
        return self._run(lambda _: self._queue.statistics())

    def put(
        self,
        samples: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        *,
        group: bool = False,
        priorities: Sequence[float] | None = None,
        wait_s: float = PUT_WAIT_S,
    ) -> list[SampleKey]:
        """Put samples that no ticket was drawn for."""
        return self._run(lambda q: q.put(samples, group=group, priorities=priorities, wait_s=wait_s), wait_s)

    def lease(
        self, task: str, *, samples: int = 0, groups: int = 0, tokens: int = 0, at_least: int = 0, wait_s: float = 0.0
    ) -> LeasedBatch:
        """Lease samples that are ready for a task."""
        return self._run(
            lambda q: q.lease(task, samples=samples, groups=groups, tokens=tokens, at_least=at_least, wait_s=wait_s),
            wait_s,
        )

    def complete(
        self,
        batch: LeasedBatch,
        columns: Mapping[SampleKey, Mapping[str, Any]] | None = None,
        failures: Sequence[Failure] = (),
        *,
        version: int = -1,
    ) -> None:
        """Finish a lease with new columns for its samples, and those that failed."""
        self._run(lambda q: q.complete(batch, columns, failures, version=version))

    def release(self, batch: LeasedBatch, reason: str) -> None:
        """Release a lease undone."""
        self._run(lambda q: q.release(batch, reason))

    def admit(self, engine_version: int, groups: int, *, wait_s: float) -> Admission:
        """Ask for tickets of groups to generate."""
        return self._run(lambda q: q.admit(engine_version, groups, wait_s=wait_s), wait_s)

    def put_samples(self, samples: Sequence[NewSample]) -> None:
        """Put samples of groups that tickets are held for."""
        self._run(lambda q: q.put_samples(samples))

    def release_groups(self, groups: Sequence[int], reason: str) -> None:
        """Release unfinished groups."""
        self._run(lambda q: q.release_groups(groups, reason))

    def complete_step(
        self,
        batch: LeasedBatch | Sequence[LeasedBatch],
        step: int,
        weights: VersionRecord,
        *,
        skipped: bool = False,
    ) -> StepReply:
        """The optimizer step over the batches is done."""
        return self._run(lambda q: q.complete_step(batch, step, weights, skipped=skipped))

    def filter_groups(self, batch: LeasedBatch, groups: Sequence[int], reason: str) -> LeasedBatch:
        """Leave groups of a batch out of the step."""
        return self._run(lambda q: q.filter_groups(batch, groups, reason))

    def request_surplus(self, groups: int) -> None:
        """Let so many groups be made beyond the staleness bound."""
        self._run(lambda q: q.request_surplus(groups))

    def assign_items(self, items: Mapping[int, int]) -> ItemsAssigned:
        """Say which data item places of the prompt order are of."""
        return self._run(lambda q: q.assign_items(items))

    def flush(self) -> None:
        """Force to disk what the queue has acknowledged so far."""
        self._run(lambda q: q.flush())

    def commit(self, step: int, checkpoint: str) -> None:
        """The checkpoint of `step` is in place."""
        self._run(lambda q: q.commit(step, checkpoint))

    def rollback(self, step: int, weights: VersionRecord) -> None:
        """The trainer starts from the checkpoint of `step`."""
        self._run(lambda q: q.rollback(step, weights))


async def _linger(client: QueueClient, wait_s: float) -> None:
    try:
        left = await client.linger(wait_s)
    except RelaxError as error:
        log.warning("%s leaves, and cannot tell whether others have read what it put: %s", client.who, error)
        return
    if left:
        log.warning("%s leaves with %d bytes that others have not read: they are lost", client.who, left)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
