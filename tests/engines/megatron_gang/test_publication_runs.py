"""Whole runs of a Megatron gang that gathers its versions slowly, is struck in the middle, or is asked to stop."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from fragile_trainer import STRIKES
from test_runs import GANG, check_account
from tiny_run import TinyRun

pytestmark = pytest.mark.engines

FILE = Path(__file__).parent / "fragile_trainer.py"


def overrides(target: str, steps: int) -> dict[str, object]:
    return {
        **GANG,
        "algorithm.steps": steps,
        "checkpoint.every_steps": 5,
        "roles.trainer.target": json.dumps(f"{FILE}:{target}"),
        "roles.trainer.hang_after_s": 15,
        "supervision.restart": "{ max_restarts = 20, backoff_max_s = 0.3 }",
    }


def digest_of(folder: Path) -> str:
    """Of the version that a checkpoint's weights are, from its files alone."""
    import torch
    from transformers import AutoModelForCausalLM

    from relax_rt.roles.rollout.engines.weights import FlatWeights
    from relax_rt.transport.weights.manifest import bucket_digest, bucket_slices, total_digest

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = FlatWeights(model, torch.float32, torch.device("cpu"))
    data = weights.standby(base=True)
    return total_digest(bucket_digest(data[part]) for part in bucket_slices(weights.layout.nbytes))


def check_versions(run: TinyRun) -> None:
    """What was published is what the checkpoints of the same step have; what engines took was committed."""
    published = {event["version"]: event for event in run.events("published")}
    folders = sorted((run.run_dir / "checkpoints").glob("step-*"))
    assert folders
    for folder in folders:
        state = json.loads((folder / "relax_rt.json").read_text())
        assert state["digest"] == published[state["version"]]["digest"] == digest_of(folder)
    assert {event["version"] for event in run.events("weights_swapped")} <= set(published)


def test_ranks_that_are_struck_in_the_middle_of_a_gather_cost_no_version(runs: list[TinyRun], tmp_path: Path) -> None:
    steps = 40
    run = TinyRun(tmp_path / "run", **overrides("FragileTrainer", steps))
    runs.append(run.start())
    assert run.wait() == 0, run.text()
    assert len(list((run.run_dir / "struck").iterdir())) == len(STRIKES)
    check_account(run, steps)
    assert len(run.events("gang_started")) == len(STRIKES) + 1
    # Every other version was issued, and came to its end: one was in the middle at each strike.
    committed = {event["version"] for event in run.events("version_committed")}
    assert len(set(range(1, max(committed))) - committed) >= len(STRIKES)
    check_versions(run)
    run.gone(run.run_id())


def test_a_gang_that_is_asked_to_stop_while_it_gathers_ends_with_a_whole_version(
    runs: list[TinyRun], tmp_path: Path
) -> None:
    steps = 30
    run = TinyRun(tmp_path / "run", **overrides("SlowTrainer", steps))
    runs.append(run.start())
    run.until("some steps", lambda: run.last_step() >= 3)
    run.until("a gather", (run.run_dir / "gathering").exists)
    run.process.send_signal(signal.SIGINT)
    run.wait()
    stopped = run.last_step()
    assert 3 <= stopped < steps
    ends = [e["diagnosis"] for e in run.events("slot_exited") if e["slot"].startswith("trainer/")]
    assert len(ends) == 2 and all(end["exit_code"] == 0 for end in ends), ends
    check_versions(run)
    assert [event["step"] for event in run.events("published")][-1] == stopped
    run.start()
    assert run.wait() == 0, run.text()
    assert [event["step"] for event in run.events("resumed")] == [stopped]
    check_account(run, steps)
    check_versions(run)
    # The last one is whole before the trainer is done.
    assert [event["step"] for event in run.events("published")][-1] == steps
    finished = run.events("training_finished")[-1]
    assert run.events("published")[-1]["m"] < finished["m"]
    run.gone(run.run_id())
