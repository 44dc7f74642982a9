"""How a role's process begins: forked by a zygote where there is one, else spawned from nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import structlog

from relax_rt.supervision import limits
from relax_rt.supervision.channel import FromRole, control_pair
from relax_rt.supervision.diagnosis import Diagnosis, KernelLog
from relax_rt.supervision.executor import EmitEvent
from relax_rt.supervision.nursery import Birth, NoZygote, Nursery
from relax_rt.supervision.process import Born, Launch, RoleProcess, begin_log, role_environment
from relax_rt.supervision.spares import Spares

JUDGES = 4
SPIES = 2
MEMORY_EVERY_S = 0.5


def emit_nothing(_kind: str, /, **_fields: Any) -> None:
    """Where there is no event log."""


class Spawner:
    """Starts processes. Call it on the loop.

    Processes are spawned from one thread that lives as long as the agent: a child's PR_SET_PDEATHSIG fires when the
    *thread* that spawned it ends, so pool threads that come and go would kill roles.

    Args:
        emit: takes events of zygotes and of spawns in their stead.
    """

    def __init__(self, emit: EmitEvent = emit_nothing) -> None:
        self._emit = emit
        self._thread = ThreadPoolExecutor(1, "relax-spawn")
        # Their own, so that exits are told at once whatever else the loop's threads are busy with.
        self._judges = ThreadPoolExecutor(JUDGES, "relax-judge")
        # A look at the stacks of a process may take seconds: exits do not wait behind it.
        self._spies = ThreadPoolExecutor(SPIES, "relax-spy")
        self._kernel = KernelLog()
        self._under_way = 0
        self._limited: dict[int, RoleProcess] = {}
        self._watch: asyncio.Task[None] | None = None
        self.nursery: Nursery | None = None
        self.spares = Spares(self._bear, emit)

    @property
    def in_flight(self) -> int:
        """Processes that may exist without anybody who watches them yet."""
        return self._under_way + self.spares.starting + (self.nursery.starting if self.nursery is not None else 0)

    @property
    def helpers(self) -> set[int]:
        """Processes of our own that are no roles."""
        return self.spares.pids | (self.nursery.pids if self.nursery is not None else set())

    def with_zygotes(self, log: Path, config: Path, run_id: str) -> Nursery:
        """Have processes forked; what they need is to be said to the nursery before it is started.

        Args:
            log: where zygotes write.
            config: the run's resolved config, for what its types import.
        """

        def environment(own: dict[str, str]) -> dict[str, str]:
            return role_environment(1, own, {"RELAX_RUN_ID": run_id})

        self.nursery = Nursery(self.spawn_plain, environment, log, str(config), self._emit)
        return self.nursery

    async def spawn(
        self, launch: Launch, on_message: Callable[[FromRole], None], on_exit: Callable[[Diagnosis], None]
    ) -> RoleProcess:
        """Start a process and watch it.

        Raises:
            OSError: the interpreter or the log file cannot be opened.
        """
        self._under_way += 1
        try:
            born = await self._enlist(launch) or await self._bear(launch)
            try:
                process = RoleProcess(launch, born, on_message, on_exit, self._judges, self._kernel, self._spies)
                process.watch()
            except BaseException:
                # Nobody would ever see it exit.
                born.control.close()
                os.kill(born.pid, signal.SIGKILL)
                raise
        finally:
            self._under_way -= 1
        if launch.memory_mib:
            self._watch_memory(process)
        return process

    async def _enlist(self, launch: Launch) -> Born | None:
        """A spare for it, if one is waiting."""
        if not self.spares.has(launch):
            return None
        log_start = await asyncio.get_running_loop().run_in_executor(self._thread, begin_log, launch)
        with launch.log.open("ab", buffering=0) as log:
            born = self.spares.take(launch, log.fileno())
        return None if born is None else born._replace(log_start=log_start)

    async def _bear(self, launch: Launch) -> Born:
        loop = asyncio.get_running_loop()
        log_start = await loop.run_in_executor(self._thread, begin_log, launch)
        with launch.log.open("ab", buffering=0) as log:
            # Each attempt has a channel of its own: what a failed one has left behind must not speak on ours.
            with _channel() as (ours, theirs):
                try:
                    return Born(await self._fork(launch, log.fileno(), theirs.fileno()), ours, log_start)
                except NoZygote as error:
                    ours.close()
                    if self.nursery is not None:
                        self._emit("spawned_plainly", slot=launch.slot, epoch=launch.epoch, reason=str(error))
            with _channel() as (ours, theirs):
                child = await loop.run_in_executor(self._thread, _popen, launch, theirs.fileno(), log)
                return Born(child.pid, ours, log_start, child)

    async def _fork(self, launch: Launch, log: int, control: int) -> int:
        if self.nursery is None or launch.key is None:
            raise NoZygote("its role has none")
        return await self.nursery.fork(
            Birth(
                key=launch.key,
                target=launch.target,
                needs=launch.preload,
                argv=launch.argv,
                env=launch.env,
                log_fd=log,
                fds={"RELAX_CONTROL_FD": control, **launch.fds},
                limits=launch.limits,
            )
        )

    async def spawn_plain(
        self, argv: list[str], env: dict[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a helper process in a session of its own."""
        self._under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, _popen_plain, argv, env, log, pass_fds
            )
        finally:
            self._under_way -= 1

    def _watch_memory(self, process: RoleProcess) -> None:
        self._limited[process.pid] = process
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_limits())

    async def _watch_limits(self) -> None:
        """Kill whoever is above its memory limit."""
        while True:
            self._limited = {pid: process for pid, process in self._limited.items() if process.living}
            if not self._limited:
                return
            used = await asyncio.to_thread(limits.family_memory, list(self._limited))
            wanted = {pid: process.launch.memory_mib for pid, process in self._limited.items()}
            for pid, reason in limits.over_memory(used, wanted).items():
                self._limited[pid].kill("oom", reason)
            await asyncio.sleep(MEMORY_EVERY_S)

    async def aclose(self) -> None:
        """End zygotes and watches."""
        if self._watch is not None:
            self._watch.cancel()
        await self.spares.close()
        if self.nursery is not None:
            await self.nursery.close()

    def close(self) -> None:
        """End the threads. Every child must be gone: they would be killed by it."""
        self._thread.shutdown(wait=False)
        self._judges.shutdown(wait=False)
        self._spies.shutdown(wait=False, cancel_futures=True)
        self._kernel.close()


@contextmanager
def _channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A control channel: theirs is closed at the end, ours if no process came of it."""
    ours, theirs = control_pair()
    try:
        with theirs:
            yield ours, theirs
    except BaseException:
        ours.close()
        raise


def _popen(launch: Launch, control: int, log: BinaryIO) -> subprocess.Popen[bytes]:
    handed = {name: str(fd) for name, fd in launch.fds.items()}
    child = subprocess.Popen(
        launch.argv,
        env={**launch.env, **handed, "RELAX_CONTROL_FD": str(control)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[control, *launch.fds.values()],
        start_new_session=True,
    )
    for problem in limits.apply(launch.limits, child.pid):
        structlog.get_logger().warning("limit not applied", slot=launch.slot, problem=problem)
    return child


def _popen_plain(argv: list[str], env: dict[str, str], log: Path, pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    with log.open("ab", buffering=0) as out:
        return subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            close_fds=True,
            pass_fds=list(pass_fds),
        )
