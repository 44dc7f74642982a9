"""A run with a cold start is evaluated between it and RL as well, once."""

from __future__ import annotations

from relax_rt.roles.evaluation.sets import AFTER_COLD_START, MAIN, EvaluationSchedule, SetSpec

SPEC = SetSpec(
    name=MAIN,
    table=None,
    items=4,
    during_items=2,
    samples=1,
    ks=(1,),
    greedy=False,
    temperature=1.0,
    max_new_tokens=8,
    every_steps=2,
    at_steps=(),
)


def walk(schedule: EvaluationSchedule, versions: list[tuple[int, int]]) -> list[str]:
    """What is evaluated when these versions (step, number) come."""
    found = []
    for step, version in versions:
        if when := schedule.when(step, version):
            schedule.record({"when": when, "step": step})
            found.append(when)
    return found


def test_the_weights_after_it_are_evaluated_once() -> None:
    # The model as it is, then the cold start's, published twice because the trainer died; then RL's.
    versions = [(0, 0), (0, 1), (0, 2), (1, 3), (2, 4), (4, 5)]
    schedule = EvaluationSchedule(SPEC, 4, cold_start=True)
    assert walk(schedule, versions) == ["before", AFTER_COLD_START, "during", "after"]
    assert SPEC.count(AFTER_COLD_START) == 4
    assert walk(EvaluationSchedule(SPEC, 4), versions) == ["before", "during", "after"]


def test_an_evaluator_that_comes_back_does_not_do_it_again() -> None:
    schedule = EvaluationSchedule(SPEC, 4, cold_start=True)
    for when in ("before", AFTER_COLD_START):
        schedule.record({"when": when, "step": 0})
    assert walk(schedule, [(0, 2), (2, 3)]) == ["during"]


def test_one_that_was_busy_leaves_it_out() -> None:
    assert walk(EvaluationSchedule(SPEC, 4, cold_start=True), [(0, 0), (3, 4), (4, 5)]) == ["before", "during", "after"]
