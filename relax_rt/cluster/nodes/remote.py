"""An executor for the processes of a node that joined: its orders wait at the head until the node fetches them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from relax_rt.cluster.nodes.api import (
    BindSlot,
    Bound,
    DumpSlot,
    InjectSlot,
    KillSlot,
    Order,
    Seat,
    SlotEvent,
    StartSlot,
    StopSlot,
)
from relax_rt.cluster.nodes.head import HeadCore
from relax_rt.supervision.executor import GangRendezvous, StartOrder
from relax_rt.supervision.protocol import SlotExited, SlotSpawned
from relax_rt.transport.rpc.errors import Refused

BIND_TIMEOUT_S = 10.0


class RemoteExecutor:
    """The processes of a node that joined; see Executor. Orders go into the head's account, where the node finds them.

    Args:
        core: the account.
        seat: the node.
        give: tells the node's waiting call that there is an order.
        on_event: takes what comes to pass.
    """

    def __init__(
        self, core: HeadCore, seat: Seat, give: Callable[[], None], on_event: Callable[[SlotEvent], None]
    ) -> None:
        self.node = seat.node
        self.seat = seat
        self._core, self._wake, self._on_event = core, give, on_event
        self.run_dir = ""
        """Where the node keeps its logs."""
        self.agent_pid = 0
        self.open: dict[str, int] = {}
        """Epoch of each slot that was ordered to start there and has not exited."""
        self._binding: dict[tuple[str, int], asyncio.Future[GangRendezvous]] = {}

    def start(self, order: StartOrder) -> None:
        """See Executor. Of a node that is gone nothing is heard: the supervisor knows that it is."""
        self.open[order.slot] = order.epoch
        self._give(StartSlot(order))

    def stop(self, slot: str) -> None:
        """See Executor."""
        self._give(StopSlot(slot))

    def kill(self, slot: str, kind: Literal["killed", "hang"], reason: str) -> None:
        """See Executor."""
        self._give(KillSlot(slot, kind, reason))

    def dump_stacks(self, slot: str) -> None:
        """See Executor."""
        self._give(DumpSlot(slot))

    def inject(self, slot: str, fault: str, seconds: float, amount: float) -> None:
        """See Executor. What the node refuses is told in its agent's log."""
        if slot not in self.open:
            raise Refused(f"cannot inject {fault} into {slot}", why=f"it has no process on node {self.node}")
        self._give(InjectSlot(slot, fault, seconds, amount))

    async def rendezvous(self, slot: str, generation: int) -> GangRendezvous:
        """See Executor."""
        bound: asyncio.Future[GangRendezvous] = asyncio.get_running_loop().create_future()
        self._binding[slot, generation] = bound
        try:
            if not self._give(BindSlot(slot, generation)):
                raise OSError(f"node {self.node} is gone")
            async with asyncio.timeout(BIND_TIMEOUT_S):
                return await bound
        except TimeoutError:
            raise OSError(f"node {self.node} bound no port in {BIND_TIMEOUT_S:g} s") from None
        finally:
            self._binding.pop((slot, generation), None)

    async def close(self) -> None:
        """See Executor: the fleet ends all nodes at once."""

    def _give(self, order: Order) -> bool:
        given = self._core.order(self.node, order)
        self._wake()
        return given

    def bound(self, answer: Bound) -> None:
        """The node has bound a socket, or could not."""
        waiting = self._binding.get((answer.slot, answer.generation))
        if waiting is None or waiting.done():
            return
        if answer.host:
            waiting.set_result(GangRendezvous(answer.host, answer.port))
        else:
            waiting.set_exception(OSError(f"node {self.node}: {answer.error}"))

    def told(self, event: SlotEvent) -> None:
        """An event of a slot that we started there; one of any other is none of ours any more."""
        epoch = self.open.get(event.slot)
        if epoch is None or (isinstance(event, SlotSpawned) and event.epoch != epoch):
            return
        if isinstance(event, SlotExited):
            del self.open[event.slot]
        self._on_event(event)

    def lost(self, reason: str) -> None:
        """The node is gone: nobody waits for its answers any more."""
        for waiting in self._binding.values():
            if not waiting.done():
                waiting.set_exception(OSError(f"node {self.node} is gone: {reason}"))
