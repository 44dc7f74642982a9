"""A whole run with a further held-out set, evaluated in the middle of it, and a writer that loses its disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import CONFIG, TinyRun

from relax_rt.roles.models.resolve import resolve_model

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]

SETS = """
[roles.writer]
tensorboard = true

[[evaluation.sets]]
name = "larger"
task = "basic_arithmetic"
{options}
size = 200
template = "{{expression}} ="
items = 32
samples = 4
pass_at = [1, 2, 4]
greedy = true
at_steps = [{chosen}]
reward = "reward.py:held_out"
"""
CHOSEN, LAST = 2, 8
GIVE_UP_S = 180.0
PACED = """

import functools
import json
import time
from pathlib import Path

HERE = Path(__file__).parent


def records(kind):
    path = HERE / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [r for r in (json.loads(line) for line in lines if line.endswith("}}")) if r["kind"] == kind]


@functools.cache
def given_up_at(name):
    return time.monotonic() + {give_up_s}


def wait_for(name):
    while not (HERE / name).exists() and time.monotonic() < given_up_at(name):
        time.sleep(0.05)


def training(completion, answer, finish_reason):
    if any(r["step"] >= {chosen} for r in records("step")):
        wait_for("begun")
    return right(completion, answer, finish_reason)


def held_out(completion, answer, finish_reason):
    if records("evaluation_set"):
        wait_for("went_on")
    return right(completion, answer, finish_reason)
"""
"""Rewards that wait, so that nothing depends on how fast a machine is. From the chosen step on samples are scored once
the evaluation has begun: the run is not over before the evaluator came to it. Its completions are judged once the
training went on: a trainer that waits for it stands still, until they give up and the test fails."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The tiny job with a further set, and with rewards that wait for files that the test makes."""
    resolve_model("package:tiny", Path())
    path = tmp_path / "roles.toml"
    text = CONFIG.read_text().replace("reward.py:right", "reward.py:training")
    text = text.replace("[reward]", f"[reward]\ntimeout_s = {1.5 * GIVE_UP_S}")
    options = next(line for line in text.splitlines() if line.startswith("options")).replace(" }", ", seed = 5 }")
    path.write_text(text + SETS.format(options=options, chosen=CHOSEN))
    paced = PACED.format(chosen=CHOSEN, give_up_s=GIVE_UP_S)
    path.with_name("reward.py").write_text(CONFIG.with_name("reward.py").read_text() + paced)
    return path


@pytest.fixture
def run(config: Path, tmp_path: Path) -> Iterator[TinyRun]:
    sets = {"algorithm.steps": LAST, "roles.reward.hang_after_s": 2 * GIVE_UP_S}
    run = TinyRun(tmp_path / "run", config, **sets)
    yield run
    run.end()


def went_on_meanwhile(run: TinyRun) -> int:
    """Wait until the evaluation of the chosen step has begun, and then until steps were made beside it: the last."""
    folder = run.run_dir.parent
    run.until("evaluation", lambda: [e for e in run.events("evaluation_started") if e["when"] == "during"])
    made: int = run.last_step()
    (folder / "begun").touch()
    # A trainer that waits between its steps would still end the one that it is in.
    run.until("steps beside the evaluation", lambda: run.last_step() >= made + 2)
    (folder / "went_on").touch()
    return made + 2


def test_sets_are_evaluated_beside_the_training_and_a_writer_may_fail(run: TinyRun) -> None:
    pytest.importorskip("tensorboard")
    # No folder can be made where a file is.
    run.run_dir.mkdir()
    (run.run_dir / "tensorboard").write_text("")
    run.start()
    beside = went_on_meanwhile(run)
    assert run.wait() == 0, run.text()
    before, during, after = made = run.records("evaluation_set")
    assert [(r["when"], r["for_steps"]) for r in made] == [("before", []), ("during", [CHOSEN]), ("after", [])]
    assert before["step"] == 0 and CHOSEN <= during["step"] < LAST and after["step"] == LAST
    (step,) = (r for r in run.records("step") if r["step"] == beside)
    assert step["m"] < during["m"], "the evaluation was over before the training went on"
    for record in made:
        assert (record["set"], record["items"], record["samples"]) == ("larger", 32, 4)
        p = record["pass_at"]
        assert 0 <= p["1"] <= p["2"] <= p["4"] <= 1 and p["1"] == pytest.approx(record["success"])
        assert record["failed"] == 0 and 0 <= record["greedy"]["success"] <= 1
    (failed,) = run.events("writer_failed")
    assert failed["sink"] == "tensorboard" and run.events("writer_ended")
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["sets"]["larger"]["after"]["pass_at"] and summary["steps"]["done"] == LAST
    run.gone(run.run_id())


def test_a_writer_tells_the_whole_run(run: TinyRun, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("begun", "went_on"):
        (tmp_path / name).touch()
    assert run.start().wait() == 0, run.text()
    found = EventAccumulator(str(run.run_dir / "tensorboard"))
    found.Reload()
    steps = {r["step"]: r["reward_mean"] for r in run.records("step")}
    assert {one.step: one.value for one in found.Scalars("train/reward_mean")} == pytest.approx(steps)
    assert len(found.Scalars("larger/pass_at/4")) == len(run.records("evaluation_set"))
    assert not run.events("writer_failed")
