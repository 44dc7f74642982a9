"""What operators ask of a living run: more slots, fewer, none for now; and an idle role that is dead is found."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from live_run import LiveRun, until

from relax_rt.process import procfs
from relax_rt.supervision import control
from relax_rt.transport.rpc.errors import Refused

pytestmark = pytest.mark.integration


def states(run: LiveRun) -> dict[str, str]:
    return {s.slot: s.state for s in control.status(run.run_dir).slots}


def test_role_is_scaled_up_and_down_while_the_others_go_on(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]\n[roles.aide]") as run:
        run.ready("worker/0", "aide/0")
        stays = run.pid("worker/0"), run.pid("aide/0")
        control.scale(run.run_dir, "worker", 3)
        run.ready("worker/1", "worker/2")
        leaves = run.pid("worker/2")
        control.scale(run.run_dir, "worker", 1)
        until("two slots are gone", lambda: states(run) == {"worker/0": "ready", "aide/0": "ready"})
        assert procfs.start_time(leaves) == 0
        assert (run.pid("worker/0"), run.pid("aide/0")) == stays
        assert [(e["before"], e["count"]) for e in run.poll() if e["kind"] == "scaled"] == [(1, 3), (3, 1)]
        assert {e["diagnosis"]["kind"] for e in run.events if e["kind"] == "slot_exited"} == {"clean"}


def test_drained_role_stays_down_until_it_is_restarted(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]\n[roles.aide]") as run:
        run.ready("worker/0", "aide/0")
        control.drain(run.run_dir, "aide")
        run.event("slot_drained", slot="aide/0")
        drained = next(s for s in control.status(run.run_dir).slots if s.slot == "aide/0")
        assert (drained.state, drained.pid) == ("ended", 0)
        assert drained.waiting.startswith("drained")
        with pytest.raises(Refused, match="no such slot, role or node"):
            control.drain(run.run_dir, "aid")
        control.restart(run.run_dir, "aide/0")
        run.event("slot_ready", slot="aide/0", nth=1)
        assert control.status(run.run_dir).status == "running"


def test_stopped_idle_role_is_found_by_its_missing_reports(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.idler]\nhang_after_s = 0.5") as run:
        run.ready("idler/0")
        until("it says why it is idle", lambda: control.status(run.run_dir).slots[0].waiting)
        os.kill(run.pid("idler/0"), signal.SIGSTOP)
        assert "no sign of life" in run.event("slot_hung", slot="idler/0")["reason"]
        run.event("slot_ready", slot="idler/0", nth=1)


def test_signal_of_a_failing_server_to_its_parent_does_not_end_the_run(tmp_path: Path) -> None:
    """SGLang's processes send SIGQUIT to their parent; orphaned ones are the agent's."""
    with LiveRun(tmp_path, "[roles.worker]\n[roles.aide]") as run:
        run.ready("worker/0", "aide/0")
        before = run.pid("worker/0")
        keeper = procfs.stat_fields(run.agent_pid)
        assert keeper is not None
        for pid in (run.agent_pid, int(keeper[1])):
            os.kill(pid, signal.SIGQUIT)
        control.restart(run.run_dir, "aide/0")
        run.event("slot_ready", slot="aide/0", nth=1)
        assert run.pid("worker/0") == before and control.status(run.run_dir).status == "running"
