"""A role's process as the agent sees it: how it is started, its control messages, and the diagnosis of its exit."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

import msgspec

from relax_rt.interfaces.agent import Diagnosis
from relax_rt.process import procfs
from relax_rt.process.child import Child, PacketReader, read_tail
from relax_rt.process.limits import ProcessLimits
from relax_rt.process.zygote_pool import ZygoteKey
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
    ExitFacts,
    FailureReport,
    KernelLog,
    OwnKill,
    cgroup_oom_kills,
    diagnose,
    memory_kill,
)

NATIVE_STACKS_TIMEOUT_S = 5.0
ROLE_TAGS = ("RELAX_SLOT", "RELAX_EPOCH")
"""Environment variables by which the orphans of a dead incarnation are found."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a role's process.

    Attributes:
        slot, epoch: whose process it is.
        argv: the command.
        env: its whole environment, without the control channel's descriptor.
        log: file that its stdout and stderr are appended to.
        limits: cores, niceness, open files.
        memory_mib: memory above which it is killed; 0: no limit.
        key: which zygotes may fork it; None: it is spawned.
        target, preload: its class, and modules that a zygote must know to be of use.
        fds: descriptors passed on, by the environment variable that tells the process its number. The caller
            closes its own once the spawn is over.
    """

    slot: str
    epoch: int
    argv: list[str]
    env: dict[str, str]
    log: Path
    limits: ProcessLimits = ProcessLimits()
    memory_mib: int = 0
    key: ZygoteKey | None = None
    target: str = ""
    preload: tuple[str, ...] = ()
    fds: dict[str, int] = {}

    @property
    def kind(self) -> str:
        """Its role."""
        return self.slot.partition("/")[0]


KEEP_PAGES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""glibc settings of a role: freed tensors stay with the process. By default each large tensor is a fresh mapping, and
touching fresh pages costs up to twenty times the copy (measured: decoding 314 -> 555 tokens/s, 80% of a busy machine's
time in page faults before)."""


class StartedProcess(NamedTuple):
    """A process that was just started.

    Attributes:
        control: our end of its control channel.
        log_start: where its part of the log begins.
        popen: if it was spawned; one that was forked by a zygote is known by its pid alone.
    """

    pid: int
    control: socket.socket
    log_start: int
    popen: subprocess.Popen[bytes] | None = None

    def abandon(self) -> None:
        """Kill it: no reader watches for its exit."""
        self.control.close()
        os.kill(self.pid, signal.SIGKILL)


def role_environment(threads: int, extra: dict[str, str], relax: dict[str, str]) -> dict[str, str]:
    """Return the environment of a role: ours, thread limits, the role's own variables, then the runtime's."""
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


HOST_MODULE = "relax_rt.hosting.host"
HOST_ENTRY = f"{HOST_MODULE}:main"
"""What a role's process runs. By name: supervision starts hosts, but does not import them."""


