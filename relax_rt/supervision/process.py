"""One role's process: spawned in its own session, watched by pidfd, ended with its whole process group."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

import msgspec

from relax_rt.supervision import procfs
from relax_rt.supervision.channel import (
    MAX_PACKET_BYTES,
    DumpStacksMsg,
    FailedMsg,
    FaultMsg,
    FromRole,
    HelloMsg,
    StopMsg,
    decode_from_role,
    send_now,
)
from relax_rt.supervision.diagnosis import (
    Diagnosis,
    Exit,
    KernelLog,
    OwnKill,
    Report,
    cgroup_oom_kills,
    diagnose,
    memory_kill,
    read_tail,
)
from relax_rt.supervision.limits import Limits
from relax_rt.supervision.nursery import ZygoteKey

LOGS_KEPT = 2
SPY_WITHIN_S = 5.0


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a role's process.

    Attributes:
        slot, epoch: whose process it is.
        argv: the command.
        env: its whole environment, without the control channel's descriptor.
        log: file that its stdout and stderr are appended to.
        limits: what it may take.
        memory_mib: memory above which it is killed; 0: no limit.
        key: which zygotes may fork it; None: it is spawned.
        target, preload: its class, and modules that a zygote must know to be of use.
        fds: descriptors handed over, by the environment variable that tells the process its number. The caller
            closes its own once the spawn is over.
    """

    slot: str
    epoch: int
    argv: list[str]
    env: dict[str, str]
    log: Path
    limits: Limits = Limits()
    memory_mib: int = 0
    key: ZygoteKey | None = None
    target: str = ""
    preload: tuple[str, ...] = ()
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


class Born(NamedTuple):
    """A process that has just begun: our end of its control channel, and where its part of the log begins.

    `child` is there when it was spawned; one that was forked by a zygote is known by its pid alone.
    """

    pid: int
    control: socket.socket
    log_start: int
    child: subprocess.Popen[bytes] | None = None


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
    return [python or sys.executable, "-m", "relax_rt.hosting.host", slot]


class RoleProcess:
    """A living process of a role, as the agent's loop sees it.

    `on_message` is called for each packet of the role, `on_exit` once with its diagnosis; nothing follows it.
    """

    def __init__(
        self,
        launch: Launch,
        born: Born,
        on_message: Callable[[FromRole], None],
        on_exit: Callable[[Diagnosis], None],
        judges: Executor | None = None,
        kernel: KernelLog | None = None,
        spies: Executor | None = None,
    ) -> None:
        self.launch = launch
        self.pid = born.pid
        self.started = time.monotonic()
        self._child = born.child
        self._control = born.control
        self._pidfd = os.pidfd_open(born.pid)
        self._log_start = born.log_start
        self._on_message, self._on_exit = on_message, on_exit
        self._judges, self._kernel, self._spies = judges, kernel, spies
        self._oom_kills = cgroup_oom_kills()
        self._kill: tuple[OwnKill, str] | None = None
        self._report: Report | None = None
        self._greeted = False
        self._judging: asyncio.Task[None] | None = None

    @property
    def living(self) -> bool:
        """False once its exit was seen."""
        return self._pidfd >= 0

    def watch(self) -> None:
        """Begin to listen. Call it on the loop."""
        loop = asyncio.get_running_loop()
        self._control.setblocking(False)
        loop.add_reader(self._pidfd, self._exited)
        loop.add_reader(self._control.fileno(), self._readable)

    def stop(self) -> None:
        """Ask the role to finish."""
        send_now(self._control, StopMsg(), socket.MSG_DONTWAIT)

    def inject(self, fault: FaultMsg) -> bool:
        """Have the role do itself harm; False when it cannot be told."""
        return send_now(self._control, fault, socket.MSG_DONTWAIT)

    def dump_stacks(self) -> None:
        """Have the stacks of all threads written to the role's log, even while native code holds the interpreter."""
        if self._greeted:
            self._signal(signal.SIGUSR1)
        else:
            send_now(self._control, DumpStacksMsg(), socket.MSG_DONTWAIT)
        if (py_spy := shutil.which("py-spy")) is not None:
            # It knows the frames of native code too, which the role's own dump does not.
            asyncio.get_running_loop().run_in_executor(self._spies, spy, py_spy, self.pid, self.launch.log)

    def kill(self, kind: OwnKill, reason: str) -> None:
        """SIGKILL the process group; kind and reason become the diagnosis. Nothing once it has exited: the group's
        number may be another's by then, and its end was its own."""
        if not self.living:
            return
        self._kill = self._kill or (kind, reason)
        self._kill_group()

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except (ProcessLookupError, PermissionError):
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
        status = -info.si_status if by_signal else info.si_status
        if self._child is not None:
            self._child.returncode = status
        self._judging = loop.create_task(self._judge(status, at))

    async def _judge(self, status: int, at: float) -> None:
        loop, known = asyncio.get_running_loop(), self._known(status)
        try:
            facts = await loop.run_in_executor(self._judges, self._look, known)
        except Exception as error:  # noqa: BLE001 whoever waits for this exit must hear of it, whatever the evidence
            left = f"what it left behind cannot be looked at ({type(error).__name__}: {error})"
            facts = msgspec.structs.replace(known, log=left)
        self._on_exit(diagnose(self.launch.slot, self.launch.epoch, self.pid, facts, at))

    def _known(self, status: int) -> Exit:
        """What needs no looking."""
        code = status if status >= 0 else None
        return Exit(exit_code=code, signal=max(0, -status), report=self._report, kill=self._kill)

    def _look(self, known: Exit) -> Exit:
        kill_strays(self.launch.slot, self.launch.epoch, self.pid)
        killed = known.signal == signal.SIGKILL and known.kill is None
        return msgspec.structs.replace(
            known,
            oom=memory_kill(self.pid, self._oom_kills, self._kernel) if killed else "",
            log=read_tail(self.launch.log, self._log_start),
        )


def spy(program: str, pid: int, log: Path) -> None:
    """Append what py-spy sees of a process to its log. Blocking, for a bounded time."""
    with log.open("ab", buffering=0) as out:
        out.write(f"--- py-spy dump of {pid}\n".encode())
        try:
            subprocess.run(
                [program, "dump", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                timeout=SPY_WITHIN_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            out.write(f"--- py-spy failed: {error}\n".encode())


def kill_strays(slot: str, epoch: int, session: int = 0) -> None:
    """Kill what a dead incarnation left behind under us: we are the subreaper, so its orphans are our children.

    They bear its names in their environment (a forked role writes them there, see `zygote.stamp`), or are of its
    session, whose number no other process can get while they live.
    """
    tags = (f"RELAX_SLOT={slot}", f"RELAX_EPOCH={epoch}")
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        left = [
            pid
            for pid in procfs.children(os.getpid())
            if (session and procfs.session_of(pid) == session) or procfs.has_environment(pid, *tags)
        ]
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.002)


def begin_log(launch: Launch) -> int:
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
