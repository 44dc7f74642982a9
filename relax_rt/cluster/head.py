"""The agent of a run's head: feeds the supervisor, carries out its actions, and serves the run on agent.sock.

Its process is ``python -m relax_rt.cluster.head``, started by the keeper. Every event goes through `HeadAgent.post`,
every action through `HeadAgent._carry_out`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog
import uvloop

from relax_rt.cluster.nodes.fleet import NodeFleet
from relax_rt.config.job import absent_kinds, finished, load_job, stall_after_s
from relax_rt.config.loader import read_resolved
from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.agent import AgentApi, Diagnosis, Kind, NodeStatus, RunStatus, WhereApi
from relax_rt.observe.events import EventLog
from relax_rt.observe.logs import open_log, setup_logging
from relax_rt.observe.text import clip
from relax_rt.process import procfs
from relax_rt.supervision.executor import (
    Executor,
    GangOrder,
    InjectFault,
    PendingStart,
    PendingStarts,
    StartOrder,
    gang_orders,
)
from relax_rt.supervision.local import LocalExecutor, failure_of, unspawned
from relax_rt.supervision.placement import Placer
from relax_rt.supervision.plan import RolePlan, check_count, plan_roles
from relax_rt.supervision.protocol import (
    Action,
    DrainRequested,
    DumpStacks,
    Emit,
    Event,
    Kill,
    KillRequested,
    NodeLost,
    RestartRequested,
    RunDone,
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
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RunPaths, owner_of, slot_file, update_run, write_json
from relax_rt.supervision.supervisor import InvalidTransition, Supervisor
from relax_rt.supervision.system_roles import AGENT_SLOT, SystemRoles
from relax_rt.transport.rpc.errors import Refused, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcServer, make_hello

TICK_S = 0.1
STATE_EVERY_S = 0.25
MIB = 1 << 20
SUMMARY = "summary.json"
REASON, SHOWN_LINES = 160, 12


class LiveProcess:
    """What the agent knows of a living process."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.ready_s = 0.0
        self.address = ""


