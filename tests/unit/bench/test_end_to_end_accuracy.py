"""The verdict of end_to_end.py --accuracy on runs made up, what it takes from a plain process, and what it keeps."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "bench"))

import convergence
import end_to_end_accuracy
from convergence import Ran
from end_to_end_accuracy import (
    LATE,
    OURS,
    PLAIN,
    SOURCE,
    arms_of,
    carry_out,
    compare,
    main,
    refused,
    samples_of,
    settings_of,
    show,
    take_plain,
)
from equivalence_statistics import Score

ONE = f"{OURS}1"


def options(**others: Any) -> argparse.Namespace:
    given = {
        "seeds": "1,2,3",
        "steps": 4,
        "items": 700,
        "at_most": None,
        "threads": 1,
        "dtype": None,
        "max_staleness": "1",
        "late": False,
        "quick": False,
        "json": False,
        **others,
    }
    return argparse.Namespace(**given)


def runs(
    ours: int = 345, plain: int = 350, half: int = 150, *, items: int = 700, seeds: Sequence[int] = (1, 2, 3)
) -> list[Ran]:
    """Runs with so many right answers, a few more with each seed."""
    found = []
    for s in seeds:
        settings, ages = {arm: settings_of(s, arm, options(items=items)) for arm in (ONE, PLAIN)}, {"0": 200, "1": 184}
        after, middle = Score(min(items, plain + 3 * s), items), Score(half + 3 * s, items)
        found += [
            Ran(seed=s, arm=ONE, settings=settings[ONE], after=Score(min(items, ours + 3 * s), items), ages=ages),
            Ran(seed=s, arm=PLAIN, settings=settings[PLAIN], half=middle, after=after, ages={"0": 384}),
        ]
    return found


def verdict(found: Sequence[Ran]) -> tuple[str, str]:
    _, conclusion = compare(found)
    return conclusion.verdict, "; ".join(conclusion.reasons)


def test_as_much_learned_and_a_control_that_differs_are_equivalent() -> None:
    assert verdict(runs()) == ("equivalent", "")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (runs(ours=250), r"max_staleness 1: .* is not inside ±0.08: a DIFFERENCE is shown"),
        (runs(ours=450), r"max_staleness 1: .* a DIFFERENCE is shown"),
        (runs(half=340), "half of the steps: .* is not told apart"),
        (runs(seeds=(1, 2)), "max_staleness 1: 2 seeds, at least 3 are wanted"),
        (runs(seeds=(1,)), "max_staleness 1: too few runs"),
        (runs(items=400, ours=200, plain=200), "400 items, at least 500 are wanted"),
        ([one for one in runs() if one.arm == ONE], "max_staleness 1: too few runs"),
        ([one for one in runs() if (one.seed, one.arm) != (2, PLAIN)], "2 seeds, at least 3 are wanted"),
    ],
)
def test_whatever_is_missing_is_not_shown_and_told(found: list[Ran], reason: str) -> None:
    said, reasons = verdict(found)
    assert said == "not shown" and re.search(reason, reasons), reasons


def test_other_numbers_of_samples_and_failed_runs_spoil_the_verdict() -> None:
    found = runs()
    found[0].ages = {"0": 376}
    found[3].problems.append("the plain process failed with 1")
    assert verdict(found) == (
        "not shown",
        "seed 2, plain: the plain process failed with 1; seed 1, max_staleness 1: 376 samples, the plain process 384",
    )


def plain_records(steps: int = 4) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        found.append({"kind": "step", "step": step, "elapsed_s": 2.0 * step, "reward_mean": 0.5, "samples": 96})
        if step % 2 == 0:
            found.append({"kind": "evaluation", "step": step, "exact": step / 10, "items": 700})
    return found


def test_what_is_taken_from_the_plain_process() -> None:
    ran = Ran(seed=1, arm=PLAIN, settings=settings_of(1, PLAIN, options()))
    take_plain(ran, plain_records())
    assert (ran.half, ran.after, ran.problems) == (Score(140, 700), Score(280, 700), [])
    assert (samples_of(ran), ran.seconds) == (384, [2.0, 4.0, 6.0, 8.0])
    assert ran.ages == {"0": 384}
    late = Ran(seed=1, arm=LATE, settings=settings_of(1, LATE, options()))
    take_plain(late, plain_records())
    assert late.ages == {"0": 96, "1": 288}
    short = Ran(seed=1, arm=PLAIN, settings=settings_of(1, PLAIN, options()))
    take_plain(short, plain_records(3))
    assert short.problems == ["it ended after 3 of 4 steps, or was not evaluated"]


def test_both_are_given_the_same_seed_steps_and_items(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run_plain(*given: Any, late: bool) -> list[dict[str, Any]]:
        asked.append((*given, late))
        return plain_records()

    def run_system(seed: int, arm: str, settings: dict[str, Any], job: Path) -> Ran:
        asked.append((settings, job.name))
        return Ran(seed=seed, arm=arm, settings=settings)

    monkeypatch.setattr(end_to_end_accuracy, "run_plain", run_plain)
    monkeypatch.setattr(convergence, "carry_out", run_system)
    settings = {arm: settings_of(7, arm, options()) for arm in (f"{OURS}0", ONE, PLAIN, LATE)}
    for arm, own in settings.items():
        ran = carry_out(7, arm, own)
        assert (ran.problems, ran.arm) == ([], arm)
    assert {arm for arm, own in settings.items() if own.pop(SOURCE, None)} == {PLAIN, LATE}
    sets = {arm: [f"{key}={value}" for key, value in own.items()] for arm, own in settings.items()}
    assert asked == [
        (settings[f"{OURS}0"], "roles.toml"),
        (settings[ONE], "roles.toml"),
        (2, 4, 2, 2.0, 700, sets[PLAIN], False),
        (2, 4, 2, 2.0, 700, sets[LATE], True),
    ]
    assert [own.pop("algorithm.max_staleness") for own in settings.values()] == [0, 1, 0, 1]
    assert all(own == settings[PLAIN] for own in settings.values())
    assert (settings[ONE]["run.seed"], settings[ONE]["algorithm.steps"], settings[ONE]["evaluation.items"]) == (
        7,
        4,
        700,
    )


def test_each_value_is_judged_and_the_late_process_is_only_shown() -> None:
    found = runs()
    for one in runs(ours=345):
        if one.arm == ONE:
            found.append(Ran(seed=one.seed, arm=f"{OURS}0", settings=one.settings, after=one.after, ages=one.ages))
    for one in runs(plain=200):
        if one.arm == PLAIN:
            found.append(Ran(seed=one.seed, arm=LATE, settings=one.settings, after=one.after, ages={"1": 384}))
    intervals, conclusion = compare(found)
    assert conclusion.verdict == "equivalent" and list(intervals)[:3] == [f"{OURS}0", ONE, LATE]
    late = intervals[LATE]
    assert late is not None and not late.inside
    behind = [structs.replace(one, after=Score(200, 700)) if one.arm == ONE else one for one in found]
    said, reasons = verdict(behind)
    assert said == "not shown" and ONE in reasons and f"{OURS}0" not in reasons


def test_a_plain_run_of_other_code_is_not_taken(tmp_path: Path) -> None:
    settings = settings_of(1, PLAIN, options())
    ran = Ran(seed=1, arm=PLAIN, settings={**settings, SOURCE: "another"})
    convergence.place(tmp_path, 1, PLAIN).write_bytes(msgspec.json.encode(ran))
    with pytest.raises(SystemExit, match="other settings"):
        convergence.known(tmp_path, 1, PLAIN, settings)


def test_what_is_run_for_each_seed() -> None:
    assert arms_of(options(max_staleness="1,0", late=True)) == [f"{OURS}0", ONE, PLAIN, LATE]
    assert arms_of(options(max_staleness="0")) == [f"{OURS}0", PLAIN]


def test_a_plain_process_that_fails_is_a_problem_and_a_request_to_end_is_obeyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(code: Any) -> None:
        def run_plain(*_: Any, late: bool) -> Any:
            raise SystemExit(code)

        monkeypatch.setattr(end_to_end_accuracy, "run_plain", run_plain)

    fail("the plain process failed with 3")
    assert carry_out(1, PLAIN, settings_of(1, PLAIN, options())).problems == ["the plain process failed with 3"]
    fail(143)
    with pytest.raises(SystemExit):
        carry_out(1, PLAIN, settings_of(1, PLAIN, options()))


def test_runs_are_made_once_in_pieces_and_then_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[int, str]] = []
    ready = {(one.seed, one.arm): one for one in runs()}

    def carry(seed: int, arm: str, settings: dict[str, Any], threads: int) -> Ran:
        assert threads == 1
        made.append((seed, arm))
        return ready[seed, arm]

    monkeypatch.setattr(end_to_end_accuracy, "carry_out", carry)
    statuses = [main(options(accuracy=tmp_path, at_most=2)) for _ in range(4)]
    assert statuses == [1, 1, 0, 0]
    assert made == [(seed, arm) for seed in (1, 2, 3) for arm in (ONE, PLAIN)]
    assert capsys.readouterr().out.rstrip().endswith("verdict: equivalent")
    with pytest.raises(SystemExit, match="other settings"):
        main(options(accuracy=tmp_path, steps=6))


def test_the_tables_show_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = runs(seeds=(1,))
    show(found, *compare(found))
    text = capsys.readouterr().out
    assert re.search(r"1  plain .* 384 +- +0.219 +0.504", text) and "too few runs" in text


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"steps": 5}, "even"),
        ({"steps": 0}, "even"),
        ({"seeds": "1,x"}, "--seeds"),
        ({"seeds": ",".join(map(str, range(40)))}, "1 to"),
        ({"quick": True}, "--quick"),
        ({"max_staleness": "-1"}, "--max-staleness"),
        ({"max_staleness": "0,inf"}, "--max-staleness"),
    ],
)
def test_options_that_are_none(given: dict[str, Any], word: str) -> None:
    assert word in refused(options(**given)) and refused(options()) == ""
