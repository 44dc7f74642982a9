"""Spares and zygotes of a real run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from live_run import LiveRun, until

from relax_rt.process import procfs
from relax_rt.supervision import control

pytestmark = pytest.mark.integration

FAST = "[supervision.restart]\nmax_restarts = 5\nbackoff_first_s = 0.05\nbackoff_max_s = 0.1\n"


def test_spare_takes_the_place_of_the_dead_and_is_replaced(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]\ncount = 2\nspares = 1", FAST) as run:
        run.ready("worker/0", "worker/1")
        spare = run.event("spare_ready", role="worker")["pid"]
        assert procfs.has_environment(spare, "RELAX_SLOT=worker/spare")
        os.kill(run.pid("worker/1"), signal.SIGKILL)
        assert run.event("slot_spawned", slot="worker/1", nth=1)["pid"] == spare
        again = run.event("slot_ready", slot="worker/1", nth=1)
        assert procfs.has_environment(spare, "RELAX_SLOT=worker/1", f"RELAX_EPOCH={again['epoch']}")
        assert "---" in run.paths.log("worker/1").read_text()
        following = run.event("spare_ready", role="worker", nth=1)["pid"]
        os.kill(following, signal.SIGKILL)
        run.event("spare_died", role="worker", pid=following)
        os.kill(run.pid("worker/1"), signal.SIGKILL)
        run.event("slot_ready", slot="worker/1", nth=2)
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0
        assert run.left() == []


def test_killed_zygotes_cost_nothing(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]\ncount = 2", FAST) as run:
        run.ready("worker/0", "worker/1")
        zygotes = [run.event("zygote_ready", zygote=f"{name}-0")["pid"] for name in ("light", "heavy")]
        before = [run.pid("worker/0"), run.pid("worker/1")]
        for pid in zygotes:
            os.kill(pid, signal.SIGKILL)
        run.event("zygote_died", zygote="light-0", reason="ended by SIGKILL")
        run.event("zygote_ready", zygote="heavy-0", nth=1)
        assert [run.pid("worker/0"), run.pid("worker/1")] == before, "roles go on"
        os.kill(before[0], signal.SIGKILL)
        run.event("slot_ready", slot="worker/0", nth=1)
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0
        assert run.left() == []


def test_run_without_zygotes_spawns_its_roles(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]\nspares = 1", "[supervision]\nzygote = false\n") as run:
        run.ready("worker/0")
        spare = run.event("spare_ready", role="worker")["pid"]
        os.kill(run.pid("worker/0"), signal.SIGKILL)
        assert run.event("slot_spawned", slot="worker/0", nth=1)["pid"] == spare
        run.event("slot_ready", slot="worker/0", nth=1)
        assert not [e for e in run.poll() if e["kind"].startswith("zygote")]
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0


def test_agent_killed_while_zygotes_are_starting_leaves_nothing(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]\nspares = 1") as run:
        run.event("run_started")
        run.left()
        os.kill(run.agent_pid, signal.SIGKILL)
        run.ends()
        assert run.is_gone()


def test_no_spares_are_kept_for_a_role_that_is_drained(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]\nspares = 1\n[roles.aide]", FAST) as run:
        run.ready("worker/0", "aide/0")
        spare = run.event("spare_ready", role="worker")["pid"]
        control.drain(run.run_dir, "worker")
        run.event("spares_ended", role="worker")
        until("the spare ends", lambda: not procfs.start_time(spare))
        control.restart(run.run_dir, "worker")
        run.event("spare_ready", role="worker", nth=1)
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0 and run.left() == []
