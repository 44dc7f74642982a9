"""What `up --detach` tells while it waits."""

from __future__ import annotations

from relax_rt.cli.detach import Reasons
from relax_rt.supervision.api import RunStatus, SlotStatus


def status(waiting: str, state: str = "pending") -> RunStatus:
    slot = SlotStatus(slot="env/0", kind="env", tier=1, state=state, waiting=waiting)
    return RunStatus(run_id="ab", name="r", run_dir="/r", status="starting", slots=[slot])


def test_a_reason_to_wait_is_told_when_it_changes() -> None:
    said: list[str] = []
    reasons = Reasons(said.append)
    assert reasons.take(status("node b has not joined"))
    assert not reasons.take(status("node b has not joined"))
    assert reasons.take(status("no room on node b"))
    assert not reasons.take(status("calls", "ready"))
    assert said == ["env/0 waits: node b has not joined", "env/0 waits: no room on node b"]
