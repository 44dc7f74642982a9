"""Real processes really killed: who dies, who goes on, and what is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from live_run import LiveRun, until

from relax_rt.process import procfs
from relax_rt.supervision import control

pytestmark = pytest.mark.integration

FAST = "[supervision.restart]\nmax_restarts = 2\nbackoff_first_s = 0.05\nbackoff_max_s = 0.1\n"


def test_killed_role_restarts_with_a_new_epoch_and_the_others_stay(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]\ncount = 2\n[roles.aide]") as run:
        run.ready("worker/0", "worker/1", "aide/0")
        before = {slot: run.pid(slot) for slot in ("worker/0", "worker/1", "aide/0")}
        killed_at = time.time()
        os.kill(before["worker/0"], signal.SIGKILL)
        end = run.event("slot_exited", slot="worker/0")
        assert end["diagnosis"]["kind"] == "killed" and end["diagnosis"]["signal"] == "SIGKILL"
        assert end["diagnosis"]["at"] >= killed_at
        again = run.event("slot_ready", slot="worker/0", nth=1)
        assert again["epoch"] > end["epoch"]
        status = {s.slot: s for s in control.status(run.run_dir).slots}
        assert status["worker/0"].restarts == 1 and status["worker/0"].pid not in (0, before["worker/0"])
        assert status["worker/0"].last is not None and status["worker/0"].last.pid == before["worker/0"]
        assert {s: status[s].pid for s in ("worker/1", "aide/0")} == {s: before[s] for s in ("worker/1", "aide/0")}
        until("progress is reported", lambda: run.pid("worker/0") and control.status(run.run_dir).slots[0].progress)
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0 and run.record["status"] == "stopped"
        assert run.left() == []


def test_killed_role_takes_its_children_with_it(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.brooder]", FAST) as run:
        run.ready("brooder/0")
        child = run.event("brood")["pid"]
        os.kill(run.pid("brooder/0"), signal.SIGKILL)
        run.event("slot_exited", slot="brooder/0")
        assert procfs.start_time(child) == 0, "its child in another session is dead before the exit is reported"
        run.event("slot_ready", slot="brooder/0", nth=1)


def test_hang_in_native_code_dumps_stacks_then_kills_and_restarts(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.hanger]\nhang_after_s = 4\n[roles.worker]", FAST) as run:
        hung = run.event("slot_hung", slot="hanger/0")
        assert "hang_after_s" in hung["reason"]
        end = run.event("slot_exited", slot="hanger/0")["diagnosis"]
        assert end["kind"] == "hang" and end["signal"] == "SIGKILL"
        log = run.paths.log("hanger/0").read_text()
        assert "stuck_in_native_code" in log, "the stack of the stuck thread is in the role's log"
        assert any("stuck_in_native_code" in line for line in end["last_lines"])
        run.event("slot_ready", slot="hanger/0", nth=1)


def test_stopped_role_is_a_hang(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]\nhang_after_s = 4", FAST) as run:
        run.ready("worker/0")
        os.kill(run.pid("worker/0"), signal.SIGSTOP)
        assert run.event("slot_exited", slot="worker/0")["diagnosis"]["kind"] == "hang"
        run.event("slot_ready", slot="worker/0", nth=1)


def test_crash_loop_ends_the_run_with_one_diagnosis(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.crasher]\n[roles.aide]", FAST) as run:
        assert run.ends() == 1
        spawned = [e for e in run.poll() if e["kind"] == "slot_spawned" and e["slot"] == "crasher/0"]
        assert len(spawned) == 6, "two restarts, then the role once as a whole with two more, then the end"
        assert run.event("role_restarting", role="crasher")["slot"] == "crasher/0"
        record = run.record
        assert record["status"] == "failed" and record["diagnosis"]["kind"] == "exception"
        assert record["diagnosis"]["cause"] == "ValueError: the toy broke"
        assert "in run" in record["diagnosis"]["trace"]
        assert run.process.stdout is not None and "the toy broke" in run.process.stdout.read()
        assert run.left() == []
        final = control.status(run.run_dir)
        assert final.ended and final.exit_code == 1 and final.diagnosis is not None
        with pytest.raises(control.NoRun, match="failed"):
            control.stop(run.run_dir)


def test_killed_agent_leaves_nothing(tmp_path: Path) -> None:
    roles = "[roles.worker]\ncount = 2\n[roles.brooder]\n[roles.busy]\nhang_after_s = 600\n"
    with LiveRun(tmp_path, roles) as run:
        run.ready("worker/0", "worker/1", "brooder/0", "busy/0")
        child = run.event("brood")["pid"]
        os.kill(run.pid("worker/1"), signal.SIGSTOP)
        assert run.paths.shm_dir.is_dir() and run.paths.agent_socket.exists()
        run.left()
        os.kill(run.agent_pid, signal.SIGKILL)
        assert run.ends() == 128 + signal.SIGKILL
        assert run.left() == [] and procfs.start_time(child) == 0
        run.event("agent_died", by="keeper")
        assert run.record["status"] == "agent died"
        assert control.status(run.run_dir).status == "agent died"


def test_killed_keeper_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]\n[roles.brooder]") as run:
        run.ready("worker/0", "brooder/0")
        worker, child = run.pid("worker/0"), run.event("brood")["pid"]
        run.process.kill()
        first = run.event("keeper_started")["pid"]
        assert run.pid("worker/0") == worker, "the roles go on"
        os.kill(first, signal.SIGKILL)
        run.event("keeper_started", nth=1)
        os.kill(run.agent_pid, signal.SIGKILL)
        assert run.is_gone() and procfs.start_time(child) == 0
        until("the stand-in's word", lambda: run.record["status"] == "agent died")


def test_run_without_its_keeper_ends_in_order(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]") as run:
        run.ready("worker/0")
        run.process.kill()
        stand_in = run.event("keeper_started")["pid"]
        control.stop(run.run_dir, wait_s=120)
        assert run.is_gone() and run.record["status"] == "stopped"
        until("the stand-in ends too", lambda: not procfs.start_time(stand_in))


def test_leftovers_of_a_run_that_lost_agent_and_keeper_are_cleaned_by_the_next(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]") as run:
        run.ready("worker/0")
        old, agent = run.paths, run.agent_pid
        run.left()
        os.kill(run.process.pid, signal.SIGSTOP)
        os.kill(agent, signal.SIGKILL)
        run.process.kill()
        run.process.wait()
        assert run.process.stdout is not None
        run.process.stdout.close()
        assert old.socket_dir.exists() and old.shm_dir.exists()
        run.start()
        until("the next run is up", lambda: run.record["run_id"] != old.run_id and run.record["status"] == "running")
        assert not old.socket_dir.exists() and not old.shm_dir.exists()
