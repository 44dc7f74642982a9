"""A whole run of the tiny job with a torch gang as the trainer, killed and taken up with another number of ranks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tiny_run import TinyRun, steps_that_count

from relax_rt.roles.models.resolve import resolve_model

pytestmark = pytest.mark.engines

BATCH = 64


@pytest.fixture(scope="module", autouse=True)
def tiny_model() -> None:
    """Converted once, outside any run's deadlines."""
    resolve_model("package:tiny", Path())


@pytest.mark.parametrize("lora", [None, "{ rank = 8, alpha = 16 }"], ids=["all weights", "adapters"])
def test_a_gang_is_killed_ended_and_goes_on_as_one_process(
    lora: str | None, runs: list[TinyRun], tmp_path: Path
) -> None:
    steps = 40
    overrides = {"roles.trainer.count": 2, "algorithm.steps": steps, "checkpoint.every_steps": 5}
    overrides |= {"evaluation.items": 16} | (
        {"roles.trainer.lora": lora, "publication.adapters": "true"} if lora is not None else {}
    )
    run = TinyRun(tmp_path / "run", **overrides)
    runs.append(run.start())
    run.until("a checkpoint", lambda: run.events("checkpoint"))
    at = run.last_step()
    run.kill("trainer/1")
    run.until("another step", lambda: run.last_step() > at)
    # An orderly end: the trainer writes a last checkpoint, then all ranks end.
    run.process.send_signal(signal.SIGINT)
    run.wait()
    saved = [event["step"] for event in run.events("checkpoint")][-1]
    assert 5 <= saved < steps, "it was over too soon to matter"
    folder = run.run_dir / "checkpoints" / f"step-{saved:06d}"
    assert len(list(folder.glob("optimizer-*"))) == 2 and (folder / "adapter").is_dir() == (lora is not None)
    run.overrides |= {"roles.trainer.count": 1}
    run.start()
    assert run.wait() == 0, run.text()
    resumed = [event["step"] for event in run.events("resumed")]
    assert len(resumed) == 2 and resumed[-1] == saved and all(step >= 5 for step in resumed)
    assert all((event["adapter_bytes"] > 0) == (lora is not None) for event in run.events("published"))
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, steps + 1))
    keys = [key for record in path.values() for key in record["keys"]]
    assert len(keys) == len(set(keys)) == steps * BATCH
    account = run.events("queue_account")[-1]
    assert (account["trained_twice"], account["freed"]) == (0, steps * BATCH)
