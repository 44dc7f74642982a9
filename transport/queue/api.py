"""Interface of the TransferQueue broker: the messages between a producer or consumer and the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Protocol

import msgspec

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Count, Extent
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.interface import idempotent

WHY = 500
"""Characters of a reason."""
ABOUT = 80
"""Characters of an item's question by which people know it again: what roles send of it, and the ledger keeps."""
MAX_PROMPTS = 8
"""Different prompts that a loss counts."""

CountOrNone = Annotated[int, msgspec.Meta(ge=-1, le=1 << 48)]
"""-1: not known."""
Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""NaN has no order."""
MarkBytes = Annotated[bytes, msgspec.Meta(max_length=4 << 20)]
Origin = Annotated[bytes, msgspec.Meta(max_length=16)]
Why = Annotated[str, msgspec.Meta(max_length=WHY)]


class SampleKey(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """Names a sample: its group and its place in it. Group ids are issued by the ledger and never reused."""

    group: Count
    member: Count

    def __str__(self) -> str:
        return f"{self.group}.{self.member}"


class VersionSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) of a sample's completion were sampled with `version`.

    kv_version is the oldest version in the KV cache they were sampled on (equal to version unless weights were
    swapped under a kept cache: then no single version reproduces their log-probability).
    """

    start: Count
    end: Count
    version: Count
    kv_version: Count


class RowPut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Row `row` of a block belongs to sample `key`.

    Attributes:
        length: tokens of the sample (-1: the block does not hold them), for samplers and length histograms.
        versions: come with the columns that a producer puts first.
        priority: for the priority sampler; higher goes first.
    """

    key: SampleKey
    row: Count
    length: CountOrNone = -1
    versions: list[VersionSpan] = []
    priority: Finite = 0.0


class Put(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block and whose its rows are. Every row belongs to one sample, and no sample is twice in a block.

    rows: empty in an offer of one block whose rows are the samples of its groups, in order; lengths are theirs then,
    or empty if the block does not hold tokens.
    version: the weights that the columns were computed with, for fields that the policy lists as versioned.
    """

    block: BlockRef
    rows: list[RowPut]
    blobs: list[BlobRef] = []
    version: CountOrNone = -1
    lengths: list[CountOrNone] = []


class Ticket(msgspec.Struct, frozen=True):
    """The right to generate one group, or the members of it that are missing, held until its lease lapses.

    Attributes:
        group: id of the group.
        prompt: index in the run's prompt order, which derives from (run seed, index) alone.
        attempt: 0, or how often this prompt was given out before (after a refusal, loss or lapse).
        size: members of the group.
        version: the newest policy version that the ledger knew when it admitted the group.
        lease_s: length of the lease; renew it while the group is worked on.
        members: those to generate, when others of the group are there already; empty: all.
        issue: counts how often the group was given out, so that what was sampled under an earlier ticket is known.
        partials: tokens that are kept of members that somebody else began, by member; `QueueApi.partials` has them.
        item: data item that was chosen for the prompt; None: the one that the run's order has at its index.
        losses: how often in a row what was begun of it was lost, with nothing made in between.
    """

    group: int
    prompt: int
    attempt: int
    size: int
    version: int
    lease_s: float
    members: list[int] = []
    issue: int = 0
    partials: dict[int, int] = {}
    item: int | None = None
    losses: int = 0

    def wanted(self) -> list[int]:
        """The members to generate."""
        return self.members or list(range(self.size))


