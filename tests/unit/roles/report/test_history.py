from __future__ import annotations

import random
from pathlib import Path

import pytest
from synthetic_run import START, Writer, died, evaluation, make, step_record

from relax_rt.roles.report.history import History, read_history


def write_steps(run_dir: Path, steps: list[tuple[int, int]]) -> History:
    """Steps as (step, epoch) in the order written, 30 s apart."""
    out, rng = Writer(run_dir), random.Random(0)
    for i, (step, epoch) in enumerate(steps):
        out.metric("step", START + 30.0 * (i + 1), f"trainer/0#{epoch}", **step_record(step, epoch, 1 + 100 * i, rng))
    out.close()
    return read_history(run_dir)


def path_of(history: History) -> list[tuple[int, int]]:
    return [(step.step, step.epoch) for step in history.steps]


def test_the_highest_epoch_of_a_step_counts(tmp_path: Path) -> None:
    history = write_steps(tmp_path, [(1, 2), (2, 2), (3, 2), (2, 5), (3, 5), (4, 5)])
    assert path_of(history) == [(1, 2), (2, 5), (3, 5), (4, 5)]
    assert sorted((step.step, step.epoch) for step in history.redone) == [(2, 2), (3, 2)]


def test_steps_past_a_restart_that_were_not_reached_again_do_not_count(tmp_path: Path) -> None:
    history = write_steps(tmp_path, [(1, 2), (2, 2), (3, 2), (4, 2), (2, 5)])
    assert path_of(history) == [(1, 2), (2, 5)]
    assert len(history.redone) == 3


def test_a_dead_trainer_that_still_writes_changes_nothing(tmp_path: Path) -> None:
    history = write_steps(tmp_path, [(1, 2), (2, 2), (2, 5), (3, 2), (3, 5)])
    assert path_of(history) == [(1, 2), (2, 5), (3, 5)]


def test_two_restarts_in_a_row(tmp_path: Path) -> None:
    history = write_steps(tmp_path, [(1, 1), (2, 1), (3, 1), (2, 4), (1, 6), (2, 6)])
    assert path_of(history) == [(1, 6), (2, 6)]
    assert len(history.redone) == 4


def test_a_whole_run(tmp_path: Path) -> None:
    make(tmp_path, steps=60, crash_at=47, checkpoint=40)
    history = read_history(tmp_path)
    assert [step.step for step in history.steps] == list(range(1, 61))
    assert sorted(step.step for step in history.redone) == list(range(41, 48))
    restarts = history.restarts
    assert {role: r.count for role, r in restarts.items()} == {"rollout": 1, "trainer": 1}
    assert restarts["trainer"].causes == {"killed": 1}
    assert restarts["trainer"].away_s == pytest.approx(14.0)
    assert history.account is not None and history.account["trained_twice"] == 0
    # 60 + 7 steps, half of 15,000 tokens each for two rollouts, whoever died in between.
    assert history.generated_tokens == 67 * 15_000 and history.incomplete
    assert [life.failure for life in history.lives if life.slot == "trainer/0"] == ["killed", ""]
    assert [e.when for e in history.evaluations] == ["before", "during", "during", "after"]


def test_the_time_between_two_sessions_does_not_count(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    out.event("run_started", START)
    out.event("slot_spawned", START + 1, slot="trainer/0", epoch=1, pid=7)
    out.event("slot_ready", START + 2, slot="trainer/0", epoch=1)
    out.metric("evaluation", START + 100, "evaluator/0#2", **evaluation("before", 0, 0.3))
    out.event("run_started", START + 10_000)
    out.event("slot_spawned", START + 10_001, slot="trainer/0", epoch=5, pid=8)
    out.event("slot_exited", START + 10_050, **died("trainer/0", 5, "killed", "SIGKILL", START + 10_050))
    out.close()
    history = read_history(tmp_path)
    assert history.wall_s == 150.0
    assert history.active(START + 100) == history.active(START + 9_000) == history.active(START + 10_000) == 100.0
    assert history.active(START + 10_050) == 150.0
    # The first trainer died with its agent, unseen: it lived no longer than that session.
    assert [(life.end, life.failure) for life in history.lives] == [(START + 100, ""), (START + 10_050, "killed")]


def test_a_slot_that_never_comes_back_is_away_to_the_end(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    out.event("run_started", START)
    for n in range(3):
        t = START + 10 + n
        out.event("slot_spawned", t, slot="reward/0", epoch=n, pid=9)
        out.event("slot_exited", t + 0.5, **died("reward/0", n, "exception" if n else "oom", "boom", t))
        out.event("slot_restarting", t + 0.5, slot="reward/0", epoch=n, wait_s=0.5, restarts=n + 1)
    out.event("run_done", START + 20, exit_code=1)
    out.close()
    restarts = read_history(tmp_path).restarts["reward"]
    assert (restarts.count, dict(restarts.causes)) == (3, {"oom": 1, "exception": 2})
    assert restarts.away_s == pytest.approx(9.5)


def test_nothing_at_all(tmp_path: Path) -> None:
    history = read_history(tmp_path)
    assert (history.steps, history.lives, history.wall_s, history.account) == ([], [], 0.0, None)


def test_torn_lines_and_missing_fields_are_lived_with(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    out.metric("step", START, "trainer/0#1", step=1, reward_mean=None, loss=None)
    out.metrics.write('{"kind": "step", "t": 17000\n')
    out.metric("evaluation", START + 1, "evaluator/0#1")
    out.event("slot_exited", START, slot="rollout/0")
    out.close()
    history = read_history(tmp_path)
    assert [step.step for step in history.steps] == [1]
    assert history.steps[0].reward != history.steps[0].reward


@pytest.mark.parametrize(
    ("slot", "end", "untold"),
    [
        ("rollout/0", "clean", False),
        ("rollout/0", "killed", True),
        ("rollout/0", "", True),
        ("trainer/0", "killed", False),
    ],
)
def test_who_generated_more_than_is_reported(tmp_path: Path, slot: str, end: str, untold: bool) -> None:
    out = Writer(tmp_path)
    out.event("run_started", START)
    out.event("slot_spawned", START + 1, slot=slot, epoch=3, pid=7)
    if end:
        out.event("slot_exited", START + 5, slot=slot, diagnosis={"kind": end, "cause": "x"})
    out.event("run_started", START + 9)
    out.close()
    assert read_history(tmp_path).incomplete is untold


def test_a_session_in_which_nothing_was_generated_makes_no_rate_lower(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    told = [(2, "a", 0), (7, "a", 500), (12, "a", 1000), (18, "a", 1000), (105, "b", 0), (125, "b", 0)]
    for start in (0, 100):
        out.event("run_started", START + start)
        out.event("slot_ready", START + start + 30, slot="rollout/0", epoch=1)
    for t, by, tokens in told:
        out.metric("rollout", START + t, by, tokens=tokens)
    out.close()
    history = read_history(tmp_path)
    assert (history.generated_tokens, history.generated_s) == (1000, 10.0)
