"""One role's process: spawned in its own session, watched by pidfd, ended with its whole process group."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from relax_rt.supervision import procfs
from relax_rt.supervision.channel import (
    MAX_PACKET_BYTES,
    DumpStacksMsg,
    FailedMsg,
    FromRole,
    HelloMsg,
    StopMsg,
    control_pair,
    decode_from_role,
    send_now,
)
from relax_rt.supervision.diagnosis import (
    Diagnosis,
    Exit,
    Report,
    cgroup_oom_kills,
    diagnose,
    memory_kill,
    read_tail,
)

LOGS_KEPT = 2


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a role's process.

    Attributes:
        slot, epoch: whose process it is.
        argv: the command.
        env: its whole environment, without the control channel's descriptor.
        log: file that its stdout and stderr are appended to.
        nice: niceness.
        fds: descriptors handed over, by the environment variable that tells the process its number. The caller
            closes its own once the spawn is over.
    """

    slot: str
    epoch: int
    argv: list[str]
    env: dict[str, str]
    log: Path
    nice: int = 0
    fds: dict[str, int] = {}


KEEP_PAGES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""glibc settings of a role: freed tensors stay with the process. By default each large tensor is a fresh mapping, and
touching fresh pages costs up to twenty times the copy (measured: decoding 314 -> 555 tokens/s, 80% of a busy machine's
time in page faults before)."""


def role_environment(threads: int, extra: dict[str, str], relax: dict[str, str]) -> dict[str, str]:
    """Environment of a role: ours, thread limits, the role's own variables, then the runtime's, which win."""
    limits = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        **KEEP_PAGES,
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **limits, **extra, **relax}


def host_argv(python: str | None, slot: str) -> list[str]:
    """Command of the host process that runs a role; the slot's name is there for people who look at `ps`."""
    return [python or sys.executable, "-m", "relax_rt.host", slot]


class RoleProcess:
    """A living process of a role, as the agent's loop sees it.

    `on_message` is called for each packet of the role, `on_exit` once with its diagnosis; nothing follows it.
    """

    def __init__(
        self,
        launch: Launch,
        child: subprocess.Popen[bytes],
        control: socket.socket,
        log_start: int,
        on_message: Callable[[FromRole], None],
        on_exit: Callable[[Diagnosis], None],
    ) -> None:
        self.launch = launch
        self.pid = child.pid
        self.started = time.monotonic()
        self._child = child
        self._control = control
        self._pidfd = os.pidfd_open(child.pid)
        self._log_start = log_start
        self._on_message, self._on_exit = on_message, on_exit
        self._oom_kills = cgroup_oom_kills()
        self._kill: tuple[Literal["killed", "hang"], str] | None = None
        self._report: Report | None = None
        self._greeted = False
        self._judging: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Begin to listen. Call it on the loop."""
        loop = asyncio.get_running_loop()
        self._control.setblocking(False)
        loop.add_reader(self._pidfd, self._exited)
        loop.add_reader(self._control.fileno(), self._readable)

    def stop(self) -> None:
        """Ask the role to finish."""
        send_now(self._control, StopMsg(), socket.MSG_DONTWAIT)

    def dump_stacks(self) -> None:
        """Have the stacks of all threads written to the role's log, even while native code holds the interpreter."""
        if self._greeted:
            self._signal(signal.SIGUSR1)
        else:
            send_now(self._control, DumpStacksMsg(), socket.MSG_DONTWAIT)

    def kill(self, kind: Literal["killed", "hang"], reason: str) -> None:
        """SIGKILL the process group; kind and reason become the diagnosis."""
        self._kill = self._kill or (kind, reason)
        self._kill_group()

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass

    def log_truncated(self) -> None:
        """The log was rotated: this incarnation's part begins at its start."""
        self._log_start = 0

    def _readable(self, packets: int = 64) -> None:
        # A bounded number of packets a turn, so that a chatty role cannot hold the loop.
        for _ in range(packets):
            try:
                packet = self._control.recv(MAX_PACKET_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                packet = b""
            if not packet:
                asyncio.get_running_loop().remove_reader(self._control.fileno())
                return
            self._take(packet)

    def _take(self, packet: bytes) -> None:
        try:
            message = decode_from_role(packet)
        except msgspec.DecodeError as error:
            self.kill("killed", f"spoke nonsense on its control channel: {error}")
            return
        if isinstance(message, HelloMsg):
            self._greeted = True
        elif isinstance(message, FailedMsg):
            self._report = message.diagnosis
        self._on_message(message)

    def _exited(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        if self._control.fileno() >= 0:
            self._readable(packets=4096)
            loop.remove_reader(self._control.fileno())
        self._control.close()
        # The dead leader still holds its pid here, so the group's number cannot be another's.
        self._kill_group()
        at = time.time()
        info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)
        self._pidfd = -1
        assert info is not None
        by_signal = info.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        self._child.returncode = -info.si_status if by_signal else info.si_status
        self._judging = loop.create_task(self._judge(self._child.returncode, at))

    async def _judge(self, status: int, at: float) -> None:
        self._on_exit(await asyncio.to_thread(self._diagnose, status, at))

    def _diagnose(self, status: int, at: float) -> Diagnosis:
        kill_strays(self.launch.slot, self.launch.epoch)
        asked = self._kill is not None
        facts = Exit(
            exit_code=status if status >= 0 else None,
            signal=-status if status < 0 else 0,
            report=self._report,
            kill=self._kill,
            oom=memory_kill(self.pid, self._oom_kills) if status == -signal.SIGKILL and not asked else "",
            log=read_tail(self.launch.log, self._log_start),
        )
        return diagnose(self.launch.slot, self.launch.epoch, self.pid, facts, at)


def kill_strays(slot: str, epoch: int) -> None:
    """Kill what a dead incarnation left behind under us: we are the subreaper, so its orphans are our children."""
    tags = (f"RELAX_SLOT={slot}", f"RELAX_EPOCH={epoch}")
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        left = [pid for pid in procfs.children(os.getpid()) if procfs.has_environment(pid, *tags)]
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.002)


