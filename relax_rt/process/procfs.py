"""Read /proc and end process trees: for everything that hosts child processes, and for tests.

Standard library only: the keeper and the guards import this module.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from relax_rt.transport.base.process_stat import start_time as start_time
from relax_rt.transport.base.process_stat import stat_fields as stat_fields

CPUINFO = Path("/proc/cpuinfo")
CPU_MODEL = ("model name", "Processor")
"""Names of the line of /proc/cpuinfo with the CPU model, on x86 and on Arm."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Raises OSError: the kernel refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def become_subreaper() -> None:
    """Orphaned descendants become our children instead of init's."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> bool:
    """Have the kernel send this process a signal when its parent ends. False: the parent is dead already.

    PR_SET_PDEATHSIG is of a thread in both directions: it fires when the *thread* that forked this process ends, and
    the setting is cleared in what this process forks.
    """
    prctl(PR_SET_PDEATHSIG, number)
    # A parent that ended before the call above sends no signal any more.
    return os.getppid() == parent


def cpuinfo_field(names: Sequence[str], cpuinfo: Path = CPUINFO) -> str | None:
    """Return the value of the first line of /proc/cpuinfo with one of these names; None without one."""
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
    """Return the id of this boot of the host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Return the name of our pid namespace; our pids mean nothing in another one."""
    return str(Path("/proc/self/ns/pid").readlink())


def pids() -> list[int]:
    """Return the pid of every process in /proc."""
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]


def session_of(pid: int) -> int:
    """Return the session of a living process; 0 when it is gone."""
    fields = stat_fields(pid)
    return 0 if fields is None or fields[0] in "ZX" else int(fields[3])


def children(root: int) -> list[int]:
    """Return the living direct children."""
    try:
        # As the kernel lists them for each thread.
        lists = [(thread / "children").read_text() for thread in Path(f"/proc/{root}/task").iterdir()]
        candidates = [int(pid) for text in lists for pid in text.split()]
    except OSError:
        candidates = pids()  # this kernel has no such list, or the process has ended
    found = []
    for pid in candidates:
        fields = stat_fields(pid)
        if fields is not None and fields[0] not in "ZX" and int(fields[1]) == root:
            found.append(pid)
    return found


def descendants(root: int) -> set[int]:
    """Return the living descendants of a process."""
    return descendants_of_each([root])[root]


def descendants_of_each(roots: Iterable[int]) -> dict[int, set[int]]:
    """Return the living descendants of each of these processes, from one walk over /proc."""
    children_of: dict[int, list[int]] = {}
    zombies = set()
    for pid in pids():
        fields = stat_fields(pid)
        if fields is not None:
            children_of.setdefault(int(fields[1]), []).append(pid)
            if fields[0] in "ZX":
                zombies.add(pid)
    return {root: _below(root, children_of) - zombies for root in roots}


def _below(root: int, children_of: Mapping[int, list[int]]) -> set[int]:
    found: set[int] = set()
    todo = list(children_of.get(root, []))
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children_of.get(pid, [])
    return found


def in_exec(pid: int) -> bool:
    """Return whether the process is inside execve and /proc does not show its environment yet.

    Its parent may already believe that it runs: descriptors with close-on-exec are closed before that point.
    """
    fields = stat_fields(pid)
    if fields is None or fields[0] in "ZX" or int(fields[48]) != 0:
        return False
    try:
        return bool(Path(f"/proc/{pid}/exe").readlink().name)  # a kernel thread has none
    except OSError:
        return False


def runs_module(pid: int, module: str) -> bool:
    """Return whether a process was started by ``python -m <module>``."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return (b"-m", module.encode()) in pairwise(arguments)


def has_environment(pid: int, *pairs: str, limit_s: float = 1.0) -> bool:
    """Return whether the process was started with all of these ``NAME=value`` pairs in its environment.

    Waits at most `limit_s` for a process that is inside execve.
    """
    end = time.monotonic() + limit_s
    while True:
        # Before the read: an execve that ends between the two would leave an empty environment that looks final.
        loading = in_exec(pid)
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        if environment or not loading or time.monotonic() > end:
            found = environment.split(b"\0")
            return all(pair.encode() in found for pair in pairs)
        time.sleep(0.001)


def with_environment(*pairs: str) -> set[int]:
    """Return the living processes that were started with all of these ``NAME=value`` pairs, except ourselves."""
    return {pid for pid in pids() if pid != os.getpid() and has_environment(pid, *pairs) and start_time(pid)}


def kill_until_none(find: Callable[[], Iterable[int]], *, reap: bool, limit_s: float = 20.0) -> list[int]:
    """SIGKILL what `find` returns until it returns nothing; return what would not die.

    reap: also reap every dead child of this process. Only for a process that waits for no child elsewhere.
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
    """Kill and reap all descendants of this process, which must be a subreaper.

    They are stopped first, until none runs any more: a stopped process cannot fork while the others are killed.
    """
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


def kill_orphans(tags: Iterable[str], session: int = 0, limit_s: float = 2.0) -> None:
    """Kill what a dead child left behind: we are the subreaper, so its orphans are our children.

    They have its tags (``NAME=value``) in their environment, or are in its session, whose number cannot be reused
    while they live.
    """
    own = tuple(tags)

    def orphans() -> list[int]:
        return [
            pid
            for pid in children(os.getpid())
            if (session and session_of(pid) == session) or has_environment(pid, *own)
        ]

    kill_until_none(orphans, reap=False, limit_s=limit_s)


def reap_all() -> None:
    """Reap every dead child of this process."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
