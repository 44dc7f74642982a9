"""Events of the ledger. They are journaled as they are; a replay gives the same state."""

from __future__ import annotations

import msgspec

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.queue.ledger.messages import BlockPut, Failure, LeaseRequest, PartialChunk, SampleKey
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.queue.ledger.state import SampleRange
from relax_rt.transport.rpc.identity import Incarnation


class ConfigureQueue(msgspec.Struct, frozen=True, tag="configure"):
    """The policy from here on. In the journal, so that a replay judges each event as it was judged then."""

    policy: LedgerPolicy
    limits: QueueLimits


class OpenRun(msgspec.Struct, frozen=True, tag="open_run"):
    """The broker serves run `run_id` on `node`. Another run id than before means that shared memory began anew.

    payloads: address of the node's payload server, for readers on other nodes.
    """

    run_id: str
    node: str = ""
    payloads: str = ""


class JoinQueue(msgspec.Struct, frozen=True, tag="join"):
    """The caller's incarnation is seen for the first time; older ones of its slot are fenced.

    Attributes:
        node, payloads: see QueueApi.join.
        pid, started: the caller's process on the broker's node (0: not to be watched) and its start in clock ticks.
        issued: the epoch was issued by this ledger.
    """

    node: str = ""
    payloads: str = ""
    pid: int = 0
    started: int = 0
    issued: bool = False


class RequestTickets(msgspec.Struct, frozen=True, tag="admit"):
    engine_version: int
    groups: int


class PutGroups(msgspec.Struct, frozen=True, tag="put_groups", gc=False):
    puts: list[BlockPut]
    groups: list[int]


class PutSamples(msgspec.Struct, frozen=True, tag="put_samples", gc=False):
    puts: list[BlockPut]


class SavePartials(msgspec.Struct, frozen=True, tag="save_partials", gc=False):
    chunks: list[PartialChunk]


class ReleaseGroups(msgspec.Struct, frozen=True, tag="release_groups"):
    """failed: what is missing of the groups could not be made, which counts against their prompts.
    losses: how often it was begun and lost meanwhile, which counts when it comes again and again.
    late, item, about: see Failure."""

    groups: list[int]
    reason: str
    failed: bool = False
    losses: int = 0
    late: bool = False
    item: str = ""
    about: str = ""


class SkipGroups(msgspec.Struct, frozen=True, tag="skip_groups"):
    """Groups of retired items are not made."""

    groups: list[int]


class ReinstateItems(msgspec.Struct, frozen=True, tag="reinstate_items"):
    """Retired items are tried again."""

    items: list[str]


class ReportFailures(msgspec.Struct, frozen=True, tag="report_losses"):
    """Report the losses that were not reported and whose cause was last reported at least `older_s` seconds ago."""

    older_s: float


class RequestLease(msgspec.Struct, frozen=True, tag="request_lease", gc=False):
    """keys, slices: what was chosen, in the journal; keys is None while it is still to be chosen."""

    task: str
    request: LeaseRequest
    keys: list[SampleKey] | None = None
    slices: list[SampleRange] = []


class CompleteLease(msgspec.Struct, frozen=True, tag="complete_lease", gc=False):
    lease: int
    puts: list[BlockPut]
    failures: list[Failure]
    pinned: bool = False


class UnpinLeases(msgspec.Struct, frozen=True, tag="unpin", gc=False):
    leases: list[int]


class ReleaseLease(msgspec.Struct, frozen=True, tag="release_lease"):
    lease: int
    reason: str
    pinned: bool = False


class CompleteStep(msgspec.Struct, frozen=True, tag="complete_step"):
    leases: list[int]
    step: int
    weights: VersionRecord
    skipped: bool = False
    pinned: list[int] = []


class FilterGroups(msgspec.Struct, frozen=True, tag="filter_groups"):
    lease: int
    groups: list[int]
    reason: str
    pinned: bool = False


class RequestSurplus(msgspec.Struct, frozen=True, tag="request_surplus"):
    groups: int


class AssignItems(msgspec.Struct, frozen=True, tag="assign_items"):
    """items: data item by place in the prompt order."""

    items: dict[int, int]


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    step: int
    checkpoint: str


class Rollback(msgspec.Struct, frozen=True, tag="rollback"):
    step: int
    weights: VersionRecord


class ProcessExited(msgspec.Struct, frozen=True, tag="process_exited"):
    """The process of `who` has ended."""

    who: Incarnation
    reason: str


class MoveBlocks(msgspec.Struct, frozen=True, tag="move_blocks"):
    """Blocks were copied to a file on the broker's disk: block id and where it is now."""

    moves: list[tuple[int, Extent]]


class Lapse(msgspec.Struct, frozen=True, tag="lapse"):
    """Deadlines passed. The ids are written out because renewals are not journaled."""

    groups: list[int]
    leases: list[int]


Event = (
    ConfigureQueue
    | OpenRun
    | JoinQueue
    | RequestTickets
    | PutGroups
    | PutSamples
    | SavePartials
    | ReleaseGroups
    | SkipGroups
    | ReinstateItems
    | ReportFailures
    | RequestLease
    | CompleteLease
    | UnpinLeases
    | ReleaseLease
    | CompleteStep
    | FilterGroups
    | RequestSurplus
    | AssignItems
    | Commit
    | Rollback
    | ProcessExited
    | MoveBlocks
    | Lapse
)


class JournalEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One record of the journal.

    Attributes:
        n: ledger sequence number, growing by one.
        at: the broker's clock in seconds.
        event: what happened.
        who: the caller; None for the broker's own events.
        seq: the caller's sequence number; 0: not deduplicated.
    """

    n: int
    at: float
    event: Event
    who: Incarnation | None = None
    seq: int = 0
