"""The nodes of a run as the head's agent uses them: an executor for each, and what becomes of those that go."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import structlog

from relax_rt.cluster.nodes.api import (
    Began,
    BindSlot,
    Bound,
    DumpSlot,
    EndNode,
    Facts,
    InjectSlot,
    Item,
    KillSlot,
    Listens,
    Order,
    Seat,
    SlotEvent,
    StartSlot,
    StopSlot,
    Told,
    WantsToLeave,
    Wrote,
    hear,
)
from relax_rt.cluster.nodes.base import HeadBase
from relax_rt.cluster.nodes.head import Departure, HeadCore
from relax_rt.cluster.nodes.placement import Node
from relax_rt.observe.events import CURRENT, Appender
from relax_rt.supervision.api import NodeStatus
from relax_rt.supervision.executor import EmitEvent, Executor, Rendezvous, StartOrder
from relax_rt.supervision.protocol import DrainRequested, Event, NodeJoined, NodeLost, SlotExited, SlotSpawned
from relax_rt.supervision.rundir import RunPaths
from relax_rt.transport.rpc.errors import Refused, RelaxError

BIND_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 5.0
"""How long the end of a run waits for its nodes to say that nothing is left there."""


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
        self._binding: dict[tuple[str, int], asyncio.Future[Rendezvous]] = {}

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

    async def rendezvous(self, slot: str, generation: int) -> Rendezvous:
        """See Executor."""
        bound: asyncio.Future[Rendezvous] = asyncio.get_running_loop().create_future()
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
            waiting.set_result(Rendezvous(answer.host, answer.port))
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


class HeadAgent(Protocol):
    """What the fleet tells the head's agent."""

    def post(self, event: Event) -> None:
        """An event for the supervisor."""

    def on_event(self, event: Event) -> None:
        """What came to pass with a slot on a node that joined."""

    def on_address(self, slot: str, address: str, remote: str) -> None:
        """Where a role on such a node serves."""

    def on_gone(self, slot: str, epoch: int, reason: str) -> None:
        """A process went with its node."""


