"""What happens to a group of ranks, and what is to be done about it: the alphabet of `machine`."""

from __future__ import annotations

from typing import Literal

import msgspec

Fate = Literal["died", "silent", "absent", "stuck", "duplicate_device", "corrupt", "failed", "late"]
"""Why a member did not get a transfer.

died: its process ended. silent: it answered nothing, as a stopped process does. absent: it never came. stuck: its
collective could not be ended, twice. duplicate_device: another rank has its device. corrupt: what it received is not
what was sent. failed: it could not do its part, as it says itself. late: the transfer's own deadline came first.
"""


class Limits(msgspec.Struct, frozen=True):
    """How long each step of a group may take.

    Attributes:
        hello_s: of a transfer, until the processes of its ranks have said their first word.
        start_s: from the start of a process to its first word, over all transfers that would have had it: a slow one is
            left out of them and not begun again each time.
        starts: how often in a row a process is started that ends before its first word; then its member is given up.
        join_s: to meet all others.
        stall_s: between two buckets of the slowest rank.
        abort_s: from the request to end a collective until it has ended.
        blameless: groups in one transfer that may fail while every rank answers and none has failed itself.
        second_chances: how often, in one transfer, a rank that answers but hangs in the library gets a new process.
        waiting: transfers that may wait for the one under way.
    """

    hello_s: float = 60.0
    start_s: float = 60.0
    starts: int = 3
    join_s: float = 30.0
    stall_s: float = 20.0
    abort_s: float = 5.0
    blameless: int = 1
    second_chances: int = 1
    waiting: int = 4


class Lost(msgspec.Struct, frozen=True):
    """A member that did not get the transfer, and why."""

    member: str
    fate: Fate
    why: str


class Outcome(msgspec.Struct, frozen=True):
    """How a transfer ended: each of its members but the root is delivered or lost. `error`: why nobody was served."""

    transfer: int
    delivered: tuple[str, ...]
    lost: tuple[Lost, ...]
    error: str = ""


class Asked(msgspec.Struct, frozen=True):
    """Somebody wants a transfer from members[0] to the others: `buckets` of them, with `digest` over all."""

    transfer: int
    members: tuple[str, ...]
    buckets: int
    digest: str
    timeout_s: float


class Wanted(msgspec.Struct, frozen=True):
    """Transfers with these members are to come: their processes are to be there by then."""

    members: tuple[str, ...]


class Cancelled(msgspec.Struct, frozen=True):
    """Nobody wants the transfer any more: what is under way of it is ended."""

    transfer: int


class _FromMember(msgspec.Struct, frozen=True):
    """Something of one incarnation of a member: what another incarnation does means nothing."""

    member: str
    incarnation: int


class Hello(_FromMember, frozen=True):
    """Its process is there and works on `device`."""

    device: str = ""


class Joined(_FromMember, frozen=True):
    """It has met all ranks of the generation."""

    generation: int


class Progressed(_FromMember, frozen=True):
    """It has `buckets` of the transfer, from the first on."""

    generation: int
    buckets: int


class Done(_FromMember, frozen=True):
    """It has, or has sent, all buckets; `digest` is that of what lies in its memory."""

    generation: int
    transfer: int
    digest: str


class Failed(_FromMember, frozen=True):
    """Its collective ended with an error; `own`: for a reason of its own, not on account of another rank."""

    generation: int
    own: bool
    error: str


class Heard(_FromMember, frozen=True):
    """It has understood that the generation is to be aborted."""

    generation: int


class Aborted(_FromMember, frozen=True):
    """Its collective has ended; it can join another group."""

    generation: int


class Died(_FromMember, frozen=True):
    """Its process has ended."""

    diagnosis: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: the deadline that the machine named may be over."""


class Closed(msgspec.Struct, frozen=True):
    """The owner is done with the group."""


Event = (
    Asked | Wanted | Cancelled | Hello | Joined | Progressed | Done | Failed | Heard | Aborted | Died | Tick | Closed
)


class Spawn(msgspec.Struct, frozen=True):
    """Start a process for the member."""

    member: str
    incarnation: int


class Init(msgspec.Struct, frozen=True):
    """Have it meet the others of this generation."""

    member: str
    incarnation: int
    generation: int
    rank: int
    world: int
    timeout_s: float


class Broadcast(msgspec.Struct, frozen=True):
    """Have it take part in the transfer from bucket `first` on; rank 0 is the root."""

    member: str
    incarnation: int
    generation: int
    transfer: int
    first: int
    stall_s: float


class Abort(msgspec.Struct, frozen=True):
    """Have it end the collective it is in."""

    member: str
    incarnation: int
    generation: int


class Kill(msgspec.Struct, frozen=True):
    """End its process."""

    member: str
    incarnation: int
    why: str


class Report(msgspec.Struct, frozen=True):
    """Tell whoever asked."""

    outcome: Outcome


Action = Spawn | Init | Broadcast | Abort | Kill | Report
