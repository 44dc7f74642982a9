"""Why a process ended, as data: from its own report, its exit status, the kernel's counters and its log."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from relax_rt.config.problems import BadInput
from relax_rt.interfaces.agent import TAIL_LINES, TRACE_LINES, Diagnosis, Kind
from relax_rt.transport.rpc.errors import GivenUp, RelaxError

OwnKill = Literal["killed", "hang", "oom"]
"""Why the runtime itself kills a process."""

_CUDA = re.compile(r"CUDA error|CUDA out of memory|cudaError|CUBLAS_STATUS|CUDNN_STATUS|NCCL error|ncclUnhandled", re.I)
_EXCEPTION_LINE = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Died|Refused|Unreachable))(?:: (.*))?$"
)
_OOM_LINE = re.compile(r"(?:out of memory|oom.kill)[^\n]*?\b(?:process |pid=)(\d+)\b", re.I)
KILLS_REMEMBERED = 256
_SIGNAL_CAUSE = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted (a failed native check)",
    signal.SIGBUS: "bus error: shared memory or disk behind a mapping may be full",
    signal.SIGILL: "illegal instruction: a binary built for another processor",
    signal.SIGFPE: "arithmetic fault in native code",
}


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """A role's own report of its failure before it exits."""

    kind: Kind
    cause: str
    trace: str = ""


class ExitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence from which `diagnose` finds the cause.

    Attributes:
        exit_code, signal: exit status, or the number of the signal (0: none).
        report: the role's own report, if it had time for one.
        kill: kind and reason of our own kill, if we killed it.
        oom: the kernel's statement that it was killed for memory.
        log: the end of this incarnation's part of its log.
    """

    exit_code: int | None
    signal: int = 0
    report: FailureReport | None = None
    kill: tuple[OwnKill, str] | None = None
    oom: str = ""
    log: str = ""


def diagnose(slot: str, epoch: int, pid: int, facts: ExitFacts, at: float) -> Diagnosis:
    """Find the cause of an exit. Pure: all evidence is in `facts`."""
    lines = [line for line in facts.log.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line.startswith(("Traceback (most recent", "Fatal Python error"))]
    trace = facts.report.trace if facts.report else ""
    if not trace and starts:
        trace = "\n".join(lines[starts[-1] :])
    kind, cause = _classify(facts, lines)
    name = f"SIG{facts.signal}" if facts.signal else ""
    if facts.signal in _SIGNALS:
        name = signal.Signals(facts.signal).name
    return Diagnosis(
        slot=slot,
        epoch=epoch,
        pid=pid,
        kind=kind,
        cause=cause,
        signal=name,
        exit_code=facts.exit_code,
        last_lines=lines[-TAIL_LINES:] if kind != "clean" else [],
        trace="\n".join(trace.splitlines()[-TRACE_LINES:]) if kind != "clean" else "",
        at=at,
    )


_SIGNALS = {int(s) for s in signal.Signals}


def _classify(facts: ExitFacts, lines: list[str]) -> tuple[Kind, str]:
    # The surest evidence first. Our own kill explains a SIGKILL; a process that died of another signal while we were
    # about to kill it has a cause of its own. The role's report beats its log, in which anything may be written; a
    # native crash leaves no report, and the log is all there is.
    if facts.kill is not None and facts.signal == signal.SIGKILL:
        return facts.kill
    if facts.signal and facts.oom:
        return "oom", facts.oom
    raised = ""
    if any(line.startswith("Traceback (most recent call last)") for line in lines):
        raised = next((line.strip() for line in reversed(lines) if _EXCEPTION_LINE.match(line.strip())), "")
    cuda = ""
    if any(_CUDA.search(line) for line in lines[-TAIL_LINES:]):
        cuda = next(line.strip() for line in lines if _CUDA.search(line))
    if facts.signal and cuda:
        return "cuda", cuda
    if facts.report is not None:
        return facts.report.kind, facts.report.cause
    if facts.signal:
        if facts.signal not in _SIGNALS:
            return "killed", f"signal {facts.signal}"
        known = signal.Signals(facts.signal)
        return "killed", _SIGNAL_CAUSE.get(known, f"{known.name} from outside the run")
    if facts.exit_code == 0:
        return "clean", "finished"
    if cuda:
        return "cuda", raised or cuda
    if raised:
        if raised.startswith(("ModuleNotFoundError", "ImportError")):
            return "import_error", raised
        return "oom" if raised.startswith("MemoryError") else "exception", raised
    if facts.exit_code == 2:
        return "config", lines[-1] if lines else "exit code 2"
    return "unknown", f"exit code {facts.exit_code} without a report"


def classify_exception(error: BaseException) -> Kind:
    """Return the kind of an exception that ends a role; called inside the role.

    BadInput means that the role's input is impossible, GivenUp that it has reached a limit: no restart changes that,
    and the run ends.
    """
    name, text = type(error).__name__, str(error)
    if isinstance(error, BadInput):
        return "config"
    if isinstance(error, GivenUp):
        return "given_up"
    if _CUDA.search(text) or name in ("AcceleratorError", "OutOfMemoryError"):
        return "cuda"
    if isinstance(error, MemoryError):
        return "oom"
    if isinstance(error, ImportError):
        return "import_error"
    return "exception"


def cause_of(error: BaseException) -> str:
    """Return an exception as the cause of a role's end."""
    return str(error) if isinstance(error, RelaxError) else f"{type(error).__name__}: {error}"


