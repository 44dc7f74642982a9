"""The agents of a simulated run: the real supervisor on the head, the real bond with joined nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from plane_checker import LOST_NODE, TWO
from plane_parts import CALL_S, Host, Process
from plane_roles import Meeting, Role
from sim_checker import UNEXPECTED
from sim_kernel import Promise, Steps, Thread

from relax_rt.cluster.nodes.api import (
    BindRendezvous,
    EndNode,
    NodeFacts,
    NodeMembership,
    Orders,
    RendezvousBound,
)
from relax_rt.cluster.nodes.fleet import RemoteExecutor
from relax_rt.cluster.nodes.session import HeadSession
from relax_rt.cluster.nodes.table import TICK_S, Departure, NodeTable
from relax_rt.interfaces.agent import Diagnosis
from relax_rt.supervision.executor import (
    GangRendezvous,
    PendingStart,
    PendingStarts,
    SlotOrder,
    StartOrder,
    gang_orders,
)
from relax_rt.supervision.placement import Node, Placer
from relax_rt.supervision.protocol import (
    Emit,
    Event,
    Kill,
    NodeJoined,
    NodeLost,
    RunDone,
    RunStarted,
    SlotEvent,
    SlotExited,
    SlotFinished,
    SlotProgress,
    SlotReady,
    SlotSpawned,
    Start,
    StartGang,
    Stop,
    Tick,
)
from relax_rt.supervision.supervisor import InvalidTransition, Supervisor
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation

if TYPE_CHECKING:
    from plane_world import World

SEEN_S = 0.005
"""Exits are seen by pidfd after at most so long."""
KEEPER_S = 1.5
"""Roles end this long after their agent at the latest."""
NODE_LEASE_S = 2.0
AGENT_SLOT = "agent/0"


def unspawned(slot: str, kind: Any, cause: str) -> Diagnosis:
    return Diagnosis(slot=slot, epoch=0, kind=kind, cause=cause)


class Executor:
    """The processes of one host; ends with the agent that carries it."""

    def __init__(self, owner: Process, node: str, on_event: Callable[[SlotEvent], None]) -> None:
        self.owner, self.node, self._on_event = owner, node, on_event
        self.roles: dict[str, Role] = {}
        self._coming: dict[str, tuple[str, str]] = {}

    @property
    def world(self) -> World:
        return self.owner.world

    def carry_out(self, order: SlotOrder) -> None:
        slot = order.slot
        match order:
            case StartOrder():
                self._coming[slot] = ("", "")
                self.owner.later(self.world.kernel.random.uniform(0.005, 0.1), lambda: self._spawn(order))
            case Stop() if slot in self._coming:
                self._coming[slot] = ("clean", "called off before it was started")
            case Stop() if slot in self.roles:
                role = self.roles[slot]
                role.later(0.001, role.asked_to_stop)
            case Kill(kind=kind, reason=reason) if slot in self._coming:
                self._coming[slot] = (kind, reason)
            case Kill(kind=kind, reason=reason) if slot in self.roles:
                self.roles[slot].exit(kind, reason)

    def _spawn(self, order: StartOrder) -> None:
        kind, cause = self._coming.pop(order.slot, ("", ""))
        if kind:
            self._on_event(SlotExited(order.slot, unspawned(order.slot, kind, cause)))
            return
        role = self.world.make(order, self.owner.host, self)
        self.roles[order.slot] = role
        self._judge(role)
        self._on_event(SlotSpawned(order.slot, order.epoch, role.pid))

    def _judge(self, new: Role) -> None:
        """Nobody else may live in the slot, but on a machine that stood still as a whole."""
        world = self.world
        world.note("spawn", who=new.name, on=self.node or "head")
        world.deaths.pop(new.slot, None)
        for old in world.roles:
            same = old.alive and old.slot == new.slot and old.run == new.run
            if same and max(old.host.excused_until, new.host.excused_until) < world.kernel.now:
                world.checker.found(TWO, f"{old.name} on {old.host.name} lives, and {new.name} was started")
        world.roles.append(new)
        world.roles = [role for role in world.roles if role.alive]

    def told(self, role: Role, event: SlotEvent) -> None:
        """A role says something; its pipe outlives it for as long as something is in it."""
        self.owner.take(lambda: self._on_event(event) if self.roles.get(role.slot) is role else None)

    def exited(self, role: Role, kind: Any, cause: str) -> None:
        self.world.died(role)
        self.owner.later(self.world.kernel.random.uniform(0.0, SEEN_S), lambda: self._exited(role, kind, cause))

    def _exited(self, role: Role, kind: Any, cause: str) -> None:
        if self.roles.get(role.slot) is role:
            del self.roles[role.slot]
            at = self.world.kernel.now
            diagnosis = Diagnosis(
                slot=role.slot, epoch=role.who.epoch, pid=role.pid, kind=kind, cause=cause, at=at, exit_code=1
            )
            self._on_event(SlotExited(role.slot, diagnosis))

    def bind(self) -> GangRendezvous:
        """Ports are few here, so that a number comes back soon."""
        port = self.world.kernel.random.randrange(2)
        return GangRendezvous(self.owner.host.name, port)

    def kill_all(self, cause: str) -> None:
        for slot in list(self._coming):
            self._coming[slot] = ("killed", cause)
        for role in list(self.roles.values()):
            role.exit("killed", cause)


class Box:
    """Stands for the future that the remote executor settles with a rendezvous."""

    def __init__(self, agent: Agent) -> None:
        self.promise, self._agent = Promise(), agent

    def done(self) -> bool:
        return self.promise.settled

    def set_result(self, value: GangRendezvous) -> None:
        self.promise.settle(value)

    def set_exception(self, error: Exception) -> None:
        # Who waits for a future goes on in a later turn of the loop.
        self._agent.later(0.0, lambda: self.promise.settle(None))


class Agent(Process):
    """The head's agent: carries out what the supervisor decides, as `supervision/agent.py` does."""

    def __init__(self, world: World, host: Host) -> None:
        super().__init__(world, f"agent of run {world.run}", host)
        self._local = Executor(self, world.head_node, self.on_event)
        self.core = self._make_core()
        self.head = NodeTable(f"run-{self.run}", NODE_LEASE_S, self.now())
        self.remote: dict[str, RemoteExecutor] = {}
        if world.nodes:
            self.thread(self._keep_door())
        self._starts = PendingStarts()
        self._under_way: dict[PendingStart, Thread] = {}
        self._on_node: dict[str, str] = {}
        self._held: list[tuple[float, NodeMembership, int, int, Callable[[Any], None]]] = []
        self._ended: dict[str, deque[Incarnation]] = {"registry/0": deque(), "queue/0": deque()}
        self.done: RunDone | None = None
        for server in self._ended:
            self.thread(self._deliver(server))
        self.thread(self._tick())
        self.post(RunStarted())

    def _make_core(self) -> Supervisor:
        world = self.world
        nodes = [Node(world.head_node, 4, world.head_gpus)]
        return Supervisor(world.specs, world.kernel.random.random, world.rules, Placer(nodes) if world.nodes else None)

    # --- the supervisor's shell

    def post(self, event: Event) -> None:
        if not self.alive or self.done is not None:
            return
        if isinstance(event, NodeLost):
            self._forget_node(event.node)
        try:
            actions = self.core.handle(event, self.now())
        except InvalidTransition as error:
            self.world.checker.found(UNEXPECTED, f"supervisor: {error}")
            return
        for action in actions:
            self._carry_out(action)

    def on_event(self, event: SlotEvent) -> None:
        if isinstance(event, SlotExited) and event.diagnosis.pid:
            self._notice(Incarnation(event.slot, event.diagnosis.epoch))
        self.post(event)

    def _forget_node(self, node: str) -> None:
        """The core knows that whatever was there is gone; starts that no executor knows of are dropped unanswered."""
        for slot in [slot for slot, at in self._on_node.items() if at == node]:
            for attempt in self._starts.forget([slot]):
                self._cancel(attempt)

    def _carry_out(self, action: Any) -> None:
        match action:
            case Start():
                self._begin([action], None)
            case StartGang(ranks=ranks):
                self._begin(ranks, action)
            case Stop(slot=slot):
                if not self._call_off(unspawned(slot, "clean", "called off before it was started")):
                    self._order_at(slot, action)
            case Kill(slot=slot, kind=kind, reason=reason):
                if not self._call_off(unspawned(slot, kind, reason)):
                    self._order_at(slot, action)
            case Emit(kind=kind, fields=fields):
                self.world.emitted(kind, fields)
            case RunDone():
                self.done = action
                self._finish()

    def _order_at(self, slot: str, order: SlotOrder) -> None:
        executor = self.executor(self._on_node.get(slot, self._local.node))
        if executor is not None:
            executor.carry_out(order)
            self.let_go()

    def _begin(self, starts: Sequence[Start], gang: StartGang | None) -> None:
        attempt = self._starts.begin(start.slot for start in starts)
        self._on_node |= {start.slot: start.node for start in starts}
        self._under_way[attempt] = self.thread(self._orders(attempt, starts, gang))

    def _orders(self, attempt: PendingStart, starts: Sequence[Start], gang: StartGang | None) -> Steps:
        """What is ordered once the slots have their epochs."""
        epochs = []
        for start in starts:
            epoch = 0
            if start.slot != "registry/0":
                epoch = yield from self.ask("registry/0", "issue_epoch", start.slot)
            epochs.append(epoch)
        places: list[Any] = [None] * len(starts)
        if gang is not None:
            at = yield from self._meet(gang)
            if at is None:
                self._order(attempt, [])
                return
            places = list(gang_orders(gang, at))
            self.world.meetings[at] = Meeting(gang.generation, len(starts))
        orders = [
            StartOrder(slot=start.slot, epoch=epoch, node=start.node, gang=place)
            for start, epoch, place in zip(starts, epochs, places, strict=True)
        ]
        self._order(attempt, orders if all(self.executor(start.node) for start in starts) else [])

    def _order(self, attempt: PendingStart, orders: Sequence[StartOrder], cause: str = "cannot be started") -> None:
        """Hand the orders over; without any, the slots' starts have failed or were called off."""
        self._under_way.pop(attempt, None)
        if not orders or attempt.broken:
            for slot, off in self._starts.settle(attempt):
                self.on_event(SlotExited(slot, off or unspawned(slot, "unknown", cause)))
            return
        self.world.gangs += 1
        by_slot = {order.slot: order for order in orders}
        for slot, _ in self._starts.settle(attempt):
            order = by_slot[slot]
            self.world.gang_of[str(Incarnation(slot, order.epoch))] = self.world.gangs
            self.executor(order.node).carry_out(order)
        self.let_go()

    def _meet(self, gang: StartGang) -> Steps:
        first = gang.ranks[0]
        executor = self.executor(first.node)
        if not isinstance(executor, RemoteExecutor):
            return self._local.bind() if executor is not None else None
        box = Box(self)
        executor._binding[first.slot, gang.generation] = box  # type: ignore[assignment]
        if not executor._order(BindRendezvous(first.slot, gang.generation)):
            return None
        self.let_go()
        self.later(3.0, lambda: box.promise.settle(None))
        return (yield box.promise)

    def _call_off(self, off: Diagnosis) -> bool:
        """A start that no executor knows of yet ends here; a gang's as a whole."""
        attempt = self._starts.call_off(off)
        if attempt is not None:
            self._cancel(attempt)
        return attempt is not None

    def _cancel(self, attempt: PendingStart) -> None:
        """As a task that is cancelled: it ends in a later turn of the loop."""
        thread = self._under_way.get(attempt)
        if thread is not None:
            thread.kill()
            self.later(0.0, lambda: self._order(attempt, [], "its start was called off"))

    def _tick(self) -> Steps:
        while True:
            deadline = self.core.next_deadline()
            left = 0.25 if deadline is None else deadline - self.now()
            yield min(0.25, max(0.005, left))
            if self.core.next_deadline() is not None and self.core.next_deadline() <= self.now():  # type: ignore[operator]
                self.post(Tick())

    # --- notices

    def _notice(self, who: Incarnation) -> None:
        for server, waiting in self._ended.items():
            if who.slot not in (server, "registry/0") and who.epoch > 0:
                waiting.append(who)

    def _deliver(self, server: str) -> Steps:
        waiting, seq, me = self._ended[server], 0, Incarnation(AGENT_SLOT, 0)
        while True:
            if not waiting:
                yield 0.1
                continue
            who = waiting.popleft()
            try:
                if server == "registry/0":
                    yield from self.ask(server, "gone", who)
                    continue
                if not me.epoch:
                    epoch = yield from self.ask("registry/0", "issue_epoch", AGENT_SLOT)
                    me = Incarnation(AGENT_SLOT, epoch)
                seq += 1
                yield from self.ask(server, "event", me, seq, ev.ProcessExited(who, "seen dead"))
            except Refused:
                continue

    # --- the door

    def _keep_door(self) -> Steps:
        self.world.servers["door"] = self
        while True:
            yield TICK_S
            for departure in self.head.tick(self.now()):
                self._judge_loss(departure)
                self._gone(departure, lost=True)
            self.let_go()

    def _judge_loss(self, departure: Departure) -> None:
        node_agent = self.world.node_agents.get(departure.membership.node)
        self.world.note("node lost", membership=str(departure.membership))
        there = node_agent is not None and node_agent.alive and node_agent.membership == departure.membership
        if node_agent is not None and there and self.world.kernel.now > node_agent.trouble + 2.0 * NODE_LEASE_S:
            self.world.checker.found(
                LOST_NODE, f"{departure.membership}, which was well since {node_agent.trouble:.2f}"
            )

    def serve(self, do: Callable[[Any], Any], back: Callable[[Any], None]) -> None:
        try:
            value = do(self)
        except Refused as error:
            value = error
        if value is None:
            return
        if callable(value):
            value(back)
        else:
            back(value)
        self.let_go()

    def join(self, facts: NodeFacts, token: str) -> NodeMembership:
        membership, new = self.head.join(facts, token, self.now())
        if new:
            self.world.note("node joined", membership=str(membership))
            self.remote[membership.node] = RemoteExecutor(self.head, membership, lambda: None, self.on_event)
            self.post(NodeJoined(Node(membership.node, facts.cores, facts.gpus)))
        return membership

    def orders(self, membership: NodeMembership, since: int, addresses_version: int, wait_s: float) -> Any:
        self.head.renew(membership, self.now())
        found = self.head.orders(membership, since, addresses_version)
        until = self.world.kernel.now + wait_s
        return found or (lambda back: self._held.append((until, membership, since, addresses_version, back)))

    def report(self, membership: NodeMembership, first: int, items: Sequence[Any]) -> int:
        self.head.renew(membership, self.now())
        known = self.head.report(membership, first, len(items))
        for item in items[known:]:
            self._item(membership, item)
        return first + len(items) - 1

    def leave(self, membership: NodeMembership, reason: str) -> bool:
        departure = self.head.leave(membership, reason)
        if departure is not None:
            self._gone(departure, lost=False)
        return True

    def let_go(self) -> None:
        """Answer the calls for orders for which there is something, or that waited long enough."""
        if not self._held:
            return
        held, self._held = self._held, []
        for until, membership, since, addresses_version, back in held:
            try:
                found = self.head.orders(membership, since, addresses_version)
            except StaleEpoch as error:
                back(error)
                continue
            if found is None and until > self.world.kernel.now:
                self._held.append((until, membership, since, addresses_version, back))
            else:
                back(found or Orders(since + 1, [], addresses_version))

    # --- nodes, as `nodes/fleet.py`

    def executor(self, node: str) -> Any:
        """The node's; None when it is gone."""
        return self._local if node == self._local.node else self.remote.get(node)

    def _gone(self, departure: Departure, *, lost: bool) -> None:
        membership, reason = departure.membership, departure.reason
        executor = self.remote.pop(membership.node, None)
        if executor is None:
            return
        executor.lost(reason)
        for slot, epoch in executor.open.items():
            self._notice(Incarnation(slot, epoch))
        self.post(NodeLost(membership.node, reason, keep=lost and self.world.wait_for_lost, at=self.world.kernel.now))

    def _item(self, membership: NodeMembership, item: Any) -> None:
        executor = self.remote.get(membership.node)
        if executor is None or executor.membership != membership:
            return
        match item:
            case SlotSpawned() | SlotReady() | SlotFinished() | SlotExited() | SlotProgress():
                executor.apply_event(item)
            case RendezvousBound():
                executor.bound(item)

    # --- ends

    def _finish(self) -> None:
        for view in self.head.view():
            self.head.order(view.membership.node, EndNode(0, "the run is over"))
        self.let_go()

    def die(self) -> None:
        """The keeper ends what runs here."""
        super().die()
        for role in list(self._local.roles.values()):
            after_s = self.world.kernel.random.uniform(0.01, KEEPER_S)
            self.world.kernel.after(after_s, partial(role.exit, "killed", "its agent is gone"))


