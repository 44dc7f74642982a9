"""Engines and trainer in turns on one device: real processes, real model, killed in each other's turn."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_run import DEADLINE_S, TinyRun, steps_that_count

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]

MEMORY = {"roles.rollout.max_sequences": 512}
"""A cache that is large beside all else that a rollout holds."""


@pytest.fixture
def start(tmp_path: Path, runs: list[TinyRun]) -> Any:
    def begin(mode: str, staleness: int, **overrides: Any) -> TinyRun:
        given = {
            "algorithm.mode": f'"{mode}"',
            "algorithm.max_staleness": staleness,
            "evaluation.items": 128,
            "checkpoint.every_steps": 4,
            **MEMORY,
            **overrides,
        }
        runs.append(TinyRun(tmp_path / "run", **given).start())
        return runs[-1]

    return begin


def turns_of(run: TinyRun) -> tuple[int, int]:
    """Turns begun and ended by the trainer."""
    return len(run.events("device_acquired")), len(run.events("device_released"))


def of_slot(run: TinyRun, kind: str, slot: str) -> list[dict[str, Any]]:
    return [event for event in run.events(kind) if event["slot"] == slot]


def kill_in_turn(run: TinyRun, slot: str, *, trainers: bool) -> None:
    """SIGKILL a slot while the device is the trainer's, or the engines'."""
    run.until(f"{slot} to be ready", lambda: of_slot(run, "slot_ready", slot))
    ready = len(of_slot(run, "slot_ready", slot))
    pid = of_slot(run, "slot_spawned", slot)[-1]["pid"]

    def its_turn() -> bool:
        changes = sorted(run.events("device_acquired") + run.events("device_released"), key=lambda event: event["t"])
        return len(changes) > 4 and (changes[-1]["kind"] == "device_acquired") == trainers

    deadline = time.monotonic() + DEADLINE_S
    while not its_turn():
        assert time.monotonic() < deadline and run.process.poll() is None, run.text()
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    run.until(f"{slot} to be back", lambda: len(of_slot(run, "slot_ready", slot)) > ready)


def check_account(run: TinyRun, steps: int) -> None:
    """Every step once, no sample twice, and never both at work on the device."""
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, steps + 1))
    keys = [key for record in path.values() for key in record["keys"]]
    assert len(set(keys)) == len(keys) == 64 * steps
    assert not run.events("engine_not_released"), "an engine did not give way"


def test_engines_give_their_memory_back_for_the_trainers_turn_and_it_learns(start: Any) -> None:
    steps = 60
    run = start("colocate", 0, **{"algorithm.steps": steps, "evaluation.items": 256})
    assert run.wait() == 0, run.text()
    check_account(run, steps)
    assert {s for record in run.records("step") for s in record["staleness"]} == {0}
    assert turns_of(run) == (steps, steps)
    released = run.events("engine_memory")
    assert len(released) == steps
    freed = [one["before_mib"] - one["resident_mib"] for one in released]
    cache_mib = 50
    assert min(freed) > cache_mib, f"memory did not fall: {freed}"
    assert len(run.events("engine_resumed")) >= steps - 1
    before, *_, after = [record["exact"] for record in run.records("evaluation")]
    assert after > before + 0.05, "nothing was learnt"


def test_a_run_goes_on_whoever_is_killed_in_whosever_turn(start: Any) -> None:
    steps = 60
    run = start("colocate", 0, **{"algorithm.steps": steps, "roles.rollout.count": 2, "roles.evaluator.count": 0})
    kill_in_turn(run, "rollout/0", trainers=True)
    kill_in_turn(run, "trainer/0", trainers=True)
    kill_in_turn(run, "rollout/1", trainers=False)
    kill_in_turn(run, "trainer/0", trainers=False)
    assert run.last_step() < steps, "all of it was to happen while the run goes on"
    assert run.wait() == 0, run.text()
    check_account(run, steps)
    killed = [e["slot"] for e in run.events("slot_exited") if e["diagnosis"]["signal"] == "SIGKILL"]
    assert sorted(killed) == ["rollout/0", "rollout/1", "trainer/0", "trainer/0"]


def test_hybrid_keeps_the_tokens_of_what_is_in_flight_when_a_batch_is_there(start: Any) -> None:
    steps = 12
    run = start(
        "hybrid",
        1,
        **{
            "algorithm.steps": steps,
            "sampling.max_new_tokens": 160,
            "reward.function": '"relax_rt.roles.rewards.builtin:lenient_integer"',
            "sampling.temperature": 5.0,
            "roles.rollout.groups_in_flight": 12,
            "roles.evaluator.count": 0,
            "queue.capacity_mib": 64,
        },
    )
    kill_in_turn(run, "rollout/0", trainers=True)
    assert run.wait() == 0, run.text()
    check_account(run, steps)
    gone_on = run.events("group_resumed")
    assert any(tokens for event in gone_on for tokens in event["tokens"]), "nothing was gone on with"
    records = run.records("step")
    assert max(s for record in records for s in record["staleness"]) == 1
    both = [versions for record in records for versions in record["versions"] if len(versions) > 1]
    assert both, "no sample has tokens of before and after a turn"
