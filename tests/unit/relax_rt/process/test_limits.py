"""Limits of real processes, and memory that is measured."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from relax_rt.process import limits, procfs

MIB = 1 << 20
SLEEP = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_limits_hold_for_the_process_they_are_applied_to(child: subprocess.Popen[bytes]) -> None:
    core = min(os.sched_getaffinity(0))
    assert limits.apply(limits.ProcessLimits(nice=7, cpus=[core], open_files=100), child.pid) == []
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == 7
    assert os.sched_getaffinity(child.pid) == {core}
    assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE)[0] == 100


@pytest.mark.skipif(
    not limits.AUTOGROUP.exists() or limits.AUTOGROUP.read_text().strip() != "1", reason="no autogroups in this kernel"
)
def test_a_role_in_a_session_of_its_own_has_its_niceness_among_sessions_too() -> None:
    own = Path("/proc/self/autogroup").read_text()
    with subprocess.Popen(SLEEP, stdin=subprocess.PIPE, start_new_session=True) as leader:
        try:
            assert limits.apply(limits.ProcessLimits(nice=9), leader.pid) == []
            assert Path(f"/proc/{leader.pid}/autogroup").read_text().split()[-1] == "9"
        finally:
            leader.kill()
    with subprocess.Popen(SLEEP, stdin=subprocess.PIPE) as member:
        try:
            assert limits.apply(limits.ProcessLimits(nice=9), member.pid) == []
            assert Path("/proc/self/autogroup").read_text() == own, "the session is not this process's own"
        finally:
            member.kill()


def test_process_starts_where_the_niceness_of_its_session_cannot_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(SLEEP, stdin=subprocess.PIPE, start_new_session=True) as leader:
        try:
            before = Path(f"/proc/{leader.pid}/autogroup").read_text() if limits.AUTOGROUP.exists() else ""
            off, closed = tmp_path / "off", tmp_path / "closed"
            off.write_text("0\n")
            closed.mkdir()
            for path in (off, tmp_path / "missing"):
                monkeypatch.setattr(limits, "AUTOGROUP", path)
                assert limits.apply(limits.ProcessLimits(nice=9), leader.pid) == []
            monkeypatch.setattr(limits, "AUTOGROUP", closed)
            (problem,) = limits.apply(limits.ProcessLimits(nice=9), leader.pid)
            assert "was refused for the session" in problem
            assert not before or Path(f"/proc/{leader.pid}/autogroup").read_text() == before
        finally:
            leader.kill()


def test_refused_limits_are_reported(child: subprocess.Popen[bytes]) -> None:
    hard = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)[1]
    impossible = limits.ProcessLimits(cpus=[100_000], open_files=hard + 1)
    cpus, files = limits.apply(impossible, child.pid)
    assert "cpus = [100000] was refused" in cpus and "above the hard limit" in files


def test_own_memory_is_what_was_touched_and_not_what_is_shared() -> None:
    shared = shared_memory.SharedMemory(create=True, size=64 * MIB)
    try:
        assert shared.buf is not None
        before = limits.own_memory(os.getpid())
        for at in range(0, shared.size, MIB):
            shared.buf[at : at + MIB] = b"\1" * MIB
        after_shared = limits.own_memory(os.getpid())
        # Pages of its own mapping: the heap may have freed ones at hand, which would not count anew.
        with mmap.mmap(-1, 48 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
            for at in range(0, 48 * MIB, mmap.PAGESIZE):
                mapped[at] = 1
            grown = limits.own_memory(os.getpid()) - after_shared
        assert after_shared - before < 16 * MIB, "shared pages are not its own"
        assert grown >= 40 * MIB
    finally:
        shared.close()
        shared.unlink()
    assert limits.own_memory(2**22 + 1) == 0


def test_memory_is_measured_with_all_descendants(child: subprocess.Popen[bytes]) -> None:
    measured = {child.pid: 5 * MIB, os.getpid(): 3 * MIB}
    used = limits.tree_memory([os.getpid()], lambda pid: measured.get(pid, 0))
    assert used[os.getpid()] == 8 * MIB
    assert limits.over_memory(used, {os.getpid(): 8}) == {}
    assert limits.over_memory(used, {os.getpid(): 7}) == {
        os.getpid(): "had 8 MiB of its own, above memory_mib = 7",
    }
    assert limits.over_memory({}, {1: 7}) == {}


def test_all_trees_are_found_in_one_walk(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[None] = []
    pids = procfs.pids
    monkeypatch.setattr(procfs, "pids", lambda: (walks.append(None), pids())[1])
    used = limits.tree_memory([os.getpid(), child.pid], lambda pid: pid == child.pid)
    assert used == {os.getpid(): 1, child.pid: 1} and len(walks) == 1