class RoleProcess:
    """A living process of a role, on the agent's event loop.

    Args:
        on_message: called for each message of the role.
        on_exit: called once with the diagnosis of its end; nothing follows it.
        examiners: threads that collect the evidence of an exit.
        kernel: the kernel's log.
        stack_dumpers: threads that dump native stacks.
    """

    def __init__(
        self,
        launch: Launch,
        started: StartedProcess,
        on_message: Callable[[FromRole], None],
        on_exit: Callable[[Diagnosis], None],
        examiners: Executor | None = None,
        kernel: KernelLog | None = None,
        stack_dumpers: Executor | None = None,
    ) -> None:
        self.launch = launch
        self.pid = started.pid
        self._control = started.control
        self._log_start = started.log_start
        self._on_message, self._on_exit = on_message, on_exit
        self._examiners, self._kernel, self._stack_dumpers = examiners, kernel, stack_dumpers
        self._oom_kills = cgroup_oom_kills()
        self._kill: tuple[OwnKill, str] | None = None
        self._report: FailureReport | None = None
        self._greeted = False
        self._diagnosing: asyncio.Task[None] | None = None
        self._child = Child(started.pid, self._exited, started.popen)
        self._reader = PacketReader(started.control, MAX_PACKET_BYTES, self._on_packet)

    @property
    def living(self) -> bool:
        """False once its exit was seen."""
        return self._child.alive

    def stop(self) -> None:
        """Ask the role to finish."""
        send_now(self._control, StopMsg(), socket.MSG_DONTWAIT)

    def inject(self, fault: FaultMsg) -> bool:
        """Inject a fault into the role; False when the message cannot be delivered."""
        return send_now(self._control, fault, socket.MSG_DONTWAIT)

    def dump_stacks(self) -> None:
        """Have the stacks of all threads written to the role's log, even while native code holds the interpreter."""
        if self._greeted:
            self._child.signal(signal.SIGUSR1)
        else:
            send_now(self._control, DumpStacksMsg(), socket.MSG_DONTWAIT)
        if (py_spy := shutil.which("py-spy")) is not None:
            # It shows the frames of native code too, which the role's own dump does not.
            loop = asyncio.get_running_loop()
            loop.run_in_executor(self._stack_dumpers, dump_native_stacks, py_spy, self.pid, self.launch.log)

    def kill(self, kind: OwnKill, reason: str) -> None:
        """SIGKILL the process group; kind and reason become the diagnosis.

        Does nothing once the process has exited: its end was its own, and its number may be recycled.
        """
        if self.living:
            self._kill = self._kill or (kind, reason)
            self._child.kill()

    def log_truncated(self) -> None:
        """The log was rotated: this incarnation's part begins at its start."""
        self._log_start = 0

    def _on_packet(self, packet: bytes) -> None:
        try:
            message = decode_from_role(packet)
        except msgspec.DecodeError as error:
            self.kill("killed", f"sent an undecodable control message: {error}")
            return
        if isinstance(message, HelloMsg):
            self._greeted = True
        elif isinstance(message, FailedMsg):
            self._report = message.diagnosis
        self._on_message(message)

    def _exited(self, status: int) -> None:
        # What it has sent before it died.
        self._reader.close()
        self._diagnosing = asyncio.create_task(self._diagnose(status, time.time()))

    async def _diagnose(self, status: int, at: float) -> None:
        code = status if status >= 0 else None
        facts = ExitFacts(exit_code=code, signal=max(0, -status), report=self._report, kill=self._kill)
        try:
            facts = await asyncio.get_running_loop().run_in_executor(self._examiners, self._examine, facts)
        except Exception as error:  # noqa: BLE001 the exit must be reported whatever the evidence
            missing = f"what it left behind cannot be examined ({type(error).__name__}: {error})"
            facts = msgspec.structs.replace(facts, log=missing)
        self._on_exit(diagnose(self.launch.slot, self.launch.epoch, self.pid, facts, at))

    def _examine(self, facts: ExitFacts) -> ExitFacts:
        """Kill what the process left behind, and collect what only a look at the machine shows. Blocking."""
        # Before the exit is reported: the slot's next incarnation must not meet the last one's children on its
        # devices, ports and files. And before the log is read, which they would write on.
        procfs.kill_orphans([f"RELAX_SLOT={self.launch.slot}", f"RELAX_EPOCH={self.launch.epoch}"], self.pid)
        killed = facts.signal == signal.SIGKILL and facts.kill is None
        return msgspec.structs.replace(
            facts,
            oom=memory_kill(self.pid, self._oom_kills, self._kernel) if killed else "",
            log=read_tail(self.launch.log, self._log_start),
        )


def dump_native_stacks(program: str, pid: int, log: Path) -> None:
    """Append py-spy's dump of a process to its log. Blocking, for a bounded time."""
    with log.open("ab", buffering=0) as out:
        out.write(f"--- py-spy dump of {pid}\n".encode())
        try:
            subprocess.run(
                [program, "dump", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                timeout=NATIVE_STACKS_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            out.write(f"--- py-spy failed: {error}\n".encode())


def begin_log(launch: Launch) -> int:
    """Write the line that opens this incarnation's part of the log; return where the part begins."""
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with launch.log.open("ab") as log:
        start = log.tell()
        log.write(f"--- {launch.slot}#{launch.epoch} {now}\n".encode())
    return start