class Spawner:
    """Starts processes from one thread that lives as long as the agent.

    A child's PR_SET_PDEATHSIG fires when the *thread* that spawned it ends, so pool threads that come and go
    would kill roles.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "relax-spawn")
        self.in_flight = 0

    async def spawn(
        self, launch: Launch, on_message: Callable[[FromRole], None], on_exit: Callable[[Diagnosis], None]
    ) -> RoleProcess:
        """Start a process and watch it.

        Raises:
            OSError: the interpreter or the log file cannot be opened.
        """
        self.in_flight += 1
        try:
            loop = asyncio.get_running_loop()
            child, control, log_start = await loop.run_in_executor(self._thread, _popen, launch)
            try:
                process = RoleProcess(launch, child, control, log_start, on_message, on_exit)
                process.watch()
            except BaseException:
                # Nobody would ever see it exit.
                control.close()
                child.kill()
                child.wait()
                raise
            return process
        finally:
            self.in_flight -= 1

    async def spawn_plain(self, argv: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a helper process without a control channel, in a session of its own."""
        self.in_flight += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, _popen_plain, argv, env, log)
        finally:
            self.in_flight -= 1

    def close(self) -> None:
        """End the thread. Every child must be gone: they would be killed by it."""
        self._thread.shutdown(wait=False)


def _popen(launch: Launch) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    ours, theirs = control_pair()
    log_start = _begin_log(launch)
    handed = {name: str(fd) for name, fd in launch.fds.items()}
    try:
        with theirs, launch.log.open("ab", buffering=0) as log:
            child = subprocess.Popen(
                launch.argv,
                env={**launch.env, **handed, "RELAX_CONTROL_FD": str(theirs.fileno())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno(), *launch.fds.values()],
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    if launch.nice:
        try:
            os.setpriority(os.PRIO_PROCESS, child.pid, launch.nice)
        except OSError:
            pass
    return child, ours, log_start


def _popen_plain(argv: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab", buffering=0) as out:
        return subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, close_fds=True
        )


def _begin_log(launch: Launch) -> int:
    """Write the line that opens this incarnation's part of the log; answers with where the part begins."""
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with launch.log.open("ab") as log:
        start = log.tell()
        log.write(f"--- {launch.slot}#{launch.epoch} {stamp}\n".encode())
    return start


def rotate_log(path: Path, limit_bytes: int) -> bool:
    """Rotate a log in place once it is too long: copied to ``.1`` (``.1`` to ``.2``), then cut to nothing.

    The file keeps its inode, because the role and whatever it started hold it open for appending.
    """
    try:
        if path.stat().st_size < limit_bytes:
            return False
    except FileNotFoundError:
        return False
    for n in range(LOGS_KEPT, 1, -1):
        older = path.with_name(f"{path.name}.{n - 1}")
        if older.exists():
            older.rename(path.with_name(f"{path.name}.{n}"))
    with path.open("r+b") as log, path.with_name(f"{path.name}.1").open("wb") as copy:
        while chunk := log.read(1 << 20):
            copy.write(chunk)
        log.truncate(0)
    return True
