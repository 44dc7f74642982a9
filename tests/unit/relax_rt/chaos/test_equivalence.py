"""Equivalence of two ways of running: what is the same passes, a shift is found, too little shows nothing."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[4] / "tools" / "soak"))

import equivalence
from equivalence_statistics import Conclusion, Interval, Pair, Score, conclude, interval

from relax_rt.chaos.evidence import Evidence

CONTROL = {"broken": interval([Pair(s, Score(600, 1000), Score(250 + s, 1000)) for s in range(4)])}


def made(
    dice: random.Random, shift: float, *, seeds: int = 4, items: int = 1000, spread: float = 0.02
) -> Interval | None:
    """Runs whose true accuracy is 0.6 and 0.6 + shift, each with a spread of its own."""

    def run(mean: float) -> Score:
        share = dice.gauss(mean, spread)
        return Score(sum(dice.random() < share for _ in range(items)), items)

    return interval([Pair(seed, run(0.6), run(0.6 + shift)) for seed in range(seeds)])


def verdicts(shift: float, times: int = 60, **how: Any) -> Counter[str]:
    dice = random.Random(f"{shift} {how}")
    return Counter(conclude(made(dice, shift, **how), CONTROL).verdict for _ in range(times))


def test_equal_data_pass() -> None:
    same = [Pair(seed, Score(600, 1000), Score(600, 1000)) for seed in range(4)]
    assert conclude(interval(same), CONTROL) == Conclusion("equivalent", [])
    assert verdicts(0.0)["equivalent"] > 45


def test_a_shift_at_the_margin_is_seldom_called_equivalent() -> None:
    """The promise of the 90% interval: in at most 5 of 100 cases; and a clear one never."""
    assert verdicts(-0.08, 200)["equivalent"] <= 20
    assert verdicts(-0.2)["equivalent"] == 0


def test_a_known_shift_is_found() -> None:
    found = made(random.Random(5), -0.3)
    assert found is not None and found.apart and found.low < -0.3 < found.high
    (reason,) = conclude(found, CONTROL).reasons
    assert "a DIFFERENCE is shown" in reason


@pytest.mark.parametrize(
    ("seeds", "items", "reason"),
    [
        (4, 499, "under chaos: 499 items, at least 500 are wanted"),
        (2, 1000, "under chaos: 2 seeds, at least 3 are wanted"),
        (1, 1000, "under chaos: too few runs for an interval"),
    ],
)
def test_too_little_shows_nothing(seeds: int, items: int, reason: str) -> None:
    same = [Pair(seed, Score(items // 2, items), Score(items // 2, items)) for seed in range(seeds)]
    assert conclude(interval(same), CONTROL) == Conclusion("not shown", [reason])


def test_differences_that_agree_by_luck_do_not_narrow_the_interval_below_the_items() -> None:
    found = interval([Pair(seed, Score(300, 500), Score(300, 500)) for seed in range(3)])
    assert found is not None and found.seeds_se == 0.0
    assert found.items_se == pytest.approx((2 * 0.24 / 500 / 3) ** 0.5, rel=0.01)
    assert found.high == pytest.approx(2.92 * found.items_se)
    assert interval([Pair(s, Score(500, 500), Score(500, 500)) for s in range(3)]).high > 0  # type: ignore[union-attr]


def test_the_spread_over_the_seeds_widens_it() -> None:
    found = interval([Pair(n, Score(600, 1000), Score(600 + d, 1000)) for n, d in enumerate((-100, 0, 100))])
    assert found is not None and found.mean == 0.0
    assert found.high == pytest.approx(2.92 * 0.1 / 3**0.5) and not found.inside and not found.apart


def test_a_control_that_is_not_distinguished_spoils_the_verdict() -> None:
    same = interval([Pair(seed, Score(600, 1000), Score(600, 1000)) for seed in range(4)])
    assert conclude(same, {}).reasons == ["there is no negative control"]
    assert "not told apart" in conclude(same, {"broken": same}).reasons[0]
    assert conclude(same, {"broken": None}).verdict == "not shown"
    assert conclude(same, CONTROL, ["seed 1: it failed"]) == Conclusion("not shown", ["seed 1: it failed"])


def test_more_seeds_than_quantiles_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 20"):
        interval([Pair(seed, Score(1, 2), Score(1, 2)) for seed in range(21)])


def evidence(kills: dict[str, int], *, status: str = "finished") -> Evidence:
    events = [{"kind": "slot_spawned", "slot": f"{role}/0", "m": 0.0} for role in ("queue", "trainer")]
    events += [
        {"kind": "fault_injected", "name": "kill", "slot": f"{role}/0", "number": n, "m": 1.0, "pid": n}
        for role, count in kills.items()
        for n in range(count)
    ]
    steps = [{"step": step, "m": float(m)} for m, step in enumerate((1, 2, 3, 2, 3, 4))]
    evaluations = [
        {"when": "before", "step": 0, "items": 1000, "exact": 0.25},
        {"when": "during", "step": 2, "items": 1000, "exact": 0.4},
        {"when": "after", "step": 4, "items": 1000, "exact": 0.6},
    ]
    return Evidence(
        events=events, steps=steps, produced=[], evaluations=evaluations, writes=[], ended=True, status=status, target=4
    )


def test_what_a_run_says_is_used_and_what_it_was_not_is_reported() -> None:
    ran = equivalence.Ran(seed=1, arm=equivalence.CHAOS)
    equivalence.take(ran, evidence({"queue": 2, "trainer": 2}))
    assert (ran.before, ran.half, ran.after) == (Score(250, 1000), Score(400, 1000), Score(600, 1000))
    assert (ran.steps, ran.redone, ran.kills, ran.problems) == (4, 2, {"queue": 2, "trainer": 2}, [])
    seldom = equivalence.Ran(seed=1, arm=equivalence.CHAOS)
    equivalence.take(seldom, evidence({"queue": 2}))
    assert seldom.problems == ["not every kind of role was killed twice: trainer 0"]
    harmed = equivalence.Ran(seed=1, arm=equivalence.UNDISTURBED)
    equivalence.take(harmed, evidence({"queue": 1}, status="failed"))
    assert len(harmed.problems) == 2


def test_runs_are_paired_by_seed_and_half_of_the_steps_is_a_control() -> None:
    ran = [
        equivalence.Ran(seed=seed, arm=arm, half=Score(400, 1000), after=Score(right, 1000))
        for seed in (1, 2, 3)
        for arm, right in ((equivalence.UNDISTURBED, 600), (equivalence.CHAOS, 610), (equivalence.BY_LOT, 250))
    ]
    ran[0].after = None
    found = {name: (one.seeds, one.mean) for name, one in equivalence.compare(ran).items() if one is not None}
    assert found == {
        equivalence.CHAOS: (2, pytest.approx(0.01)),
        equivalence.BY_LOT: (2, pytest.approx(-0.35)),
        equivalence.HALF: (2, pytest.approx(-0.2)),
    }


def test_the_schedule_reaches_every_kind_again_and_again() -> None:
    slots = [f"{role}/0" for role in ("registry", "queue", "reward", "rollout", "trainer", "evaluator")]
    strikes = list(equivalence.schedule(3, 5.0, slots))
    assert [s.number for s in strikes] == list(range(1, len(strikes) + 1))
    assert [s.at_s for s in strikes] == sorted(s.at_s for s in strikes)
    first = Counter(s.slot for s in strikes if s.at_s < 90.0)
    assert set(first) == set(slots) and min(first.values()) >= 2
