"""An executor for the processes of a node that joined: its orders wait at the head until the node fetches them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from relax_rt.cluster.nodes.api import (
    BindRendezvous,
    DumpSlot,
    InjectSlot,
    KillSlot,
    NodeMembership,
    Order,
    RendezvousBound,
    SlotEvent,
    StartSlot,
    StopSlot,
)
from relax_rt.cluster.nodes.table import NodeTable
from relax_rt.supervision.executor import GangRendezvous, StartOrder
from relax_rt.supervision.protocol import SlotExited, SlotSpawned
from relax_rt.transport.rpc.errors import Refused

BIND_TIMEOUT_S = 10.0


class RemoteExecutor:
    """Executor of a node that joined. Orders go into the head's node table, from which the node fetches them.

    Args:
        table: of the head.
        membership: the node.
        wake: answers the node's waiting call for orders.
        on_event: gets the events of the node's slots.
    """

    def __init__(
        self,
        table: NodeTable,
        membership: NodeMembership,
        wake: Callable[[], None],
        on_event: Callable[[SlotEvent], None],
    ) -> None:
        self.node = membership.node
        self.membership = membership
        self._table, self._wake, self._on_event = table, wake, on_event
        self.run_dir = ""
        """Where the node keeps its logs."""
        self.agent_pid = 0
        self.open: dict[str, int] = {}
        """Epoch of each slot that was ordered to start there and has not exited."""
        self._binding: dict[tuple[str, int], asyncio.Future[GangRendezvous]] = {}

    def start(self, order: StartOrder) -> None:
        self.open[order.slot] = order.epoch
        self._order(StartSlot(order))

    def stop(self, slot: str) -> None:
        self._order(StopSlot(slot))

    def kill(self, slot: str, kind: Literal["killed", "hang"], reason: str) -> None:
        self._order(KillSlot(slot, kind, reason))

    def dump_stacks(self, slot: str) -> None:
        self._order(DumpSlot(slot))

    def inject(self, slot: str, fault: str, seconds: float, amount: float) -> None:
        if slot not in self.open:
            raise Refused(f"cannot inject {fault} into {slot}", why=f"it has no process on node {self.node}")
        self._order(InjectSlot(slot, fault, seconds, amount))

    async def rendezvous(self, slot: str, generation: int) -> GangRendezvous:
        bound: asyncio.Future[GangRendezvous] = asyncio.get_running_loop().create_future()
        self._binding[slot, generation] = bound
        try:
            if not self._order(BindRendezvous(slot, generation)):
                raise OSError(f"node {self.node} is gone")
            async with asyncio.timeout(BIND_TIMEOUT_S):
                return await bound
        except TimeoutError:
            raise OSError(f"node {self.node} bound no port in {BIND_TIMEOUT_S:g} s") from None
        finally:
            self._binding.pop((slot, generation), None)

    async def close(self) -> None:
        """Do nothing: the fleet ends all nodes together."""

    def _order(self, order: Order) -> bool:
        given = self._table.order(self.node, order)
        self._wake()
        return given

    def bound(self, answer: RendezvousBound) -> None:
        """The node's answer to BindRendezvous."""
        waiting = self._binding.get((answer.slot, answer.generation))
        if waiting is None or waiting.done():
            return
        if answer.host:
            waiting.set_result(GangRendezvous(answer.host, answer.port))
        else:
            waiting.set_exception(OSError(f"node {self.node}: {answer.error}"))

    def apply_event(self, event: SlotEvent) -> None:
        """Pass on an event of a slot started here; events of other incarnations are ignored."""
        epoch = self.open.get(event.slot)
        if epoch is None or (isinstance(event, SlotSpawned) and event.epoch != epoch):
            return
        if isinstance(event, SlotExited):
            del self.open[event.slot]
        self._on_event(event)

    def lost(self, reason: str) -> None:
        """The node is gone: fail whatever waits for its answers."""
        for waiting in self._binding.values():
            if not waiting.done():
                waiting.set_exception(OSError(f"node {self.node} is gone: {reason}"))
