"""Starts role processes: from a spare if one waits, else forked by a zygote, else spawned from nothing.

A spare is a process of a role that has done what can be done beforehand: it was started as a role is, has imported the
role's class, has run `Role.prepare`, and waits on its control channel for the slot that it fills, its epoch and its
devices.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import structlog

from relax_rt.interfaces.agent import Diagnosis
from relax_rt.process import child, limits
from relax_rt.process.child import Child, Notifier, PacketReader, packet_pair
from relax_rt.process.zygote import ForkMsg
from relax_rt.process.zygote_pool import EmitEvent, ForkFailed, ZygotePool
from relax_rt.supervision.channel import MAX_PACKET_BYTES, AssignMsg, FromRole, PreparedMsg, decode_from_role, encode
from relax_rt.supervision.diagnosis import KernelLog
from relax_rt.supervision.role_process import (
    HOST_ENTRY,
    HOST_MODULE,
    ROLE_TAGS,
    Launch,
    RoleProcess,
    StartedProcess,
    begin_log,
    role_environment,
)

EXAMINERS = 4
STACK_DUMPERS = 2
MEMORY_EVERY_S = 0.5
ALWAYS_IMPORTED = (
    HOST_MODULE,
    "relax_rt.cluster.registry.role",
    "relax_rt.hosting.queue_role",
)
"""What every role, the registry and the queue need, by name."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.5, 60.0
STEADY_S = 60.0
CLOSE_TIMEOUT_S = 5.0


