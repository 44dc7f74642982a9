"""Limits of a process: cores, niceness, open files, threads; and the measurement of its memory.

Memory is measured, not limited with RLIMIT_AS: that limit counts address space, and torch, CUDA and shared memory map
tens of gigabytes that they never touch, so any limit that they survive would limit nothing. What counts are a process's
own pages: resident anonymous ones and those in swap. Pages of shared memory and of files are left out. Pages that a
forked process still shares with its zygote do count: the kernel's exact figure would walk all page tables of the
process, under a lock that delays its allocations.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from relax_rt.process import procfs

KIB = 1 << 10
MIB = 1 << 20
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
AUTOGROUP_ATTEMPTS = 20


class ProcessLimits(msgspec.Struct, frozen=True, kw_only=True):
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


def apply(limits: ProcessLimits, pid: int = 0) -> list[str]:
    """Apply limits to a process (0: ourselves) that has just started; threads that it already has keep their own.

    Returns:
        What was refused, in words; the process runs without it.
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
    """Apply the niceness to the process's session, too.

    With CONFIG_SCHED_AUTOGROUP (on by default in Debian, Ubuntu and Fedora) the scheduler shares cores between sessions
    first, and `nice` weighs only the processes within one: see sched(7), "The autogroup feature". Every child has a
    session of its own. From users other than root the kernel accepts one such change every 0.1 s in all, so children
    that start together retry at random intervals.
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
    return [f"nice = {nice} was not applied to the session: the kernel was busy with other such changes"]


def _limit_files(wanted: int, pid: int) -> list[str]:
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (allowed, hard))
    except OSError as error:
        return [f"open_files = {wanted} was refused: {error}"]
    return [] if allowed == wanted else [f"open_files = {wanted} is above the hard limit: {allowed} is used"]


def raise_open_files(wanted: int) -> int:
    """Raise this process's limit of open files, as far as its hard limit allows; return the limit that holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def own_memory(pid: int) -> int:
    """Return the bytes of a process's own pages, resident or in swap; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("RssAnon:", "VmSwap:"))) * KIB


def tree_memory(leaders: Iterable[int], measure: Callable[[int], int] = own_memory) -> dict[int, int]:
    """Return the bytes of each of these processes with its descendants. Blocking: one walk over /proc for all."""
    trees = procfs.descendants_of_each(leaders)
    return {pid: measure(pid) + sum(map(measure, below)) for pid, below in trees.items()}


def over_memory(used: Mapping[int, int], limits_mib: Mapping[int, int]) -> dict[int, str]:
    """Return the processes above their limit, each with the reason. Pure."""
    return {
        pid: f"had {used[pid] // MIB} MiB of its own, above memory_mib = {limit}"
        for pid, limit in limits_mib.items()
        if used.get(pid, 0) > limit * MIB
    }
