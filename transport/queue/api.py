"""Interface of the TransferQueue's broker, as RPC clients call it and `Broker` serves it."""

from __future__ import annotations

from typing import Any, Protocol

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.refs import Count, Extent
from relax_rt.transport.queue.ledger.messages import (
    Admission,
    BlockPut,
    Failure,
    GroupsPut,
    ItemsAssigned,
    LeaseGrant,
    LeaseRequest,
    Membership,
    PartialChunk,
    ProgressReport,
    QueueStats,
    SampleKey,
    SavedPartials,
    StepReply,
    Why,
)
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.interface import idempotent


class QueueApi(Protocol):
    """The broker of the TransferQueue. Every call that changes the ledger is journaled before it is answered.

    `seq` is the caller's own sequence number for changing calls, growing by one: a repeated call (after a
    reconnect) gets the first answer again and changes nothing.
    """

    @idempotent
    async def join(self, name: str, node: str, pid: Count, payloads: str) -> Membership:
        """Enter a queue that no supervisor runs: get an epoch for slot `name`. Older holders of the name are fenced.

        node: names the caller's node. pid: its process there, watched when the node is the broker's.
        payloads: address of the caller's payload server, for readers on other nodes; empty if it has none.
        """

    @idempotent
    async def register(self, node: str, payloads: str) -> None:
        """Say where the caller's memory is, before any other call: its epoch is a supervisor's, which tells of its end.

        node, payloads: as with join. Who does not say so is on the broker's node, in memory that is shared there.
        """

    @idempotent
    async def payload_servers(self, owners: list[str]) -> dict[str, str]:
        """Addresses of the payload servers of those slab owners whose memory the caller does not share, by owner.

        With them a process that holds no lease itself reads a part of another one's (`LeasedBatch.part`).
        """

    @idempotent
    async def put_groups(self, seq: Count, puts: list[BlockPut], groups: list[Count], wait_s: float) -> GroupsPut:
        """Put whole groups of samples that no ticket was drawn for (a queue without prompts).

        groups: size of each; a row's key names its group by the place in this list.
        """

    @idempotent
    async def admit(self, seq: Count, engine_version: Count, groups: Count, wait_s: float) -> Admission:
        """Ask for up to `groups` new groups, waiting at most wait_s for the staleness bound to allow one."""

    @idempotent
    async def put_samples(self, seq: Count, puts: list[BlockPut], short_bytes: Count = 0) -> list[Extent]:
        """Put columns on samples of groups that the caller generates. Answers with its freed extents.

        short_bytes: what the caller cannot put, as its own memory is full: some of it may be spilled.
        """

    @idempotent
    async def save_partials(self, seq: Count, chunks: list[PartialChunk]) -> SavedPartials:
        """Journal tokens of unfinished members, for whoever resumes them, until they are put or their group ends."""

    @idempotent
    async def load_partials(self, keys: list[SampleKey]) -> list[PartialChunk]:
        """Return the partial completions of members that the caller makes, from their first token on.

        Ask again for members that are missing in the answer: it has about 4 MiB at most.
        Those without tokens are never in it.
        """

    @idempotent
    async def release_groups(
        self,
        seq: Count,
        groups: list[Count],
        reason: str,
        failed: bool = False,
        losses: Count = 0,
        late: bool = False,
        item: str = "",
        about: str = "",
    ) -> None:
        """Release unfinished groups of a producer; their missing members are admitted again.

        failed: it could not be made: `on_failed_member` says what becomes of it, and it counts against the prompt.
        losses: how often it was begun here and lost without a failure; several in a row count as one.
        late, item, about: of a failure, see Failure.
        """

    @idempotent
    async def skip_groups(self, seq: Count, groups: list[Count]) -> None:
        """End the caller's groups, whose items are retired; their places in the prompt order are skipped."""

    @idempotent
    async def progress(self) -> ProgressReport:
        """Return what was lost since the run was started, and the retired items."""

    @idempotent
    async def reinstate(self, items: list[str]) -> None:
        """Reinstate those of the items that are retired."""

    @idempotent
    async def renew(self, groups: list[Count], leases: list[Count]) -> list[int]:
        """Renew the caller's group tickets and consumer leases; answers with the ids that are no longer its own."""

    @idempotent
    async def lease(self, seq: Count, task: str, request: LeaseRequest, wait_s: float) -> LeaseGrant:
        """Lease ready samples for a task, chosen by the task's sampler, waiting at most wait_s for enough of them."""

    @idempotent
    async def complete(
        self, seq: Count, lease: Count, puts: list[BlockPut], failures: list[Failure], pinned: bool
    ) -> list[Extent]:
        """Finish a lease: new columns for its samples, and those that failed.

        pinned: the caller still reads the lease's memory; it calls `unpin` when it does not any more.
        """

    @idempotent
    async def unpin(self, seq: Count, leases: list[Count]) -> list[Extent]:
        """Release the caller's pins on the memory of these leases."""

    @idempotent
    async def release(self, seq: Count, lease: Count, reason: str, pinned: bool = False) -> None:
        """Release a lease undone; its samples are offered again. pinned: see complete."""

    @idempotent
    async def complete_step(
        self, seq: Count, leases: list[Count], step: Count, weights: VersionRecord, skipped: bool, pinned: list[Count]
    ) -> StepReply:
        """The optimizer step over the samples of these leases is done; the trainer's weights are now `weights`.

        Other leases of the step task end: their groups are offered again.
        skipped: the step was thrown away (not a number): its samples end as `skipped`, the weights are the old ones.
        pinned: leases whose memory the caller still reads; it calls `unpin` when it does not any more.
        """

    @idempotent
    async def filter_groups(self, seq: Count, lease: Count, groups: list[Count], reason: Why, pinned: bool) -> None:
        """These groups of a train lease are not trained on: they end as dropped(filter), and their prompts are retired.

        The lease keeps the others; without any it ends. pinned: the caller still reads the groups' memory.
        """

    @idempotent
    async def request_surplus(self, seq: Count, groups: Count) -> None:
        """Allow so many groups beyond the staleness bound until the next step; over_provision counts if it is more."""

    @idempotent
    async def assign_items(self, seq: Count, items: dict[Count, Count]) -> ItemsAssigned:
        """Set the data items of places in the prompt order; issued places keep theirs."""

    @idempotent
    async def flush(self) -> None:
        """Force to disk what was acknowledged so far. A checkpoint is put in place only after that: else the queue
        could forget, with its host, the steps that the checkpoint covers."""

    @idempotent
    async def commit(self, seq: Count, step: Count, checkpoint: str) -> None:
        """A checkpoint that covers all steps up to `step` was renamed into place; their samples are freed."""

    @idempotent
    async def rollback(self, seq: Count, step: Count, weights: VersionRecord) -> None:
        """The trainer (re)starts from the checkpoint of `step` (0: none) with weights published as `weights`.

        Samples trained after that step are offered again if still admissible, else their prompts return.
        """

    @idempotent
    async def process_exited(self, seq: Count, who: Incarnation, reason: str) -> None:
        """Report from the agent that a process has ended; its leases lapse at once and its pins are released."""

    @idempotent
    async def stats(self) -> QueueStats:
        """Numbers for people and metrics."""

    @idempotent
    async def statistics(self) -> dict[str, Any]:
        """All numbers of the ledger, the journal, memory and waits, for tools (see transport/queue/statistics.py)."""

    @idempotent
    async def account(self) -> dict[str, int]:
        """The ledger's account: for each state the number of samples since the run began, and duplicates (0)."""
