"""The nodes of a run at the head: those that joined, what they report, their executors, and the listener."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil  # type: ignore[import-untyped]
import structlog

from relax_rt.cluster.nodes.api import (
    HEAD,
    HELLO_NAME,
    AgentStarted,
    BindRendezvous,
    EndNode,
    EventLine,
    HeadApi,
    Item,
    JoinReply,
    LeaveRequested,
    NodeFacts,
    NodeMembership,
    Order,
    Orders,
    RendezvousBound,
    SlotAddress,
)
from relax_rt.cluster.nodes.checks import pinned_plans
from relax_rt.cluster.nodes.links import role_environment
from relax_rt.cluster.nodes.membership import read_keys
from relax_rt.cluster.nodes.table import STOP_S, TICK_S, Departure, NodeTable
from relax_rt.config.checks import check_listen
from relax_rt.config.loader import SYSTEM_ROLES
from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.agent import NodeStatus
from relax_rt.observe.events import CURRENT, Appender
from relax_rt.supervision.devices import count_gpus
from relax_rt.supervision.executor import (
    EmitEvent,
    Executor,
    GangRendezvous,
    InjectFault,
    SlotOrder,
    StartOrder,
)
from relax_rt.supervision.placement import Node
from relax_rt.supervision.plan import RolePlan
from relax_rt.supervision.protocol import (
    DrainRequested,
    Event,
    NodeJoined,
    NodeLost,
    SlotEvent,
    SlotExited,
    SlotSpawned,
)
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RunPaths, read_run
from relax_rt.transport.rpc.channel import AddressError, parse_address
from relax_rt.transport.rpc.errors import Refused, RelaxError, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import CurveKeys, RpcServer, make_hello

MIB = 1 << 20
BIND_TIMEOUT_S = 10.0
MAX_WAIT_S = 30.0
LEAVE_TIMEOUT_S = 5.0
"""How long the end of a run waits for its nodes to say that nothing is left there."""


class NodeEvents(Protocol):
    """What the fleet reports to: the head's agent."""

    def post(self, event: Event) -> None:
        """An event for the supervisor."""

    def on_event(self, event: Event) -> None:
        """Something happened to a slot on a node that joined."""

    def on_address(self, slot: str, address: str, remote: str) -> None:
        """Where a role on such a node serves."""

    def on_gone(self, slot: str, epoch: int, reason: str) -> None:
        """A process was lost with its node."""


