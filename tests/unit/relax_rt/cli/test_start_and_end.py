"""What `up --detach` and `down` tell while they wait."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from relax_rt.cli import run as run_commands
from relax_rt.cli.run import WaitingReasons, ending_slots, wait_until_ended
from relax_rt.cli.time_left import Estimate
from relax_rt.interfaces.agent import RunStatus, SlotStatus
from relax_rt.supervision import control


def status(waiting: str, state: str = "pending") -> RunStatus:
    slot = SlotStatus(slot="env/0", kind="env", tier=1, state=state, waiting=waiting)
    return RunStatus(run_id="ab", name="r", run_dir="/r", status="starting", slots=[slot])


def test_a_reason_to_wait_is_reported_when_it_changes() -> None:
    said: list[str] = []
    reasons = WaitingReasons(said.append)
    assert reasons.update(status("node b has not joined"))
    assert not reasons.update(status("node b has not joined"))
    assert reasons.update(status("no room on node b"))
    assert not reasons.update(status("calls", "ready"))
    assert said == ["env/0 waits: node b has not joined", "env/0 waits: no room on node b"]


def trainer(**fields: object) -> SlotStatus:
    values = {"state": "stopping", "state_s": 35.0, "kill_s": 85.0, "kill_latest_s": 565.0, **fields}
    detail = "asked to stop: finishing the step"
    return SlotStatus(slot="trainer/0", kind="trainer", tier=40, detail=detail, **values)  # type: ignore[arg-type]


class Ending:
    """A run that ends in the given steps: each look at it shows the next, and after the last it is gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: Sequence[SlotStatus]) -> None:
        self._steps = list(steps)
        self.said: list[str] = []
        monkeypatch.setattr(control, "status", lambda _: self._status())
        monkeypatch.setattr(control, "wait_ended", lambda *_: self._gone())
        found = Estimate(12, 150, step_s=210.0, left_s=1e4, measured=9, since_s=190.0)
        monkeypatch.setattr(run_commands, "estimate_of", lambda _: found)
        self._looked = False

    def _status(self) -> RunStatus:
        slots = [*self._steps[0], SlotStatus(slot="queue/0", kind="queue", tier=10, state="ready")]
        return RunStatus(run_id="ab", name="r", run_dir="/r", status="draining", slots=slots)

    def _gone(self) -> bool:
        if self._looked:
            self._steps.pop(0)
        self._looked = True
        return not self._steps


def test_down_says_at_once_who_is_waited_for_how_long_at_most_and_how_to_end_it_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Ending(monkeypatch, [trainer()])
    assert wait_until_ended(Path("runs/r"), 660.0, run.said.append)
    first, second = run.said
    assert "11m 00s at most" in first and "relax-rt down runs/r --now" in first
    assert "trainer/0 stopping for 35 s (asked to stop: finishing the step)" in second
    assert "killed in 1m 25s unless it makes progress, in 9m 25s at the latest" in second
    assert "then 1 more slots" in second
    assert "step 12 was done 3m 10s ago; a step takes 3m 30s here" in second


def test_down_reports_again_when_it_is_another_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    same, other = [trainer()], [SlotStatus(slot="reward/0", kind="reward", tier=40, state="stopping")]
    run = Ending(monkeypatch, same, same, same, other, [])
    assert wait_until_ended(Path("runs/r"), 660.0, run.said.append)
    told = [line.partition(": ")[2] for line in run.said[1:]]
    assert ["trainer/0" in told[0], "reward/0" in told[1], "cleans up" in told[2]] == [True] * 3 and len(told) == 3


def test_down_of_a_run_that_is_gone_at_once_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ending(monkeypatch)
    assert wait_until_ended(Path("runs/r"), 660.0, run.said.append) and not run.said


def test_one_deadline_is_reported_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Ending(monkeypatch, [trainer(kill_s=564.8)])
    assert "killed in 9m 25s at the latest" in ending_slots(Path("runs/r"))[1]
