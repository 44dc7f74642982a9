"""The gradients of every loss, aggregation and advantage over ranks that share the model, cut and streamed in unequal
parts, are those of sequences computed one by one in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gang_gradients import Alone, check_advantages, check_losses
from gang_harness import Gang

TEMPERATURE = 0.9
FLOAT32, FLOAT64 = 1e-5, 1e-12
Gangs = Callable[[int], Gang]
Models = Callable[[str], Path]


@pytest.fixture(scope="module")
def alone(shared_model: Models) -> Alone:
    return Alone(shared_model("dense"), TEMPERATURE)


def test_gradients_do_not_depend_on_ranks_nor_on_the_cut(torch_gang: Gangs, shared_model: Models, alone: Alone) -> None:
    two = torch_gang(2)
    two.call("build", model=shared_model("dense"), algorithm={}, budget=40)
    check_losses(two, alone, FLOAT32)
    check_advantages(two, alone, FLOAT32, given=False)


@pytest.mark.parametrize("packed", [False, True])
def test_nor_in_float64(packed: bool, torch_gang: Gangs, shared_model: Models, alone: Alone) -> None:
    two = torch_gang(2)
    two.call("build", model=shared_model("dense"), algorithm={}, budget=40, packed=packed, double=True)
    check_losses(two, alone, FLOAT64)
    check_advantages(two, alone, FLOAT64, branched=packed)
