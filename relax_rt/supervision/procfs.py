"""Processes as /proc shows them. Standard library only: the keeper uses it."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from relax_rt.transport.base.process_stat import start_time as start_time
from relax_rt.transport.base.process_stat import stat_fields as stat_fields

CPUINFO = Path("/proc/cpuinfo")
CPU_MODEL = ("model name", "Processor")
"""Names of the line of /proc/cpuinfo with the CPU model, on x86 and on Arm."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Call prctl(2).

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def become_subreaper() -> None:
    """Orphaned descendants become our children instead of init's."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def cpuinfo_field(names: Sequence[str], cpuinfo: Path = CPUINFO) -> str | None:
    """Value of the first line of /proc/cpuinfo that has one of these names; None: no line has, or it is unreadable."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return None


def boot_id() -> str:
    """Changes with every boot of the host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Names the pid namespace; pids mean nothing in another one."""
    return str(Path("/proc/self/ns/pid").readlink())


def pids() -> list[int]:
    """Every process that /proc shows."""
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]


def session_of(pid: int) -> int:
    """The session of a living process; 0 when it is gone."""
    fields = stat_fields(pid)
    return 0 if fields is None or fields[0] in "ZX" else int(fields[3])


def children(root: int) -> list[int]:
    """Living direct children."""
    listed = _listed_children(root)
    found = []
    for pid in pids() if listed is None else listed:
        fields = stat_fields(pid)
        if fields is not None and fields[0] not in "ZX" and int(fields[1]) == root:
            found.append(pid)
    return found


def _listed_children(root: int) -> list[int] | None:
    """Children as the kernel lists them for each thread; None where it is built without that list."""
    found = []
    try:
        for thread in Path(f"/proc/{root}/task").iterdir():
            found += [int(pid) for pid in (thread / "children").read_text().split()]
    except OSError:
        return None
    return found


def descendants(root: int) -> set[int]:
    """Living descendants of a process, without itself."""
    return descendants_of_each([root])[root]


def descendants_of_each(roots: Iterable[int]) -> dict[int, set[int]]:
    """Living descendants of each of these processes, without itself: one walk over /proc for all."""
    kin: dict[int, list[int]] = {}
    zombies = set()
    for pid in pids():
        fields = stat_fields(pid)
        if fields is not None:
            kin.setdefault(int(fields[1]), []).append(pid)
            if fields[0] in "ZX":
                zombies.add(pid)
    return {root: _below(root, kin) - zombies for root in roots}


def _below(root: int, kin: Mapping[int, list[int]]) -> set[int]:
    found: set[int] = set()
    todo = list(kin.get(root, []))
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += kin.get(pid, [])
    return found


def in_exec(pid: int) -> bool:
    """True in the instants of execve in which a program is loaded while /proc does not show its environment yet.

    Those who spawned it may already be told that it runs: descriptors with close-on-exec are closed before that point.
    """
    fields = stat_fields(pid)
    if fields is None or fields[0] in "ZX" or int(fields[48]) != 0:
        return False
    try:
        return bool(Path(f"/proc/{pid}/exe").readlink().name)  # a kernel thread has none
    except OSError:
        return False


def has_environment(pid: int, *pairs: str, limit_s: float = 1.0) -> bool:
    """True when the process was started with all of these ``NAME=value`` pairs in its environment.

    One that is being loaded is waited for, `limit_s` at most.
    """
    end = time.monotonic() + limit_s
    while True:
        # Asked before the read: a load that ends between the two would leave an empty answer that is believed.
        loading = in_exec(pid)
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        if environment or not loading or time.monotonic() > end:
            found = environment.split(b"\0")
            return all(pair.encode() in found for pair in pairs)
        time.sleep(0.001)


def members_of_run(run_id: str) -> set[int]:
    """Living processes started with this run's id in their environment, except ourselves."""
    tag = f"RELAX_RUN_ID={run_id}"
    return {pid for pid in pids() if pid != os.getpid() and has_environment(pid, tag) and start_time(pid)}


def kill_until_none(find: Callable[[], Iterable[int]], *, reap: bool, limit_s: float = 20.0) -> list[int]:
    """SIGKILL what `find` finds until it finds nothing; answers with what would not die.

    reap: also reap every dead child of this process, as only a process whose children are all of its own making may.
    """
    end = time.monotonic() + limit_s
    while True:
        left = list(find())
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        if reap:
            reap_all()
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.005)


def kill_descendants(limit_s: float = 10.0) -> None:
    """End and reap all that this process, a subreaper, has below it. They are stopped first, until none is left that
    runs: what is stopped forks no more."""
    end = time.monotonic() + limit_s
    stopped: set[int] = set()
    while (fresh := descendants(os.getpid()) - stopped) and time.monotonic() < end:
        for pid in fresh:
            try:
                os.kill(pid, signal.SIGSTOP)
            except (ProcessLookupError, PermissionError):
                continue
        stopped |= fresh
    kill_until_none(lambda: descendants(os.getpid()), reap=True, limit_s=limit_s)


def reap_all() -> None:
    """Reap every dead child of this process."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
