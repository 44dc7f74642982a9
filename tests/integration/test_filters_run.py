"""Filters with refill, and steps whose groups are trained on as they come: real processes, the trainer killed."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TinyRun, steps_that_count

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]

GROUPS, MEMBERS = 8, 8


@pytest.fixture
def make(tmp_path: Path, runs: list[TinyRun]) -> Any:
    def start(steps: int, **overrides: Any) -> TinyRun:
        sets = {"algorithm.steps": steps, "evaluation.items": 4, "evaluation.during_items": 4}
        runs.append(TinyRun(tmp_path / f"run-{len(runs)}", **sets, **overrides))
        return runs[-1].start()

    return start


def path_of(run: TinyRun, steps: int) -> list[dict[str, Any]]:
    """The steps that count, each there, none with a sample or a prompt that another one has."""
    assert run.wait() == 0, run.text()
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, steps + 1))
    for name in ("keys", "prompts"):
        seen = [one for record in path.values() for one in record[name]]
        assert len(set(seen)) == len(seen), f"{name} were trained on twice"
    return [path[step] for step in sorted(path)]


def killed(run: TinyRun, after: int) -> None:
    """End the trainer at once, somewhere in a step after this one."""
    run.until(f"step {after}", lambda: run.last_step() >= after)
    pid = run.until("the trainer", lambda: (s := run.slot("trainer/0")).get("state") == "ready" and s["pid"])
    os.kill(pid, signal.SIGKILL)


def account_of(run: TinyRun) -> dict[str, int]:
    found = dict(run.events("queue_account")[-1])
    assert found["trained_twice"] == found["prompts_trained_twice"] == 0
    return found


def test_groups_of_equal_rewards_are_never_trained_on_though_the_trainer_dies(make: Any) -> None:
    steps = 24
    run = make(steps, **{"algorithm.filters": '["zero_variance"]', "checkpoint.every_steps": 4})
    killed(run, 6)
    records = path_of(run, steps)
    assert any(e["slot"] == "trainer/0" and e["diagnosis"]["signal"] == "SIGKILL" for e in run.events("slot_exited"))
    for record in records:
        assert all(max(rewards) > min(rewards) for rewards in by_group(record).values())
    # What one step left out, it replaced: all are full, and each says how many groups it cost.
    short = {event["step"] for event in run.events("step_short")}
    for record in records:
        groups = {key.split(".")[0] for key in record["keys"]}
        assert len(groups) == GROUPS or record["step"] in short
        assert record["scored"] == len(groups) + sum(record["filtered"].values())
        assert record["kept_fraction"] == pytest.approx(len(groups) / record["scored"])
    assert sum(record["filtered"].get("zero_variance", 0) for record in records) > 0
    # Each prompt: trained once, left out, or still there.
    account = account_of(run)
    prompts = sum(len(record["prompts"]) for record in records)
    assert account["freed"] == sum(len(record["keys"]) for record in records)
    assert account["prompts_filtered"] * MEMBERS == account["dropped(filter)"]
    assert account["prompts_first_issued"] >= prompts + account["prompts_filtered"]
    # What is known of prompts goes with the checkpoint.
    newest = max((run.run_dir / "checkpoints").glob("step-*"))
    state = json.loads((newest / "sampling.json").read_text())
    seen = sum(outcomes[0] for outcomes in state["history"]["items"].values())
    assert seen == sum(record["scored"] for record in records)
    assert state["refill"]["dropped"] == dict(sum((Counter(r["filtered"]) for r in records), Counter()))


def by_group(record: dict[str, Any]) -> dict[str, list[float]]:
    """A step's rewards by group."""
    found: dict[str, list[float]] = {}
    for key, reward in zip(record["keys"], record["sample_rewards"], strict=True):
        found.setdefault(key.split(".")[0], []).append(reward)
    return found


def test_a_streamed_step_trains_each_sample_once_though_the_trainer_dies(make: Any) -> None:
    steps = 24
    run = make(
        steps,
        **{
            "algorithm.streaming": "true",
            "algorithm.max_staleness": 0,
            "roles.trainer.tokens_per_micro_batch": 64,
            "checkpoint.every_steps": 4,
        },
    )
    killed(run, 6)
    records = path_of(run, steps)
    assert all(len(record["keys"]) == GROUPS * MEMBERS for record in records)
    assert max(record["parts"] for record in records) > 1, "no step came in parts"
    assert all(staleness == 0 for record in records for staleness in record["staleness"])
    assert account_of(run)["freed"] == steps * GROUPS * MEMBERS
