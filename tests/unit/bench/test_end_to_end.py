"""The figures of tools/bench/end_to_end.py, of records made up."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "bench"))

import end_to_end
from end_to_end import (
    all_hold,
    best_of_trl,
    generated,
    judged,
    last_common,
    missing_of,
    plain_figures,
    show,
    table,
    time_to,
)
from end_to_end_runs import Trial

Records = list[dict[str, Any]]
PLAIN, TRL = "plain, 1 thread", "TRL, bfloat16, 2 threads"


def system(step_s: float = 2.0, exact: float = 0.4) -> Records:
    """Ten steps of 8 samples and 40 tokens each; two rollouts that sample 30 tokens a second each."""
    records: Records = []
    for step in range(1, 11):
        t = step * step_s
        records.append({"kind": "step", "step": step, "t": t, "elapsed_s": t, "tokens": 40, "keys": ["k"] * 8})
        records += [{"kind": "rollout", "by": by, "t": t, "tokens": 30 * t} for by in ("rollout/0#1", "rollout/1#2")]
    return [
        *records,
        {"kind": "evaluation", "step": 5, "exact": exact},
        {"kind": "evaluation", "step": 0, "exact": 0.0},
    ]


def peer(step_s: float, exact: float = 0.4) -> Records:
    """Ten steps of one process, the first three slower."""
    spent, records = 0.0, Records()
    for step in range(1, 11):
        seconds = step_s * (5 if step <= 3 else 1)
        spent += seconds
        records.append({"kind": "step", "step": step, "step_s": seconds, "tokens": 40, "elapsed_s": spent})
        if step == 5:
            records.append({"kind": "evaluation", "step": 5, "exact": exact})
    return records


def rows(*peers: tuple[str, Records], ours: Records | None = None, target: float | None = 0.3) -> dict[str, Any]:
    return {row["name"]: row for row in table(ours or system(), dict(peers), target)}


def test_rates_are_of_the_steps_after_the_first() -> None:
    found = rows((PLAIN, peer(2.0)), (TRL, peer(20.0)))
    assert (found["step, median"]["ours"], found["step, median"]["peers"]) == (2.0, {PLAIN: 2.0, TRL: 20.0})
    assert found["tokens trained"]["ours"] == found["tokens trained"]["peers"][PLAIN] == 20.0
    assert found["samples trained"]["ours"] == found["samples trained"]["peers"][PLAIN] == 4.0
    assert found["samples trained"]["peers"][TRL] == pytest.approx(0.4)
    assert found["tokens generated"]["ours"] == pytest.approx(60.0)
    assert found["time to 30% held-out"]["ours"] == 10.0 and found["time to 30% held-out"]["peers"][TRL] == 340.0
    assert found["one seed, exact after step 5"]["ours"] == 0.4


@pytest.mark.parametrize(
    ("plain_s", "trl_s", "missed"),
    [
        (2.0, 20.0, set()),
        (1.8, 20.0, {"samples trained"}),
        (2.0, 2.0, {"time to 30% held-out"}),
        (0.1, 20.0, {"samples trained", "time to 30% held-out"}),
    ],
)
def test_goals(plain_s: float, trl_s: float, missed: set[str]) -> None:
    found = rows((PLAIN, peer(plain_s)), (TRL, peer(trl_s)))
    assert {name for name, row in found.items() if row["holds"] is False} == missed
    assert {name for name, row in found.items() if row["goal"]} == {"samples trained", "time to 30% held-out"}
    assert all_hold(list(found.values())) is (not missed)


TIME = "time to 30% held-out"
NO_TRL = "at most 0.25 of TRL: TRL was not measured"


@pytest.mark.parametrize(
    ("ours", "plain", "trl", "holds", "words"),
    [
        (0.4, 0.4, 0.4, True, f"   at most 1 of {PLAIN}; at most 0.25 of {TRL}: yes"),
        # A peer that never comes there sets no bound, also where ours does not come there either.
        (0.4, 0.4, 0.2, None, f"   NOT SHOWN: at most 0.25 of {TRL}: {TRL} did not reach it"),
        (0.4, 0.2, 0.4, None, f"   NOT SHOWN: at most 1 of {PLAIN}: {PLAIN} did not reach it"),
        (0.1, 0.2, 0.2, None, f"NOT SHOWN: at most 0.25 of {TRL}: {TRL} did not reach it"),
        (0.4, 0.4, None, None, f"   NOT SHOWN: {NO_TRL}"),
        # Ours does not come where a peer does: that is missed, whatever else is not shown.
        (0.1, 0.4, 0.4, False, f"   MISSED: at most 1 of {PLAIN}   MISSED: at most 0.25 of {TRL}"),
        (0.1, 0.4, None, False, f"   MISSED: at most 1 of {PLAIN}   NOT SHOWN: {NO_TRL}"),
    ],
)
def test_what_was_not_measured_or_not_reached_is_not_shown(
    ours: float, plain: float, trl: float | None, holds: bool | None, words: str
) -> None:
    others = ("TRL", Records()) if trl is None else (TRL, peer(20.0, exact=trl))
    found = rows((PLAIN, peer(2.0, exact=plain)), others, ours=system(exact=ours))
    row = found[TIME]
    assert row["holds"] is holds and judged(row).endswith(words), judged(row)
    assert all_hold(list(found.values())) is (holds is True)


def test_a_peer_that_is_missing_leaves_the_other_rows_alone(capsys: pytest.CaptureFixture[str]) -> None:
    peers = {PLAIN: peer(2.0), "TRL": Records()}
    found = table(system(), peers, 0.3)
    assert missing_of(peers) == {"TRL"}
    show(found, missing_of(peers))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(found) and all("not measured" in line for line in lines[1:])
    by = {row["name"]: row for row in found}
    assert by["samples trained"]["holds"] is True and by["samples trained"]["peers"] == {PLAIN: 4.0, "TRL": None}
    assert by["one seed, exact after step 5"]["peers"] == {PLAIN: 0.4, "TRL": None}


def test_accuracy_of_one_seed_is_no_goal() -> None:
    row = rows((PLAIN, peer(2.0, exact=0.9)))["one seed, exact after step 5"]
    assert (row["goal"], row["holds"], judged(row)) == (None, None, "")


def test_without_a_goal_nothing_is_shown() -> None:
    assert not all_hold([row for row in rows((PLAIN, peer(2.0))).values() if row["goal"] is None])
    assert TIME not in rows((PLAIN, peer(2.0)), target=None)


@pytest.mark.parametrize(
    ("plain_s", "trl", "quick", "status"),
    [(2.0, True, False, 0), (1.8, True, False, 1), (2.0, False, False, 1), (2.0, False, True, 0), (1.8, True, True, 1)],
)
def test_the_exit_status_tells_what_is_missed_or_not_shown(
    plain_s: float, trl: bool, quick: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(end_to_end, "run_system", lambda *given: asked.append(given[-1]) or system())
    monkeypatch.setattr(end_to_end, "run_plain", lambda *_: peer(plain_s))
    monkeypatch.setattr(end_to_end, "run_trl", lambda *_: peer(20.0) if trl else [])
    monkeypatch.setattr(end_to_end, "write_job", lambda *_: None)
    options = argparse.Namespace(quick=quick, target=0.3, json=True, max_staleness=None)
    assert end_to_end.compare(options) == status
    options.max_staleness = "0"
    assert end_to_end.compare(options) == status
    assert asked == [{}, {"algorithm.max_staleness": 0}]


def test_time_is_that_of_the_weights() -> None:
    assert time_to(peer(1.0), 0.4) == 17.0 and time_to(peer(1.0), 0.5) is None


def test_the_step_at_which_all_were_evaluated() -> None:
    at = [[{"kind": "evaluation", "step": step} for step in steps] for steps in ((0, 10, 20), (0, 10), (0, 10, 30))]
    assert last_common(at) == 10 and last_common([at[0], [{"kind": "evaluation", "step": 5}]]) == 0


def test_generation_is_counted_between_two_times() -> None:
    assert generated(system(), 0.0, 3.0) == 0.0, "one record of each shows no rate"
    assert generated(system(), 3.0, 9.0) == pytest.approx(60.0)


def test_few_steps_lose_one_only() -> None:
    assert plain_figures(peer(1.0)[:4], 8)["step_s"] == 5.0


@pytest.mark.parametrize("quick", [True, False])
def test_trl_runs_in_the_best_of_its_settings(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Trial] = []

    def run_trl(job: Path, trial: Trial, *_: Any) -> Records:
        tried.append(trial)
        dtype, threads, micro_batch = trial
        if dtype == "bfloat16" and threads == 1:
            return []  # it failed
        seconds = (10.0 if dtype == "float32" else 20.0) + (0.0 if threads == 2 else 5.0) - micro_batch / 100
        return [{"kind": "step", "step_s": 99.0}, *[{"kind": "step", "step_s": seconds}] * 2]

    monkeypatch.setattr(end_to_end, "run_trl", run_trl)
    best, seen = best_of_trl(Path("job"), quick=quick)
    assert best == ("float32", 2, 16 if quick else 96)
    assert len(tried) == (2 if quick else 7) and len(seen) == (2 if quick else 6)
    monkeypatch.setattr(end_to_end, "run_trl", lambda *_: [])
    assert best_of_trl(Path("job"), quick=quick) == (None, {})
