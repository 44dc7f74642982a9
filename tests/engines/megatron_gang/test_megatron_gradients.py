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
EXPERTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "ep2": {"expert_parallel": 2},
    "tp2-etp2": {"tensor_parallel": 2, "expert_tensor_parallel": 2},
    "tp2-ep2": {"tensor_parallel": 2, "expert_parallel": 2},
    "cp2-ep2": {"context_parallel": 2, "expert_parallel": 2},
}
"""Divisions of a mixture of experts."""
FLOAT32, FLOAT64 = 1e-5, 1e-12
ROUTED = 1e-6
"""In float64, of a mixture of experts: Megatron's router has its shares in float32."""


@pytest.fixture(scope="module")
def alone(model: Callable[[str], Path]) -> Alone:
    return Alone(model("qwen3"), TEMPERATURE)


@pytest.fixture(scope="module")
def experts_alone(model: Callable[[str], Path]) -> Alone:
    return Alone(model("qwen3_moe"), TEMPERATURE)


def divided(gang: Callable[[int], Gang], folder: Path, division: dict[str, Any], **options: Any) -> Gang:
    """Two ranks; once gradients are reduced each has whole ones of its parameters, for none updates a part alone."""
    table = {"tokens_per_micro_batch": 40, "distributed_optimizer": False, **division}
    if options.get("double"):
        # Which leaves them in the parameters' own.
        table["gradient_dtype"] = "bfloat16"
    two = gang(2)
    two.call("build", model=folder, division=table, algorithm={}, temperature=TEMPERATURE, **options)
    return two


@pytest.mark.parametrize("division", DIVISIONS)
def test_gradients_do_not_depend_on_the_division_nor_on_the_cut(
    division: str, gang: Callable[[int], Gang], model: Callable[[str], Path], alone: Alone
) -> None:
    two = divided(gang, model("qwen3"), DIVISIONS[division])
    check_losses(two, alone, FLOAT32)
    check_advantages(two, alone, FLOAT32, given=False)


@pytest.mark.parametrize("division", DIVISIONS)
def test_nor_in_float64(division: str, gang: Callable[[int], Gang], model: Callable[[str], Path], alone: Alone) -> None:
    two = divided(gang, model("qwen3"), DIVISIONS[division], double=True)
    check_losses(two, alone, FLOAT64)
    check_advantages(two, alone, FLOAT64)


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("division", EXPERTS)
def test_nor_does_it_matter_who_has_which_expert(
    division: str, double: bool, gang: Callable[[int], Gang], model: Callable[[str], Path], experts_alone: Alone
) -> None:
    two = divided(gang, model("qwen3_moe"), EXPERTS[division], double=double)
    check_losses(two, experts_alone, ROUTED if double else FLOAT32)
