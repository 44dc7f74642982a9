"""The interface between the head and the nodes that join. Nodes call, the head answers: only the head listens."""

from __future__ import annotations

from typing import Protocol

import msgspec

from relax_rt.supervision.executor import SlotOrder
from relax_rt.supervision.protocol import NodeMessage, SlotEvent
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.interface import idempotent

HELLO_NAME = "nodes"
"""Run id in the handshake: a node does not know the run before it has joined; the key decides who is admitted."""
HEAD = "head"
"""Name of the head's own node in a run of several."""
NODES_PROTOCOL = 3
"""Version of this interface and of everything that crosses it."""
MAX_ITEMS = 500
"""Most items in one report or answer; the rest goes into the next."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A node's description of itself when it joins.

    Attributes:
        name: the name that it asks for.
        host: address at which other nodes reach its roles.
        machine: the host name, for display.
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
    """A node of this name is there already; it may be declared lost soon."""


class NodeMembership(msgspec.Struct, frozen=True, array_like=True):
    """A node's membership in a run. Each join gets a new epoch; the earlier ones are fenced."""

    run_id: str
    node: str
    epoch: int

    def __str__(self) -> str:
        return f"node {self.node}#{self.epoch}"


class JoinReply(msgspec.Struct, frozen=True, kw_only=True):
    """The head's answer to a node that may take part.

    Attributes:
        membership: comes with every further call.
        config: the resolved config, JSON.
        system: the system roles of the run.
        lease_s: without a call that is answered, the node ends its roles this long after it made the last one.
        stop_s: within this time after that every process of the run on the node must be dead.
    """

    membership: NodeMembership
    config: str
    system: list[str]
    lease_s: float
    stop_s: float


class BindRendezvous(NodeMessage, frozen=True):
    """Bind the socket of a gang's rendezvous; answered by RendezvousBound."""

    slot: str
    generation: int


class EndNode(NodeMessage, frozen=True):
    """The run, or this node's membership, is over: end what is left and leave."""

    exit_code: int
    reason: str


Order = SlotOrder | BindRendezvous | EndNode


class Orders(msgspec.Struct, frozen=True):
    """Orders after the number asked for.

    Attributes:
        first: number of the first; they are numbered without gaps.
        items: the orders, in order.
        addresses_version: of `addresses`.
        addresses: where each slot listens for other nodes; None when nothing changed since the version asked for.
    """

    first: int
    items: list[Order]
    addresses_version: int = 0
    addresses: dict[str, str] | None = None


class SlotAddress(NodeMessage, frozen=True):
    """Where a slot serves; both empty when it has ended.

    Attributes:
        address: on its node.
        remote: for other nodes.
    """

    slot: str
    address: str
    remote: str


class RendezvousBound(NodeMessage, frozen=True):
    """The socket of a rendezvous; an empty host: none was bound, for the reason in `error`."""

    slot: str
    generation: int
    host: str
    port: int
    error: str = ""


class EventLine(NodeMessage, frozen=True):
    """A line of the node's event log, JSON."""

    line: bytes


class AgentStarted(NodeMessage, frozen=True):
    """The node's agent has started: its pid, and the folder of the node's logs and events."""

    pid: int
    run_dir: str


class LeaveRequested(NodeMessage, frozen=True):
    """Someone asked the node to leave: its slots are to be stopped in order and started elsewhere."""

    reason: str


Item = SlotEvent | SlotAddress | RendezvousBound | EventLine | LeaveRequested | AgentStarted


class HeadApi(Protocol):
    """The head of a run, for nodes. Every call with a membership renews the node's lease.

    A call with the membership of a node that was lost, has left or has joined anew raises StaleEpoch: it must end its
    roles.
    """

    @idempotent
    async def join(self, facts: NodeFacts, token: str) -> JoinReply:
        """Join the run. `token` names one attempt, which may ask twice.

        Refused when the versions differ, or a node of this name is there.
        """

    @idempotent
    async def orders(self, membership: NodeMembership, since: int, addresses_version: int, wait_s: float) -> Orders:
        """Orders after number `since` (which confirms those up to it), at once or the next within wait_s."""

    @idempotent
    async def report(self, membership: NodeMembership, first: int, items: list[Item]) -> int:
        """Report items numbered from `first` without gaps; returns the last number received."""

    @idempotent
    async def leave(self, membership: NodeMembership, reason: str) -> None:
        """Leave: nothing of the run lives on the node. A repetition, or an earlier epoch, changes nothing."""
