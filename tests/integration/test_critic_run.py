"""PPO with a critic: real processes, real model, really killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import TinyRun, steps_that_count

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]

STEPS = 40
PPO = {
    "algorithm.name": '"ppo"',
    "algorithm.group_size": 1,
    "algorithm.prompts_per_step": 64,
    "algorithm.steps": STEPS,
    "checkpoint.every_steps": 4,
    "evaluation.items": 8,
    "roles.critic.dtype": '"float32"',
    "roles.critic.learning_rate": 1e-3,
    "roles.critic.value_clip": 0,
}


@pytest.fixture
def run(tmp_path: Path, runs: list[TinyRun]) -> TinyRun:
    runs.append(TinyRun(tmp_path / "run", **PPO))
    return runs[-1]


def test_policy_and_critic_stay_together_whoever_dies(run: TinyRun) -> None:
    run.start()
    run.until("a checkpoint", lambda: run.last_step() >= 5)
    run.kill("critic/0")
    run.until("the trainer to go back", lambda: run.events("resumed"))
    run.kill("trainer/0")
    assert run.wait() == 0, run.text()
    killed = {e["slot"] for e in run.events("slot_exited") if e["diagnosis"]["signal"] == "SIGKILL"}
    assert killed == {"critic/0", "trainer/0"}
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, STEPS + 1))
    keys = [key for record in path.values() for key in record["keys"]]
    assert len(set(keys)) == len(keys) == 64 * STEPS
    # Both went back each time: the critic took every step that counts, and none ahead of the trainer's.
    learnt = run.records("critic")
    assert {record["step"] for record in learnt} == set(range(1, STEPS + 1))
    assert all(record["applied"] for record in learnt)
    resumed = [e["step"] for e in run.events("resumed")]
    assert len(resumed) == 2 and all(step % 4 == 0 for step in resumed)
    for checkpoint in (run.run_dir / "checkpoints").glob("step-*"):
        assert (checkpoint / "critic.safetensors").exists()
    by_step = {record["step"]: record for record in learnt}
    gaps = [abs(by_step[step]["value"] - by_step[step]["returned"]) for step in range(1, STEPS + 1)]
    assert max(gaps[-5:]) < gaps[0], "the critic learnt nothing"
