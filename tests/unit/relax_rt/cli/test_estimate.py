"""The time left by recorded steps: those of two real runs, and what restarts, pauses and resumes make of such."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from relax_rt.cli.time_left import SETTLED, WINDOW, Estimate, Estimator
from relax_rt.config.job import Pacing

PACING = Pacing("wait_s", ("train_s", "publish_s"), 1, ("evaluation", "evaluation_set"))
Record = dict[str, object]
Row = tuple[float, float, float]
"""When a step was done, what it waited, what it worked; all s."""

SLOW: Sequence[Row] = (
    *((24.04, 11.68, 12.35), (27.98, 0.0, 3.92), (46.06, 4.79, 13.28), (69.15, 0.01, 23.07), (82.26, 0.0, 13.1)),
    *((94.03, 0.01, 11.76), (110.89, 0.01, 16.84), (123.65, 0.0, 12.76), (136.29, 0.0, 12.63), (148.48, 0.01, 12.17)),
    *((168.42, 0.0, 18.82), (179.02, 0.01, 10.58), (189.3, 0.0, 10.27), (199.98, 0.0, 10.67), (210.17, 0.01, 10.17)),
    *((218.73, 0.01, 8.54), (229.0, 0.02, 10.24), (236.71, 0.0, 7.69), (250.2, 0.0, 13.48), (265.6, 0.01, 15.38)),
    *((284.25, 0.01, 17.88), (295.75, 0.01, 11.49), (304.36, 0.0, 8.6), (310.2, 0.0, 5.84)),
)
"""SmolLM2 (135 M) on two cores that other work shared, evaluated before, after, and at steps 10 and 20."""
SLOW_END, SLOW_BEFORE = 318.8, 15.146


def step(n: int, m: float, wait: float = 0.0, work: float = 0.0, by: str = "trainer/0#6", t0: float = 1e9) -> Record:
    times = {"t": t0 + m, "m": m, "wait_s": wait, "train_s": work, "publish_s": 0.0}
    return {"kind": "step", "by": by, "step": n, **times}


def evaluated(
    seconds: float, when: str = "before", kind: str = "evaluation", name: str = "held_out", m: float = 0.0
) -> Record:
    about = {"kind": kind, "by": "evaluator/0#7", "when": when, "set": name, "step": 0}
    return {**about, "seconds": seconds, "t": 1e9 + m}


def fed(records: Iterable[Record], steps: int, pacing: Pacing = PACING) -> Estimator:
    estimator = Estimator(steps, pacing)
    for record in records:
        estimator.update(record)
    return estimator


def at(estimator: Estimator, m: float) -> Estimate:
    return estimator.estimate(1e9 + m)


def left(estimator: Estimator, m: float) -> float:
    found = at(estimator, m).left_s
    assert found is not None
    return found


def bursts(steps: int, ahead: int, seconds: float) -> list[Record]:
    """Rollouts that take `seconds` a batch and finish ahead + 1 of them together; the trainer takes no time."""
    each = ahead + 1
    return [
        step(n, seconds * each * (1 + (n - 1) // each), wait=0.0 if n % each != 1 else seconds * each)
        for n in range(1, steps + 1)
    ]


@pytest.mark.parametrize("done", [1, 2, 3, 4, 5, 7, 9, 10])
def test_a_real_run_is_foretold_within_30_percent_from_its_first_step_on(done: int) -> None:
    records = [evaluated(SLOW_BEFORE), *(step(n, *row) for n, row in enumerate(SLOW, 1))]
    estimator = fed(records[: done + 1], len(SLOW))
    now = SLOW[done - 1][0]
    assert left(estimator, now) == pytest.approx(SLOW_END - now, rel=0.3)


@pytest.mark.parametrize("done", [5, 6, 7, 9])
def test_steps_beside_the_evaluation_before_training_do_not_count_as_the_pace(done: int) -> None:
    """SmolLM2 (135 M) on two quiet cores: an evaluation of 34 s ends within step 6, then a step takes 4.2 s."""
    times = (13.7, 17.5, 25.4, 32.2, 38.5, 43.7, 47.9, 52.1, 56.3)
    records = [step(n, m, 5.1 if n == 1 else 0.0, 8.6 if n == 1 else 4.0) for n, m in enumerate(times, 1)]
    records.insert(5, evaluated(34.0, m=42.7))
    truly = 4.2 * (130 - done)
    shared = Pacing("wait_s", ("train_s", "publish_s"), 1, ("evaluation", "evaluation_set"), contention=1.5)
    now = times[done - 1]
    assert left(fed(records[: done + (done > 5)], 130, shared), now) == pytest.approx(truly + 17.0, rel=0.15)
    assert left(fed(records[:5], 130), times[4]) > 1.3 * (4.2 * 125 + 17.0), "without it the time left is too long"


@pytest.mark.parametrize("done", [5, 6, 7, 8, 9])
def test_a_run_whose_first_steps_are_slower_is_foretold_within_30_percent_from_its_fifth_step_on(done: int) -> None:
    """The quickstart's 150 steps in bfloat16 on two quiet cores: 3.1 s a step in the mean, over at 489.1 s."""
    times = (8.7, 12.0, 19.4, 24.9, 29.4, 33.3, 37.0, 40.5, 44.0)
    records = [step(n, m, 2.9 if n == 1 else 0.0, 5.8 if n == 1 else 3.5) for n, m in enumerate(times, 1)]
    records.insert(2, evaluated(14.2, m=18.9))
    shared = Pacing("wait_s", ("train_s", "publish_s"), 1, ("evaluation", "evaluation_set"), contention=1.5)
    now = times[done - 1]
    assert left(fed(records[: done + 1], 150, shared), now) == pytest.approx(489.1 - now, rel=0.3)


