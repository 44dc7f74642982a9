"""The gradients of every loss, aggregation and advantage over ranks, cut and streamed in unequal parts, are those of
sequences computed one by one in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gang_gradients import Alone, check_advantages, check_losses
from megatron_parts import Gang

TEMPERATURE = 0.8
DIVISIONS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "cp2": {"context_parallel": 2},
}
FLOAT32, FLOAT64 = 1e-5, 1e-12


@pytest.fixture(scope="module")
def alone(model: Callable[[str], Path]) -> Alone:
    return Alone(model("qwen3"), TEMPERATURE)


def divided(gang: Callable[[int], Gang], model: Callable[[str], Path], division: str, **options: Any) -> Gang:
    """Two ranks; once gradients are reduced each has whole ones of its parameters, for none updates a part alone."""
    table = {"tokens_per_micro_batch": 40, "distributed_optimizer": False, **DIVISIONS[division]}
    if options.get("double"):
        # Which leaves them in the parameters' own.
        table["gradient_dtype"] = "bfloat16"
    two = gang(2)
    two.call("build", model=model("qwen3"), division=table, algorithm={}, temperature=TEMPERATURE, **options)
    return two


@pytest.mark.parametrize("division", DIVISIONS)
def test_gradients_do_not_depend_on_the_division_nor_on_the_cut(
    division: str, gang: Callable[[int], Gang], model: Callable[[str], Path], alone: Alone
) -> None:
    two = divided(gang, model, division)
    check_losses(two, alone, FLOAT32)
    check_advantages(two, alone, FLOAT32, given=False)


@pytest.mark.parametrize("division", DIVISIONS)
def test_nor_in_float64(division: str, gang: Callable[[int], Gang], model: Callable[[str], Path], alone: Alone) -> None:
    two = divided(gang, model, division, double=True)
    check_losses(two, alone, FLOAT64)
    check_advantages(two, alone, FLOAT64)
