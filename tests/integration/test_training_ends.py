"""How a training ends that comes to nothing, and how one that is finished goes on: real processes, real model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tiny_run import RELAX, TinyRun, steps_that_count

from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.training.trainer import SKIPPED_IN_A_ROW

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]

EVERY = 3
LOSS = """
from pathlib import Path

from relax_rt.roles.training.algorithms.registry import part

SPOILT = Path(__file__).with_name("spoilt")


def loss(tokens, options):
    harm = float("nan") if SPOILT.exists() else 1.0
    return -harm * tokens.advantages * tokens.logprobs, {}
"""


@pytest.fixture(scope="module", autouse=True)
def tiny_model() -> None:
    """Converted once, outside any run's deadlines."""
    resolve_model("package:tiny", Path())


def told(run: TinyRun, *words: str) -> str:
    done = subprocess.run([RELAX, *words, str(run.run_dir)], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


def test_a_loss_that_is_no_number_for_good_ends_the_run_once(runs: list[TinyRun], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOSS)
    given = {"algorithm.loss": json.dumps(f"{tmp_path}/mine.py:loss"), "algorithm.steps": 200}
    run = TinyRun(tmp_path / "run", **given, **{"checkpoint.every_steps": EVERY, "evaluation.items": 8})
    runs.append(run.start())
    run.until("a checkpoint", lambda: run.events("checkpoint"))
    run_id = run.run_id()
    (tmp_path / "spoilt").touch()
    assert run.wait() == 1, run.text()
    # As often as the limit says, and never again from the checkpoint on.
    skipped = [event["step"] for event in run.events("step_skipped")]
    assert skipped == list(range(skipped[0], skipped[0] + SKIPPED_IN_A_ROW))
    failed = [e["diagnosis"] for e in run.events("slot_exited") if e["diagnosis"]["kind"] not in ("clean", "killed")]
    assert [(d["slot"], d["kind"]) for d in failed] == [("trainer/0", "given_up")]
    assert not run.events("slot_restarting") and not run.events("resumed")
    cause = f"{SKIPPED_IN_A_ROW} steps in a row were skipped: loss is nan in step {skipped[-1]}"
    assert cause in run.events("run_done")[-1]["reason"]
    why = " ".join(told(run, "why").split())
    assert cause in why and "lower the learning rate" in why, why
    run.gone(run_id)
    # What was wrong is mended, as it says: the run goes on from its checkpoint.
    (tmp_path / "spoilt").unlink()
    steps = run.last_step() + 2
    run.overrides |= {"algorithm.learning_rate": 1e-5, "algorithm.steps": steps}
    run.start()
    assert run.wait() == 0, run.text()
    assert sorted(steps_that_count(run.records("step"))) == list(range(1, steps + 1))


def test_a_finished_run_goes_on_to_more_steps(runs: list[TinyRun], tmp_path: Path) -> None:
    first, more = 4, 3
    run = TinyRun(tmp_path / "run", **{"algorithm.steps": first, "evaluation.items": 8})
    runs.append(run.start())
    assert run.wait() == 0, run.text()
    # Said again, it is done already.
    run.start()
    assert run.wait() == 0, run.text()
    assert run.last_step() == first
    run.overrides["algorithm.steps"] = first + more
    run.start()
    assert run.wait() == 0, run.text()
    assert [event["step"] for event in run.events("resumed")] == [first, first]
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, first + more + 1))
    keys = [key for record in path.values() for key in record["keys"]]
    assert len(keys) == len(set(keys)) == 64 * (first + more)
    account = run.events("queue_account")[-1]
    assert (account["trained_twice"], account["freed"]) == (0, 64 * (first + more))
    last = run.records("evaluation")[-1]
    assert (last["when"], last["step"]) == ("after", first + more)
    # Other settings stay what they are.
    run.overrides["algorithm.group_size"] = 4
    run.start()
    assert run.wait() == 2 and "algorithm.group_size was 8, is 4" in " ".join(run.text().split()), run.text()
