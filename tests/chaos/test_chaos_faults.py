"""Each fault by itself on a run of roles without a model: it is told, it ends, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "toys"))

from toy_run import ToyRun

from relax_rt.chaos.evidence import read_evidence
from relax_rt.chaos.faults import FAULTS, ScheduledFault
from relax_rt.chaos.injector import FilledDisk, Injector, RestartBudget, run_schedule
from relax_rt.chaos.verdict import run_checks, violations
from relax_rt.transport.rpc.errors import Refused

pytestmark = pytest.mark.chaos

RELAX = str(Path(sys.executable).with_name("relax-rt"))
TOYS = """\
[run]
name = "toys"
job = "toys"
dir = "{dir}"
[supervision]
chaos = %s
[queue]
capacity_mib = 16
slab_mib = 1
lease_s = 5
[roles.idler]
hang_after_s = 60
[roles.maker]
count = 2
[roles.eater]
"""


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[ToyRun]:
    with ToyRun(tmp_path, TOYS % "true") as run:
        run.ready()
        yield run


def relax(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RELAX, *argv], capture_output=True, text=True, timeout=120, check=False)


def readies(run: ToyRun, slot: str) -> int:
    return len([e for e in run.poll() if e["kind"] == "slot_ready" and e["slot"] == slot])


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_every_fault_is_reported_with_its_end_and_the_run_continues(toys: ToyRun) -> None:
    lasting = {"kill": 0.0, "stop": 0.5, "overtake": 0.5, "disk": 0.2}
    strikes = [
        ScheduledFault(
            number=number,
            fault=name,
            slot="" if fault.means == "disk" else ("maker/0" if number % 2 else "eater/0"),
            at_s=number * 1.0,
            seconds=lasting.get(name, 0.4),
            amount=16.0 if name == "memory" else fault.amount,
        )
        for number, (name, fault) in enumerate(FAULTS.items(), 1)
    ]
    with Injector(toys.run_dir, 1, most_disk_bytes=0) as injector:
        # A slot that is still on its way back from the last one is struck when it is there.
        session = run_schedule(toys.run_dir, injector, strikes, recovery_s=60.0, defer=True)
    assert {o.fault.fault for o in session.outcomes if o.skipped} == {"disk"}, session.outcomes
    assert session.recovered and not session.run_ended
    steps = len([e for e in toys.poll() if e["kind"] == "first_work"])
    assert steps > 0
    assert toys.end() == 0
    events = toys.poll()
    told = [e for e in events if e["kind"] == "fault_injected"]
    assert sorted(e["name"] for e in told) == sorted(name for name in FAULTS if name != "disk")
    assert all(e["pid"] and e["epoch"] and e["seed"] == 1 for e in told)
    lasted = {e["number"] for e in events if e["kind"] == "fault_ended"}
    assert lasted == {e["number"] for e in told if e["seconds"]}
    assert violations(run_checks(read_evidence(toys.run_dir))) == []


def test_what_was_stopped_continues_when_chaos_itself_is_killed(toys: ToyRun) -> None:
    command = [RELAX, "chaos", str(toys.run_dir), "--at-once", "stop:idler/0:60s"]
    pid = next(s.pid for s in toys.ready().slots if s.slot == "idler/0")
    chaos = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        toys.until("the stop", lambda: is_stopped(pid))
    finally:
        chaos.send_signal(signal.SIGKILL)
        chaos.wait()
    toys.until("its going on", lambda: not is_stopped(pid))
    assert not [e for e in toys.poll() if e["kind"] == "slot_exited"]


def test_what_cannot_be_asked_for_is_refused_in_words(toys: ToyRun) -> None:
    run = str(toys.run_dir)
    for argv, words in (
        (["--faults", "kil"], ["kil", "kill"]),
        (["--roles", "eatr"], ["eatr", "eater"]),
        (["--at-once", "kill:maker/7"], ["maker/7"]),
        (["--mean", "soon"], ["soon", "duration"]),
        (["--in-steps", "0.1"], ["steps"]),
    ):
        done = relax("chaos", run, *argv)
        assert done.returncode == 2, done.stderr
        assert all(word in done.stderr for word in words), done.stderr
    assert toys.end() == 0
    done = relax("chaos", run)
    assert done.returncode == 2 and "no live run" in done.stderr
    done = relax("chaos", run, "--check", "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["ok"]


def test_a_run_may_refuse_to_be_harmed(tmp_path: Path) -> None:
    with ToyRun(tmp_path, TOYS % "false") as run:
        run.ready()
        done = relax("chaos", str(run.run_dir), "--at-once", "kill:idler/0")
        assert done.returncode != 0
        assert "supervision.chaos" in done.stderr
        assert not [e for e in run.poll() if e["kind"] in ("fault_injected", "slot_exited")]


def test_a_fault_that_would_escalate_is_skipped(toys: ToyRun) -> None:
    with Injector(toys.run_dir, 1, budget=RestartBudget(max_restarts=1, period_s=600.0)) as injector:
        first = injector.inject(ScheduledFault(number=1, fault="kill", slot="idler/0"))
        toys.until(
            "its restart",
            lambda: len([e for e in toys.poll() if e["kind"] == "slot_ready" and e["slot"] == "idler/0"]) > 1,
        )
        second = injector.inject(ScheduledFault(number=2, fault="kill", slot="idler/0"))
    assert not first.skipped
    assert "used up its restarts" in second.skipped
    assert [e["number"] for e in toys.poll() if e["kind"] == "fault_skipped"] == [2]


def test_a_filled_file_system_is_given_back(tmp_path: Path) -> None:
    """Bounded to a little: the file system of the tests belongs to others too."""
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(Refused, match="at most"):
        FilledDisk(tmp_path, most_bytes=1 << 20)
    filling = FilledDisk(tmp_path, most_bytes=64 << 20, reserve_bytes=free - (32 << 20))
    try:
        assert filling.nbytes > 0
        assert list(tmp_path.iterdir()) == [], "it has a name"
    finally:
        filling.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB, of nobody else's."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_run_outlives_a_full_disk(small_disk: Path) -> None:
    def free() -> int:
        return os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize

    with ToyRun(small_disk, TOYS % "true") as run:
        run.ready()
        before = free()
        with Injector(run.run_dir, 1) as injector:
            outcome = injector.inject(ScheduledFault(number=1, fault="disk", slot="", seconds=2.0))
            assert not outcome.skipped
            assert free() <= 1 << 20 < before
            session = run_schedule(run.run_dir, injector, [], recovery_s=60.0)
        assert session.recovered and not session.run_ended
        run.until("its room back", lambda: free() > before - (8 << 20))
        worked = len(list((run.run_dir / "metrics.jsonl").read_bytes().splitlines()))
        run.until("work", lambda: len((run.run_dir / "metrics.jsonl").read_bytes().splitlines()) > worked)
        assert run.end() == 0
        (told,) = [e for e in run.poll() if e["kind"] == "fault_injected"]
        assert (told["name"], told["nbytes"] > 8 << 20) == ("disk", True)
        assert [e["number"] for e in run.poll() if e["kind"] == "fault_ended"] == [1]
        assert violations(run_checks(read_evidence(run.run_dir))) == []


def test_schedules_by_time_fall_in_order_and_interruptions_undo(toys: ToyRun) -> None:
    pid = next(s.pid for s in toys.ready().slots if s.slot == "idler/0")
    with Injector(toys.run_dir, 1) as injector:
        assert not injector.inject(ScheduledFault(number=1, fault="stop", slot="idler/0", seconds=60.0)).skipped
        # The kernel stops its threads when each comes by.
        toys.until("the stop", lambda: is_stopped(pid))
        again = injector.inject(ScheduledFault(number=2, fault="stop", slot="idler/0", seconds=60.0))
        assert "still lasts" in again.skipped
    toys.until("its going on", lambda: not is_stopped(pid))