class NodeAgent(Process):
    """A joined node's agent, as `nodes/agent.py`: obeys, reports, and ends everything when its lease is over."""

    def __init__(self, world: World, host: Host, membership: NodeMembership, asked_at: float, clock: Any) -> None:
        super().__init__(world, str(membership), host)
        self.now = clock
        self.membership = membership
        self.core = HeadSession(NODE_LEASE_S, asked_at)
        self.local = Executor(self, membership.node, self._happened)
        self.over = False
        for steps in (self._obey(), self._report(), self._watch_lease()):
            self.thread(steps)

    def _happened(self, event: SlotEvent) -> None:
        self.core.add(event)

    def _asked(self, timeout_s: float, call: str, *arguments: Any) -> Steps:
        made = self.now()
        try:
            answer = yield from self.ask("door", call, *arguments, timeout_s=timeout_s, give_up_s=0.0)
        except StaleEpoch:
            self._end()
            return None
        except (Refused, TimeoutError):
            yield 0.1
            return None
        self.core.renew(made)
        return answer

    def _obey(self) -> Steps:
        core = self.core
        while True:
            answer = yield from self._asked(
                CALL_S, "orders", self.membership, core.since, core.addresses_version, core.poll_s
            )
            for order in core.take(answer) if answer is not None else ():
                self._carry_out(order)

    def _carry_out(self, order: Any) -> None:
        match order:
            case BindRendezvous(slot=slot, generation=generation):
                at = self.local.bind()
                self.core.add(RendezvousBound(slot, generation, at.host, at.port))
            case EndNode():
                self.over = True
                self._end()
            case _:
                self.local.carry_out(order)

    def _report(self) -> Steps:
        while True:
            yield 0.02
            while not self.core.nothing_to_report:
                first, items = self.core.report()
                last = yield from self._asked(0.5, "report", self.membership, first, list(items))
                if last is not None:
                    self.core.reported(last)

    def _watch_lease(self) -> Steps:
        while (left := self.core.left_s(self.now())) > 0:
            yield min(max(left, 0.001), 0.1)
        self._end()

    def _end(self) -> None:
        """Kill everything, say so if the head can be reached, go."""
        if self.alive:
            self.local.kill_all("its node's part is over")
            self.world.kernel.after(0.0, self._gone)

    def _gone(self) -> None:
        if self.alive:
            door = self.world.servers.get("door")
            if isinstance(door, Agent) and door.alive and door.run == self.run:
                leave = methodcaller("leave", self.membership, "over")
                self.world.net.send(self, door, partial(door.serve, leave, lambda _: None))
            self.die()

    def die(self) -> None:
        super().die()
        for role in list(self.local.roles.values()):
            after_s = self.world.kernel.random.uniform(0.01, KEEPER_S)
            self.world.kernel.after(after_s, partial(role.exit, "killed", "its agent is gone"))
