"""Whole runs of the tiny job with a Megatron gang as the trainer, killed and divided anew."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tiny_run import TinyRun, steps_that_count

from relax_rt.roles.models.resolve import resolve_model

pytestmark = pytest.mark.engines

BATCH = 64
GANG = {
    "roles.trainer.backend": '"megatron"',
    "roles.trainer.count": 2,
    "roles.trainer.tensor_parallel": 2,
    "evaluation.items": 16,
}


@pytest.fixture(scope="module", autouse=True)
def tiny_model() -> None:
    """Converted once, outside any run's deadlines."""
    resolve_model("package:tiny", Path())


def check_account(run: TinyRun, steps: int) -> None:
    """Every step was taken once, and no sample twice."""
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, steps + 1))
    keys = [key for record in path.values() for key in record["keys"]]
    assert len(keys) == len(set(keys)) == steps * BATCH
    account = run.events("queue_account")[-1]
    assert (account["trained_twice"], account["freed"]) == (0, steps * BATCH)


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(runs: list[TinyRun], tmp_path: Path) -> None:
    steps = 60
    run = TinyRun(tmp_path / "run", **GANG, **{"algorithm.steps": steps, "checkpoint.every_steps": 5})
    runs.append(run.start())
    run.until("a checkpoint", lambda: run.events("checkpoint"))
    run_id = run.run_id()
    for victim in ("trainer/1", "trainer/0"):
        at = run.last_step()
        run.kill(victim)
        run.until("another step", lambda at=at: run.last_step() > at)
    assert run.last_step() < steps, "the kills came too late to matter"
    assert run.wait() == 0, run.text()
    check_account(run, steps)
    generations = [event["generation"] for event in run.events("gang_started")]
    assert generations == sorted(set(generations)) and len(generations) >= 3
    resumed = [event["step"] for event in run.events("resumed")]
    assert len(resumed) == 2 and all(step >= 5 and step % 5 == 0 for step in resumed)
    run.gone(run_id)


def test_a_run_goes_on_with_another_division(runs: list[TinyRun], tmp_path: Path) -> None:
    steps = 60
    run = TinyRun(tmp_path / "run", **GANG, **{"algorithm.steps": steps, "checkpoint.every_steps": 50})
    runs.append(run.start())
    run.until("some steps", lambda: run.last_step() >= 3)
    # An orderly end: the trainer writes a last checkpoint, then all ranks end.
    run.process.send_signal(signal.SIGINT)
    run.wait()
    saved = [event["step"] for event in run.events("checkpoint")][-1]
    assert 3 <= saved < steps
    assert len(list((run.run_dir / "checkpoints" / f"step-{saved:06d}").glob("optimizer-*"))) == 2
    ends = [e["diagnosis"] for e in run.events("slot_exited") if e["slot"].startswith("trainer/")]
    assert len(ends) == 2 and all(end["exit_code"] == 0 for end in ends), ends
    run.overrides |= {"roles.trainer.count": 1, "roles.trainer.tensor_parallel": 1}
    run.start()
    assert run.wait() == 0, run.text()
    assert [event["step"] for event in run.events("resumed")] == [saved]
    check_account(run, steps)
    assert len(list((run.run_dir / "checkpoints" / f"step-{steps:06d}").glob("optimizer-*"))) == 1
    # It is finished, and goes on to more steps with the other backend, and back.
    for backend, more in (("torch", 3), ("megatron", 6)):
        run.overrides |= {"roles.trainer.backend": f'"{backend}"', "algorithm.steps": steps + more}
        run.start()
        assert run.wait() == 0, run.text()
        assert run.events("resumed")[-1]["step"] == steps + more - 3
        check_account(run, steps + more)