class Fleet:
    """The head's own executor, and one for each node that joined.

    Args:
        local: the head's own.
        base: the head's own node.
        agent: takes what comes to pass.
        emit: appends to the run's event log.
    """

    def __init__(self, local: Executor, base: HeadBase, agent: HeadAgent, emit: EmitEvent) -> None:
        self.core = HeadCore(base.paths.run_id, base.table.lease_s, time.monotonic()) if base.several else None
        self.emit = emit
        self._local, self._base, self._agent = local, base, agent
        self._lines = Appender(base.paths.run_dir / "events" / CURRENT)
        self._log = structlog.get_logger()
        self._remote: dict[str, RemoteExecutor] = {}
        self._room: dict[str, Node] = {}
        self._news, self._changed = asyncio.Event(), asyncio.Event()
        self.ending: EndNode | None = None
        """Set once the run is over."""

    def executor(self, node: str) -> Executor | None:
        """The node's; None when it is gone."""
        return self._local if node == self._base.here.name else self._remote.get(node)

    def put(self, slot: str, remote: str) -> None:
        """Where a slot listens for other nodes; empty: nowhere any more."""
        if self.core is not None:
            self.core.put(slot, remote)
            self.wake()

    def where(self, slot: str) -> str:
        """Where a slot listens for other nodes; empty while it does nowhere."""
        return "" if self.core is None else self.core.places.get(slot, "")

    def log(self, node: str, slot: str) -> str:
        """A slot's log on a node that joined, as ``node:path``; empty for the head's own."""
        executor = self._remote.get(node)
        return f"{node}:{RunPaths('', Path(executor.run_dir)).log(slot)}" if executor and executor.run_dir else ""

    def wake(self) -> None:
        """Answer the calls for orders that wait."""
        self._news.set()
        self._news = asyncio.Event()

    @property
    def news(self) -> asyncio.Event:
        """Set when there may be something for a node; asked for anew after each time."""
        return self._news

    def joined(self, seat: Seat, facts: Facts) -> None:
        """A node has joined; its agent is yet to begin."""
        assert self.core is not None
        self._remote[seat.node] = RemoteExecutor(self.core, seat, self.wake, self._agent.on_event)
        self._room[seat.node] = Node(seat.node, facts.cores, facts.gpus, facts.memory_mib)
        fields = {"host": facts.host, "machine": facts.machine, "cores": facts.cores, "gpus": facts.gpus}
        self.emit("node_joined", node=seat.node, node_epoch=seat.epoch, **fields)
        self._log.info("node joined", node=str(seat), host=facts.host)

    def began(self, seat: Seat) -> None:
        """The node's agent takes orders: there is room from now on."""
        self._agent.post(NodeJoined(self._room[seat.node]))

    def gone(self, departure: Departure, *, lost: bool) -> None:
        """A node is gone, and with it everything that ran there."""
        seat, reason = departure.seat, departure.reason
        executor = self._remote.pop(seat.node, None)
        if executor is None or self.core is None:
            return
        kind = "node_lost" if lost else "node_left"
        self.emit(kind, node=seat.node, node_epoch=seat.epoch, reason=reason, slots=list(executor.open))
        self._log.warning("node is gone", node=str(seat), why=reason, slots=list(executor.open))
        executor.lost(reason)
        for slot, epoch in executor.open.items():
            self.core.put(slot, "")
            self._agent.on_gone(slot, epoch, f"node {seat.node} is gone: {reason}")
        self.wake()
        self._agent.post(NodeLost(seat.node, reason, keep=lost and self._base.table.on_loss == "wait", at=time.time()))
        self._changed.set()

    def reported(self, seat: Seat, items: Sequence[Item]) -> None:
        """Take what a node has to tell."""
        executor = self._remote.get(seat.node)
        if executor is None or executor.seat != seat:
            return
        for item in items:
            try:
                self._item(executor, item)
            except RelaxError as error:
                self._log.error("a node's report makes no sense", node=str(seat), error=str(error))

    def _item(self, executor: RemoteExecutor, item: Item) -> None:
        match item:
            case Told():
                executor.told(hear(item))
                self._let_go(executor)
            case Listens(slot=slot, address=address, remote=remote):
                if slot in executor.open:
                    self._agent.on_address(slot, address, remote)
            case Bound():
                executor.bound(item)
            case Began(pid=pid, run_dir=run_dir):
                executor.agent_pid, executor.run_dir = pid, run_dir
            case Wrote(line=line):
                self._lines.append(line)
            case WantsToLeave(reason=reason):
                self._leaving(executor, reason)

    def _leaving(self, executor: RemoteExecutor, reason: str) -> None:
        assert self.core is not None
        if self.core.leaving(executor.seat, reason):
            self.emit("node_leaving", node=executor.node, node_epoch=executor.seat.epoch, reason=reason)
            self._agent.post(DrainRequested(executor.node))
            self._let_go(executor)

    def _let_go(self, executor: RemoteExecutor) -> None:
        """A node that wants to leave may go once nothing runs there."""
        if self.core is not None and not executor.open and self.core.is_leaving(executor.seat):
            self.core.order(executor.node, EndNode(0, "it was asked to leave, and nothing runs there any more"))
            self.wake()

    async def close(self, exit_code: int, reason: str) -> None:
        """The run is over: end all nodes, and wait until they say that nothing is left there, or a while."""
        self.ending = EndNode(exit_code, reason)
        for node in self._remote:
            assert self.core is not None
            self.core.order(node, self.ending)
        self.wake()
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                while self._remote:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            names = ", ".join(self._remote)
            self._log.warning("nodes have not said that they ended; they end when their lease is over", nodes=names)

    def status(self, slots: Sequence[str]) -> list[NodeStatus]:
        """Every node: the head's own first, with its slots of these, then the others in the order they joined."""
        elsewhere = {slot for executor in self._remote.values() for slot in executor.open}
        own = NodeStatus(
            node=self._base.here.name,
            host=self._base.host if self._base.several else os.uname().nodename,
            agent_pid=os.getpid(),
            cores=self._base.here.cores,
            gpus=self._base.here.gpus,
            slots=[slot for slot in slots if slot not in elsewhere],
        )
        if self.core is None:
            return [own]
        now = time.monotonic()
        return [own] + [
            NodeStatus(
                node=view.seat.node,
                state=view.state,
                host=view.facts.host,
                agent_pid=self._remote[view.seat.node].agent_pid if view.seat.node in self._remote else 0,
                cores=view.facts.cores,
                memory_mib=view.facts.memory_mib,
                gpus=view.facts.gpus,
                slots=list(self._remote[view.seat.node].open) if view.seat.node in self._remote else [],
                seen_s=now - view.heard,
            )
            for view in self.core.view()
        ]
