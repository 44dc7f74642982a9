"""What the ranks of a Megatron gang do for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gang_work import Here, export, logprobs, mine, orders, restore, save, step, streamed, write

from relax_rt.roles.sample import Sample
from relax_rt.roles.sections import AlgorithmTable, TrainerSettings
from relax_rt.roles.trainers.megatron.backend import MegatronBackend
from relax_rt.roles.trainers.megatron.model import sizes_of
from relax_rt.roles.trainers.megatron.ranks import Ranks

__all__ = [
    "Here",
    "build",
    "export",
    "grads",
    "logprobs",
    "mine",
    "orders",
    "restore",
    "save",
    "step",
    "steps",
    "streamed",
    "write",
]


def build(
    here: Here,
    model: Path,
    division: dict[str, Any],
    algorithm: dict[str, Any],
    temperature: float = 1.0,
    stacked: bool = True,
) -> None:
    """A backend with this division of the gang's ranks."""
    here.leave()
    table = TrainerSettings(**{"backend": "megatron", "dtype": "float32", "count": here.world, **division})
    here.ranks = Ranks(sizes_of(table), here.next_store(), here.rank)
    here.backend = MegatronBackend(
        model, AlgorithmTable(**algorithm), table, here.ranks, temperature=temperature, stacked_experts=stacked
    )
    here.gradients = here.backend.gradients


def steps(here: Here) -> int:
    """Updates that the moments have seen."""
    found: int = here.backend._state.steps
    return found


def grads(here: Here, batches: list[list[Sample]]) -> dict[str, Any]:
    """This rank's gradient sums, by Megatron's name; then forgotten."""
    for batch in batches:
        here.backend.accumulate(mine(here, batch)[1])
    found = {name: value.numpy() for name, value in here.backend.gradients().items()}
    here.backend._begin()
    return found
