"""The node agent: carries out what the supervisor's core decides, and answers for the run on agent.sock."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import structlog
import uvloop

from relax_rt.config.schema import RunConfig
from relax_rt.events import EventLog
from relax_rt.supervision import procfs
from relax_rt.supervision.api import AgentApi, NodeStatus, RunStatus, SlotStatus
from relax_rt.supervision.channel import AddressMsg, FinishedMsg, FromRole, ProgressMsg, ReadyMsg
from relax_rt.supervision.core import InvalidTransition, SlotView, Supervisor
from relax_rt.supervision.diagnosis import Diagnosis, Kind
from relax_rt.supervision.notices import AGENT_SLOT, Notices
from relax_rt.supervision.plan import RolePlan
from relax_rt.supervision.process import Launch, RoleProcess, Spawner, host_argv, role_environment, rotate_log
from relax_rt.supervision.protocol import (
    Action,
    Done,
    DumpStacks,
    Emit,
    Event,
    Kill,
    KillRequested,
    Progress,
    RestartRequested,
    RunStarted,
    SlotExited,
    SlotFinished,
    SlotReady,
    SlotSpawned,
    Start,
    Stop,
    StopRequested,
    Tick,
)
from relax_rt.supervision.rundir import RunPaths, owner_of, update_run
from relax_rt.transport.errors import Refused
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.rpc import Server, make_hello

TICK_S = 0.1
HOUSEKEEPING_S = 1.0
STATE_EVERY_S = 0.25
MIB = 1 << 20

OnState = Callable[[RunStatus], None]


class Agent:
    """One run on this node, from its first process to its last.

    Args:
        config: the resolved config.
        paths: the run's directories, already made.
        plans: the roles to run.
        keeper_pid: the keeper above us; 0 when there is none.
        on_state: called with the run's status at most four times a second, and once at the end.
    """

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        plans: Sequence[RolePlan],
        *,
        keeper_pid: int = 0,
        on_state: OnState | None = None,
    ) -> None:
        self.config, self.paths = config, paths
        self._plans = {plan.kind: plan for plan in plans}
        specs = [spec for plan in plans for spec in plan.specs(config.supervision)]
        self._specs = {spec.slot: spec for spec in specs}
        self._core = Supervisor(specs, random.Random().random)
        self._log = structlog.get_logger()
        self._events = EventLog(paths.run_dir, "agent", config.events.segment_mib * MIB, config.events.keep_segments)
        self._spawner = Spawner()
        self._notices = Notices(paths, has_registry="registry/0" in self._specs, has_queue="queue/0" in self._specs)
        self._processes: dict[str, RoleProcess] = {}
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._spawning: set[str] = set()
        self._called_off: dict[str, tuple[Kind, str]] = {}
        self._addresses: dict[str, str] = {}
        self._keeper_pid = keeper_pid
        self._stand_in_pid = 0
        self._on_state = on_state
        self._began = time.monotonic()
        self._asked = ""
        self._status = "starting"
        self._interrupts = 0
        self._done: asyncio.Future[Done] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> Done:
        """Run to the end; nothing of the run lives when this returns."""
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        procfs.become_subreaper()
        self.paths.own(os.getpid())
        self._write_status(agent=owner_of(os.getpid()))
        self._install_signals(loop)
        self._watch_keeper()
        server = Server(make_hello(self.paths.run_id, Incarnation(AGENT_SLOT, 0)))
        server.offer(AgentApi, _Desk(self))
        await server.listen(f"unix://{self.paths.agent_socket}")
        self._notices.start()
        self._events.emit("run_started", run_id=self.paths.run_id, pid=os.getpid(), slots=list(self._specs))
        background = [asyncio.create_task(work()) for work in (self._tick, self._housekeeping, self._show)]
        self.post(RunStarted())
        try:
            done = await self._done
        finally:
            for task in background:
                task.cancel()
        await self._close(server, done)
        return done

    def post(self, event: Event) -> None:
        """Feed the core and carry out what it answers."""
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

    def _carry_out(self, action: Action) -> None:
        match action:
            case Start(slot=slot):
                self._starts[slot] = asyncio.create_task(self._start(slot))
            case Stop(slot=slot):
                if slot in self._processes:
                    self._processes[slot].stop()
                else:
                    self._call_off(slot, "clean", "called off before it was started")
            case Kill(slot=slot, kind=kind, reason=reason):
                if slot in self._processes:
                    self._processes[slot].kill(kind, reason)
                else:
                    self._call_off(slot, kind, reason)
            case DumpStacks(slot=slot):
                if slot in self._processes:
                    self._processes[slot].dump_stacks()
            case Emit(kind=kind, fields=fields):
                self._events.emit(kind, **fields)
                self._log.info(kind, **{k: v for k, v in fields.items() if k != "diagnosis"})
            case Done():
                assert self._done is not None
                self._done.set_result(action)
        if self._core.draining and self._status in ("starting", "running"):
            self._write_status("draining", reason=self._core.draining)

    async def _start(self, slot: str) -> None:
        """Answered by SlotSpawned, or by SlotExited when no process comes of it."""
        epoch = 0
        try:
            epoch = await self._notices.issue_epoch(slot)
            # From here on a process may exist: the start is not called off any more, the process is stopped.
            self._spawning.add(slot)
            try:
                process = await self._spawner.spawn(
                    self._launch(slot, epoch), self._hearer(slot), self._exit_taker(slot)
                )
            finally:
                self._spawning.discard(slot)
        except asyncio.CancelledError:
            del self._starts[slot]
            kind, reason = self._called_off.pop(slot, ("killed", "the agent is closing"))
            self.post(SlotExited(slot, _unspawned(slot, epoch, kind, reason)))
            return
        except Exception as error:  # noqa: BLE001 whatever went wrong is this slot's diagnosis
            del self._starts[slot]
            self.post(SlotExited(slot, _unspawned(slot, epoch, "unknown", f"cannot be started: {error!r}")))
            return
        del self._starts[slot]
        self._processes[slot] = process
        self.post(SlotSpawned(slot, epoch, process.pid))

    def _call_off(self, slot: str, kind: Kind, reason: str) -> None:
        if slot in self._starts and slot not in self._spawning:
            self._called_off[slot] = (kind, reason)
            self._starts[slot].cancel()

    def _launch(self, slot: str, epoch: int) -> Launch:
        plan = self._plans[self._specs[slot].kind]
        relax = {
            "RELAX_RUN_ID": self.paths.run_id,
            "RELAX_RUN_DIR": str(self.paths.run_dir),
            "RELAX_SLOT": slot,
            "RELAX_EPOCH": str(epoch),
            "RELAX_SOCKET_DIR": str(self.paths.socket_dir),
            "RELAX_SHM_DIR": str(self.paths.shm_dir),
            "RELAX_AGENT_PID": str(os.getpid()),
            "RELAX_ROLE_TARGET": plan.target,
            "RELAX_HAS_REGISTRY": "1" if "registry/0" in self._specs else "0",
        }
        return Launch(
            slot=slot,
            epoch=epoch,
            argv=host_argv(plan.settings.python, slot),
            env=role_environment(plan.settings.threads, plan.settings.env, relax),
            log=self.paths.log(slot),
            nice=plan.settings.nice,
        )

    def _hearer(self, slot: str) -> Callable[[FromRole], None]:
        def hear(message: FromRole) -> None:
            match message:
                case ReadyMsg():
                    self.post(SlotReady(slot))
                    if self._status == "starting" and all(v.state in ("ready", "ended") for v in self._core.view()):
                        self._write_status("running")
                case ProgressMsg(n=n, detail=detail, waiting=waiting, extend_s=extend_s):
                    self.post(Progress(slot, n, waiting, extend_s, detail))
                case AddressMsg(address=address):
                    self._addresses[slot] = address
                case FinishedMsg():
                    self.post(SlotFinished(slot))

        return hear

    def _exit_taker(self, slot: str) -> Callable[[Diagnosis], None]:
        def take(diagnosis: Diagnosis) -> None:
            self._processes.pop(slot, None)
            self._addresses.pop(slot, None)
            if diagnosis.failed:
                self._log.warning("role ended", slot=slot, why=str(diagnosis))
            self._notices.ended(Incarnation(slot, diagnosis.epoch), f"{diagnosis.kind}: {diagnosis.cause}")
            self.post(SlotExited(slot, diagnosis))

        return take

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
        )

    def nodes(self) -> list[NodeStatus]:
        """The nodes of the run."""
        slots = [view.slot for view in self._core.view() if view.pid]
        return [NodeStatus(node="", host=os.uname().nodename, agent_pid=os.getpid(), slots=slots)]

    def _slot_status(self, view: SlotView, now: float) -> SlotStatus:
        spec = self._specs[view.slot]
        process = self._processes.get(view.slot)
        return SlotStatus(
            slot=view.slot,
            kind=spec.kind,
            tier=spec.tier,
            state=view.state,
            pid=view.pid,
            epoch=view.epoch,
            restarts=view.restarts,
            uptime_s=now - process.started if process else 0.0,
            state_s=now - view.since if view.since else 0.0,
            progress=view.progress,
            detail=view.detail,
            waiting=view.waiting,
            address=self._addresses.get(view.slot, ""),
            log=str(self.paths.log(view.slot)),
            last=view.last,
        )

    def _write_status(self, status: str = "", **fields: Any) -> None:
        self._status = status or self._status
        try:
            update_run(self.paths.run_dir, status=self._status, **fields)
        except OSError as error:
            self._log.error("run.json cannot be written", error=str(error))

    def _watch_keeper(self) -> None:
        if not self._keeper_pid:
            return
        # If it died before we could look, our parent is another by now.
        if os.getppid() != self._keeper_pid:
            self._keeper_died(0)
        else:
            self._on_death(self._keeper_pid, self._keeper_died)

    def _on_death(self, pid: int, callback: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(pid)

        def died() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            callback(pid)

        loop.add_reader(pidfd, died)

    def _keeper_died(self, pid: int) -> None:
        self._log.warning("the keeper is dead; starting a stand-in", pid=pid)
        self._events.emit("keeper_died", pid=pid)
        self._background(self._start_stand_in())

    async def _start_stand_in(self) -> None:
        argv = [sys.executable, "-m", "relax_rt.supervision.keeper"]
        argv += ["--run-id", self.paths.run_id, "--run-dir", str(self.paths.run_dir), "--watch", str(os.getpid())]
        env = {name: value for name, value in os.environ.items() if name != "RELAX_RUN_ID"}
        child = await self._spawner.spawn_plain(argv, env, self.paths.log("keeper"))
        self._stand_in_pid = child.pid
        self._events.emit("keeper_started", pid=child.pid)

        def died(pid: int) -> None:
            child.wait()
            self._stand_in_pid = 0
            self._events.emit("keeper_died", pid=pid)
            self._background(self._after(HOUSEKEEPING_S, self._start_stand_in))

        self._on_death(child.pid, died)

    async def _after(self, wait_s: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await asyncio.sleep(wait_s)
        await work()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick(self) -> None:
        while True:
            deadline = self._core.next_deadline()
            left = TICK_S if deadline is None else deadline - time.monotonic()
            await asyncio.sleep(min(TICK_S, max(0.005, left)))
            self.post(Tick())

    async def _housekeeping(self) -> None:
        limit = self.config.events.role_log_mib * MIB
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self._reap_strangers()
            try:
                await asyncio.to_thread(self._events.rotate)
                for slot, process in list(self._processes.items()):
                    if await asyncio.to_thread(rotate_log, self.paths.log(slot), limit):
                        process.log_truncated()
            except OSError as error:
                self._log.error("logs cannot be rotated", error=str(error))

    def _reap_strangers(self) -> None:
        """Reap dead orphans that came to us as subreaper; our own roles are reaped when their pidfd says so."""
        known = {process.pid for process in self._processes.values()} | {self._stand_in_pid}
        while not self._spawner.in_flight:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if info is None or info.si_pid in known:
                    return
                os.waitpid(info.si_pid, 0)
            except ChildProcessError:
                return

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
        await asyncio.to_thread(self._kill_rest)
        self._spawner.close()
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

    def _kill_rest(self) -> None:
        mine = {self._stand_in_pid, os.getpid()}
        procfs.kill_until_none(lambda: procfs.descendants(os.getpid()) - mine, reap=True)


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
        self._agent.post(RestartRequested(slot))

    async def scale(self, kind: str, count: int) -> None:
        raise Refused(f"cannot scale {kind} to {count}", why="not yet")

    async def drain(self, what: str) -> None:
        raise Refused(f"cannot drain {what}", why="not yet")

    async def inject(self, slot: str, fault: str, seconds: float, amount: float) -> None:
        raise Refused(f"cannot inject {fault} into {slot}", why="not yet")

    async def nodes(self) -> list[NodeStatus]:
        return self._agent.nodes()


def _unspawned(slot: str, epoch: int, kind: Kind, cause: str) -> Diagnosis:
    return Diagnosis(slot=slot, epoch=epoch, kind=kind, cause=cause, at=time.time())


def run_agent(
    config: RunConfig,
    paths: RunPaths,
    plans: Sequence[RolePlan],
    *,
    keeper_pid: int = 0,
    on_state: OnState | None = None,
) -> Done:
    """Run a node's part of a run to its end; see Agent."""

    async def run() -> Done:
        return await Agent(config, paths, plans, keeper_pid=keeper_pid, on_state=on_state).run()

    return uvloop.run(run())
