"""How a run ends when it is asked to, when it is finished, and when it must not begin."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from live_run import LiveRun, until

from relax_rt.supervision import control
from relax_rt.transport.rpc.errors import Refused

pytestmark = pytest.mark.integration


def output(run: LiveRun) -> str:
    assert run.process.stdout is not None
    return run.process.stdout.read()


def test_ctrl_c_once_drains_in_reverse_order(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]\n[roles.aide]") as run:
        run.ready("worker/0", "aide/0")
        run.process.send_signal(signal.SIGINT)
        assert run.ends() == 130
        exits = [e for e in run.poll() if e["kind"] == "slot_exited"]
        assert [e["slot"] for e in exits] == ["aide/0", "worker/0"]
        assert all(e["diagnosis"]["kind"] == "clean" for e in exits)
        assert run.record["status"] == "stopped" and run.record["reason"] == "Ctrl-C"
        assert run.left() == []


def test_ctrl_c_twice_kills(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.stubborn]\n[roles.brooder]") as run:
        run.ready("stubborn/0", "brooder/0")
        run.process.send_signal(signal.SIGINT)
        run.event("run_draining")
        run.process.send_signal(signal.SIGINT)
        assert run.ends() == 130
        assert run.record["status"] == "killed" and run.left() == []


def test_role_that_does_not_stop_is_killed_at_its_deadline(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.stubborn]\n[roles.worker]", "[supervision]\nstop_timeout_s = 0.5") as run:
        run.ready("stubborn/0", "worker/0")
        run.process.send_signal(signal.SIGTERM)
        assert run.ends() == 143
        end = run.event("slot_exited", slot="stubborn/0")["diagnosis"]
        assert end["kind"] == "killed" and "asked to stop" in end["cause"]


def test_failure_that_no_restart_would_fix_ends_the_run_at_once(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.refuser]\nafter_s = 0.2\n[roles.worker]") as run:
        assert run.ends() == 1
        (end,) = [
            e["diagnosis"] for e in run.poll() if e["kind"] == "slot_exited" and e["diagnosis"]["kind"] != "clean"
        ]
        assert (end["slot"], end["kind"], end["cause"]) == ("refuser/0", "config", "the toy's folder: read-only")
        assert run.record["reason"] == "refuser/0 cannot go on: the toy's folder: read-only" and run.left() == []
        assert not [e for e in run.events if e["kind"] == "slot_restarting"]


def test_finished_significant_role_ends_the_run(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]\n[roles.finisher]\nafter_s = 0.2") as run:
        assert run.ends() == 0
        assert run.record["status"] == "finished" and "finisher/0" in run.record["reason"]
        assert (run.run_dir / "summary.json").exists() and run.left() == []


def test_operator_restarts_a_slot(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]", "[supervision.restart]\nmax_restarts = 0") as run:
        run.ready("worker/0")
        before = run.pid("worker/0")
        control.restart(run.run_dir, "worker/0")
        run.event("slot_ready", slot="worker/0", nth=1)
        assert run.pid("worker/0") != before
        with pytest.raises(Refused, match="no such slot"):
            control.restart(run.run_dir, "worker/7")


def test_a_directory_serves_one_run_at_a_time_and_one_config(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]") as run:
        run.ready("worker/0")
        other = tmp_path / "other"
        other.mkdir()
        with LiveRun(other, "[roles.worker]\ncount = 2") as second:
            second.process.kill()
            second.process.wait()
            second.toml.write_text(second.toml.read_text().replace(str(second.run_dir), str(run.run_dir)))
            assert second.process.stdout is not None
            second.process.stdout.close()
            second.start()
            assert second.ends() == 2 and "is alive" in output(second)
            control.kill(run.run_dir, wait_s=120)
            assert run.ends() == 137
            second.process.stdout.close()
            second.start()
            assert second.ends() == 2 and "another config" in output(second)
        resumed = run.record["run_id"]
        assert run.process.stdout is not None
        run.process.stdout.close()
        run.start()
        until("the same config resumes", lambda: run.record["run_id"] != resumed and run.record["status"] == "running")


@pytest.mark.parametrize(
    ("roles", "tables", "message"),
    [
        ("[roles.worker]", "[queue]\ncapacity_mib = 1048576", "queue.capacity_mib"),
        ("[roles.broken]", "", "supervision_missing_module"),
        ("[roles.worker]", "[supervision.restart]\nperiod_s = 0.1\nbackoff_first_s = 5.0", "can never fire"),
    ],
)
def test_what_must_not_start_is_refused_before_anything_starts(
    tmp_path: Path, roles: str, tables: str, message: str
) -> None:
    with LiveRun(tmp_path, roles, tables) as run:
        assert run.ends() == 2
        assert message in output(run)
        assert not (run.run_dir / "run.json").exists()


def test_logs_are_bounded(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]", "[events]\nrole_log_mib = 1") as run:
        run.ready("worker/0")
        log = run.paths.log("worker/0")
        # Another holder of the file appends, as a role's native library would.
        fd = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.write(fd, b"x" * (1 << 20) + b"\n")
        until("the log is rotated", log.with_name(log.name + ".1").exists)
        until("and cut", lambda: log.stat().st_size < 1 << 20)
        os.write(fd, b"after the rotation\n")
        os.close(fd)
        assert log.read_text().endswith("after the rotation\n")


def test_agent_whose_log_cannot_be_written_goes_on(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "agent.log").symlink_to("/dev/full")
    with LiveRun(tmp_path, "[roles.worker]", "[supervision.restart]\nbackoff_max_s = 0.1\n") as run:
        run.ready("worker/0")
        os.kill(run.pid("worker/0"), signal.SIGKILL)
        run.event("slot_ready", slot="worker/0", nth=1)
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0 and run.left() == []


BROKEN = """
import sys
if sys.orig_argv[1:3] == ["-m", "relax_rt.cluster.head"]:
    from relax_rt.supervision.local import LocalExecutor
    async def break_down(self, events): raise ZeroDivisionError("broken")
    LocalExecutor.run_housekeeping = break_down
"""


def test_fault_of_the_agent_ends_the_run_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with LiveRun(tmp_path, "[roles.worker]") as run:
        assert run.ends() == 1
        cause = "housekeeping has failed: ZeroDivisionError: broken"
        assert run.record["reason"] == f"fault of the supervisor: {cause}" and run.left() == []
        assert "break_down" in run.event("supervisor_fault", error=cause)["trace"]


def test_no_log_of_a_run_grows_without_bound(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]\nspares = 1", "[events]\nrole_log_mib = 1\n") as run:
        run.ready("worker/0")
        run.event("spare_ready", role="worker")
        for name in ("agent", "zygote", "keeper", "up", "worker-spare", "worker-0"):
            log = run.run_dir / "logs" / f"{name}.log"
            with log.open("a") as out:
                out.write("chatter\n" * (1 << 18))
            until(f"{log} is rotated", lambda log=log: log.stat().st_size < 1 << 20)
            assert (log.with_name(f"{log.name}.1")).stat().st_size > 1 << 20
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0
