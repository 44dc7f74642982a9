"""What a process may take: cores, niceness, open files, threads; and a watchdog over its memory.

Memory is measured, not limited with RLIMIT_AS: that one counts address space, and torch, CUDA and the run's shared
memory map tens of gigabytes that they never touch, so any limit that they survive would limit nothing. What counts is
what the process has of its own: resident anonymous pages and what of them is in swap. Pages of shared memory and of
files belong to nobody in particular and are left out. Pages that a forked role still shares with its zygote do count:
the kernel's exact figure would walk all page tables of the process, under a lock that holds up its allocations.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from relax_rt.supervision import procfs

KIB = 1 << 10
MIB = 1 << 20
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
AUTOGROUP_ATTEMPTS = 20


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one process.

    Attributes:
        nice: niceness.
        cpus: cores that it may run on; empty: all.
        open_files: limit of open files; 0: as ours.
        threads: compute threads.
    """

    nice: int = 0
    cpus: list[int] = []
    open_files: int = 0
    threads: int = 1


def apply(limits: Limits, pid: int = 0) -> list[str]:
    """Put limits on a process (0: ourselves) that has only just begun: threads that it has already keep theirs.

    Returns:
        What could not be done, in words; a role runs without it.
    """
    problems = []
    if limits.nice:
        try:
            os.setpriority(os.PRIO_PROCESS, pid, limits.nice)
        except OSError as error:
            problems.append(f"nice = {limits.nice} was refused: {error}")
        else:
            problems += _nice_session(limits.nice, pid)
    if limits.cpus:
        try:
            os.sched_setaffinity(pid, limits.cpus)
        except OSError as error:
            problems.append(f"cpus = {limits.cpus} was refused: {error} (usable: {sorted(os.sched_getaffinity(0))})")
    if limits.open_files:
        problems += _limit_files(limits.open_files, pid)
    return problems


def _nice_session(nice: int, pid: int) -> list[str]:
    """Give the process's session the niceness too.

    With CONFIG_SCHED_AUTOGROUP (on by default in Debian, Ubuntu and Fedora) the scheduler shares cores between sessions
    first, and `nice` weighs only the processes within one: see sched(7), "The autogroup feature". Every role has a
    session of its own. From users other than root the kernel takes one such change every 0.1 s in all, so that roles
    that start together wait for each other, at irregular intervals.
    """
    try:
        if os.getsid(pid) != (pid or os.getpid()) or AUTOGROUP.read_text().strip() != "1":
            return []
        for _ in range(AUTOGROUP_ATTEMPTS):
            try:
                Path(f"/proc/{pid or 'self'}/autogroup").write_text(str(nice))
                return []
            except BlockingIOError:
                time.sleep(random.uniform(0.05, 0.15))
    except FileNotFoundError:
        return []  # a kernel without autogroups, or the process has ended
    except OSError as error:
        return [f"nice = {nice} was refused for the session, whose weight counts here: {error}"]
    return [f"nice = {nice} was not taken for the session: the kernel was busy with other such changes"]


def _limit_files(wanted: int, pid: int) -> list[str]:
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (allowed, hard))
    except OSError as error:
        return [f"open_files = {wanted} was refused: {error}"]
    return [] if allowed == wanted else [f"open_files = {wanted} is above the hard limit: {allowed} it is"]


def raise_open_files(wanted: int) -> int:
    """Let this process have so many open files, as far as its hard limit goes; says how many it may have then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def own_memory(pid: int) -> int:
    """Bytes that a process has of its own, resident or in swap; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("RssAnon:", "VmSwap:"))) * KIB


def family_memory(leaders: Iterable[int], measure: Callable[[int], int] = own_memory) -> dict[int, int]:
    """Bytes of each of these processes together with all their descendants. Blocking: one walk over /proc for all."""
    families = procfs.descendants_of_each(leaders)
    return {pid: measure(pid) + sum(map(measure, below)) for pid, below in families.items()}


def over_memory(used: Mapping[int, int], limits_mib: Mapping[int, int]) -> dict[int, str]:
    """Which processes are above their limit, and what to say of it. Pure."""
    return {
        pid: f"had {used[pid] // MIB} MiB of its own, above memory_mib = {limit}"
        for pid, limit in limits_mib.items()
        if used.get(pid, 0) > limit * MIB
    }