def test_an_evaluation_whose_record_was_not_read_is_not_taken_to_run_for_ever() -> None:
    """Only the beginning and the end of long metrics files are read."""
    shared = Pacing("wait_s", ("train_s",), 1, ("evaluation",), contention=2.0)
    records = [step(n, 4.0 * n, work=4.0) for n in range(1, 2 * WINDOW)]
    assert at(fed(records[:5], 200, shared), 20.0).step_s == pytest.approx(2.0)
    assert at(fed(records, 200, shared), 4.0 * len(records)).step_s == pytest.approx(4.0)


def test_before_the_first_step_nothing_is_made_up() -> None:
    found = at(fed([evaluated(9.0)], 10), 5.0)
    assert (found.step_s, found.left_s) == (None, None) and "measured on the first step" in str(found)


def test_records_that_do_not_name_their_writer_begin_with_a_first_step_too() -> None:
    """The monotonic clock counts from the start of the machine, which says nothing of the first step."""
    records = [{key: value for key, value in step(n, 5e4 + 2.0 * n).items() if key != "by"} for n in (1, 2, 3)]
    assert at(fed(records[:1], 10, Pacing()), 5e4 + 2.0).step_s is None
    assert at(fed(records, 10, Pacing()), 5e4 + 6.0).step_s == pytest.approx(2.0)


def test_a_first_step_that_warms_up_counts_no_more_than_the_slowest_other() -> None:
    """As with a compiler: 100 s, then 5 s each."""
    records = [step(n, 100.0 + 5.0 * (n - 1), work=100.0 if n == 1 else 5.0) for n in range(1, 7)]
    assert left(fed(records[:5], 50), 120.0) == pytest.approx(45 * 5.0, rel=0.3)
    assert "a first guess" in str(at(fed(records[:1], 50), 100.0))


@pytest.mark.parametrize("ahead", [1, 2, 4, 8])
def test_steps_that_come_in_bursts_are_not_taken_for_fast_ones(ahead: int) -> None:
    """Where the samples of several steps are made at once, some steps take no time."""
    pacing = Pacing("wait_s", ("train_s",), ahead)
    records = bursts(200, ahead, 2.0)
    for done in (1, 5, 12, 60):
        estimator = fed(records[:done], 200, pacing)
        now = float(str(records[done - 1]["m"]))
        assert left(estimator, now) == pytest.approx((200 - done) * 2.0, rel=0.35)


def test_input_and_work_that_take_turns_add_up() -> None:
    records = [step(1, 9.0, wait=6.0, work=3.0)]
    assert at(fed(records, 10, Pacing("wait_s", ("train_s",))), 9.0).step_s == pytest.approx(9.0)
    assert at(fed(records, 10, PACING), 9.0).step_s == pytest.approx(3.0)