class Mark(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a producer has sampled of an unfinished member, from position `start` of its completion on.

    Attributes:
        issue: of the ticket that it works under.
        start: the tokens before this one were marked before; those from here on are replaced.
        tokens, logprobs: int32 and float32, little-endian, as many of one as of the other.
        versions: of these tokens, in positions of the completion.
        origin: digest of what else the tokens depend on (prompt, temperature), for whoever goes on with them.
        rows: what else their producer keeps of them, as many bytes of each as of any other: experts that a token was
            routed to. Empty: nothing.
    """

    key: SampleKey
    issue: Count
    start: Count
    tokens: MarkBytes
    logprobs: MarkBytes
    versions: list[VersionSpan]
    origin: Origin = b""
    rows: MarkBytes = b""


class Marked(msgspec.Struct, frozen=True):
    """Tokens that are kept of the member of each mark, in their order; -1: it is not the caller's to make (any more).

    Fewer than were marked: there was no room, or marks before this one are missing. The next one begins there.
    """

    held: list[int]


class Admission(msgspec.Struct, frozen=True):
    """Tickets, or why there are none yet.

    retired: revision of the list of retired items, of which nothing is to be made (`QueueApi.skip`).
    """

    tickets: list[Ticket]
    waiting_on: str = ""
    retired: int = 0


class Offered(msgspec.Struct, frozen=True, gc=False):
    """Ids that the ledger gave to the groups of an offer, in their order, or why it does not take them yet."""

    groups: list[int]
    freed: list[Extent] = []
    waiting_on: str = ""


class Want(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a consumer asks for.

    Attributes:
        samples: up to this many samples.
        groups: exactly this many whole groups (samples is not looked at then).
        at_least: for training by one caller alone: fewer groups will do, but not fewer than this; 0: exactly `groups`.
            `groups` is what the step still lacks then, and several leases may be held until `trained` ends them all.
        tokens: no more than this many tokens in all (0: no limit; one sample always goes).
        stream: name of a sequence of batches that several ranks read in step; empty: none.
        index: place in the stream: the batch of an index is granted once, and every rank of `readers` gets the same.
        readers: how many ranks read each batch of the stream; it is finished when all have completed it.
    """

    samples: Count = 0
    groups: Count = 0
    tokens: Count = 0
    stream: str = ""
    index: Count = 0
    readers: Count = 1
    at_least: Count = 0


class SampleInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A leased sample.

    Attributes:
        parts: its columns, as (index into the batch's blocks, row).
        length: tokens, -1 if no producer said.
        staleness: -1 outside training.
        masked: token ranges [start, end) over the staleness bound: context only, their loss mask counts as 0.
    """

    key: SampleKey
    prompt: int
    attempt: int
    parts: list[tuple[int, int]]
    versions: list[VersionSpan]
    length: int = -1
    staleness: int = -1
    masked: list[tuple[int, int]] = []


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Leased samples without prompt and versions that follow each other: a short form of as many SampleInfos.

    Attributes:
        key: of the first. by_group: the others are the same member of the next groups; else the next members.
        parts: of the first; the others have the next rows of the same blocks.
        lengths: of each; empty: none of them is known.
    """

    key: SampleKey
    count: int
    by_group: bool
    parts: list[tuple[int, int]]
    lengths: list[int] = []

    def infos(self) -> Iterator[SampleInfo]:
        """The same in the long form."""
        group, member = self.key.group, self.key.member
        for i in range(self.count):
            key = SampleKey(group + i, member) if self.by_group else SampleKey(group, member + i)
            parts = [(block, row + i) for block, row in self.parts]
            yield SampleInfo(key, -1, 0, parts, [], self.lengths[i] if self.lengths else -1)


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Samples leased together. lease is 0 and there are none when nothing was ready in time: see waiting_on.

    runs: the samples of a queue without steps, instead of `samples`.
    A lease without samples is to be given back (`abandon`): it lapsed, or they ended, before the answer arrived.

    remote: where the payload server is of slabs that lie on another node than the caller's, by slab owner.
    """

    lease: int
    samples: list[SampleInfo]
    runs: list[Run] = []
    blocks: list[BlockRef] = []
    blobs: list[BlobRef] = []
    remote: dict[str, str] = {}
    lease_s: float = 0.0
    waiting_on: str = ""

    def __len__(self) -> int:
        return len(self.samples) + sum(run.count for run in self.runs)

    def infos(self) -> list[SampleInfo]:
        """All its samples."""
        return [*self.samples, *(info for run in self.runs for info in run.infos())]


class Failure(msgspec.Struct, frozen=True):
    """A sample on which the work cannot succeed, and why.

    Attributes:
        late: it took too long, as opposed to being wrong.
        item, about: id of the data item, and its beginning for people; empty: not known.
    """

    key: SampleKey
    reason: str
    late: bool = False
    item: str = ""
    about: str = ""


class Loss(msgspec.Struct, frozen=True):
    """Members lost for one cause since the run was started.

    Attributes:
        task: at which they failed; empty: they could not be made.
        cause, where, example: the newest reason, the `file:line` in it, and more of it.
        prompt, item, about: whose it is: index in the run's order, id of the data item and its beginning, if known.
        late: it was a timeout. partial: other members of such groups succeeded.
        members, groups: how many. prompts: how many different items (indices where no item is known), up to
            MAX_PROMPTS.
    """

    task: str = ""
    cause: str = ""
    where: str = ""
    late: bool = False
    members: int = 0
    groups: int = 0
    prompts: int = 0
    example: str = ""
    prompt: int = -1
    partial: bool = False
    item: str = ""
    about: str = ""


class Retired(msgspec.Struct, frozen=True):
    """A data item that is not tried again.

    Attributes:
        item, about: its id and beginning.
        task, timeouts: at which task it was late, and how many times as a whole group. reason: the last one.
    """

    item: str = ""
    about: str = ""
    task: str = ""
    reason: str = ""
    timeouts: int = 0


class ProgressReport(msgspec.Struct, frozen=True):
    """What was lost since the run was started, and whether anything comes of it.

    Attributes:
        failed_groups: in a row, with none whole in between. prompts: different ones of these. most: that end a run.
        ended: so many failed that the run is to end.
        losses: by cause, the most frequent first.
        retired: items that are not tried again. revision: changes with them.
    """

    failed_groups: int = 0
    prompts: int = 0
    most: int = 0
    ended: bool = False
    losses: list[Loss] = []
    retired: list[Retired] = []
    revision: int = 0


def describe_loss(loss: Loss) -> str:
    """Say in a line how much was lost, at which task, and for which cause."""
    of = _count(loss.prompts, "prompt") if loss.prompts < MAX_PROMPTS else f"{MAX_PROMPTS} or more prompts"
    lost = f"{_count(loss.members, 'sample')} of {_count(loss.groups, 'group')}"
    return f"{lost} ({of}) failed {describe_cause(loss)}"


def describe_cause(loss: Loss) -> str:
    """Say at which task, and for which cause."""
    what = f"at task {loss.task}" if loss.task else "while they were made"
    more = "" if not loss.where or loss.where in loss.cause else f" at {loss.where}"
    return f"{what}: {loss.cause}{more}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def failure_summary(report: ProgressReport) -> str:
    """Say how many groups failed in a row, and the most frequent cause; empty while nothing fails."""
    if not report.failed_groups or not report.losses:
        return ""
    row = f"{report.failed_groups} groups failed in a row (the run ends at {report.most})"
    return f"{row}; {describe_loss(report.losses[0])}"


class Advice(msgspec.Struct, frozen=True):
    """What the ledger asks of the trainer after a step, and tells it.

    Attributes:
        checkpoint_now: why it should commit a checkpoint early.
        refused_tokens: of whole samples that were over-stale, by this step or since the one before.
    """

    checkpoint_now: str = ""
    refused_tokens: int = 0


class Chosen(msgspec.Struct, frozen=True):
    """The answer to a choice of prompts: places in the prompt order from next_index on were not yet given out."""

    next_index: int


class Membership(msgspec.Struct, frozen=True):
    """What a process is told when it joins a queue of its own accord.

    Attributes:
        who: its incarnation; the epoch is issued by the ledger.
        run_id: of the shared memory.
        shm_dir, spill_dir: where slabs and spilled blocks lie on the broker's node.
        node: the broker's node; a caller on it maps slabs, any other fetches payloads.
        lease_s: length of tickets and leases.
        fields: declared columns (see transport/memory/fields.py); empty: any column may be put.
        max_sample_bytes: a sample with more payload is refused.
    """

    who: Incarnation
    run_id: str
    shm_dir: str
    spill_dir: str
    node: str
    lease_s: float
    fields: dict[str, str] = {}
    max_sample_bytes: int = 0


class QueueStats(msgspec.Struct, frozen=True):
    """Numbers of the queue for people and metrics; counts are samples unless named otherwise."""

    by_state: dict[str, int]
    outstanding: int
    bound: float
    trainer_version: int
    step: int
    payload_bytes: int
    journal_bytes: int
    prompts_issued: int
    prompts_returned: int
    refused_stale: int
    waiting: dict[str, str]
    committed: int = 0
    """Steps that a checkpoint covers."""


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
    async def arrive(self, node: str, payloads: str) -> None:
        """Say where the caller's memory is, before any other call: its epoch is a supervisor's, which tells of its end.

        node, payloads: as with join. Who does not say so is on the broker's node, in memory that is shared there.
        """

    @idempotent
    async def offer(self, seq: Count, puts: list[Put], groups: list[Count], wait_s: float) -> Offered:
        """Put whole groups of samples that no ticket was drawn for (a queue without prompts).

        groups: size of each; a row's key names its group by the place in this list.
        """

    @idempotent
    async def admit(self, seq: Count, engine_version: Count, groups: Count, wait_s: float) -> Admission:
        """Ask for up to `groups` new groups, waiting at most wait_s for the staleness bound to allow one."""

    @idempotent
    async def put(self, seq: Count, puts: list[Put], short_bytes: Count = 0) -> list[Extent]:
        """Put columns on samples of groups that the caller generates. Answers with its freed extents.

        short_bytes: what the caller cannot put, as its own memory is full: some of it may be spilled.
        """

    @idempotent
    async def mark(self, seq: Count, marks: list[Mark]) -> Marked:
        """Have tokens of unfinished members kept, until they are put or their group ends, for whoever makes them."""

    @idempotent
    async def partials(self, keys: list[SampleKey]) -> list[Mark]:
        """What is kept of members that the caller makes, from their first token on; ask again for what is not there.

        An answer has about 4 MiB at most, and those without tokens are left out.
        """

    @idempotent
    async def give_back(
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
        """A producer returns unfinished groups; what is missing of them is given out again.

        failed: it could not be made: `on_failed_member` says what becomes of it, and it counts against the prompt.
        losses: how often it was begun here and lost, through nobody's fault: several in a row are a failure.
        late, item, about: of a failure, see Failure.
        """

    @idempotent
    async def skip(self, seq: Count, groups: list[Count]) -> None:
        """The caller's groups are of retired items: they end, and their places in the prompt order are passed over."""

    @idempotent
    async def progress(self) -> ProgressReport:
        """What was lost since the run was started, and the items that were retired."""

    @idempotent
    async def reinstate(self, items: list[str]) -> None:
        """Take those of the items back that are retired."""

    @idempotent
    async def renew(self, groups: list[Count], leases: list[Count]) -> list[int]:
        """Renew the caller's group tickets and consumer leases; answers with the ids that are no longer its own."""

    @idempotent
    async def take(self, seq: Count, task: str, want: Want, wait_s: float) -> Batch:
        """Lease ready samples for a task, chosen by the task's sampler, waiting at most wait_s for enough of them."""

    @idempotent
    async def complete(
        self, seq: Count, task: str, lease: Count, puts: list[Put], failures: list[Failure], pinned: bool
    ) -> list[Extent]:
        """Finish a lease: new columns for its samples, and those that failed.

        pinned: the caller still reads the lease's memory; it says `unpin` when it does not any more.
        """

    @idempotent
    async def unpin(self, seq: Count, leases: list[Count]) -> list[Extent]:
        """The caller reads the memory of these leases no more."""

    @idempotent
    async def abandon(self, seq: Count, lease: Count, reason: str, pinned: bool = False) -> None:
        """Give a lease back undone; its samples are offered again. pinned: see complete."""

    @idempotent
    async def trained(
        self, seq: Count, leases: list[Count], step: Count, weights: VersionRecord, skipped: bool, pinned: list[Count]
    ) -> Advice:
        """The optimizer step over the samples of these leases is done; the trainer's weights are now `weights`.

        Other leases of the step task end: their groups are offered again.
        skipped: the step was thrown away (not a number): its samples end as `skipped`, the weights are the old ones.
        pinned: leases whose memory the caller still reads; it says `unpin` when it does not any more.
        """

    @idempotent
    async def filtered(self, seq: Count, lease: Count, groups: list[Count], reason: Why, pinned: bool) -> None:
        """These groups of a train lease are not trained on: they end as dropped(filter), and their prompts are retired.

        The lease keeps the others; without any it ends. pinned: the caller still reads the groups' memory.
        """

    @idempotent
    async def ask(self, seq: Count, groups: Count) -> None:
        """Until the next `trained` so many groups may be under way beyond the bound; over_provision, if it is more."""

    @idempotent
    async def choose(self, seq: Count, items: dict[Count, Count]) -> Chosen:
        """The data items of places in the prompt order; places that were given out keep what they had."""

    @idempotent
    async def flush(self) -> None:
        """Force to disk what was acknowledged so far. A checkpoint is put in place only after that: else the queue
        could forget, with its host, the steps that the checkpoint covers."""

    @idempotent
    async def committed(self, seq: Count, step: Count, checkpoint: str) -> None:
        """A checkpoint that covers all steps up to `step` was renamed into place; their samples are freed."""

    @idempotent
    async def rollback(self, seq: Count, step: Count, weights: VersionRecord) -> None:
        """The trainer (re)starts from the checkpoint of `step` (0: none) with weights published as `weights`.

        Samples trained after that step are offered again if still admissible, else their prompts return.
        """

    @idempotent
    async def gone(self, seq: Count, who: Incarnation, reason: str) -> None:
        """Told by the agent: this process has ended; its leases lapse at once and its pins are released."""

    @idempotent
    async def stats(self) -> QueueStats:
        """Numbers for people and metrics."""

    @idempotent
    async def statistics(self) -> dict[str, Any]:
        """All numbers of the ledger, the journal, memory and waits, for tools (see transport/queue/statistics.py)."""

    @idempotent
    async def account(self) -> dict[str, int]:
        """The ledger's account: for each state the number of samples since the run began, and duplicates (0)."""
