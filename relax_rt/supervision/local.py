"""The executor of this node: turns orders into processes, and their messages and exits into events.

Also watches the keeper above the agent, and replaces it when it dies.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast, get_args

import msgspec
import structlog

from relax_rt.config.loader import SYSTEM_ROLES
from relax_rt.config.schema import RoleSettings, RunConfig
from relax_rt.interfaces.agent import Diagnosis, Kind
from relax_rt.observe.events import EventLog
from relax_rt.process import procfs
from relax_rt.process.child import rotate_log, watch_exit
from relax_rt.process.limits import ProcessLimits
from relax_rt.process.zygote_pool import EmitEvent, ZygoteKey
from relax_rt.supervision.channel import (
    AddressMsg,
    FaultKind,
    FaultMsg,
    FinishedMsg,
    FromRole,
    ProgressMsg,
    ReadyMsg,
)
from relax_rt.supervision.devices import DeviceGate, device_environment
from relax_rt.supervision.executor import (
    GangOrder,
    GangRendezvous,
    InjectFault,
    OnAddress,
    OnEvent,
    SlotOrder,
    StartOrder,
)
from relax_rt.supervision.plan import RolePlan
from relax_rt.supervision.protocol import (
    DumpStacks,
    Kill,
    SlotExited,
    SlotFinished,
    SlotProgress,
    SlotReady,
    SlotSpawned,
    Stop,
)
from relax_rt.supervision.role_process import HOST_MODULE, Launch, RoleProcess, role_environment
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RunPaths
from relax_rt.supervision.spawner import RoleSpawner, SpareSpec
from relax_rt.transport.rpc.errors import Refused

MIB = 1 << 20
HOUSEKEEPING_S = 1.0
RENDEZVOUS_TIMEOUT_S = 60.0
"""Close a gang's socket if its rank 0 has not been ordered by then."""
SPARES_WITHOUT_SLOT_S = 10.0
"""Keep spares of a role this long, beyond its longest back-off, after its last process on this node has gone: then no
slot is about to start again (drained, scaled to none, given up, or placed elsewhere)."""
KEEPER_RESTART_S = 1.0


