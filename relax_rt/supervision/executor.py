"""Interfaces between the supervisor's decisions and processes: orders, executors (one a node), pending starts.

local.py implements Executor for this node, cluster/nodes/fleet.py for others.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import msgspec

from relax_rt.interfaces.agent import Diagnosis
from relax_rt.supervision.protocol import DumpStacks, Event, Kill, NodeMessage, StartGang, Stop


class GangOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's position in one generation of its gang.

    Attributes:
        generation: grows with each start of the gang; ranks of different generations never meet.
        rank, world_size: among all slots of the gang.
        local_rank, local_world_size: among those on the same node.
        master_addr, master_port: of the rendezvous store that rank 0 serves. The socket listens already.
        key: random, the same for all ranks of one generation; a prefix of all their keys in the store.
    """

    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    key: str


class StartOrder(NodeMessage, frozen=True, kw_only=True):
    """One process to start: all that another node needs to know besides the run's config.

    Attributes:
        slot, epoch: who it will be.
        node: where.
        devices: numbers of the GPUs it may use.
        gang: its position in the gang, if its role is one.
    """

    slot: str
    epoch: int
    node: str = ""
    devices: tuple[int, ...] = ()
    gang: GangOrder | None = None


class InjectFault(NodeMessage, frozen=True):
    """Inject a fault into a role, see channel.FaultMsg."""

    slot: str
    fault: str
    seconds: float
    amount: float


SlotOrder = StartOrder | Stop | Kill | DumpStacks | InjectFault


class GangRendezvous(NamedTuple):
    """Where a gang's ranks meet."""

    host: str
    port: int


def gang_orders(gang: StartGang, at: GangRendezvous) -> list[GangOrder]:
    """Return the position of each rank, in their order; local ranks are counted in the same order."""
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


class PendingStart:
    """One start: of a slot, or of a gang as a whole.

    Attributes:
        slots: what it should start.
        broken: it was called off, or one of its slots was forgotten: it must lead to no order.
    """

    def __init__(self, slots: Iterable[str]) -> None:
        self.slots = tuple(slots)
        self.broken = False
        self._off: dict[str, Diagnosis] = {}


class PendingStarts:
    """Starts that were decided and that no executor knows of yet: the newest attempt of each slot. Pure.

    Between the decision and the order the agent waits (for epochs, for a gang's socket), and the slot may be asked to
    stop, its node may be lost, and the next start of the same slot may be decided. The result of an attempt concerns a
    slot only while it is the slot's newest one.
    """

    def __init__(self) -> None:
        self._newest: dict[str, PendingStart] = {}

    def __contains__(self, slot: object) -> bool:
        """Return whether a start of the slot is pending."""
        return slot in self._newest

    def begin(self, slots: Iterable[str]) -> PendingStart:
        """Begin a start of these slots, which supersedes an earlier one."""
        attempt = PendingStart(slots)
        self.forget(attempt.slots)
        for slot in attempt.slots:
            self._newest[slot] = attempt
        return attempt

    def call_off(self, off: Diagnosis) -> PendingStart | None:
        """End the start of a slot, and of its gang with it; the slot exits with this diagnosis once the attempt is
        settled. None when no start of it is pending: an executor answers for the slot."""
        attempt = self._newest.get(off.slot)
        if attempt is not None:
            attempt.broken = True
            attempt._off[off.slot] = off
        return attempt

    def forget(self, slots: Iterable[str]) -> list[PendingStart]:
        """Drop these slots' starts without a result; return the attempts that are broken by it."""
        attempts = {attempt: None for slot in slots if (attempt := self._newest.pop(slot, None)) is not None}
        for attempt in attempts:
            attempt.broken = True
        return list(attempts)

    def settle(self, attempt: PendingStart) -> Iterator[tuple[str, Diagnosis | None]]:
        """End the attempt: yield each slot that it still answers for, and the diagnosis if it was called off.

        What the caller does with one slot may call off the next, or begin another start of it, so each is looked up
        when it is its turn.
        """
        for slot in attempt.slots:
            if self._newest.get(slot) is attempt:
                del self._newest[slot]
                yield slot, attempt._off.pop(slot, None)


class Executor(Protocol):
    """Starts, stops and watches the processes of one node.

    Results are events: of a start SlotSpawned and later one SlotExited, or SlotExited alone when no process was
    started; of everything else the SlotExited of the process. Orders for a slot without a process are ignored: the
    supervisor repeats them when it learns of the process.
    """

    node: str
    """Its name; empty is the head's own node in a run of one node."""

    def carry_out(self, order: SlotOrder) -> None:
        """Carry out an order. Raises Refused: a fault cannot be injected: there is no such fault, or the slot has no
        process."""

    async def rendezvous(self, slot: str, generation: int) -> GangRendezvous:
        """Bind the socket that the gang's next rank 0 serves on; the next start of `slot` passes it on. Raises OSError:
        no port can be bound."""

    async def close(self) -> object:
        """End whatever still runs on the node."""


OnEvent = Callable[[Event], None]
"""Takes an executor's events."""

OnAddress = Callable[[str, str, str], None]
"""Takes (slot, address, remote) of a role that serves, remote for other nodes; empty addresses when it is gone."""

EmitEvent = Callable[..., None]
"""Appends to the run's event log: emit(kind, **fields)."""
