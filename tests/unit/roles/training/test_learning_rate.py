"""The learning rate of each step, and that a resumed training goes on with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from relax_rt.roles.training.algorithms.settings import AlgorithmTable, check_rates, learning_rate


def rates(**table: Any) -> list[float]:
    given = AlgorithmTable(**{"learning_rate": 1e-3, "steps": 10, **table})
    return [learning_rate(given, number, given.steps) for number in range(1, given.steps + 1)]


def test_a_constant_rate_is_reached_at_the_end_of_the_warm_up_and_stays() -> None:
    assert rates(warmup_steps=4) == [2.5e-4, 5e-4, 7.5e-4, *[1e-3] * 7]
    assert rates() == [1e-3] * 10


def test_a_line_goes_down_by_equal_parts_and_would_be_at_the_floor_one_step_later() -> None:
    assert rates(learning_rate_schedule="linear") == pytest.approx([1e-3 * (10 - n) / 10 for n in range(10)])
    found = rates(learning_rate_schedule="linear", learning_rate_floor=2e-4, warmup_steps=2)
    assert found[:3] == [5e-4, 1e-3, 1e-3]
    assert found[2:] == pytest.approx([1e-3 - n * 1e-4 for n in range(8)])


def test_half_a_cosine_from_the_rate_to_the_floor() -> None:
    found = rates(learning_rate_schedule="cosine", learning_rate_floor=1e-4, warmup_steps=2)
    assert found[2:] == pytest.approx([1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * n / 8)) for n in range(8)])
    assert found[6] == pytest.approx(5.5e-4) and min(found[2:]) == found[-1] > 1e-4


def test_no_step_is_without_effect_unless_the_warm_up_says_so() -> None:
    for schedule in ("linear", "cosine"):
        for warmup in (0, 1, 9):
            assert min(rates(learning_rate_schedule=schedule, warmup_steps=warmup)) > 0
        assert rates(learning_rate_schedule=schedule, steps=1) == [1e-3]


@pytest.mark.parametrize(
    ("table", "key", "message"),
    [
        ({"learning_rate_floor": 1e-4}, "learning_rate_floor", "has no effect"),
        ({"learning_rate_schedule": "cosine", "learning_rate_floor": 1e-3}, "learning_rate_floor", "would not go down"),
        ({"warmup_steps": 10}, "warmup_steps", "the rate is never reached"),
    ],
)
def test_what_cannot_be_meant_is_refused(table: dict[str, Any], key: str, message: str) -> None:
    given = AlgorithmTable(**{"learning_rate": 1e-3, "steps": 10, **table})
    (problem,) = check_rates(given, ("algorithm",), given.steps)
    assert problem.path == ("algorithm", key) and message in problem.message


def test_a_resumed_training_has_the_rates_that_it_would_have_had(model_dir: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from packing_samples import SAMPLES

    from relax_rt.roles.training.torch.backend import TorchBackend

    table = AlgorithmTable(learning_rate=1e-2, steps=5, learning_rate_schedule="cosine", warmup_steps=1)

    def opened() -> TorchBackend:
        return TorchBackend(
            model_dir,
            table,
            dtype="float32",
            threads=1,
            tokens_per_micro_batch=64,
            temperature=1.0,
            on_progress=lambda _: None,
        )

    straight, resumed = opened(), opened()
    found = [straight.step(SAMPLES, number).learning_rate for number in (1, 2, 3)]
    straight.snapshot()
    straight.write(tmp_path)
    resumed.restore(tmp_path)
    for number in (4, 5):
        found.append(straight.step(SAMPLES, number).learning_rate)
        assert resumed.step(SAMPLES, number).learning_rate == found[-1]
    assert found == [learning_rate(table, number, 5) for number in range(1, 6)]
    for a, b in zip(straight._model.parameters(), resumed._model.parameters(), strict=True):
        assert torch.equal(a, b)
