"""What stands between the supervisor's decisions and processes: one executor a node, given self-contained orders."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from relax_rt.supervision.api import NodeStatus
from relax_rt.supervision.diagnosis import Diagnosis
from relax_rt.supervision.placement import Node
from relax_rt.supervision.plan import RolePlan
from relax_rt.supervision.protocol import Event, StartGang


class GangOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's place in one generation of its gang.

    Attributes:
        generation: grows with each start of the gang; ranks of different generations never meet.
        rank, world_size: among all slots of the gang.
        local_rank, local_world_size: among those on the same node.
        master_addr, master_port: of the rendezvous store that rank 0 serves. The socket listens already.
        key: random, the same for all ranks of one generation; before every key of theirs in the store.
    """

    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    key: str


class StartOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start; says all that another node needs to know beside the run's config.

    Attributes:
        slot, epoch: who it will be.
        node: where.
        devices: numbers of the GPUs it may use.
        gang: its place in the gang, if its role is one.
    """

    slot: str
    epoch: int
    node: str = ""
    devices: list[int] = []
    gang: GangOrder | None = None


class Rendezvous(NamedTuple):
    """Where a gang's ranks meet."""

    host: str
    port: int


def gang_orders(gang: StartGang, at: Rendezvous) -> list[GangOrder]:
    """The place of each rank, in their order; ranks of one node are counted in the same order."""
    nodes = [start.node for start in gang.ranks]
    key = secrets.token_hex(8)
    return [
        GangOrder(
            generation=gang.generation,
            rank=rank,
            world_size=len(nodes),
            local_rank=nodes[:rank].count(node),
            local_world_size=nodes.count(node),
            master_addr=at.host,
            master_port=at.port,
            key=key,
        )
        for rank, node in enumerate(nodes)
    ]


class StartAttempt:
    """One start: of a slot, or of a gang as a whole.

    Attributes:
        slots: what it is to start.
        broken: it was called off, or one of its slots was forgotten: no order may come of it.
    """

    def __init__(self, slots: Iterable[str]) -> None:
        self.slots = tuple(slots)
        self.broken = False
        self._off: dict[str, Diagnosis] = {}


class PendingStarts:
    """The newest attempt of each slot, until it is answered for."""

    def __init__(self) -> None:
        self._newest: dict[str, StartAttempt] = {}

    def __contains__(self, slot: object) -> bool:
        """Whether a start of the slot is under way."""
        return slot in self._newest

    def begin(self, slots: Iterable[str]) -> StartAttempt:
        """A start of these slots; an earlier one has no say in them any more."""
        attempt = StartAttempt(slots)
        self.forget(attempt.slots)
        for slot in attempt.slots:
            self._newest[slot] = attempt
        return attempt

    def call_off(self, off: Diagnosis) -> StartAttempt | None:
        """End the start of a slot, and of its gang with it; the slot exits with this diagnosis once the attempt is
        settled. None when no start of it is under way: somebody else answers for the slot."""
        attempt = self._newest.get(off.slot)
        if attempt is not None:
            attempt.broken = True
            attempt._off[off.slot] = off
        return attempt

    def forget(self, slots: Iterable[str]) -> list[StartAttempt]:
        """Nothing more is to be said of these slots' starts; answers with the attempts that are broken by it."""
        attempts = {attempt: None for slot in slots if (attempt := self._newest.pop(slot, None)) is not None}
        for attempt in attempts:
            attempt.broken = True
        return list(attempts)

    def settle(self, attempt: StartAttempt) -> Iterator[tuple[str, Diagnosis | None]]:
        """The attempt is over: each slot that it still answers for, and what it was called off with, if it was.

        What the caller does with one slot may call off the next, or begin another start of it: the account is kept
        between any two of them.
        """
        for slot in attempt.slots:
            if self._newest.get(slot) is attempt:
                del self._newest[slot]
                yield slot, attempt._off.pop(slot, None)


class Executor(Protocol):
    """Starts, stops and watches the processes of one node.

    What comes of an order is told by events: a start by SlotSpawned and later one SlotExited, or by SlotExited alone
    when no process came of it; everything else by the SlotExited of the process. Orders for a slot without a process
    are ignored: the core repeats them when it hears of the process. Nothing here waits or raises, but for what is
    said below.
    """

    node: str
    """Its name; empty is the head's own node in a run of one node."""

    def start(self, order: StartOrder) -> None:
        """Start a process."""

    def stop(self, slot: str) -> None:
        """Ask the slot's role to finish."""

    def kill(self, slot: str, kind: Literal["killed", "hang"], reason: str) -> None:
        """SIGKILL the slot's process group; kind and reason go into the diagnosis of the exit."""

    def dump_stacks(self, slot: str) -> None:
        """Have the stacks of all its threads written to its log."""

    def inject(self, slot: str, fault: str, seconds: float, amount: float) -> None:
        """Have a role do itself harm.

        Raises:
            Refused: there is no such fault, or the slot has no process.
        """

    async def rendezvous(self, slot: str, generation: int) -> Rendezvous:
        """Bind the socket that the gang's next rank 0 will serve on; it is handed over by the start of `slot`.

        Raises:
            OSError: no port can be bound.
        """

    async def close(self) -> object:
        """End whatever still runs on the node."""


OnEvent = Callable[[Event], None]
"""Takes what an executor has to tell."""

OnAddress = Callable[[str, str, str], None]
"""Takes (slot, address, remote) of a role that serves, remote for other nodes; empty addresses when it is gone."""

EmitEvent = Callable[..., None]
"""Appends to the run's event log: emit(kind, **fields)."""


class HeadAgent(Protocol):
    """What `Nodes` reports to: the head's agent."""

    def post(self, event: Event) -> None:
        """An event for the supervisor."""

    def on_event(self, event: Event) -> None:
        """Something happened to a slot on a node that joined."""

    def on_address(self, slot: str, address: str, remote: str) -> None:
        """Where a role on such a node serves."""

    def on_gone(self, slot: str, epoch: int, reason: str) -> None:
        """A process was lost with its node."""


class Nodes(Protocol):
    """The nodes of a run: the head's own and those that joined. See relax_rt.cluster.nodes.fleet.Fleet."""

    here: Node
    """The head's own node; its name is empty in a run of one node."""
    host: str
    """Address at which other nodes reach it."""
    environment: dict[str, str]
    """Variables of its roles."""

    def pinned(self, plans: Sequence[RolePlan]) -> list[RolePlan]:
        """The roles, those pinned to the head that cannot run elsewhere."""

    def attach(self, local: Executor, agent: HeadAgent, emit: EmitEvent) -> None:
        """Use this executor for the head's own node, and report to this agent. Call it once, before all others."""

    async def open(self, kinds: Sequence[str]) -> str:
        """Listen for nodes, which are told of these kinds of role; the address, or empty in a run of one node."""

    async def close(self, exit_code: int, reason: str) -> None:
        """End all nodes that joined, wait until they are gone (or for a while), and stop listening."""

    def executor(self, node: str) -> Executor | None:
        """The executor of a node; None when the node is gone."""

    def put(self, slot: str, remote: str) -> None:
        """Set the address at which a slot serves other nodes; empty: none."""

    def where(self, slot: str) -> str:
        """The address at which a slot serves other nodes; empty: none."""

    def log(self, node: str, slot: str) -> str:
        """A slot's log on a node that joined, as ``node:path``; empty for the head's own."""

    def status(self, slots: Sequence[str]) -> list[NodeStatus]:
        """Every node, the head's own first, with its slots of these."""
