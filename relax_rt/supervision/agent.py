"""The node agent: carries out what the supervisor's core decides, and answers for the run on agent.sock."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog
import uvloop

from relax_rt.config.job import absent_kinds, finished, stall_after_s
from relax_rt.config.schema import RunConfig
from relax_rt.observe.events import EventLog
from relax_rt.process import procfs
from relax_rt.supervision.api import AgentApi, NodeStatus, RunStatus, SlotStatus, WhereApi
from relax_rt.supervision.diagnosis import Diagnosis, Kind
from relax_rt.supervision.executor import (
    Executor,
    GangOrder,
    Nodes,
    PendingStarts,
    StartAttempt,
    StartOrder,
    gang_orders,
)
from relax_rt.supervision.local import KeeperWatch, LocalExecutor, unspawned
from relax_rt.supervision.notices import AGENT_SLOT, Notices
from relax_rt.supervision.placement import Placer
from relax_rt.supervision.plan import RolePlan
from relax_rt.supervision.protocol import (
    Action,
    Done,
    DrainRequested,
    DumpStacks,
    Emit,
    Event,
    Kill,
    KillRequested,
    NodeLost,
    RestartRequested,
    RunStarted,
    ScaleRequested,
    SlotExited,
    SlotReady,
    SlotSpawned,
    Start,
    StartGang,
    Stop,
    StopRequested,
    Tick,
)
from relax_rt.supervision.rundir import RunPaths, owner_of, slot_file, update_run
from relax_rt.supervision.scaling import check_count
from relax_rt.supervision.supervisor import InvalidTransition, Supervisor
from relax_rt.supervision.tree import SlotView
from relax_rt.transport.rpc.errors import Refused, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import Server, make_hello

TICK_S = 0.1
HOUSEKEEPING_S = 1.0
STATE_EVERY_S = 0.25
MIB = 1 << 20

OnState = Callable[[RunStatus], None]


class _Life:
    """What the agent knows of a living process."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.ready_s = 0.0
        self.address = ""