class RoleSpawner:
    """Starts processes, on the event loop.

    They are spawned from one thread that lives as long as the agent: a child's PR_SET_PDEATHSIG fires when the *thread*
    that spawned it ends, so pool threads that come and go would kill roles.

    Args:
        emit: takes the events of zygotes and spares, and `spawned_without_zygote`.
    """

    def __init__(self, emit: EmitEvent = lambda kind, /, **fields: None) -> None:
        self._emit = emit
        self._thread = ThreadPoolExecutor(1, "relax-spawn")
        # Threads of their own, so that an exit is reported at once whatever else the loop's threads do. A look at the
        # stacks of a process may take seconds: exits do not wait behind it.
        self._examiners = ThreadPoolExecutor(EXAMINERS, "relax-examine")
        self._stack_dumpers = ThreadPoolExecutor(STACK_DUMPERS, "relax-stacks")
        self._kernel = KernelLog()
        self._starting = 0
        self._limited: dict[int, RoleProcess] = {}
        self._memory_watch: asyncio.Task[None] | None = None
        self.zygotes: ZygotePool | None = None
        self.spares = Spares(self._start_process, emit)

    @property
    def in_flight(self) -> int:
        """Processes that may exist and are not watched yet."""
        return self._starting + self.spares.starting + (self.zygotes.starting if self.zygotes is not None else 0)

    @property
    def helpers(self) -> set[int]:
        """Processes of our own that are no roles."""
        return self.spares.pids | (self.zygotes.pids if self.zygotes is not None else set())

    def use_zygotes(self, log: Path, config: Path | None, run_id: str) -> ZygotePool:
        """Have processes forked from now on; preload what they need before the pool is started.

        Args:
            log: where zygotes write.
            config: the run's resolved config, read for what its types import; None: there is none.
        """

        def environment(own: dict[str, str]) -> dict[str, str]:
            return role_environment(1, own, {"RELAX_RUN_ID": run_id})

        calls = {} if config is None else {"relax_rt.config.loader:read_resolved": str(config)}
        self.zygotes = ZygotePool(self.spawn_helper, environment, log, self._emit, ALWAYS_IMPORTED, calls)
        return self.zygotes

    async def spawn(
        self, launch: Launch, on_message: Callable[[FromRole], None], on_exit: Callable[[Diagnosis], None]
    ) -> RoleProcess:
        """Start a role's process and watch it. Raises OSError: the interpreter or the log file cannot be opened."""
        self._starting += 1
        try:
            started = await self._assign_spare(launch) or await self._start_process(launch)
            try:
                process = RoleProcess(
                    launch, started, on_message, on_exit, self._examiners, self._kernel, self._stack_dumpers
                )
            except BaseException:
                started.abandon()
                raise
        finally:
            self._starting -= 1
        if launch.memory_mib:
            self._limited[process.pid] = process
            if self._memory_watch is None or self._memory_watch.done():
                self._memory_watch = asyncio.create_task(self._watch_memory())
        return process

    async def _assign_spare(self, launch: Launch) -> StartedProcess | None:
        if not self.spares.prepared(launch):
            return None
        log_start = await asyncio.get_running_loop().run_in_executor(self._thread, begin_log, launch)
        with launch.log.open("ab", buffering=0) as log:
            started = self.spares.take(launch, log.fileno())
        return None if started is None else started._replace(log_start=log_start)

    async def _start_process(self, launch: Launch) -> StartedProcess:
        loop = asyncio.get_running_loop()
        log_start = await loop.run_in_executor(self._thread, begin_log, launch)
        with launch.log.open("ab", buffering=0) as log:
            # Each attempt has a channel of its own: what a failed one has left behind must not talk on the next.
            with _channel() as (ours, theirs):
                try:
                    return StartedProcess(await self._fork(launch, log.fileno(), theirs.fileno()), ours, log_start)
                except ForkFailed as error:
                    ours.close()
                    if self.zygotes is not None:
                        self._emit("spawned_without_zygote", slot=launch.slot, epoch=launch.epoch, reason=str(error))
            with _channel() as (ours, theirs):
                popen = await loop.run_in_executor(self._thread, _spawn, launch, theirs.fileno(), log)
                return StartedProcess(popen.pid, ours, log_start, popen)

    async def _fork(self, launch: Launch, log: int, control: int) -> int:
        if self.zygotes is None or launch.key is None:
            raise ForkFailed("its role has none")
        fds = {"RELAX_CONTROL_FD": control, **launch.fds}
        order = ForkMsg(
            entry=HOST_ENTRY,
            argv=launch.argv,
            env=launch.env,
            descriptors=tuple(fds),
            tags=ROLE_TAGS,
            limits=launch.limits,
        )
        return await self.zygotes.fork(
            launch.key, order, [log, *fds.values()], target=launch.target, needs=launch.preload
        )

    async def spawn_helper(
        self, argv: list[str], env: dict[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a process that is no role."""
        self._starting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, child.spawn, argv, env, log, pass_fds)
        finally:
            self._starting -= 1

    async def _watch_memory(self) -> None:
        """Kill processes above their memory limit."""
        # By polling: no cgroup is sure to be there, and RLIMIT_AS counts address space (see process/limits.py). What
        # a process takes between two looks is the machine's risk; one walk over /proc serves all of them.
        while True:
            self._limited = {pid: process for pid, process in self._limited.items() if process.living}
            if not self._limited:
                return
            used = await asyncio.to_thread(limits.tree_memory, list(self._limited))
            limits_mib = {pid: process.launch.memory_mib for pid, process in self._limited.items()}
            for pid, reason in limits.over_memory(used, limits_mib).items():
                self._limited[pid].kill("oom", reason)
            await asyncio.sleep(MEMORY_EVERY_S)

    async def aclose(self) -> None:
        """End zygotes, spares and watches."""
        if self._memory_watch is not None:
            self._memory_watch.cancel()
        await self.spares.close()
        if self.zygotes is not None:
            await self.zygotes.close()

    def close(self) -> None:
        """End the threads. Every child must be gone: the end of their thread would kill them."""
        self._thread.shutdown(wait=False)
        self._examiners.shutdown(wait=False)
        self._stack_dumpers.shutdown(wait=False, cancel_futures=True)
        self._kernel.close()


@contextmanager
def _channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A control channel; closes their end when it is over, and ours if no process was started."""
    ours, theirs = packet_pair()
    try:
        with theirs:
            yield ours, theirs
    except BaseException:
        ours.close()
        raise


def _spawn(launch: Launch, control: int, log: BinaryIO) -> subprocess.Popen[bytes]:
    numbers = {name: str(fd) for name, fd in launch.fds.items()}
    env = {**launch.env, **numbers, "RELAX_CONTROL_FD": str(control)}
    popen = child.spawn(launch.argv, env, log, [control, *launch.fds.values()])
    for problem in limits.apply(launch.limits, popen.pid):
        structlog.get_logger().warning("limit not applied", slot=launch.slot, problem=problem)
    return popen


class Spare:
    """One waiting process."""

    def __init__(self, started: StartedProcess, changed: Notifier) -> None:
        self.started, self._changed = started, changed
        self.prepared = False
        self.end = ""
        """Why we have killed it."""
        self._child = Child(started.pid, self._exited, started.popen)
        self._reader = PacketReader(started.control, MAX_PACKET_BYTES, self._on_packet)

    @property
    def gone(self) -> bool:
        """Its exit was seen."""
        return not self._child.alive

    def assign(self, order: AssignMsg, fds: list[int]) -> bool:
        """Give it its slot; from then on it is no longer ours. False: the message cannot be delivered."""
        try:
            socket.send_fds(self.started.control, [encode(order)], fds, socket.MSG_NOSIGNAL)
        except OSError:
            return False
        self._child.release()
        self._reader.stop()
        return True

    def kill(self, reason: str = "") -> None:
        """SIGKILL it."""
        self.prepared, self.end = False, self.end or reason
        self._child.kill()

    def _on_packet(self, packet: bytes) -> None:
        try:
            self.prepared = self.prepared or isinstance(decode_from_role(packet), PreparedMsg)
        except msgspec.DecodeError:
            self.kill()
        self._changed.notify()

    def _exited(self, _status: int) -> None:
        self._reader.close()
        self._changed.notify()


class SpareSpec(NamedTuple):
    """How many spares of a role there should be, how to start one, and how long it may take to prepare."""

    number: int
    launch: Launch
    start_timeout_s: float = 180.0


class Spares:
    """The spares of this node.

    Args:
        start_process: starts a process.
        emit: takes `spare_ready` and `spare_died`.
    """

    def __init__(self, start_process: Callable[[Launch], Awaitable[StartedProcess]], emit: EmitEvent) -> None:
        self._start_process, self._emit = start_process, emit
        self._specs: dict[str, SpareSpec] = {}
        self._waiting: dict[str, list[Spare]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: list[Spare] = []
        self._changed = Notifier()
        self.starting = 0
        """Processes that may exist and are not watched yet."""

    @property
    def pids(self) -> set[int]:
        """Processes that are ours to wait for."""
        return {spare.started.pid for spare in self._all() if not spare.gone}

    @property
    def kept(self) -> list[str]:
        """Roles whose spares are kept now."""
        return list(self._tasks)

    def _all(self) -> list[Spare]:
        return [*self._ended, *(spare for spares in self._waiting.values() for spare in spares)]

    def configure(self, kind: str, spec: SpareSpec) -> None:
        """Say what there should be once `keep` is called for the role."""
        self._specs[kind] = spec
        self._waiting[kind] = []

    def keep(self, kind: str) -> None:
        """Keep spares of this role from now on. Call it when its slots are up: spares would slow their start down."""
        if kind in self._specs and kind not in self._tasks:
            self._tasks[kind] = asyncio.create_task(self._keep(kind, self._specs[kind]))

    def drop(self, kind: str) -> None:
        """End the spares of this role, until `keep` is called again."""
        if (task := self._tasks.pop(kind, None)) is None:
            return
        task.cancel()
        self._ended = [spare for spare in (*self._ended, *self._waiting[kind]) if not spare.gone]
        self._waiting[kind] = []
        for spare in self._ended:
            spare.kill()

    def take(self, launch: Launch, log: int) -> StartedProcess | None:
        """Turn a prepared spare into this process; None when there is none."""
        order = AssignMsg(argv=launch.argv, env=launch.env, descriptors=tuple(launch.fds))
        for spare in self.prepared(launch):
            self._waiting[launch.kind].remove(spare)
            self._changed.notify()
            if spare.assign(order, [log, *launch.fds.values()]):
                return spare.started
            spare.kill()
        return None

    def prepared(self, launch: Launch) -> list[Spare]:
        """Return the spares that can become such a process."""
        return [spare for spare in self._waiting.get(launch.kind, ()) if spare.prepared and not spare.gone]

    async def close(self) -> None:
        """End them."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        spares = self._all()
        for spare in spares:
            spare.kill()
        await self._changed.wait_for(lambda: all(spare.gone for spare in spares), CLOSE_TIMEOUT_S)

    async def _keep(self, kind: str, spec: SpareSpec) -> None:
        waiting = self._waiting[kind]
        backoff_s = 0.0
        while True:
            began = time.monotonic()
            spare = await self._start(spec.launch)
            prepared = False
            if spare is not None:
                waiting.append(spare)
                prepared = await self._prepare(spare, spec.start_timeout_s)
            if spare is not None and prepared:
                seconds = round(time.monotonic() - began, 3)
                self._emit("spare_ready", role=kind, pid=spare.started.pid, seconds=seconds)
            await self._changed.wait_for(lambda: len(waiting) < spec.number or any(s.gone for s in waiting))
            dead = [s for s in waiting if s.gone]
            waiting[:] = [s for s in waiting if not s.gone]
            for lost in dead:
                reason, log = lost.end or "ended", str(spec.launch.log)
                self._emit("spare_died", role=kind, pid=lost.started.pid, reason=reason, log=log)
            failed = not prepared or (bool(dead) and time.monotonic() - began < STEADY_S)
            backoff_s = min(BACKOFF_MAX_S, max(BACKOFF_FIRST_S, 2 * backoff_s)) if failed else 0.0
            await asyncio.sleep(backoff_s)

    async def _prepare(self, spare: Spare, timeout_s: float) -> bool:
        """Wait until it is prepared; kill one that takes too long."""
        if not await self._changed.wait_for(lambda: spare.prepared or spare.gone, timeout_s):
            spare.kill(f"not prepared within start_timeout_s = {timeout_s:g} s")
            await self._changed.wait_for(lambda: spare.gone, CLOSE_TIMEOUT_S)
        return spare.prepared and not spare.gone

    async def _start(self, launch: Launch) -> Spare | None:
        self.starting += 1
        started = None
        try:
            started = await self._start_process(launch)
            return Spare(started, self._changed)
        except Exception as error:  # noqa: BLE001 whatever went wrong, the next one may succeed
            if started is not None:
                started.abandon()
            self._emit("spare_died", role=launch.kind, reason=f"cannot be started: {error!r}")
            return None
        finally:
            self.starting -= 1