def test_pauses_for_checkpoints_and_evaluations_are_part_of_the_pace() -> None:
    m, records = 0.0, []
    for n in range(1, 31):
        m += 2.0 + (8.0 if n % 5 == 0 else 0.0)
        records.append(step(n, m, work=2.0))
    assert at(fed(records, 60), m).step_s == pytest.approx(3.6, rel=0.1)


def test_the_time_that_a_restart_takes_is_no_step() -> None:
    """Killed after step 12 of 40, 90 s away, back from the checkpoint of step 10."""
    records = [step(n, 4.0 * n, work=4.0) for n in range(1, 13)]
    again = [step(n, 138.0 + 4.0 * (n - 10), work=30.0 if n == 11 else 4.0, by="trainer/0#9") for n in range(11, 20)]
    first = fed([*records, *again[:1]], 40)
    found = at(first, 142.0)
    assert found.step == 11 and found.step_s == pytest.approx(4.0) and found.left_s == pytest.approx(29 * 4.0)
    assert "before the restart" in str(found)
    later = at(fed([*records, *again], 40), 174.0)
    assert later.step_s == pytest.approx(4.0) and later.measured == len(again) - 1


def test_a_trainer_that_is_away_does_not_bring_the_end_nearer() -> None:
    estimator = fed((step(n, 4.0 * n, work=4.0) for n in range(1, 6)), 15)
    assert left(estimator, 22.0) == pytest.approx(38.0)
    assert left(estimator, 500.0) == left(estimator, 24.0) == pytest.approx(36.0)


def test_a_resumed_run_begins_with_its_former_pace_and_drops_it_once_it_has_its_own() -> None:
    """On another machine, whose monotonic clock is another."""
    former = [step(n, 5000.0 + 20.0 * n, work=20.0) for n in range(1, 31)]
    now = [step(n, 50.0 + 5.0 * (n - 30), work=5.0, by="trainer/0#21", t0=2e9) for n in range(31, 45)]
    assert at(fed(former, 60), 5600.0).step_s == pytest.approx(20.0)
    first = fed([*former, now[0]], 60).estimate(2e9 + 55.0)
    assert first.step_s == pytest.approx(20.0) and first.measured == 0
    settled = fed([*former, *now[: SETTLED + 1]], 60).estimate(2e9 + 70.0)
    assert settled.step_s == pytest.approx(5.0) and settled.measured == SETTLED


def test_a_pace_that_changes_is_followed() -> None:
    m, records = 0.0, []
    for n in range(1, 2 * WINDOW + 2):
        m += 10.0 if n <= WINDOW else 1.0
        records.append(step(n, m))
    assert at(fed(records, 1000), m).step_s == pytest.approx(1.0, rel=0.2)


def test_what_was_evaluated_before_is_evaluated_after() -> None:
    records = [evaluated(30.0), evaluated(12.0, kind="evaluation_set", name="hard"), evaluated(5.0, "during")]
    estimator = fed([*records, *(step(n, 2.0 * n, work=2.0) for n in range(1, 5))], 4)
    assert left(estimator, 8.0) == pytest.approx(42.0) and left(estimator, 18.0) == pytest.approx(32.0)
    assert left(estimator, 100.0) == 0.0
    assert "after the last step" in str(at(estimator, 8.0))


def test_steps_whose_records_were_not_seen_are_counted_by_their_numbers() -> None:
    records = [step(n, 3.0 * n, work=3.0) for n in (1, 2, 6, 10)]
    assert at(fed(records, 20), 30.0).step_s == pytest.approx(3.0)


@pytest.mark.parametrize(
    "odd",
    [
        {"kind": "step", "step": "7"},
        {"kind": "step", "step": None, "t": 1.0},
        {"kind": "step", "by": None, "step": 3, "t": None, "m": None, "train_s": None},
        {"kind": "evaluation", "when": "before", "seconds": None},
        {"step": 9},
        {},
    ],
)
def test_records_that_lack_something_break_nothing(odd: Record) -> None:
    estimator = fed([odd, step(1, 2.0, work=2.0), step(2, 4.0, work=2.0), odd], 10)
    estimator.estimate(1e9)
