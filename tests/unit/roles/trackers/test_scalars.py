"""What of a metrics record is told to other tools, under which names and at which step."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from relax_rt.roles.trackers.feed import MAX_NUMBERS, Scalars

STEP = {
    "kind": "step",
    "t": 5.0,
    "m": 1.0,
    "by": "trainer/0#1",
    "step": 3,
    "epoch": 7,
    "reward_mean": 0.5,
    "loss": None,
    "changed": True,
    "skipped": "",
    "rewards": {"format": 0.1, "right": math.nan},
    "staleness": [0, 1, 1],
    "keys": ["1.0"],
    "versions": [[1, 2]],
}


def test_a_step_is_reported_by_its_numbers() -> None:
    point = Scalars().convert(STEP)
    assert point is not None and (point.step, point.t, point.redone) == (3, 5.0, False)
    assert point.values == {
        "train/reward_mean": 0.5,
        "train/changed": 1.0,
        "train/rewards/format": 0.1,
        "train/staleness_mean": 2 / 3,
        "train/staleness_max": 1.0,
    }


def test_each_kind_stands_under_its_own_name_at_the_step_the_run_is_at() -> None:
    scalars = Scalars()
    told = [
        {"kind": "evaluation", "set": "held_out", "when": "before", "step": 0, "exact": 0.25, "samples": 4},
        STEP,
        {"kind": "evaluation_set", "set": "hard", "step": 2, "pass_at": {"1": 0.5, "8": 0.75}},
        {"kind": "rollout", "slot": "rollout/1", "tokens_per_s": 100.0},
        {"kind": "queue", "by_state": {"ready": 3}, "outstanding": 2},
        {"kind": "publication", "version": 4, "seconds": 1.5},
    ]
    points = [scalars.convert(record) for record in told]
    assert [(p.step, p.values) for p in points if p] == [
        (0, {"held_out/exact": 0.25}),
        (3, points[1].values if points[1] else {}),
        (2, {"hard/pass_at/1": 0.5, "hard/pass_at/8": 0.75}),
        (3, {"rollout/1/tokens_per_s": 100.0}),
        (3, {"queue/by_state/ready": 3.0, "queue/outstanding": 2.0}),
        (3, {"publication/version": 4.0, "publication/seconds": 1.5}),
    ]


def test_records_without_numbers_are_not_reported() -> None:
    assert [Scalars().convert(r) for r in ({}, {"kind": "produced", "samples": [1]}, {"kind": "step", "step": 1})] == [
        None
    ] * 3


def test_a_trainer_that_went_back_says_so() -> None:
    scalars = Scalars(step=10)
    points = [scalars.convert({"kind": "step", "step": step, "loss": 1.0}) for step in (11, 12, 11, 12, 13)]
    assert [p.redone for p in points if p] == [False, False, True, False, False]


def test_a_record_of_very_many_numbers_is_cut() -> None:
    point = Scalars().convert({"kind": "step", "step": 1, "rewards": {f"r{i}": i for i in range(10_000)}})
    assert point is not None and len(point.values) == MAX_NUMBERS


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(10**30), 10**30) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@example({"kind": "step", "staleness": [math.inf, 1.7e308, 1.7e308]})
@given(st.dictionaries(st.sampled_from(["kind", "step", "t", "slot", "set", "staleness", "x"]), VALUES))
def test_no_record_is_too_odd(record: dict[str, Any]) -> None:
    point = Scalars().convert(record)
    assert point is None or all(math.isfinite(value) for value in point.values.values())
