"""Messages between producers, consumers and the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from relax_rt.transport.memory.refs import BlobRef, BlockRef, Count, Extent
from relax_rt.transport.rpc.identity import Incarnation

WHY = 500
"""Characters of a reason."""
ABOUT = 80
"""Characters of an item's question by which people know it again: what roles send of it, and the ledger keeps."""
MAX_PROMPTS = 8
"""Different prompts that a loss counts."""

CountOrUnknown = Annotated[int, msgspec.Meta(ge=-1, le=1 << 48)]
"""-1: not known."""
Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""NaN has no order."""
PartialBytes = Annotated[bytes, msgspec.Meta(max_length=4 << 20)]
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
    length: CountOrUnknown = -1
    versions: list[VersionSpan] = []
    priority: Finite = 0.0


class BlockPut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block and whose its rows are. Every row belongs to one sample, and no sample is twice in a block.

    rows: empty where one block's rows are the samples of the put's groups, in order; lengths are theirs then, or
    empty if the block does not hold tokens.
    version: the weights that the columns were computed with, for fields that the policy lists as versioned.
    """

    block: BlockRef
    rows: list[RowPut]
    blobs: list[BlobRef] = []
    version: CountOrUnknown = -1
    lengths: list[CountOrUnknown] = []


class Ticket(msgspec.Struct, frozen=True):
    """The right to generate one group, or its missing members, held until its lease lapses.

    Attributes:
        group: id of the group.
        prompt: index in the run's prompt order, which derives from (run seed, index) alone.
        attempt: how often this prompt was issued before (after a refusal, loss or lapse).
        size: members of the group.
        version: the newest policy version that the ledger knew when it admitted the group.
        lease_s: length of the lease; renew it while the group is worked on.
        members: those to generate, when others of the group are there already; empty: all.
        issue: number of tickets of the group so far; tells tokens sampled under an earlier ticket from newer ones.
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


class PartialChunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of an unfinished member, from position `start` of its completion on.

    Attributes:
        issue: of the ticket that it works under.
        start: the tokens before this one were saved before; those from here on are replaced.
        tokens, logprobs: int32 and float32, little-endian, as many of one as of the other.
        versions: of these tokens, in positions of the completion.
        origin: digest of what else the tokens depend on (prompt, temperature), for whoever resumes them.
        rows: what else their producer keeps of them, as many bytes of each as of any other: experts that a token was
            routed to. Empty: nothing.
    """

    key: SampleKey
    issue: Count
    start: Count
    tokens: PartialBytes
    logprobs: PartialBytes
    versions: list[VersionSpan]
    origin: Origin = b""
    rows: PartialBytes = b""


class SavedPartials(msgspec.Struct, frozen=True, tag="saved_partials"):
    """Tokens now held of the member of each chunk, in their order; -1: it is not the caller's to make (any more).

    Fewer than were sent: there was no room, or chunks before this one are missing. The next one begins there.
    """

    held: list[int]


class Admission(msgspec.Struct, frozen=True, tag="admission"):
    """Tickets, or why there are none yet.

    retired: revision of the list of retired items, of which nothing is to be made (`QueueApi.skip`).
    """

    tickets: list[Ticket]
    waiting_on: str = ""
    retired: int = 0


class GroupsPut(msgspec.Struct, frozen=True, tag="groups_put", gc=False):
    """Ids that the ledger gave to the groups of a put, in their order, or why it does not take them yet."""

    groups: list[int]
    freed: list[Extent] = []
    waiting_on: str = ""


class LeaseRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Request of a consumer for samples.

    Attributes:
        samples: up to this many samples.
        groups: exactly this many whole groups (samples is not looked at then).
        at_least: for training: fewer groups will do, but not fewer than this; 0: exactly `groups`.
            `groups` is what the step still lacks then, and several leases may be held until `trained` ends them all.
        tokens: no more than this many tokens in all (0: no limit; one sample always goes).
    """

    samples: Count = 0
    groups: Count = 0
    tokens: Count = 0
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


class SampleRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
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


class LeaseGrant(msgspec.Struct, frozen=True, gc=False):
    """Samples leased together. lease is 0 and there are none when nothing was ready in time: see waiting_on.

    runs: the samples of a queue without steps, instead of `samples`.
    A lease without samples is to be given back (`abandon`): it lapsed, or they ended, before the answer arrived.

    remote: where the payload server is of slabs that lie on another node than the caller's, by slab owner.
    """

    lease: int
    samples: list[SampleInfo]
    runs: list[SampleRun] = []
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
    """Losses since the run was started, and whether failed groups end it.

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


class StepReply(msgspec.Struct, frozen=True, tag="step_reply"):
    """Reply to a completed step.

    Attributes:
        checkpoint_now: why it should commit a checkpoint early.
        refused_tokens: of whole samples that were over-stale, by this step or since the one before.
    """

    checkpoint_now: str = ""
    refused_tokens: int = 0


class ItemsAssigned(msgspec.Struct, frozen=True, tag="items_assigned"):
    """Reply to a choice of prompts: places in the prompt order from next_index on are not yet issued."""

    next_index: int


class Membership(msgspec.Struct, frozen=True):
    """The broker's answer to a process that joins a queue without a supervisor.

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


class Freed(msgspec.Struct, frozen=True, tag="freed", gc=False):
    """Freed extents of the caller: the reply to puts, completions and unpins."""

    extents: list[Extent] = []


class Granted(msgspec.Struct, frozen=True, tag="granted", gc=False):
    """The lease that a request was granted: what is kept of a LeaseGrant, which is built again for a repeated call."""

    lease: int


class Acknowledged(msgspec.Struct, frozen=True, tag="done", gc=False):
    """The reply of calls that have nothing to say."""


Reply = Admission | GroupsPut | StepReply | SavedPartials | ItemsAssigned | Freed | Granted | Acknowledged
"""Replies that the ledger keeps, so that a repeated call gets the first one."""