class HeadAgent:
    """One run, from its first process to its last. Implements AgentApi, WhereApi and NodeEvents.

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
        nodes: NodeFleet,
        *,
        keeper_pid: int = 0,
        on_state: Callable[[RunStatus], None] | None = None,
    ) -> None:
        self.config, self.paths = config, paths
        self._plans = {plan.kind: plan for plan in plans}
        self._absent = absent_kinds(config)
        rules = config.supervision
        plans = nodes.pinned(plans)
        self._log = structlog.get_logger()
        self._events = EventLog(paths.run_dir, "agent", config.events.segment_mib * MIB, config.events.keep_segments)
        self._system = SystemRoles(paths, has_registry="registry" in self._plans, has_queue="queue" in self._plans)
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
        self._supervisor = Supervisor(
            [spec for plan in plans for spec in plan.specs(rules)],
            random.Random().random,
            [plan.rules(rules) for plan in plans],
            self._placer,
            stall_after_s(config),
            finished(config),
        )
        self._keeper_pid = keeper_pid
        self._starts = PendingStarts()
        self._preparing: dict[PendingStart, asyncio.Task[list[tuple[Executor, StartOrder]]]] = {}
        self._processes: dict[str, LiveProcess] = {}
        self._placed: dict[str, str] = {}
        """The node of each slot's newest start."""
        self._on_state = on_state
        self._began = time.monotonic()
        self._requested_end = ""
        self._status = "starting"
        self._interrupts = 0
        self._next_tick = 0.0
        self._tick_earlier = asyncio.Event()
        self._done: asyncio.Future[RunDone] | None = None

    async def run(self) -> RunDone:
        """Run to the end; no process of the run lives when this returns."""
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        procfs.become_subreaper()
        self.paths.own(os.getpid())
        self._write_status(agent=owner_of(os.getpid()))
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        for number, reason in ((signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "the terminal was closed")):
            loop.add_signal_handler(number, self._stop, reason, 128 + number)
        # Some servers send it to their parent when they fail; their orphans become children of this subreaper.
        loop.add_signal_handler(signal.SIGQUIT, lambda: self._log.warning("SIGQUIT does not end a run; use `down`"))
        self._local.prepare()
        if self._keeper_pid:
            self._local.watch_keeper(self._keeper_pid)
        server = RpcServer(make_hello(self.paths.run_id, Incarnation(AGENT_SLOT, 0)))
        server.offer(AgentApi, self)
        server.offer(WhereApi, self)
        await server.listen(f"unix://{self.paths.agent_socket}")
        if address := await self._fleet.open(list(self._plans)):
            self._write_status(listen=address)
        self._system.start()
        self._events.emit(
            "run_started",
            run_id=self.paths.run_id,
            pid=os.getpid(),
            slots=[slot.slot for slot in self._supervisor.view()],
            chosen={key: one.model_dump() for key, one in self.config.chosen.items()},
        )
        background = [
            asyncio.create_task(self._tick(), name="the clock"),
            asyncio.create_task(self._local.run_housekeeping(self._events), name="housekeeping"),
            asyncio.create_task(self._show(), name="the screen"),
        ]
        for task in background:
            task.add_done_callback(self._end_if_failed)
        self.post(RunStarted())
        try:
            done = await self._done
        finally:
            for task in background:
                task.cancel()
        await self._close(server, done)
        return done

    # Events in, actions out.

    def post(self, event: Event) -> None:
        """Feed the supervisor and carry out its actions."""
        if isinstance(event, NodeLost):
            self._forget_node(event.node)
        try:
            actions = self._supervisor.handle(event, time.monotonic())
        except InvalidTransition as fault:
            self._log.error("supervisor fault", error=str(fault))
            self._events.emit("supervisor_fault", error=str(fault))
            if isinstance(event, KillRequested):
                raise
            self.post(KillRequested(f"fault of the supervisor: {fault}"))
            return
        for action in actions:
            self._carry_out(action)
        # A deadline before the next tick must not wait for it: a back-off is mostly short.
        deadline = self._supervisor.next_deadline()
        if deadline is not None and deadline < self._next_tick:
            self._tick_earlier.set()

    def on_event(self, event: Event) -> None:
        if isinstance(event, SlotSpawned):
            self._processes[event.slot] = LiveProcess(time.monotonic())
        elif isinstance(event, SlotReady) and event.slot in self._processes:
            process = self._processes[event.slot]
            process.ready_s = process.ready_s or time.monotonic() - process.began
        elif isinstance(event, SlotExited):
            self._processes.pop(event.slot, None)
            if event.diagnosis.failed:
                self._log.warning("role ended", slot=event.slot, why=str(event.diagnosis))
            if event.diagnosis.pid:
                who = Incarnation(event.slot, event.diagnosis.epoch)
                self._system.report_exit(who, f"{event.diagnosis.kind}: {event.diagnosis.cause}")
        self.post(event)
        starting = isinstance(event, SlotReady) and self._status == "starting"
        if starting and all(slot.state in ("ready", "ended") for slot in self._supervisor.view()):
            self._write_status("running")

    def on_address(self, slot: str, address: str, remote: str) -> None:
        """Take the addresses at which a role serves; empty when it is gone."""
        if slot in self._processes:
            self._processes[slot].address = address
        self._fleet.put(slot, remote)

    def on_gone(self, slot: str, epoch: int, reason: str) -> None:
        self._system.report_exit(Incarnation(slot, epoch), f"node_lost: {reason}")

    def _carry_out(self, action: Action) -> None:
        match action:
            case Start():
                self._begin_start([action])
            case StartGang(ranks=ranks):
                self._begin_start(ranks, action)
            case Stop(slot=slot):
                if executor := self._executor_or_call_off(
                    unspawned(slot, 0, "clean", "called off before it was started")
                ):
                    executor.carry_out(action)
            case Kill(slot=slot, kind=kind, reason=reason):
                if executor := self._executor_or_call_off(unspawned(slot, 0, kind, reason)):
                    executor.carry_out(action)
            case DumpStacks(slot=slot):
                if executor := self._executor(slot):
                    executor.carry_out(action)
            case Emit(kind=kind, fields=fields):
                self._events.emit(kind, **fields)
                self._log.info(kind, **{k: v for k, v in fields.items() if k != "diagnosis"})
            case RunDone():
                assert self._done is not None
                self._done.set_result(action)
        if self._supervisor.draining and self._status in ("starting", "running"):
            self._write_status("draining", reason=self._supervisor.draining)

    # Starts: from the decision to the order.

    def _begin_start(self, starts: Sequence[Start], gang: StartGang | None = None) -> None:
        attempt = self._starts.begin(start.slot for start in starts)
        self._placed |= {start.slot: start.node for start in starts}
        task = asyncio.create_task(self._prepare_orders(starts, gang))
        self._preparing[attempt] = task
        # Not in the task itself: one that is cancelled before its first step never gets to run its code.
        task.add_done_callback(lambda _: self._dispatch_orders(attempt))

    async def _prepare_orders(
        self, starts: Sequence[Start], gang: StartGang | None
    ) -> list[tuple[Executor, StartOrder]]:
        """Return the orders, once the slots have their epochs, and who carries them out."""
        epochs = [await self._system.issue_epoch(start.slot) for start in starts]
        ranks = [None] * len(starts) if gang is None else await self._open_rendezvous(gang)
        orders = [
            StartOrder(slot=start.slot, epoch=epoch, node=start.node, devices=start.devices, gang=rank)
            for start, epoch, rank in zip(starts, epochs, ranks, strict=True)
        ]
        return [(self._living_executor(order.node), order) for order in orders]

    async def _open_rendezvous(self, gang: StartGang) -> list[GangOrder]:
        """Return the ranks' orders; the socket at which they meet listens by then."""
        first = gang.ranks[0]
        at = await self._living_executor(first.node).rendezvous(first.slot, gang.generation)
        return gang_orders(gang, at)

    def _dispatch_orders(self, attempt: PendingStart) -> None:
        """Give the orders to their executors, which answer for the slots from then on."""
        task = self._preparing.pop(attempt)
        kind: Kind = "killed"
        cause = "its start was called off"
        if not task.cancelled() and (error := task.exception()) is not None:
            kind, cause = "unknown", f"cannot be started: {error!r}"
        elif not task.cancelled() and not attempt.broken:
            orders = {order.slot: (executor, order) for executor, order in task.result()}
            for slot, _ in self._starts.settle(attempt):
                executor, order = orders[slot]
                executor.carry_out(order)
            return
        # on_event may decide the next start of this slot, or call off another slot of this attempt, before it returns.
        # `settle` looks up each slot at its turn, so both are seen.
        for slot, called_off in self._starts.settle(attempt):
            self.on_event(SlotExited(slot, called_off or unspawned(slot, 0, kind, cause)))

    def _executor_or_call_off(self, diagnosis: Diagnosis) -> Executor | None:
        """Return who can end the slot's process. A start that no executor knows of yet is called off here, with this
        diagnosis; a gang's as a whole."""
        if (attempt := self._starts.call_off(diagnosis)) is None:
            return self._executor(diagnosis.slot)
        self._cancel(attempt)
        return None

    def _cancel(self, attempt: PendingStart) -> None:
        """Cancel its preparation: it is settled in a later turn of the loop, or is being settled now."""
        if (task := self._preparing.get(attempt)) is not None:
            task.cancel()

    def _forget_node(self, node: str) -> None:
        """Drop starts on a lost node unanswered: the supervisor knows that whatever was there is gone."""
        for slot in [slot for slot, at in self._placed.items() if at == node]:
            self._processes.pop(slot, None)
            for attempt in self._starts.forget([slot]):
                self._cancel(attempt)

    def _executor(self, slot: str) -> Executor | None:
        """Return the executor of the slot's node; None when that is lost."""
        return self._fleet.executor(self._placed.get(slot, self._local.node))

    def _living_executor(self, node: str) -> Executor:
        if (executor := self._fleet.executor(node)) is None:
            raise Unreachable(f"node {node!r}", why="it is gone")
        return executor

    # Requests: signals, and the interface on agent.sock.

    def _interrupted(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._stop("Ctrl-C", 128 + signal.SIGINT)
        else:
            self._kill("Ctrl-C again", 128 + signal.SIGINT)

    def _stop(self, reason: str, exit_code: int = 0) -> None:
        self._requested_end = self._requested_end or "stopped"
        self.post(StopRequested(reason, exit_code))

    def _kill(self, reason: str, exit_code: int = 137) -> None:
        self._requested_end = "killed"
        self.post(KillRequested(reason, exit_code))

    async def stop(self, reason: str) -> None:
        self._stop(reason or "stop requested")

    async def kill(self, reason: str) -> None:
        self._kill(reason or "kill requested")

    async def restart(self, slot: str) -> None:
        if any(node.node == slot and node.state == "leaving" for node in await self.nodes()):
            raise Refused(f"cannot restart {slot!r}", why="the node is leaving", hint="let it join again")
        self.post(RestartRequested(slot))

    async def scale(self, kind: str, count: int) -> None:
        counts = self._supervisor.counts
        if counts.get(kind, count) != count and kind in self._plans and self._supervisor.can_scale(kind):
            cores = sum(node.cores for node in self._placer.nodes)
            await asyncio.to_thread(check_count, self.config, self._plans.values(), counts, kind, count, cores)
        self.post(ScaleRequested(kind, count))

    async def drain(self, what: str) -> None:
        self.post(DrainRequested(what))

    async def inject(self, slot: str, fault: str, seconds: float, amount: float) -> None:
        if not self.config.supervision.chaos:
            raise Refused(f"cannot inject {fault} into {slot}", why="the run has [supervision] chaos = false")
        if (executor := self._executor(slot)) is None or slot not in self._processes:
            raise Refused(f"cannot inject {fault} into {slot}", why="the slot has no process now")
        executor.carry_out(InjectFault(slot, fault, seconds, amount))

    async def where(self, slot: str) -> str:
        here = self._placed.get(slot, self._local.node) == self._local.node
        return f"unix://{self.paths.socket_dir / slot_file(slot, '.sock')}" if here else self._fleet.where(slot)

    # Status.

    async def status(self) -> RunStatus:
        return self._run_status()

    async def nodes(self) -> list[NodeStatus]:
        return self._node_statuses()

    def _run_status(self, done: RunDone | None = None) -> RunStatus:
        now = time.monotonic()
        slots = []
        for slot in self._supervisor.view(now):
            process = self._processes.get(slot.slot) or LiveProcess(now)
            slots.append(
                msgspec.structs.replace(
                    slot,
                    uptime_s=now - process.began,
                    ready_s=process.ready_s,
                    address=process.address,
                    log=self._fleet.log(slot.node, slot.slot) or str(self.paths.log(slot.slot)),
                    policy_version=self._system.policy_versions.get(slot.slot, -1),
                )
            )
        return RunStatus(
            run_id=self.paths.run_id,
            name=self.config.run.name,
            run_dir=str(self.paths.run_dir),
            status=self._status,
            reason=self._supervisor.draining,
            agent_pid=os.getpid(),
            uptime_s=now - self._began,
            slots=slots,
            exit_code=done.exit_code if done else None,
            diagnosis=done.diagnosis if done else None,
            first=done.first if done else None,
            nodes=self._node_statuses(),
            roles=[kind for kind, count in self._supervisor.counts.items() if count or kind not in self._absent],
        )

    def _node_statuses(self) -> list[NodeStatus]:
        found = self._fleet.status([slot.slot for slot in self._supervisor.view() if slot.pid])
        return [
            msgspec.structs.replace(node, state="draining" if node.slots else "drained")
            if node.state == "alive" and self._placer.closed(node.node)
            else node
            for node in found
        ]

    def _write_status(self, status: str = "", **fields: Any) -> None:
        self._status = status or self._status
        try:
            update_run(self.paths.run_dir, status=self._status, **fields)
        except OSError as error:
            self._log.error("run.json cannot be written", error=str(error))

    # Background work.

    async def _tick(self) -> None:
        while True:
            self._tick_earlier.clear()
            deadline = self._supervisor.next_deadline()
            self._next_tick = time.monotonic() + TICK_S if deadline is None else deadline
            left = self._next_tick - time.monotonic()
            try:
                async with asyncio.timeout(min(TICK_S, max(0.002, left))):
                    await self._tick_earlier.wait()
            except TimeoutError:
                self.post(Tick())

    async def _show(self) -> None:
        while self._on_state is not None:
            self._notify_observer(self._run_status())
            await asyncio.sleep(STATE_EVERY_S)

    def _notify_observer(self, status: RunStatus) -> None:
        if self._on_state is None:
            return
        try:
            self._on_state(status)
        except Exception:  # noqa: BLE001 a broken screen must not end the run
            self._log.exception("the observer of the run's state failed; it is not called again")
            self._on_state = None

    def _end_if_failed(self, task: asyncio.Task[None]) -> None:
        if fault := failure_of(task, self._events):
            self.post(KillRequested(f"fault of the supervisor: {fault}"))

    async def _close(self, server: RpcServer, done: RunDone) -> None:
        status = self._requested_end or ("finished" if done.exit_code == 0 else "failed")
        if self._requested_end and done.diagnosis is not None:
            status = "failed"
        # Other nodes before this one: their roles write to the queue and the registry here. The directories go when no
        # process is left that could use them. run.json is last: who reads a final status may start the next run.
        await self._system.close()
        await server.close()
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
        self._notify_observer(self._run_status(done))


class RunScreen(Protocol):
    """Shows a running run; `close` restores the terminal and prints the last lines."""

    def __call__(self, status: RunStatus) -> None: ...

    def close(self, summary_lines: Sequence[str]) -> None: ...


def main(argv: list[str] | None = None) -> int:
    """Run the agent; returns the run's exit code."""
    parser = argparse.ArgumentParser(prog="relax_rt.cluster.head", description="Internal process of `relax-rt up`.")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--keeper-pid", type=int, default=0)
    parser.add_argument("--screen", default="", help="module:function(config, run_dir) that makes the observer")
    parser.add_argument("--system", default="", help="the system roles to run, with commas between them")
    options = parser.parse_args(argv)
    paths = RunPaths(options.run_id, options.run_dir)
    paths.logs.mkdir(parents=True, exist_ok=True)
    with open_log(paths.log("agent")) as log:
        setup_logging(os.environ.get("RELAX_LOG_LEVEL", "info"), log)
        config = read_resolved(paths.run_dir / RESOLVED_CONFIG)
        plans = plan_roles(config, [kind for kind in options.system.split(",") if kind])
        screen: RunScreen | None = None
        if options.screen:
            module, _, name = options.screen.partition(":")
            make: Callable[[RunConfig, Path], RunScreen] = getattr(importlib.import_module(module), name)
            screen = make(config, paths.run_dir)

        async def run() -> RunDone:
            fleet = NodeFleet(config, paths)
            return await HeadAgent(config, paths, plans, fleet, keeper_pid=options.keeper_pid, on_state=screen).run()

        done = uvloop.run(run())
        lines = [*_finish_job(config, paths.run_dir), *describe(done)]
        if screen is None:
            # stderr may be a file on a full disk; the exit code must still be the run's.
            with suppress(OSError):
                sys.stderr.write("\n".join(lines) + "\n")
        else:
            screen.close(lines)
    return done.exit_code


def describe(done: RunDone) -> list[str]:
    """Lines that describe the end of a run."""
    # A diagnosis has the cause in full.
    reason = done.reason if done.diagnosis is None else clip(done.reason, REASON)
    lines = [f"the run has ended: {reason} (exit code {done.exit_code})"]
    if done.diagnosis is not None:
        lines.append(f"  {done.diagnosis}")
        lines += [f"    {line}" for line in done.diagnosis.evidence(SHOWN_LINES, SHOWN_LINES)]
    if done.first is not None:
        lines.append(f"  earlier, the first failure: {done.first}")
    return lines


def _finish_job(config: RunConfig, run_dir: Path) -> list[str]:
    """Run the job's last step, after a failed run too; its failure does not change how the run ended.

    Returns:
        The job's closing lines.
    """
    try:
        job = load_job(config.run.job)
        summary: dict[str, Any] = job.finish(run_dir, config)
        if summary:
            write_json(run_dir / SUMMARY, json.loads(json.dumps(summary, default=str)))
            return job.closing(summary)
    except Exception as error:  # noqa: BLE001 code of the job
        structlog.get_logger().exception("the job's last step failed")
        return [f"relax-rt: the summary of the run could not be made: {error!r}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
