"""The figures of tools/bench/end_to_end.py, of records made up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "bench"))

import end_to_end
from end_to_end import Trial, best_of_trl, generated, last_common, plain_figures, table, time_to

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
    assert found["held-out exact, step 5"]["ours"] == 0.4


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
    assert {name for name, row in found.items() if not row["holds"]} == missed


def test_fewer_learned_from_as_many_samples_is_a_goal_missed() -> None:
    assert rows((PLAIN, peer(2.0, exact=0.47)))["held-out exact, step 5"]["holds"], "ours is 0.4"
    assert not rows((PLAIN, peer(2.0, exact=0.49)))["held-out exact, step 5"]["holds"]


def test_a_target_that_is_not_reached() -> None:
    found = rows((PLAIN, peer(2.0, exact=0.2)), ours=system(exact=0.1))
    row = found["time to 30% held-out"]
    assert (row["ours"], row["peers"]) == (None, {PLAIN: None})
    assert not rows((PLAIN, peer(2.0)), ours=system(exact=0.1))["time to 30% held-out"]["holds"]
    assert "time to 30% held-out" not in rows((PLAIN, peer(2.0)), target=None)


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
