"""A whole run with further held-out sets and a writer that loses its disk."""

from __future__ import annotations

import json
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
at_steps = [2]
reward = "{reward}:right"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The tiny job with a further set."""
    resolve_model("package:tiny", Path())
    path = tmp_path / "roles.toml"
    text = CONFIG.read_text().replace("reward.py", str(CONFIG.with_name("reward.py")))
    options = next(line for line in text.splitlines() if line.startswith("options")).replace(" }", ", seed = 5 }")
    path.write_text(text + SETS.format(reward=CONFIG.with_name("reward.py"), options=options))
    return path


def test_sets_are_evaluated_beside_the_training_and_a_writer_may_fail(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = TinyRun(tmp_path / "run", config)
    # No folder can be made where a file is.
    run.run_dir.mkdir()
    (run.run_dir / "tensorboard").write_text("")
    assert run.start().wait() == 0, run.text()
    made = {(r["when"], r["step"]): r for r in run.records("evaluation_set")}
    assert {("before", 0), ("after", 6)} <= set(made)
    for record in made.values():
        assert (record["set"], record["items"], record["samples"]) == ("larger", 32, 4)
        p = record["pass_at"]
        assert 0 <= p["1"] <= p["2"] <= p["4"] <= 1 and p["1"] == pytest.approx(record["success"])
        assert record["failed"] == 0 and 0 <= record["greedy"]["success"] <= 1
    (failed,) = run.events("writer_failed")
    assert failed["sink"] == "tensorboard" and run.events("writer_ended")
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["sets"]["larger"]["after"]["pass_at"] and summary["steps"]["done"] == 6
    run.gone(run.run_id())


def test_a_writer_tells_the_whole_run(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = TinyRun(tmp_path / "run", config)
    assert run.start().wait() == 0, run.text()
    found = EventAccumulator(str(run.run_dir / "tensorboard"))
    found.Reload()
    steps = {r["step"]: r["reward_mean"] for r in run.records("step")}
    assert {one.step: one.value for one in found.Scalars("train/reward_mean")} == pytest.approx(steps)
    assert len(found.Scalars("larger/pass_at/4")) == len(run.records("evaluation_set"))
    assert not run.events("writer_failed")
