"""What the ranks of a Megatron gang do for a test."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from gang_work import (
    Here,
    export,
    grads,
    logprobs,
    mine,
    orders,
    overlapped,
    restore,
    save,
    step,
    streamed,
    struck,
    updates,
    use,
    write,
)

from relax_rt.roles.sections import AlgorithmTable, TrainerSettings
from relax_rt.roles.trainers.budget import Budget
from relax_rt.roles.trainers.megatron import backend
from relax_rt.roles.trainers.megatron.backend import MegatronBackend
from relax_rt.roles.trainers.megatron.model import sizes_of
from relax_rt.roles.trainers.megatron.ranks import Ranks
from relax_rt.transport.weights.manifest import BUCKET_BYTES

sys.path.append(str(Path(__file__).parents[2] / "unit" / "trainer"))
from starved import failing_backward

__all__ = [
    "Here",
    "budget",
    "build",
    "draw",
    "export",
    "grads",
    "logprobs",
    "mine",
    "orders",
    "overlapped",
    "restore",
    "save",
    "starve",
    "step",
    "steps",
    "streamed",
    "struck",
    "updates",
    "use",
    "write",
]


def build(
    here: Here,
    model: Path,
    division: dict[str, Any],
    algorithm: dict[str, Any],
    temperature: float = 1.0,
    stacked: bool = True,
    kept: Path | None = None,
    gather_s: float = 60.0,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """A backend with this division of the gang's ranks.

    Args:
        kept: folder where each rank keeps what it learns of its memory.
        gather_s: deadline of each message of a publication. bucket_bytes: of its parts, at most.
    """
    here.leave()
    table = TrainerSettings(**{"backend": "megatron", "dtype": "float32", "count": here.world, **division})
    here.ranks = Ranks(sizes_of(table), here.next_store(), here.rank, gather_s=gather_s)
    backend.BUCKET_BYTES = bucket_bytes
    here.backend = MegatronBackend(
        model,
        AlgorithmTable(**algorithm),
        table,
        here.ranks,
        temperature=temperature,
        stacked_experts=stacked,
        budget=Budget(table.tokens_per_micro_batch, kept / f"{here.rank}.json" if kept is not None else None),
    )
    here.gradients = here.backend.gradients


def steps(here: Here) -> int:
    """Updates that the moments have seen."""
    found: int = here.backend._state.steps
    return found


def budget(here: Here) -> int:
    """Tokens of this rank's micro-batches."""
    found: int = here.backend._budget.tokens
    return found


def starve(here: Here, fits: int, ranks: list[int], after: int = 0) -> None:
    """From now on packs of more tokens run out of memory on these ranks, half way through the backward pass, once
    `after` packs have gone through."""
    if here.rank not in ranks:
        return
    loss, parameters, left = here.backend._loss, list(here.backend.parameters.values()), [after]

    def spoil() -> None:
        # As after the upper layers have added theirs.
        parameters[-1].main_grad.add_(7.0)

    def no_memory() -> BaseException:
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def scarce(of: Any, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
        left[0] -= 1
        if of.tokens > fits and left[0] < 0:
            logprobs = failing_backward(logprobs, no_memory, spoil)
        return loss(of, logprobs, entropy)

    here.backend._loss = scarce


def draw(here: Here) -> list[float]:
    """A number of each random generator that this rank has."""
    tracker = importlib.import_module("megatron.core.tensor_parallel").get_cuda_rng_tracker()
    found = [float(torch.rand(()))]
    for name in sorted(tracker.get_states()):
        with tracker.fork(name):
            found.append(float(torch.rand(())))
    return found
