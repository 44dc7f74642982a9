"""What happens to the ledger. Journaled as they are; replaying them gives the same state."""

from __future__ import annotations

import msgspec

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.queue.ledger.messages import Failure, Mark, Put, SampleKey, Want
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.identity import Incarnation


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """The policy from here on. In the journal, so that a replay judges each event as it was judged then."""

    policy: LedgerPolicy
    limits: QueueLimits


class Open(msgspec.Struct, frozen=True, tag="open"):
    """The broker serves run `run_id` on `node`. Another run id than before means that shared memory began anew.

    payloads: address of the node's payload server, for readers on other nodes.
    """

    run_id: str
    node: str = ""
    payloads: str = ""


class Join(msgspec.Struct, frozen=True, tag="join"):
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


class Admit(msgspec.Struct, frozen=True, tag="admit"):
    engine_version: int
    groups: int


class Offer(msgspec.Struct, frozen=True, tag="offer", gc=False):
    puts: list[Put]
    groups: list[int]


class PutColumns(msgspec.Struct, frozen=True, tag="put", gc=False):
    puts: list[Put]


class MarkTokens(msgspec.Struct, frozen=True, tag="mark", gc=False):
    marks: list[Mark]


class GiveBack(msgspec.Struct, frozen=True, tag="give_back"):
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


class Skip(msgspec.Struct, frozen=True, tag="skip"):
    """Groups of retired items are not made."""

    groups: list[int]


class Reinstate(msgspec.Struct, frozen=True, tag="reinstate"):
    """Retired items are tried again."""

    items: list[str]


class ReportLosses(msgspec.Struct, frozen=True, tag="report_losses"):
    """Report the losses that were not reported and whose cause was last reported at least `older_s` seconds ago."""

    older_s: float


class Take(msgspec.Struct, frozen=True, tag="take", gc=False):
    """keys: what was chosen, in the journal; None while it is still to be chosen."""

    task: str
    want: Want
    keys: list[SampleKey] | None = None


class Complete(msgspec.Struct, frozen=True, tag="complete", gc=False):
    task: str
    lease: int
    puts: list[Put]
    failures: list[Failure]
    pinned: bool = False


class Unpin(msgspec.Struct, frozen=True, tag="unpin", gc=False):
    leases: list[int]


class Abandon(msgspec.Struct, frozen=True, tag="abandon"):
    lease: int
    reason: str
    pinned: bool = False


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    leases: list[int]
    step: int
    weights: VersionRecord
    skipped: bool = False
    pinned: list[int] = []


class Filtered(msgspec.Struct, frozen=True, tag="filtered"):
    lease: int
    groups: list[int]
    reason: str
    pinned: bool = False


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    groups: int


class Choose(msgspec.Struct, frozen=True, tag="choose"):
    """items: data item by place in the prompt order."""

    items: dict[int, int]


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    step: int
    checkpoint: str


class Rollback(msgspec.Struct, frozen=True, tag="rollback"):
    step: int
    weights: VersionRecord


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """The process of `who` has ended."""

    who: Incarnation
    reason: str


class Spilled(msgspec.Struct, frozen=True, tag="spilled"):
    """Blocks were copied to a file on the broker's disk: block id and where it is now."""

    moves: list[tuple[int, Extent]]


class Lapse(msgspec.Struct, frozen=True, tag="lapse"):
    """Deadlines passed. The ids are written out because renewals are not journaled."""

    groups: list[int]
    leases: list[int]


Event = (
    Configure
    | Open
    | Join
    | Admit
    | Offer
    | PutColumns
    | MarkTokens
    | GiveBack
    | Skip
    | Reinstate
    | ReportLosses
    | Take
    | Complete
    | Unpin
    | Abandon
    | Trained
    | Filtered
    | Ask
    | Choose
    | Committed
    | Rollback
    | Gone
    | Spilled
    | Lapse
)


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