def cgroup_oom_kills() -> int | None:
    """Return the kernel's count of memory kills in our cgroup (v2, else v1); None where there is no counter."""
    files = []
    with suppress(OSError):
        for entry in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = entry.split(":", 2)
            if not controllers:
                files.append(Path(f"/sys/fs/cgroup{group}/memory.events"))
            elif "memory" in controllers.split(","):
                files.append(Path(f"/sys/fs/cgroup/memory{group}/memory.oom_control"))
    # In a container the path is that of the host: the mounted root is our own group.
    for path in (*files, Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control")):
        with suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.M):
                return int(match.group(1))
    return None


class KernelLog:
    """The kernel's log of processes that it killed for memory, from the creation of this object on.

    Reads from the end of the kernel's log, so that a death costs a few new records and not the whole ring, which is
    megabytes on a machine that is up for long. Where the log is not readable it knows nothing. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._killed: dict[int, str] = {}
        try:
            self._fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self._fd = -1

    def killed(self, pid: int) -> str:
        """Return the line that says that this process was killed for memory, or empty."""
        with self._lock:
            for record in self._new_records():
                self._take(record)
            return self._killed.get(pid, "")

    def _take(self, record: str) -> None:
        if found := _OOM_LINE.search(record):
            while len(self._killed) >= KILLS_REMEMBERED:
                del self._killed[next(iter(self._killed))]
            self._killed[int(found[1])] = record.partition(";")[2].splitlines()[0]

    def _new_records(self) -> Iterator[str]:
        # The ring holds a bounded number of records; a lapped reader gets EPIPE and continues.
        for _ in range(100_000 if self._fd >= 0 else 0):
            try:
                yield os.read(self._fd, 8192).decode("utf-8", "replace")
            except BrokenPipeError:
                continue
            except OSError:
                return

    def close(self) -> None:
        """Close the log."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1


def memory_kill(pid: int, kills_before: int | None, kernel: KernelLog | None = None) -> str:
    """Return why the kernel seems to have killed this process for memory, or empty. Blocking: not on the loop."""
    if kernel is not None and (line := kernel.killed(pid)):
        return line
    now = cgroup_oom_kills()
    if now is not None and kills_before is not None and now > kills_before:
        return f"killed by the kernel for memory (oom_kill counter of the cgroup rose from {kills_before} to {now})"
    return ""
