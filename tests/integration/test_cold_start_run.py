"""Runs that begin with a cold start: real processes, real model, really killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import TinyRun, steps_that_count

from relax_rt.roles.training.checkpoints.cold_start import cold_start_weights, read_progress

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]

COLD, STEPS = 60, 24


@pytest.fixture
def start(tmp_path: Path, runs: list[TinyRun]) -> Any:
    """Starts a run of the tiny job; whatever is left of it is ended here."""

    def begin(**overrides: Any) -> TinyRun:
        given = {
            "cold_start.answers": "true",
            "cold_start.steps": COLD,
            "cold_start.learning_rate": 3e-4,
            "cold_start.checkpoint_every": 5,
            "cold_start.validate_every": 20,
            "algorithm.steps": STEPS,
            "checkpoint.every_steps": STEPS,
            **overrides,
        }
        runs.append(TinyRun(tmp_path / "run", **given).start())
        return runs[-1]

    return begin


def at(run: TinyRun) -> int:
    return max((r["step"] for r in run.records("cold_start")), default=0)


def test_a_killed_cold_start_goes_on_where_it_was_and_is_never_done_again(start: Any) -> None:
    run = start(**{"algorithm.kl": '{ name = "k2", coefficient = 0.01 }', "roles.reference.dtype": '"float32"'})
    run.until("steps of the cold start", lambda: at(run) >= 12)
    for slot in ("rollout/0", "reference/0"):
        run.until(f"{slot} to say what it waits for", lambda slot=slot: "cold start" in str(run.slot(slot)))
    assert at(run) < COLD, "too late to be killed within the cold start"
    run.kill("trainer/0")
    run.until("steps of RL", lambda: run.last_step() >= 2)
    assert run.last_step() < STEPS, "too late to be killed before the first checkpoint"
    run.kill("trainer/0")
    assert run.wait() == 0, run.text()

    (resumed,) = run.events("cold_start_resumed")
    assert resumed["step"] % 5 == 0 and resumed["step"] >= 10
    records = run.records("cold_start")
    path = steps_that_count(records)
    assert sorted(path) == list(range(COLD + 1)), "each step, once, after the resume"
    assert [r["step"] for r in records if r["epoch"] == path[COLD]["epoch"]] == list(
        range(resumed["step"] + 1, COLD + 1)
    )
    assert path[COLD]["learnt_tokens"] == sum(path[step]["tokens"] for step in range(1, COLD + 1))
    losses = {step: r["validation_loss"] for step, r in path.items() if r.get("validation_loss") is not None}
    assert list(losses) == [0, 20, 40, 60] and losses[60] < 0.8 * losses[0]

    folder = cold_start_weights(run.run_dir)
    assert folder is not None and folder.name == f"step-{COLD:06d}"
    # The second death was of RL: its weights come from the cold start's end, which is not repeated.
    assert len(run.events("cold_start_adopted")) == 2 and len(run.events("cold_start_finished")) == 1
    rl = steps_that_count(run.records("step"))
    assert sorted(rl) == list(range(1, STEPS + 1))
    keys = [key for record in rl.values() for key in record["keys"]]
    assert len(set(keys)) == len(keys)
    # KL is measured against the weights after the cold start, which the first step's are.
    assert rl[1]["kl_reference"] < 1e-9 < rl[STEPS]["kl_reference"]
    # Of the first life: after the second death what the versions in between sampled is trained on first.
    first = next(record for record in run.records("step") if record["step"] == 1)
    assert first["difference_mean"] < 0.01, "rollouts sample from the weights after the cold start"
    assert {"before", "after"} <= {r["when"] for r in run.records("evaluation")}


def test_a_stopped_cold_start_leaves_a_checkpoint_of_its_last_step(start: Any, tmp_path: Path) -> None:
    import signal

    run = start(**{"cold_start.checkpoint_every": 1000, "algorithm.steps": 2, "checkpoint.every_steps": 2})
    run.until("steps of the cold start", lambda: at(run) >= 8)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()
    reached = at(run)
    mark = read_progress(run.run_dir / "cold_start" / f"step-{reached:06d}")
    assert mark is not None and (mark.step, mark.done) == (reached, False) and reached < COLD
    assert not run.records("step") and not run.events("published")
    run.start()
    assert run.wait() == 0, run.text()
    assert [e["step"] for e in run.events("cold_start_resumed")] == [reached]
    assert run.last_step() == 2
    told = run.output.read_text()
    assert f": step {COLD}/{COLD}  loss " in told and f", {COLD} of {COLD} steps, loss " in told
