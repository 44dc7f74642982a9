"""A session of harm, without a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_rt.chaos import session
from relax_rt.chaos.faults import Strike
from relax_rt.chaos.injector import Outcome


class Injector:
    """Withholds what its slot has no process for: until step 4."""

    next_undo = None

    def __init__(self, watch: Any) -> None:
        self.watch, self.at = watch, list[tuple[int, int]]()

    def undo(self, now: float) -> None: ...

    def strike(self, strike: Strike, *, put_off: bool = False) -> Outcome:
        self.at.append((strike.number, self.watch.step))
        away = self.watch.step < 4
        return Outcome(strike, "no process lives in it now" if away else "", passing=away)


@pytest.mark.parametrize(("defer", "fell"), [(True, [(2, 4), (1, 4)]), (False, [])])
def test_what_is_withheld_falls_a_step_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defer: bool, fell: list[tuple[int, int]]
) -> None:
    watch = SimpleNamespace(step=0, close=lambda: None)

    def look() -> int:
        watch.step += 1
        return int(watch.step)

    watch.look = look
    monkeypatch.setattr(session, "StepWatch", lambda run_dir: watch)
    monkeypatch.setattr(session, "settled", lambda run_dir, settle_s: True)
    monkeypatch.setattr("relax_rt.supervision.control.find_run", lambda run_dir: SimpleNamespace(alive=True))
    injector: Any = Injector(watch)
    strikes = [Strike(number=n, fault="kill", slot="a/0", at_step=s) for n, s in ((1, 2), (2, 3))]
    done = session.play(tmp_path, injector, strikes, defer=defer)
    assert {o.strike.number for o in done.outcomes if not o.withheld} == {n for n, _ in fell}
    assert done.left == 0 and (done.deferred > 0) == defer


class Away:
    """Its slots have no process for a while, or never again."""

    next_undo = None

    def __init__(self, tries: int, *, passing: bool = True) -> None:
        self.tries, self.passing = tries, passing
        self.told: list[tuple[str, str]] = []

    def undo(self, now: float) -> None: ...

    def strike(self, strike: Strike, *, put_off: bool = False) -> Outcome:
        self.tries -= 1
        away = self.tries >= 0
        if not (away and self.passing and put_off):
            self.told.append((strike.slot, "withheld" if away else "fell"))
        return Outcome(strike, "away" if away else "", passing=away and self.passing)


@pytest.mark.parametrize(
    ("injector", "defer", "told", "deferred"),
    [
        (Away(3), True, "fell", 1),
        (Away(3), False, "withheld", 0),
        (Away(10_000), True, "withheld", 1),
        (Away(3, passing=False), True, "withheld", 0),
    ],
)
def test_a_strike_by_time_that_finds_no_process_falls_once_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, injector: Any, defer: bool, told: str, deferred: int
) -> None:
    monkeypatch.setattr(session, "settled", lambda run_dir, settle_s: True)
    monkeypatch.setattr(session, "PUT_OFF_S", 0.01)
    monkeypatch.setattr(session, "PATIENCE_S", 0.2)
    monkeypatch.setattr("relax_rt.supervision.control.find_run", lambda run_dir: SimpleNamespace(alive=True))
    done = session.play(tmp_path, injector, [Strike(number=1, fault="kill", slot="a/0", at_s=0.02)], defer=defer)
    assert injector.told == [("a/0", told)]
    assert [bool(o.withheld) for o in done.outcomes] == [told == "withheld"], "one outcome a strike"
    assert (done.deferred, done.left) == (deferred, 0)
