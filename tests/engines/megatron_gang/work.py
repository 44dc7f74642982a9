"""What the ranks of a Megatron gang do for a test."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

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
    stepped,
    streamed,
    struck,
    updates,
    use,
    whole,
    write,
)

from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.backend.channel import WeightChannel
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.batch.budget import TokenBudget
from relax_rt.roles.training.megatron import backend, resharding
from relax_rt.roles.training.megatron import model as models
from relax_rt.roles.training.megatron.backend import MegatronBackend
from relax_rt.roles.training.megatron.model import sizes_of
from relax_rt.roles.training.megatron.ranks import MegatronRanks
from relax_rt.roles.training.megatron.resharding import gather_weights
from relax_rt.transport.weights.manifest import BUCKET_BYTES

sys.path.append(str(Path(__file__).parents[2] / "unit" / "roles" / "training"))
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
    "stepped",
    "steps",
    "streamed",
    "struck",
    "updates",
    "use",
    "whole",
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
    double: bool = False,
) -> None:
    """A backend with this division of the gang's ranks.

    Args:
        double: the model is in float64, which no setting asks for; so are its gradients, unless the division has them
            in float32.
        kept: folder where each rank keeps what it learns of its memory.
        gather_s: deadline of each message of a publication. bucket_bytes: of its parts, at most.
    """
    here.leave()
    table = TrainerSettings(**{"backend": "megatron", "dtype": "float32", "count": here.world, **division})
    here.ranks = MegatronRanks(sizes_of(table), here.next_store(), here.rank, gather_s=gather_s)
    backend.BUCKET_BYTES = bucket_bytes
    with mock.patch.object(models, "DTYPES", {table.dtype: torch.float64}) if double else nullcontext():
        here.backend = MegatronBackend(
            model,
            AlgorithmTable(**algorithm),
            table,
            here.ranks,
            temperature=temperature,
            stacked_experts=stacked,
            budget=TokenBudget(table.tokens_per_micro_batch, kept / f"{here.rank}.json" if kept is not None else None),
        )
    here.gradients = here.backend.gradients
    here.whole = lambda: reduced(here, "float64" if double else "float32")


def reduced(here: Here, dtype: str) -> dict[str, torch.Tensor]:
    """The gradient sums of all ranks as `apply` brings them together, on rank 0; undivided, by Hugging Face name."""
    importlib.import_module("megatron.core.distributed").finalize_model_grads([here.backend._wrapped])
    with mock.patch.dict(resharding.ITEM_BYTES, float64=8):
        planned = here.backend._plan(dtype, stacked=False)
    into = bytearray(planned.layout.nbytes) if here.rank == 0 else None
    gather_weights(
        planned, WeightChannel(here.ranks.control), [here.backend.gradients()], memoryview(into) if into else None
    )
    if into is None:
        return {}
    flat = torch.frombuffer(into, dtype=torch.uint8)
    return {
        e.name: flat[e.offset : e.offset + e.nbytes].view(getattr(torch, dtype)).view(e.shape)
        for e in planned.layout.entries
    }


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