class LocalExecutor:
    """Processes under this agent; see Executor.

    Args:
        config: the resolved config.
        paths: the run's directories.
        plans: the roles of the run.
        on_event, on_address: take what the processes do.
        emit: appends to the run's event log.
        node: this node's name.
        host: address at which other nodes reach this one; ranks of a gang meet there.
        environment: further variables of every role.
    """

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        plans: Sequence[RolePlan],
        *,
        on_event: OnEvent,
        on_address: OnAddress,
        emit: EmitEvent,
        node: str = "",
        host: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.node, self._host, self._environment = node, host, dict(environment or {})
        self._config, self._paths = config, paths
        self._plans = {plan.kind: plan for plan in plans}
        self._on_event, self._on_address, self._emit = on_event, on_address, emit
        self._log = structlog.get_logger()
        self._spawner = RoleSpawner(emit)
        self._gate = DeviceGate(emit, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._processes: dict[str, RoleProcess] = {}
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._listeners: dict[str, socket.socket] = {}
        self._keepers: set[int] = set()
        self._starting_keeper: asyncio.Task[None] | None = None
        self._vacant: dict[str, float] = {}

    def prepare(self) -> None:
        """Start the zygotes, in the background. Roles that start earlier wait for them or, if that takes long, are
        spawned."""
        for plan in self._plans.values():
            if plan.settings.spares:
                spare = self._launch(StartOrder(slot=f"{plan.kind}/spare", epoch=0))
                launch = msgspec.structs.replace(spare, env={**spare.env, "RELAX_SPARE": "1"})
                timeout_s = plan.settings.start_timeout_s or self._config.supervision.start_timeout_s
                self._spawner.spares.configure(plan.kind, SpareSpec(plan.settings.spares, launch, timeout_s))
        if not self._config.supervision.zygote:
            return
        config = self._paths.run_dir / RESOLVED_CONFIG
        zygotes = self._spawner.use_zygotes(self._paths.log("zygote"), config, self._paths.run_id)
        for plan in self._plans.values():
            # The light zygote knows the runtime's own roles.
            target = "" if plan.kind in SYSTEM_ROLES else plan.target
            zygotes.preload(zygote_key(plan.settings), target, plan.preload)
        zygotes.start()

    def has(self, slot: str) -> bool:
        """Return whether a process of the slot lives here."""
        return slot in self._processes

    def carry_out(self, order: SlotOrder) -> None:
        slot = order.slot
        process = self._processes.get(slot)
        match order:
            case StartOrder():
                self._starts[slot] = asyncio.create_task(self._start(order))
            case Stop() if process is not None:
                process.stop()
            case Kill(kind=kind, reason=reason) if process is not None:
                process.kill(kind, reason)
            case DumpStacks() if process is not None:
                process.dump_stacks()
            case InjectFault(fault=fault, seconds=seconds, amount=amount):
                what = f"cannot inject {fault} into {slot}"
                if fault not in get_args(FaultKind):
                    raise Refused(what, why="there is no such fault", hint=f"faults: {', '.join(get_args(FaultKind))}")
                if process is None:
                    raise Refused(what, why="it has no process now")
                if not process.inject(FaultMsg(cast(FaultKind, fault), seconds, amount)):
                    raise Refused(what, why="its control channel is full or closed")

    async def rendezvous(self, slot: str, generation: int) -> GangRendezvous:
        self._close_listener(slot)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family, backlog=1024)
        self._listeners[slot] = listener
        asyncio.get_running_loop().call_later(RENDEZVOUS_TIMEOUT_S, self._expire, slot, listener)
        return GangRendezvous(self._host, listener.getsockname()[1])

    async def close(self) -> list[int]:
        """End all roles, and return the processes that SIGKILL did not end; the keeper's successor lives on."""
        for task in (*self._starts.values(), self._starting_keeper):
            if task is not None:
                task.cancel()
        for slot in list(self._listeners):
            self._close_listener(slot)
        # Zygotes first: one that lives could fork while its children are killed. By now all roles have exited, unless
        # the run ends by a fault; what they left behind anywhere below us goes with the descendants.
        await self._spawner.aclose()
        mine = {*self._keepers, os.getpid()}
        left = await asyncio.to_thread(
            procfs.kill_until_none, lambda: procfs.descendants(os.getpid()) - mine, reap=True
        )
        self._spawner.close()
        if left:
            self._log.error("processes of the run could not be killed", pids=left)
            self._emit("processes_unkillable", pids=left, node=self.node)
        return left

    # The keeper above the agent. Once it is dead, a successor below the agent is kept running.

    def watch_keeper(self, pid: int) -> None:
        """Watch the keeper that started this agent."""
        # If it died before this call, our parent is another by now.
        if os.getppid() != pid:
            self._keeper_died(0)
        else:
            watch_exit(pid, lambda: self._keeper_died(pid))

    def _keeper_died(self, pid: int, wait_s: float = 0.0) -> None:
        self._log.warning("the keeper is dead; starting a successor", pid=pid)
        self._emit("keeper_died", pid=pid)
        self._starting_keeper = asyncio.create_task(self._start_keeper(wait_s))

    async def _start_keeper(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        argv = [sys.executable, "-m", "relax_rt.supervision.keeper"]
        argv += ["--run-id", self._paths.run_id, "--run-dir", str(self._paths.run_dir), "--watch", str(os.getpid())]
        # Without the run's id, by which it would find and kill itself.
        env = {name: value for name, value in os.environ.items() if name != "RELAX_RUN_ID"}
        child = await self._spawner.spawn_helper(argv, env, self._paths.log("keeper"))
        self._keepers.add(child.pid)
        self._emit("keeper_started", pid=child.pid)

        def died() -> None:
            child.wait()
            self._keepers.discard(child.pid)
            self._keeper_died(child.pid, KEEPER_RESTART_S)

        watch_exit(child.pid, died)

    # Housekeeping.

    async def run_housekeeping(self, events: EventLog) -> None:
        """Once a second, for ever: reap dead orphans, end unneeded spares, rotate long logs and the event log."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self._reap_orphans()
            self._end_idle_spares()
            await self._rotate_logs(self._config.events.role_log_mib * MIB)
            try:
                await asyncio.to_thread(events.rotate)
            except OSError as error:
                self._log.error("the event log cannot be rotated", error=str(error))

    async def _rotate_logs(self, limit_bytes: int) -> None:
        # Those of the agent, the zygotes, the keeper and spares as well: a run may last for months.
        for path in await asyncio.to_thread(lambda: sorted(self._paths.logs.glob("*.log"))):
            try:
                if not await asyncio.to_thread(rotate_log, path, limit_bytes):
                    continue
            except OSError as error:
                self._log.error("log cannot be rotated", log=path.name, error=str(error))
                continue
            for slot, process in self._processes.items():
                if self._paths.log(slot) == path:
                    process.log_truncated()

    def _end_idle_spares(self) -> None:
        # Not at once: a slot that is in its back-off has no process, and will want the spare.
        here = {slot.partition("/")[0] for slot in (*self._processes, *self._starts)}
        now = time.monotonic()
        for kind in self._spawner.spares.kept:
            if kind in here:
                self._vacant.pop(kind, None)
            elif now - self._vacant.setdefault(kind, now) > (
                SPARES_WITHOUT_SLOT_S + self._config.supervision.restart.backoff_max_s
            ):
                del self._vacant[kind]
                self._spawner.spares.drop(kind)
                self._emit("spares_ended", role=kind, reason="no slot of the role is on this node")

    async def _start(self, order: StartOrder) -> None:
        slot = order.slot
        try:
            await self._gate.free(slot, order.devices)
            process = await self._spawner.spawn(
                self._launch(order), partial(self._on_message, slot), partial(self._on_exit, slot)
            )
        except Exception as error:  # noqa: BLE001 whatever went wrong is this slot's diagnosis
            cause = f"cannot be started: {error!r}"
            self._on_event(SlotExited(slot, unspawned(slot, order.epoch, "unknown", cause)))
            return
        finally:
            del self._starts[slot]
            self._close_listener(slot)
        self._processes[slot] = process
        self._on_event(SlotSpawned(slot, order.epoch, process.pid, self.node))

    def _launch(self, order: StartOrder) -> Launch:
        slot = order.slot
        plan = self._plans[slot.partition("/")[0]]
        relax = {
            "RELAX_RUN_ID": self._paths.run_id,
            "RELAX_RUN_DIR": str(self._paths.run_dir),
            "RELAX_SLOT": slot,
            "RELAX_EPOCH": str(order.epoch),
            "RELAX_SOCKET_DIR": str(self._paths.socket_dir),
            "RELAX_SHM_DIR": str(self._paths.shm_dir),
            "RELAX_AGENT_PID": str(os.getpid()),
            "RELAX_ROLE_TARGET": plan.target,
            "RELAX_HAS_REGISTRY": "1" if "registry" in self._plans else "0",
            **self._environment,
            **device_environment(order.devices, os.environ.get("CUDA_VISIBLE_DEVICES")),
            **(gang_environment(order.gang) if order.gang is not None else {}),
        }
        listener = self._listeners.get(slot)
        return Launch(
            slot=slot,
            epoch=order.epoch,
            # The slot's name is for people who look at `ps`.
            argv=[plan.settings.python or sys.executable, "-m", HOST_MODULE, slot],
            env=role_environment(plan.settings.threads, plan.settings.env, relax),
            log=self._paths.log(slot),
            limits=ProcessLimits(
                nice=plan.settings.nice,
                cpus=plan.settings.cpus or [],
                open_files=plan.settings.open_files or 0,
                threads=plan.settings.threads,
            ),
            memory_mib=plan.settings.memory_mib or 0,
            key=zygote_key(plan.settings) if self._config.supervision.zygote else None,
            target=plan.target,
            preload=plan.preload,
            fds={} if listener is None else {"RELAX_RENDEZVOUS_FD": listener.fileno()},
        )

    def _expire(self, slot: str, listener: socket.socket) -> None:
        """Close the socket of a start that was called off, or whose order was lost."""
        if self._listeners.get(slot) is listener and slot not in self._starts:
            self._close_listener(slot)

    def _close_listener(self, slot: str) -> None:
        if (listener := self._listeners.pop(slot, None)) is not None:
            listener.close()

    def _on_message(self, slot: str, message: FromRole) -> None:
        match message:
            case ReadyMsg():
                self._spawner.spares.keep(slot.partition("/")[0])
                self._on_event(SlotReady(slot))
            case ProgressMsg(n=n, detail=detail, waiting=waiting, extend_s=extend_s):
                self._on_event(SlotProgress(slot, n, waiting, extend_s, detail))
            case AddressMsg(address=address, remote=remote):
                self._on_address(slot, address, remote)
            case FinishedMsg():
                self._on_event(SlotFinished(slot))

    def _on_exit(self, slot: str, diagnosis: Diagnosis) -> None:
        self._processes.pop(slot, None)
        self._on_address(slot, "", "")
        self._on_event(SlotExited(slot, diagnosis))

    def _reap_orphans(self) -> None:
        """Reap dead orphans that we adopted as subreaper; our own processes are reaped through their pidfds."""
        # A process exists from its fork on, and is known only when its start has returned here. Were it reaped in
        # between, its exit status would be lost, so nothing is reaped while a start is in flight. WNOWAIT peeks: the
        # kernel returns the oldest dead child, and one of ours stays for its pidfd's reader.
        known = {process.pid for process in self._processes.values()} | self._keepers | self._spawner.helpers
        while not self._spawner.in_flight:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if info is None or info.si_pid in known:
                    return
                os.waitpid(info.si_pid, 0)
            except ChildProcessError:
                return


def zygote_key(settings: RoleSettings) -> ZygoteKey:
    """Return which zygote a role can be forked from."""
    return ZygoteKey(settings.python or sys.executable, tuple(sorted(settings.env.items())))


def gang_environment(gang: GangOrder) -> dict[str, str]:
    """Return the variables that torch.distributed's env:// start reads, and the generation."""
    return {
        "RELAX_GENERATION": str(gang.generation),
        "RELAX_GANG_KEY": gang.key,
        "RANK": str(gang.rank),
        "WORLD_SIZE": str(gang.world_size),
        "LOCAL_RANK": str(gang.local_rank),
        "LOCAL_WORLD_SIZE": str(gang.local_world_size),
        "MASTER_ADDR": gang.master_addr,
        "MASTER_PORT": str(gang.master_port),
        # The host serves the store on rank 0, and env:// is a client of it everywhere.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def failure_of(task: asyncio.Task[None], events: EventLog) -> str:
    """Return how a background task of an agent failed, and record it; empty when it was cancelled or has returned.

    Without one of its tasks an agent would only seem to watch over its roles: it must end.
    """
    if task.cancelled() or (error := task.exception()) is None:
        return ""
    fault = f"{task.get_name()} has failed: {type(error).__name__}: {error}"
    structlog.get_logger().error("supervisor fault", error=fault, exc_info=error)
    events.emit("supervisor_fault", error=fault, trace="".join(traceback.format_exception(error)))
    return fault


def unspawned(slot: str, epoch: int, kind: Kind, cause: str) -> Diagnosis:
    """Return the diagnosis of a process that was never started."""
    return Diagnosis(slot=slot, epoch=epoch, kind=kind, cause=cause, at=time.time())
