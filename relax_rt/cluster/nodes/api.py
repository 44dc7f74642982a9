"""What a joined node and the head say to each other. The node calls, the head answers: only the head listens."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from relax_rt.supervision.executor import StartOrder
from relax_rt.supervision.protocol import SlotExited, SlotFinished, SlotProgress, SlotReady, SlotSpawned
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.interface import idempotent

DOOR = "nodes"
"""What both ends greet with: a node does not know the run before it has joined; the keys say who is let in."""
HEAD = "head"
"""Name of the head's own node in a run of several."""
NODES_PROTOCOL = 1
"""Version of this interface and of everything that crosses it."""
MAX_ITEMS = 500
"""Of one report or one answer; more go into the next."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself.

    Attributes:
        name: what it wants to be called.
        host: address at which other nodes reach its roles.
        machine: for people: the host's own name.
        cores, memory_mib, gpus: what it offers.
        python, version: of its interpreter and of relax-rt.
        protocol: NODES_PROTOCOL of its code.
        pid: of the process that joins.
    """

    name: str
    host: str
    machine: str = ""
    cores: int = 1
    memory_mib: int = 0
    gpus: int = 0
    python: str = ""
    version: str = ""
    protocol: int = NODES_PROTOCOL
    pid: int = 0


class NameTaken(Refused):
    """A node of this name is there; it may be given up soon."""


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """A node's place in a run. Each time it joins it gets a new epoch; the earlier ones are fenced."""

    run_id: str
    node: str
    epoch: int

    def __str__(self) -> str:
        return f"node {self.node}#{self.epoch}"


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """The head's answer to a node that may take part.

    Attributes:
        seat: comes with every further call.
        config: the resolved config, JSON.
        system: the system roles of the run.
        lease_s: without a call that is answered, the node ends its roles this long after it made the last one.
        stop_s: within this time after that every process of the run on the node must be dead.
    """

    seat: Seat
    config: str
    system: list[str]
    lease_s: float
    stop_s: float


class StartSlot(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """Start a process."""

    order: StartOrder


class StopSlot(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """Ask a role to finish."""

    slot: str


class KillSlot(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """SIGKILL a slot's process group."""

    slot: str
    kind: Literal["killed", "hang"]
    reason: str


class DumpSlot(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """Have a role's stacks written to its log."""

    slot: str


class InjectSlot(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """Have a role do itself harm."""

    slot: str
    fault: str
    seconds: float
    amount: float


class BindSlot(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """Bind the socket of a gang's rendezvous; answered by Bound."""

    slot: str
    generation: int


class EndNode(msgspec.Struct, frozen=True, tag=7, array_like=True):
    """The run, or this node's part in it, is over: end what is left and go."""

    exit_code: int
    reason: str


Order = StartSlot | StopSlot | KillSlot | DumpSlot | InjectSlot | BindSlot | EndNode


class Orders(msgspec.Struct, frozen=True):
    """Orders after the number asked for.

    Attributes:
        first: number of the first; they are numbered without gaps.
        items: the orders, in order.
        map_version: of `places`.
        places: where each slot listens for other nodes, by slot; None when nothing changed since the version asked for.
    """

    first: int
    items: list[Order]
    map_version: int = 0
    places: dict[str, str] | None = None


class Told(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """An event for the supervisor."""

    kind: str
    body: msgspec.Raw


class Listens(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """Where a role serves; both empty when it is gone.

    Attributes:
        address: on its node.
        remote: for other nodes.
    """

    slot: str
    address: str
    remote: str


class Bound(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """The socket of a rendezvous; host is empty when there is none, and `error` says why."""

    slot: str
    generation: int
    host: str
    port: int
    error: str = ""


class Wrote(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """A line that a role or the node's agent wrote to the event log there, JSON."""

    line: bytes


class Began(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """The node's agent has begun: its pid there, and where logs and events of the node lie."""

    pid: int
    run_dir: str


class WantsToLeave(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """Someone asked the node to end: its slots are to be stopped in order and started elsewhere."""

    reason: str


Item = Told | Listens | Bound | Wrote | WantsToLeave | Began

SlotEvent = SlotSpawned | SlotReady | SlotFinished | SlotExited | SlotProgress
_EVENTS: dict[str, type[SlotEvent]] = {
    event.__name__: event for event in (SlotSpawned, SlotReady, SlotFinished, SlotExited, SlotProgress)
}


def tell(event: SlotEvent) -> Told:
    """An event as it crosses the wire."""
    return Told(type(event).__name__, msgspec.Raw(msgspec.msgpack.encode(event)))


def hear(told: Told) -> SlotEvent:
    """Raises:
    Refused: it is no event that a node may report.
    """
    try:
        return msgspec.msgpack.decode(told.body, type=_EVENTS[told.kind])
    except (KeyError, msgspec.DecodeError) as error:
        raise Refused(f"event {told.kind[:40]!r} of a node", why=repr(error)) from error


class HeadApi(Protocol):
    """The head of a run, to the nodes that joined it. Every call with a seat renews the node's lease.

    A call of a node that was lost, has left or has joined anew since raises StaleEpoch: it must end its roles.
    """

    @idempotent
    async def join(self, facts: Facts, token: str) -> Joined:
        """Take part in the run. `token` is one attempt's own, so that the same attempt may ask twice.

        Refused when the versions do not fit, or a node of this name is there.
        """

    @idempotent
    async def orders(self, seat: Seat, since: int, map_version: int, wait_s: float) -> Orders:
        """Orders after number `since` (which confirms those up to it), at once or the next within wait_s."""

    @idempotent
    async def report(self, seat: Seat, first: int, items: list[Item]) -> int:
        """What came to pass, numbered from `first` without gaps; answers with the last number taken."""

    @idempotent
    async def leave(self, seat: Seat, reason: str) -> None:
        """Nothing of the run lives on the node any more. Told once more, or of an earlier epoch, it changes nothing."""
