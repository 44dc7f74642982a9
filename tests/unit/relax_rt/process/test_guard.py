"""The guard over stand-ins for servers: what ends with the owner, what is removed, how long the log gets."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import eventually

from relax_rt.process import procfs
from relax_rt.process.guard import RotatingLog

WAIT_S = 120.0


def alive(pid: int) -> bool:
    return procfs.start_time(pid) != 0


GUARD = [sys.executable, "-m", "relax_rt.process.guard"]


async def test_nothing_outlives_an_owner_that_is_killed(tmp_path: Path) -> None:
    """Its end of the lifeline closes. What has a group of its own and ignores every signal ends, too."""
    pids = tmp_path / "pids"
    tree = f"echo $$ > {pids}; (trap '' TERM INT HUP; setsid sleep 600 & echo $! >> {pids}); echo go; sleep 600"
    role = (
        "import os, subprocess, time\n"
        "reading, writing = os.pipe()\n"
        f"options = ['--lifeline', str(reading), '--log', {str(tmp_path / 'log')!r}, '--log-mib', '1', '--']\n"
        f"subprocess.Popen([*{GUARD!r}, *options, 'sh', '-c', {tree!r}], pass_fds=(reading,), start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    killed = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", role])
    try:
        await eventually(lambda: (tmp_path / "log").exists() and "go" in (tmp_path / "log").read_text())
        found = [int(pid) for pid in pids.read_text().split()]
        assert len(found) == 2 and all(map(alive, found))
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    await eventually(lambda: not any(map(alive, found)))


def test_the_guard_ends_as_its_server_did_and_changes_its_environment(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    log = tmp_path / "log"
    command = [*GUARD, "--lifeline", str(reading), "--log", str(log), "--log-mib", "1", "--set=A=1=2", "--unset=HOME"]
    shell = ["--", "sh", "-c", 'echo "[$A][$HOME]"; kill -9 $$']
    try:
        assert subprocess.run([*command, *shell], pass_fds=(reading,), check=False).returncode == 128 + 9
    finally:
        os.close(reading)
        os.close(writing)
    assert log.read_text() == "[1=2][]\n"


SEMAPHORE = """
import multiprocessing, os, signal, sys, time
from multiprocessing import resource_tracker
mine = multiprocessing.get_context("spawn").Semaphore()
print(mine._semlock.name, flush=True)
time.sleep(float(sys.argv[1]))
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
os._exit(3)
"""


PROMPT = """
import sys
from relax_rt.process import guard
guard.SCAN_EVERY_S = guard.SCAN_AFTER_OUTPUT_S = 3600.0
sys.exit(guard.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("guard", [GUARD, [sys.executable, "-c", PROMPT]], ids=["by_the_clock", "as_it_is_made"])
def test_a_semaphore_of_a_server_that_ends_by_itself_is_removed_and_no_other(tmp_path: Path, guard: list[str]) -> None:
    """It kills multiprocessing's tracker, which alone knows of it, as SGLang does when it gives up."""
    theirs = Path("/dev/shm") / f"sem.mp-relax-test-{os.getpid()}"
    theirs.write_bytes(bytes(32))
    reading, writing = os.pipe()
    log = tmp_path / "log"
    command = [*guard, "--lifeline", str(reading), "--log", str(log), "--log-mib", "1", "--"]
    try:
        done = subprocess.run([*command, sys.executable, "-c", SEMAPHORE, "1.5"], pass_fds=(reading,), check=False)
        assert done.returncode == 3
        (name,) = (line for line in log.read_text().splitlines() if line.startswith("/mp-"))
        assert not Path(f"/dev/shm/sem.{name[1:]}").exists()
        assert theirs.exists()
    finally:
        theirs.unlink()
        os.close(reading)
        os.close(writing)


def test_a_log_is_bounded(tmp_path: Path) -> None:
    log = RotatingLog(tmp_path / "log", 1000)
    for number in range(100):
        log.write(b"%099d\n" % number)
    log.close()
    assert (tmp_path / "log").stat().st_size <= 1000
    assert (tmp_path / "log.1").stat().st_size <= 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]
    assert b"99\n" in (tmp_path / "log").read_bytes()


def test_guard_imports_the_standard_library_only() -> None:
    code = "import sys, relax_rt.process.guard\n"
    code += "print(*sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
    plain = code.replace(", relax_rt.process.guard", "")
    before, after = (subprocess.run([sys.executable, "-c", c], capture_output=True, check=True) for c in (plain, code))
    assert set(after.stdout.split()) - set(before.stdout.split()) == {b"relax_rt"}
