"""A schedule of faults, without a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_rt.chaos import injector as injecting
from relax_rt.chaos.faults import ScheduledFault
from relax_rt.chaos.injector import FaultOutcome


class Injector:
    """Skips what its slot has no process for: until step 4."""

    next_undo = None

    def __init__(self, watch: Any) -> None:
        self.watch, self.at = watch, list[tuple[int, int]]()

    def undo(self, now: float) -> None: ...

    def inject(self, fault: ScheduledFault, *, may_retry: bool = False) -> FaultOutcome:
        self.at.append((fault.number, self.watch.step))
        away = self.watch.step < 4
        return FaultOutcome(fault, "it has no process now" if away else "", temporary=away)


@pytest.mark.parametrize(("defer", "injected"), [(True, [(2, 4), (1, 4)]), (False, [])])
def test_a_skipped_fault_is_retried_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defer: bool, injected: list[tuple[int, int]]
) -> None:
    watch = SimpleNamespace(step=0, close=lambda: None)

    def look() -> int:
        watch.step += 1
        return int(watch.step)

    watch.newest = look
    monkeypatch.setattr(injecting, "StepFollower", lambda run_dir: watch)
    monkeypatch.setattr(injecting, "wait_recovered", lambda run_dir, recovery_s: True)
    monkeypatch.setattr("relax_rt.supervision.control.find_run", lambda run_dir: SimpleNamespace(alive=True))
    injector: Any = Injector(watch)
    planned = [ScheduledFault(number=n, fault="kill", slot="a/0", at_step=s) for n, s in ((1, 2), (2, 3))]
    done = injecting.run_schedule(tmp_path, injector, planned, defer=defer)
    assert {o.fault.number for o in done.outcomes if not o.skipped} == {n for n, _ in injected}
    assert done.not_injected == 0 and (done.deferred > 0) == defer


class Away:
    """Its slots have no process for a while, or never again."""

    next_undo = None

    def __init__(self, tries: int, *, temporary: bool = True) -> None:
        self.tries, self.temporary = tries, temporary
        self.reported: list[tuple[str, str]] = []

    def undo(self, now: float) -> None: ...

    def inject(self, fault: ScheduledFault, *, may_retry: bool = False) -> FaultOutcome:
        self.tries -= 1
        away = self.tries >= 0
        if not (away and self.temporary and may_retry):
            self.reported.append((fault.slot, "skipped" if away else "injected"))
        return FaultOutcome(fault, "away" if away else "", temporary=away and self.temporary)


@pytest.mark.parametrize(
    ("injector", "defer", "told", "deferred"),
    [
        (Away(3), True, "injected", 1),
        (Away(3), False, "skipped", 0),
        (Away(10_000), True, "skipped", 1),
        (Away(3, temporary=False), True, "skipped", 0),
    ],
)
def test_a_fault_by_time_waits_for_a_process_of_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, injector: Any, defer: bool, told: str, deferred: int
) -> None:
    monkeypatch.setattr(injecting, "wait_recovered", lambda run_dir, recovery_s: True)
    monkeypatch.setattr(injecting, "RETRY_S", 0.01)
    monkeypatch.setattr(injecting, "MAX_DEFER_S", 0.2)
    monkeypatch.setattr("relax_rt.supervision.control.find_run", lambda run_dir: SimpleNamespace(alive=True))
    done = injecting.run_schedule(
        tmp_path, injector, [ScheduledFault(number=1, fault="kill", slot="a/0", at_s=0.02)], defer=defer
    )
    assert injector.reported == [("a/0", told)]
    assert [bool(o.skipped) for o in done.outcomes] == [told == "skipped"], "one outcome a fault"
    assert (done.deferred, done.not_injected) == (deferred, 0)
