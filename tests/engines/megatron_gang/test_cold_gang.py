"""A cold start by a gang: all ranks switch to its objective and back, and a death in the middle costs little."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import TinyRun, steps_that_count

from relax_rt.roles.models.resolve import resolve_model

pytestmark = pytest.mark.engines

COLD, STEPS = 30, 3
OVERRIDES = {
    "roles.trainer.backend": '"megatron"',
    "roles.trainer.count": 2,
    "roles.trainer.tensor_parallel": 2,
    "roles.reference.dtype": '"float32"',
    "roles.evaluator.count": 0,
    "algorithm.steps": STEPS,
    "algorithm.kl": '{ name = "k2", coefficient = 0.01 }',
    "cold_start.answers": "true",
    "cold_start.steps": COLD,
    "cold_start.learning_rate": 3e-4,
    "cold_start.checkpoint_every": 3,
    "cold_start.validate_every": 10,
}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TinyRun]:
    resolve_model("package:tiny", Path())
    made = TinyRun(tmp_path / "run", **OVERRIDES)
    yield made
    made.end()


def test_a_gang_learns_resumes_and_goes_on_to_rl(run: TinyRun) -> None:
    run.start()
    run.until("steps of the cold start", lambda: len(run.records("cold_start")) >= 8)
    run.kill("trainer/1")
    assert run.wait() == 0, run.text()
    (resumed,) = run.events("cold_start_resumed")
    assert resumed["step"] % 3 == 0 and resumed["step"] >= 3
    path = steps_that_count(run.records("cold_start"))
    assert sorted(path) == list(range(COLD + 1))
    losses = [r["validation_loss"] for r in path.values() if r.get("validation_loss") is not None]
    assert losses[-1] < 0.95 * losses[0]
    rl = steps_that_count(run.records("step"))
    assert sorted(rl) == list(range(1, STEPS + 1))
    # The reference has the weights that the gang wrote; the numerics of the two backends differ by rounding.
    assert rl[1]["kl_reference"] < 1e-6
