"""The verdict of tools/bench/convergence.py on runs made up, and its memory of finished ones."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "bench"))

import convergence
from convergence import ARMS, CONTROL, ON_POLICY, Ran, compare, judge, known, make, place, settings_of, take
from convergence_plot import at, smoothed
from equivalence_statistics import Score

OPTIONS = argparse.Namespace(steps=2, items=1000, at_most=None)
RIGHT = {ON_POLICY: 760, "max_staleness 1": 755, "max_staleness 4": 765, CONTROL: 400}


def runs(seeds: Sequence[int] = (1, 2, 3), items: int = 1000, **right: int) -> list[Ran]:
    """Runs with so many right answers; arms by the number in their name."""
    given = {arm: right.get(f"at_{arm.split()[-1]}", count) for arm, count in RIGHT.items()}
    return [
        Ran(seed=s, arm=arm, settings=settings_of(s, arm, OPTIONS), after=Score(min(items, count + 3 * s), items))
        for s in seeds
        for arm, count in given.items()
    ]


def verdict(found: Sequence[Ran]) -> tuple[str, str]:
    conclusion = judge(found, compare(found))
    return conclusion.verdict, "; ".join(conclusion.reasons)


def test_equal_arms_and_a_control_that_differs_are_equivalent() -> None:
    assert verdict(runs()) == ("equivalent", "")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (runs(at_4=640), r"max_staleness 4: .* is not inside ±0.08: a DIFFERENCE is shown"),
        (runs(at_1=640), r"max_staleness 1: .* a DIFFERENCE is shown"),
        ([one for one in runs() if one.arm != CONTROL], "32, uncorrected: too few runs"),
        (
            [*runs()[:-1], Ran(seed=3, arm=CONTROL, settings={}, after=Score(760, 1000))],
            "uncorrected: .* not told apart",
        ),
        (runs(seeds=(1, 2)), "2 seeds, at least 3 are wanted"),
        (runs(items=400), "400 items, at least 500 are wanted"),
    ],
)
def test_whatever_is_missing_is_not_shown_and_told(found: list[Ran], reason: str) -> None:
    said, reasons = verdict(found)
    assert said == "not shown" and re.search(reason, reasons), reasons


def test_a_run_that_was_not_what_it_was_to_be_spoils_the_verdict() -> None:
    found = runs()
    found[1].problems.append("it ended as 'failed' with 1 of 2 steps")
    assert verdict(found) == ("not shown", "seed 1, max_staleness 1: it ended as 'failed' with 1 of 2 steps")


def record(**fields: Any) -> dict[str, Any]:
    return {"kind": "step", "reward_mean": 0.5, "elapsed_s": 1.0, "staleness": [0, 1, 1], **fields}


def test_what_is_taken_from_a_run() -> None:
    ran = Ran(seed=1, arm="max_staleness 1", settings=settings_of(1, "max_staleness 1", OPTIONS))
    scores = [
        {"kind": "evaluation", "when": w, "exact": e, "items": 1000} for w, e in (("before", 0.3), ("after", 0.7))
    ]
    take(ran, [scores[0], record(), record(elapsed_s=2.5), scores[1], {"kind": "queue"}], "finished")
    assert (ran.before, ran.after) == (Score(300, 1000), Score(700, 1000))
    assert (ran.rewards, ran.seconds, ran.ages, ran.problems) == ([0.5, 0.5], [1.0, 2.5], {"0": 2, "1": 4}, [])


def test_samples_over_the_bound_and_missing_steps_are_problems() -> None:
    ran = Ran(seed=1, arm="max_staleness 1", settings=settings_of(1, "max_staleness 1", OPTIONS))
    take(ran, [record(staleness=[2])], "failed")
    assert ran.problems == ["it ended as 'failed' with 1 of 2 steps", "samples of staleness 2 were trained on"]


def test_finished_runs_are_taken_up_and_those_of_other_settings_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, str]] = []

    def carry_out(seed: int, arm: str, settings: dict[str, Any]) -> Ran:
        made.append((seed, arm))
        if (seed, arm) == (2, CONTROL) and len(made) <= 2 * len(ARMS):
            return Ran(seed=seed, arm=arm, settings=settings, problems=["it failed"])
        return Ran(seed=seed, arm=arm, settings=settings, after=Score(1, 1000))

    monkeypatch.setattr(convergence, "carry_out", carry_out)
    make(tmp_path, [1], OPTIONS)
    make(tmp_path, [1, 2], OPTIONS)
    assert made == [(seed, arm) for seed in (1, 2) for arm in ARMS]
    # What failed is not kept: it is made again, and nothing else is.
    again = make(tmp_path, [1, 2], OPTIONS)
    assert made[2 * len(ARMS) :] == [(2, CONTROL)]
    assert [one.problems for one in again] == [[]] * len(again)
    with pytest.raises(SystemExit, match="other settings"):
        known(tmp_path, 1, ON_POLICY, settings_of(1, ON_POLICY, argparse.Namespace(steps=3, items=1000)))
    place(tmp_path, 1, ON_POLICY).write_text("{")
    with pytest.raises(SystemExit, match="no finished run"):
        make(tmp_path, [1], OPTIONS)


def test_runs_can_be_made_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, str]] = []

    def carry_out(seed: int, arm: str, settings: dict[str, Any]) -> Ran:
        made.append((seed, arm))
        return Ran(seed=seed, arm=arm, settings=settings, after=Score(1, 1000))

    monkeypatch.setattr(convergence, "carry_out", carry_out)
    piece = argparse.Namespace(steps=2, items=1000, at_most=3)
    assert [len(make(tmp_path, [1, 2], piece)) for _ in range(4)] == [3, 6, 8, 8]
    assert made == [(seed, arm) for seed in (1, 2) for arm in ARMS]


def test_kept_runs_come_back_the_same(tmp_path: Path) -> None:
    (one, *_) = runs()
    place(tmp_path, 1, ON_POLICY).write_bytes(msgspec.json.encode(one))
    assert known(tmp_path, 1, ON_POLICY, one.settings) == one
    assert known(tmp_path, 2, ON_POLICY, one.settings) is None


def test_lines_of_the_picture() -> None:
    assert smoothed([1.0, 0.0, 2.0]) == [1.0, 0.5, 1.0]
    assert [at([1.0, 2.0], [5.0, 6.0], when) for when in (0.5, 1.0, 1.9, 2.0, 9.0)] == [5.0, 5.0, 5.0, 6.0, 6.0]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    found = runs()
    for one in found:
        one.rewards, one.seconds, one.ages = [0.1, 0.4], [1.0, 2.0 + one.seed], {"0": 3, "1": 1}
    convergence.plot(found, tmp_path / "x" / "picture.png")
    assert (tmp_path / "x" / "picture.png").read_bytes()[:4] == b"\x89PNG"