class NodeFleet:
    """The nodes of a run: the head's own, and those that joined.

    Args:
        config: of the run; without [supervision.nodes] listen no other node can join.
        paths: the run's directories on the head.
    """

    def __init__(self, config: RunConfig, paths: RunPaths) -> None:
        self._config, self._paths, table = config, paths, config.supervision.nodes
        self.table = NodeTable(paths.run_id, table.lease_s, time.monotonic()) if table.listen else None
        cores = len(os.sched_getaffinity(0))
        self.here = Node(HEAD if self.table else "", cores, count_gpus(), psutil.virtual_memory().total // MIB)
        self.host, self.environment = "127.0.0.1", dict[str, str]()
        if self.table:
            self.host = parse_address(check_listen(table.listen)).host
            self.environment = role_environment(paths, run_id=paths.run_id, node=HEAD, host=self.host)
        self._lines = Appender(paths.run_dir / "events" / CURRENT)
        self._log = structlog.get_logger()
        self._remote: dict[str, RemoteExecutor] = {}
        self._capacity: dict[str, Node] = {}
        self._news, self._changed = asyncio.Event(), asyncio.Event()
        self._listener: NodeListener | None = None
        self.ending: EndNode | None = None
        """The order that ends every node; set once the run is over."""

    def pinned(self, plans: Sequence[RolePlan]) -> list[RolePlan]:
        """Return the roles, those pinned to the head that cannot run elsewhere."""
        return pinned_plans(plans, self._config)

    def attach(self, local: Executor, agent: NodeEvents, emit: EmitEvent) -> None:
        """Use this executor for the head's own node, and report to this agent. Call it once, before all others."""
        self._local, self._agent, self.emit = local, agent, emit

    async def open(self, kinds: Sequence[str]) -> str:
        """Listen for nodes, which get these kinds of role; return the address, empty in a run of one node.

        Where any port will do, use the one before: nodes that knew the head before it died find it there.

        Raises:
            AddressError: nothing can listen there.
        """
        if self.table is None:
            return ""
        config = (self._paths.run_dir / RESOLVED_CONFIG).read_text()
        system = [kind for kind in SYSTEM_ROLES if kind in kinds]
        self._listener = NodeListener(self, self.table, config=config, system=system, keys=read_keys(self._paths))
        wanted = check_listen(self._config.supervision.nodes.listen)
        before = str((read_run(self._paths.run_dir) or {}).get("listen", ""))
        here, there = parse_address(wanted), parse_address(before) if before else None
        address = ""
        if there is not None and here.port == 0 and there.host == here.host:
            with suppress(AddressError):
                address = await self._listener.open(before)
        address = address or await self._listener.open(wanted)
        self.emit("listening_for_nodes", address=address)
        return address

    def executor(self, node: str) -> Executor | None:
        """The node's; None when it is gone."""
        return self._local if node == self.here.name else self._remote.get(node)

    def put(self, slot: str, remote: str) -> None:
        """Where a slot listens for other nodes; empty: nowhere any more."""
        if self.table is not None:
            self.table.set_address(slot, remote)
            self.wake()

    def where(self, slot: str) -> str:
        """Where a slot listens for other nodes; empty while it does nowhere."""
        return "" if self.table is None else self.table.addresses.get(slot, "")

    def log(self, node: str, slot: str) -> str:
        """A slot's log on a node that joined, as ``node:path``; empty for the head's own."""
        executor = self._remote.get(node)
        return f"{node}:{RunPaths('', Path(executor.run_dir)).log(slot)}" if executor and executor.run_dir else ""

    def wake(self) -> None:
        """Answer the waiting calls for orders."""
        self._news.set()
        self._news = asyncio.Event()

    @property
    def news(self) -> asyncio.Event:
        """Set when there may be orders; a fresh event after each time."""
        return self._news

    def node_joined(self, membership: NodeMembership, facts: NodeFacts) -> None:
        """A node has joined; its agent is still starting."""
        assert self.table is not None
        self._remote[membership.node] = RemoteExecutor(self.table, membership, self.wake, self._agent.on_event)
        self._capacity[membership.node] = Node(membership.node, facts.cores, facts.gpus, facts.memory_mib)
        fields = {"host": facts.host, "machine": facts.machine, "cores": facts.cores, "gpus": facts.gpus}
        self.emit("node_joined", node=membership.node, node_epoch=membership.epoch, **fields)
        self._log.info("node joined", node=str(membership), host=facts.host)

    def agent_started(self, membership: NodeMembership) -> None:
        """The node's agent takes orders: slots can be placed on it from now on."""
        self._agent.post(NodeJoined(self._capacity[membership.node]))

    def node_gone(self, departure: Departure, *, lost: bool) -> None:
        """A node left or was lost, and with it everything that ran there."""
        membership, reason = departure.membership, departure.reason
        executor = self._remote.pop(membership.node, None)
        if executor is None or self.table is None:
            return
        kind = "node_lost" if lost else "node_left"
        self.emit(kind, node=membership.node, node_epoch=membership.epoch, reason=reason, slots=list(executor.open))
        self._log.warning("node is gone", node=str(membership), why=reason, slots=list(executor.open))
        executor.lost(reason)
        for slot, epoch in executor.open.items():
            self.table.set_address(slot, "")
            self._agent.on_gone(slot, epoch, f"node {membership.node} is gone: {reason}")
        self.wake()
        self._agent.post(
            NodeLost(
                membership.node, reason, keep=lost and self._config.supervision.nodes.on_loss == "wait", at=time.time()
            )
        )
        self._changed.set()

    def apply_report(self, membership: NodeMembership, items: Sequence[Item]) -> None:
        """Apply the items of a node's report."""
        executor = self._remote.get(membership.node)
        if executor is None or executor.membership != membership:
            return
        for item in items:
            try:
                self._apply(executor, item)
            except RelaxError as error:
                self._log.error("an item of a node's report was refused", node=str(membership), error=str(error))

    def _apply(self, executor: RemoteExecutor, item: Item) -> None:
        if isinstance(item, SlotEvent):
            executor.apply_event(item)
            self._release_if_empty(executor)
            return
        match item:
            case SlotAddress(slot=slot, address=address, remote=remote):
                if slot in executor.open:
                    self._agent.on_address(slot, address, remote)
            case RendezvousBound():
                executor.bound(item)
            case AgentStarted(pid=pid, run_dir=run_dir):
                executor.agent_pid, executor.run_dir = pid, run_dir
            case EventLine(line=line):
                self._lines.append(line)
            case LeaveRequested(reason=reason):
                assert self.table is not None
                if self.table.request_leave(executor.membership, reason):
                    self.emit("node_leaving", node=executor.node, node_epoch=executor.membership.epoch, reason=reason)
                    self._agent.post(DrainRequested(executor.node))
                    self._release_if_empty(executor)

    def _release_if_empty(self, executor: RemoteExecutor) -> None:
        """End a node that has asked to leave once nothing runs on it."""
        if self.table is not None and not executor.open and self.table.is_leaving(executor.membership):
            self.table.order(executor.node, EndNode(0, "it was asked to leave, and nothing runs on it any more"))
            self.wake()

    async def close(self, exit_code: int, reason: str) -> None:
        """End all nodes that joined, wait until they are gone (or for a while), and stop listening."""
        self.ending = EndNode(exit_code, reason)
        for node in self._remote:
            assert self.table is not None
            self.table.order(node, self.ending)
        self.wake()
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                while self._remote:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            names = ", ".join(self._remote)
            self._log.warning("nodes did not confirm their end; they end when their lease is over", nodes=names)
        if self._listener is not None:
            await self._listener.close()

    def status(self, slots: Sequence[str]) -> list[NodeStatus]:
        """Return every node, the head's own first, with its slots of these."""
        elsewhere = {slot for executor in self._remote.values() for slot in executor.open}
        own = NodeStatus(
            node=self.here.name,
            host=self.host if self.table else os.uname().nodename,
            agent_pid=os.getpid(),
            cores=self.here.cores,
            gpus=self.here.gpus,
            slots=[slot for slot in slots if slot not in elsewhere],
        )
        if self.table is None:
            return [own]
        now = time.monotonic()
        return [own] + [
            NodeStatus(
                node=view.membership.node,
                state=view.state,
                host=view.facts.host,
                agent_pid=self._remote[view.membership.node].agent_pid if view.membership.node in self._remote else 0,
                cores=view.facts.cores,
                memory_mib=view.facts.memory_mib,
                gpus=view.facts.gpus,
                slots=list(self._remote[view.membership.node].open) if view.membership.node in self._remote else [],
                seen_s=now - view.seen,
            )
            for view in self.table.view()
        ]


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

    def carry_out(self, order: SlotOrder) -> None:
        if isinstance(order, StartOrder):
            self.open[order.slot] = order.epoch
        elif isinstance(order, InjectFault) and order.slot not in self.open:
            what = f"cannot inject {order.fault} into {order.slot}"
            raise Refused(what, why=f"it has no process on node {self.node}")
        self._order(order)

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


class NodeListener:
    """Serves HeadApi over tcp with CURVE to nodes that hold the run's key, and lets their leases lapse.

    Args:
        fleet: acts on the calls of nodes.
        table: of the fleet.
        config: the resolved config, JSON; system: the system roles of the run.
        keys: of the run.
    """

    def __init__(self, fleet: NodeFleet, table: NodeTable, *, config: str, system: list[str], keys: CurveKeys) -> None:
        self._fleet, self._table = fleet, table
        self._config, self._system = config, system
        self._log = structlog.get_logger()
        self._server = RpcServer(make_hello(HELLO_NAME, Incarnation(f"{HEAD}/0", 0)), curve=keys)
        self._server.offer(HeadApi, self)
        self._ticking: asyncio.Task[None] | None = None
        self.address = ""

    async def open(self, listen: str) -> str:
        """Listen at an address; returns it with its real port. Raises AddressError: nothing can listen there."""
        self.address = await self._server.listen(listen)
        self._ticking = asyncio.create_task(self._tick())
        return self.address

    async def close(self) -> None:
        """Stop listening."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])
        await self._server.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for departure in self._table.tick(time.monotonic()):
                self._fleet.node_gone(departure, lost=True)

    async def join(self, facts: NodeFacts, token: str) -> JoinReply:
        if self._fleet.ending is not None:
            raise Refused(f"node {facts.name!r} cannot join", why=f"the run is over: {self._fleet.ending.reason}")
        membership, new = self._table.join(facts, token, time.monotonic())
        if new:
            self._fleet.node_joined(membership, facts)
        return JoinReply(
            membership=membership, config=self._config, system=self._system, lease_s=self._table.lease_s, stop_s=STOP_S
        )

    async def orders(self, membership: NodeMembership, since: int, addresses_version: int, wait_s: float) -> Orders:
        self._heard(membership)
        deadline = time.monotonic() + min(max(0.0, wait_s), MAX_WAIT_S)
        while True:
            news = self._fleet.news
            found = self._table.orders(membership, since, addresses_version)
            left_s = deadline - time.monotonic()
            if found is not None or left_s <= 0:
                return found or Orders(since + 1, [], addresses_version)
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await news.wait()

    async def report(self, membership: NodeMembership, first: int, items: list[Item]) -> int:
        self._heard(membership)
        known = self._table.report(membership, first, len(items))
        self._fleet.apply_report(membership, items[known:])
        return first + len(items) - 1

    async def leave(self, membership: NodeMembership, reason: str) -> None:
        departure = self._table.leave(membership, reason)
        if departure is not None:
            self._fleet.node_gone(departure, lost=False)

    def _heard(self, membership: NodeMembership) -> None:
        try:
            first = self._table.renew(membership, time.monotonic())
        except StaleEpoch as error:
            self._fleet.emit("node_fenced", node=membership.node, node_epoch=membership.epoch, reason=str(error.why))
            raise
        if first:
            self._fleet.agent_started(membership)
