"""A real gang of processes that compute together, and what becomes of it when one of them is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from live_run import LiveRun

from relax_rt.supervision import control
from relax_rt.transport.rpc.errors import Refused

pytestmark = pytest.mark.integration

TABLES = "[supervision.restart]\nmax_restarts = 3\nbackoff_first_s = 0.05\nbackoff_max_s = 0.1\n"
ROLES = "[roles.worker]\n[roles.ranks]\ncount = 2\n"


def test_gang_that_lost_a_rank_restarts_as_a_whole_and_continues_to_compute(tmp_path: Path) -> None:
    with LiveRun(tmp_path, ROLES, TABLES) as run:
        run.ready("worker/0", "ranks/0", "ranks/1")
        run.event("added", generations=2, ranks=2, step=20)
        before = {s.slot: s for s in control.status(run.run_dir).slots}
        os.kill(before["ranks/1"].pid, signal.SIGKILL)
        # One sum of both: each is of generation 2, so nobody of generation 1 took part.
        for rank in (0, 1):
            run.event("added", generations=4, ranks=2, step=20, rank=rank)
        after = {s.slot: s for s in control.status(run.run_dir).slots}
        assert after["worker/0"].pid == before["worker/0"].pid, "a role that is no part of it goes on"
        for slot in ("ranks/0", "ranks/1"):
            assert after[slot].pid != before[slot].pid and after[slot].epoch > before[slot].epoch
            assert (after[slot].generation, after[slot].restarts) == (2, 1)
        failed = [e for e in run.poll() if e["kind"] == "gang_failed"]
        assert [(e["slot"], e["generation"]) for e in failed] == [("ranks/1", 1)], "a gang fails once, not twice"
        spawned = [e["m"] for e in run.events if e["kind"] == "slot_spawned" and e["slot"].startswith("ranks/")]
        exited = [e["m"] for e in run.events if e["kind"] == "slot_exited"]
        assert max(exited) < min(spawned[2:]), "the old generation is gone before the new one begins"
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0 and run.left() == []


def test_restart_of_a_rank_by_hand_restarts_the_gang_in_order(tmp_path: Path) -> None:
    with LiveRun(tmp_path, ROLES, TABLES) as run:
        run.event("added", generations=2, step=20)
        with pytest.raises(Refused, match="it is a gang"):
            control.scale(run.run_dir, "ranks", 3)
        control.restart(run.run_dir, "ranks/0")
        run.event("added", generations=4, ranks=2)
        ends = [e["diagnosis"]["kind"] for e in run.poll() if e["kind"] == "slot_exited"]
        assert ends == ["clean", "clean"], "asked to stop, they leave in the same step"
        assert not [e for e in run.events if e["kind"] == "gang_failed"]