class Agent:
    """One run on this node, from its first process to its last.

    Args:
        config: the resolved config.
        paths: the run's directories, already made.
        plans: the roles to run.
        nodes: this node and those that join it.
        keeper_pid: the keeper above us; 0 when there is none.
        on_state: called with the run's status at most four times a second, and once at the end.
    """

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        plans: Sequence[RolePlan],
        nodes: Nodes,
        *,
        keeper_pid: int = 0,
        on_state: OnState | None = None,
    ) -> None:
        self.config, self.paths = config, paths
        self._plans = {plan.kind: plan for plan in plans}
        self._absent = absent_kinds(config)
        rules = config.supervision
        plans = nodes.pinned(plans)
        specs = [spec for plan in plans for spec in plan.specs(rules)]
        self._log = structlog.get_logger()
        self._events = EventLog(paths.run_dir, "agent", config.events.segment_mib * MIB, config.events.keep_segments)
        self._notices = Notices(paths, has_registry="registry" in self._plans, has_queue="queue" in self._plans)
        self._fleet = nodes
        self._local = LocalExecutor(
            config,
            paths,
            plans,
            on_event=self.on_event,
            on_address=self.on_address,
            emit=self._events.emit,
            node=nodes.here.name,
            host=nodes.host,
            environment=nodes.environment,
        )
        nodes.attach(self._local, self, self._events.emit)
        self._placer = Placer([nodes.here])
        roles = [plan.rules(rules) for plan in plans]
        self._core = Supervisor(
            specs, random.Random().random, roles, self._placer, stall_after_s(config), finished(config)
        )
        self._keeper = KeeperWatch(paths, self._local, self._events.emit)
        self._keeper_pid = keeper_pid
        self._starts = PendingStarts()
        self._under_way: dict[StartAttempt, asyncio.Task[list[tuple[Executor, StartOrder]]]] = {}
        self._lives: dict[str, _Life] = {}
        self._nodes: dict[str, str] = {}
        self._on_state = on_state
        self._began = time.monotonic()
        self._asked = ""
        self._status = "starting"
        self._interrupts = 0
        self._next_tick = 0.0
        self._sooner = asyncio.Event()
        self._done: asyncio.Future[Done] | None = None

    async def run(self) -> Done:
        """Run to the end; nothing of the run lives when this returns."""
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        procfs.become_subreaper()
        self.paths.own(os.getpid())
        self._write_status(agent=owner_of(os.getpid()))
        self._install_signals(loop)
        self._local.prepare()
        if self._keeper_pid:
            self._keeper.watch(self._keeper_pid)
        server = Server(make_hello(self.paths.run_id, Incarnation(AGENT_SLOT, 0)))
        server.offer(AgentApi, _Desk(self))
        server.offer(WhereApi, self)
        await server.listen(f"unix://{self.paths.agent_socket}")
        if address := await self._fleet.open(list(self._plans)):
            self._write_status(listen=address)
        self._notices.start()
        self._events.emit(
            "run_started",
            run_id=self.paths.run_id,
            pid=os.getpid(),
            slots=[view.slot for view in self._core.view()],
            chosen={key: one.model_dump() for key, one in self.config.chosen.items()},
        )
        background = [
            asyncio.create_task(self._tick(), name="the clock"),
            asyncio.create_task(self._housekeeping(), name="housekeeping"),
            asyncio.create_task(self._show(), name="the screen"),
        ]
        for task in background:
            task.add_done_callback(self._work_ended)
        self.post(RunStarted())
        try:
            done = await self._done
        finally:
            for task in background:
                task.cancel()
        await self._close(server, done)
        return done

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        """Without its clock or its housekeeping an agent would only seem to watch over its roles."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        fault = f"{task.get_name()} has failed: {type(error).__name__}: {error}"
        self._log.error("supervisor fault", error=fault, exc_info=error)
        self._events.emit("supervisor_fault", error=fault, trace="".join(traceback.format_exception(error)))
        self.post(KillRequested(f"fault of the supervisor: {fault}"))

    def post(self, event: Event) -> None:
        """Feed the core and carry out what it answers."""
        if isinstance(event, NodeLost):
            self._forget_node(event.node)
        try:
            actions = self._core.handle(event, time.monotonic())
        except InvalidTransition as fault:
            self._log.error("supervisor fault", error=str(fault))
            self._events.emit("supervisor_fault", error=str(fault))
            if isinstance(event, KillRequested):
                raise
            self.post(KillRequested(f"fault of the supervisor: {fault}"))
            return
        for action in actions:
            self._carry_out(action)
        self._look_at_deadlines()

    def on_event(self, event: Event) -> None:
        """Take what an executor tells."""
        if isinstance(event, SlotSpawned):
            self._lives[event.slot] = _Life(time.monotonic())
        elif isinstance(event, SlotReady) and event.slot in self._lives:
            life = self._lives[event.slot]
            life.ready_s = life.ready_s or time.monotonic() - life.began
        elif isinstance(event, SlotExited):
            self._lives.pop(event.slot, None)
            if event.diagnosis.failed:
                self._log.warning("role ended", slot=event.slot, why=str(event.diagnosis))
            if event.diagnosis.pid:
                who = Incarnation(event.slot, event.diagnosis.epoch)
                self._notices.ended(who, f"{event.diagnosis.kind}: {event.diagnosis.cause}")
        self.post(event)
        if isinstance(event, SlotReady):
            self._tell_running()

    def _forget_node(self, node: str) -> None:
        """The core knows that whatever was there is gone; starts that no executor knows of are dropped unanswered."""
        for slot in [slot for slot, at in self._nodes.items() if at == node]:
            self._lives.pop(slot, None)
            for attempt in self._starts.forget([slot]):
                self._cancel(attempt)

    def _tell_running(self) -> None:
        if self._status == "starting" and all(view.state in ("ready", "ended") for view in self._core.view()):
            self._write_status("running")

    def on_address(self, slot: str, address: str, remote: str) -> None:
        if slot in self._lives:
            self._lives[slot].address = address
        self._fleet.put(slot, remote)

    def on_gone(self, slot: str, epoch: int, reason: str) -> None:
        """A process went with its node."""
        self._notices.ended(Incarnation(slot, epoch), f"node_lost: {reason}")

    async def where(self, slot: str) -> str:
        """See WhereApi."""
        here = self._nodes.get(slot, self._local.node) == self._local.node
        return f"unix://{self.paths.socket_dir / slot_file(slot, '.sock')}" if here else self._fleet.where(slot)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Start():
                self._begin([action])
            case StartGang(ranks=ranks):
                self._begin(ranks, action)
            case Stop(slot=slot):
                if executor := self._reach(unspawned(slot, 0, "clean", "called off before it was started")):
                    executor.stop(slot)
            case Kill(slot=slot, kind=kind, reason=reason):
                if executor := self._reach(unspawned(slot, 0, kind, reason)):
                    executor.kill(slot, kind, reason)
            case DumpStacks(slot=slot):
                if executor := self._executor(slot):
                    executor.dump_stacks(slot)
            case Emit(kind=kind, fields=fields):
                self._events.emit(kind, **fields)
                self._log.info(kind, **{k: v for k, v in fields.items() if k != "diagnosis"})
            case Done():
                assert self._done is not None
                self._done.set_result(action)
        if self._core.draining and self._status in ("starting", "running"):
            self._write_status("draining", reason=self._core.draining)

    def _begin(self, starts: Sequence[Start], gang: StartGang | None = None) -> None:
        attempt = self._starts.begin(start.slot for start in starts)
        self._nodes |= {start.slot: start.node for start in starts}
        task = asyncio.create_task(self._orders(starts, gang))
        self._under_way[attempt] = task
        # Not in the task itself: one that is cancelled before its first step never gets to say so.
        task.add_done_callback(lambda _: self._order(attempt))

    async def _orders(self, starts: Sequence[Start], gang: StartGang | None) -> list[tuple[Executor, StartOrder]]:
        """The orders, once the slots have their epochs, and who is to carry them out."""
        epochs = [await self._notices.issue_epoch(start.slot) for start in starts]
        places = [None] * len(starts) if gang is None else await self._meet(gang)
        orders = [
            StartOrder(
                slot=start.slot,
                epoch=epoch,
                node=start.node,
                devices=list(start.devices),
                gang=place,
            )
            for start, epoch, place in zip(starts, epochs, places, strict=True)
        ]
        return [(self._at(order.node), order) for order in orders]

    def _order(self, attempt: StartAttempt) -> None:
        """Hand the orders over; from then on their executors answer for the slots."""
        task = self._under_way.pop(attempt)
        kind: Kind = "killed"
        cause = "its start was called off"
        if not task.cancelled() and (error := task.exception()) is not None:
            kind, cause = "unknown", f"cannot be started: {error!r}"
        elif not task.cancelled() and not attempt.broken:
            orders = {order.slot: (executor, order) for executor, order in task.result()}
            for slot, _ in self._starts.settle(attempt):
                executor, order = orders[slot]
                executor.start(order)
            return
        for slot, off in self._starts.settle(attempt):
            self.on_event(SlotExited(slot, off or unspawned(slot, 0, kind, cause)))

    async def _meet(self, gang: StartGang) -> list[GangOrder]:
        """The ranks' places; the socket at which they meet listens when this returns."""
        first = gang.ranks[0]
        at = await self._at(first.node).rendezvous(first.slot, gang.generation)
        return gang_orders(gang, at)

    def _reach(self, off: Diagnosis) -> Executor | None:
        """Who can end the slot's process. A start that no executor knows of yet is called off here, with this
        diagnosis; a gang's as a whole."""
        if (attempt := self._starts.call_off(off)) is None:
            return self._executor(off.slot)
        self._cancel(attempt)
        return None

    def _cancel(self, attempt: StartAttempt) -> None:
        """It is settled in a later turn of the loop, or is being settled now."""
        if (task := self._under_way.get(attempt)) is not None:
            task.cancel()

    def _executor(self, slot: str) -> Executor | None:
        """None when its node is lost."""
        return self._fleet.executor(self._nodes.get(slot, self._local.node))

    def _at(self, node: str) -> Executor:
        if (executor := self._fleet.executor(node)) is None:
            raise Unreachable(f"node {node!r}", why="it is gone")
        return executor

    def stop(self, reason: str, exit_code: int = 0) -> None:
        """Drain."""
        self._asked = self._asked or "stopped"
        self.post(StopRequested(reason, exit_code))

    def kill(self, reason: str, exit_code: int = 137) -> None:
        """End everything now."""
        self._asked = "killed"
        self.post(KillRequested(reason, exit_code))

    def _install_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        loop.add_signal_handler(signal.SIGTERM, lambda: self.stop("SIGTERM", 128 + signal.SIGTERM))
        loop.add_signal_handler(signal.SIGHUP, lambda: self.stop("the terminal was closed", 128 + signal.SIGHUP))
        # Some servers send it to their parent when they fail; what they leave behind comes to us, the subreaper.
        loop.add_signal_handler(signal.SIGQUIT, lambda: self._log.warning("SIGQUIT does not end a run; use `down`"))

    def _interrupted(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self.stop("Ctrl-C", 128 + signal.SIGINT)
        else:
            self.kill("Ctrl-C again", 128 + signal.SIGINT)

    def status(self, done: Done | None = None) -> RunStatus:
        """How the run does."""
        now = time.monotonic()
        return RunStatus(
            run_id=self.paths.run_id,
            name=self.config.run.name,
            run_dir=str(self.paths.run_dir),
            status=self._status,
            reason=self._core.draining,
            agent_pid=os.getpid(),
            uptime_s=now - self._began,
            slots=[self._slot_status(view, now) for view in self._core.view()],
            exit_code=done.exit_code if done else None,
            diagnosis=done.diagnosis if done else None,
            first=done.first if done else None,
            nodes=self.nodes(),
            roles=[kind for kind, count in self._core.counts.items() if count or kind not in self._absent],
        )

    async def scale(self, kind: str, count: int) -> None:
        """Give a role another number of slots.

        Raises:
            Refused: the config may not have it, the machines have no room for it, or see ScaleRequested.
        """
        counts = self._core.counts
        if counts.get(kind, count) != count and kind in self._plans and self._core.can_scale(kind):
            cores = sum(node.cores for node in self._placer.nodes)
            await asyncio.to_thread(check_count, self.config, self._plans.values(), counts, kind, count, cores)
        self.post(ScaleRequested(kind, count))

    def restart(self, what: str) -> None:
        """Restart a slot or a role, or open a drained node again.

        Raises:
            Refused: see RestartRequested; or the node leaves by its own wish.
        """
        if any(node.node == what and node.state == "leaving" for node in self.nodes()):
            raise Refused(f"cannot restart {what!r}", why="the node is leaving", hint="let it join again")
        self.post(RestartRequested(what))

    def inject(self, slot: str, fault: str, seconds: float, amount: float) -> None:
        """Have a role do itself harm.

        Raises:
            Refused: the run does not allow it, or there is no such fault or process.
        """
        if not self.config.supervision.chaos:
            raise Refused(f"cannot inject {fault} into {slot}", why="the run has [supervision] chaos = false")
        if (executor := self._executor(slot)) is None or slot not in self._lives:
            raise Refused(f"cannot inject {fault} into {slot}", why="the slot has no process now")
        executor.inject(slot, fault, seconds, amount)

    def nodes(self) -> list[NodeStatus]:
        """The nodes of the run."""
        found = self._fleet.status([view.slot for view in self._core.view() if view.pid])
        return [self._as_drained(node) if self._placer.closed(node.node) else node for node in found]

    def _as_drained(self, node: NodeStatus) -> NodeStatus:
        if node.state != "alive":
            return node
        return msgspec.structs.replace(node, state="draining" if node.slots else "drained")

    def _slot_status(self, view: SlotView, now: float) -> SlotStatus:
        life = self._lives.get(view.slot) or _Life(now)
        return SlotStatus(
            slot=view.slot,
            kind=view.kind,
            tier=view.tier,
            state=view.state,
            pid=view.pid,
            epoch=view.epoch,
            restarts=view.restarts,
            uptime_s=now - life.began,
            state_s=now - view.since if view.since else 0.0,
            progress=view.progress,
            detail=view.detail,
            waiting=view.waiting,
            address=life.address,
            log=self._fleet.log(view.node, view.slot) or str(self.paths.log(view.slot)),
            last=view.last,
            node=view.node,
            ready_s=life.ready_s,
            policy_version=self._notices.policy_versions.get(view.slot, -1),
            given_up=view.given_up,
            generation=view.generation,
            kill_s=None if view.kill_at is None else max(0.0, view.kill_at - now),
            kill_latest_s=None if view.kill_latest is None else max(0.0, view.kill_latest - now),
        )

    def _write_status(self, status: str = "", **fields: Any) -> None:
        self._status = status or self._status
        try:
            update_run(self.paths.run_dir, status=self._status, **fields)
        except OSError as error:
            self._log.error("run.json cannot be written", error=str(error))

    async def _tick(self) -> None:
        while True:
            self._sooner.clear()
            deadline = self._core.next_deadline()
            self._next_tick = time.monotonic() + TICK_S if deadline is None else deadline
            left = self._next_tick - time.monotonic()
            try:
                async with asyncio.timeout(min(TICK_S, max(0.002, left))):
                    await self._sooner.wait()
            except TimeoutError:
                self.post(Tick())

    def _look_at_deadlines(self) -> None:
        """A deadline that is earlier than the one slept for must not wait for it: a back-off is mostly short."""
        deadline = self._core.next_deadline()
        if deadline is not None and deadline < self._next_tick:
            self._sooner.set()

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self._local.housekeep()
            try:
                await asyncio.to_thread(self._events.rotate)
            except OSError as error:
                self._log.error("the event log cannot be rotated", error=str(error))

    async def _show(self) -> None:
        while self._on_state is not None:
            self._tell(self.status())
            await asyncio.sleep(STATE_EVERY_S)

    def _tell(self, status: RunStatus) -> None:
        if self._on_state is None:
            return
        try:
            self._on_state(status)
        except Exception:  # noqa: BLE001 a broken screen must not take the run down
            self._log.exception("the observer of the run's state failed; it is not called again")
            self._on_state = None

    async def _close(self, server: Server, done: Done) -> None:
        status = self._asked or ("finished" if done.exit_code == 0 else "failed")
        if self._asked and done.diagnosis is not None:
            status = "failed"
        await self._notices.close()
        await server.close()
        self._keeper.close()
        await self._fleet.close(done.exit_code, done.reason)
        await self._local.close()
        self.paths.remove_private()
        self._events.emit("run_ended", status=status, exit_code=done.exit_code, reason=done.reason)
        self._events.close()
        self._write_status(
            status,
            exit_code=done.exit_code,
            reason=done.reason,
            ended_at=time.time(),
            diagnosis=msgspec.to_builtins(done.diagnosis),
            first=msgspec.to_builtins(done.first),
        )
        self._tell(self.status(done))


class _Desk:
    """AgentApi over an agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def status(self) -> RunStatus:
        return self._agent.status()

    async def stop(self, reason: str) -> None:
        self._agent.stop(reason or "stop requested")

    async def kill(self, reason: str) -> None:
        self._agent.kill(reason or "kill requested")

    async def restart(self, slot: str) -> None:
        self._agent.restart(slot)

    async def scale(self, kind: str, count: int) -> None:
        await self._agent.scale(kind, count)

    async def drain(self, what: str) -> None:
        self._agent.post(DrainRequested(what))

    async def inject(self, slot: str, fault: str, seconds: float, amount: float) -> None:
        self._agent.inject(slot, fault, seconds, amount)

    async def nodes(self) -> list[NodeStatus]:
        return self._agent.nodes()


def run_agent(
    config: RunConfig,
    paths: RunPaths,
    plans: Sequence[RolePlan],
    nodes: Nodes,
    *,
    keeper_pid: int = 0,
    on_state: OnState | None = None,
) -> Done:
    """Run a node's part of a run to its end; see Agent."""

    async def run() -> Done:
        return await Agent(config, paths, plans, nodes, keeper_pid=keeper_pid, on_state=on_state).run()

    return uvloop.run(run())
