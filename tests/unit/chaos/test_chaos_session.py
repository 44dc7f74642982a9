"""A session of harm, without a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_rt.chaos import session
from relax_rt.chaos.injector import Outcome
from relax_rt.chaos.schedule import Strike


class Injector:
    """Withholds what its slot has no process for: until step 4."""

    next_undo = None

    def __init__(self, watch: Any) -> None:
        self.watch, self.at = watch, list[tuple[int, int]]()

    def undo(self, now: float) -> None: ...

    def strike(self, strike: Strike) -> Outcome:
        self.at.append((strike.number, self.watch.step))
        return Outcome(strike, "no process lives in it now" if self.watch.step < 4 else "")


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
