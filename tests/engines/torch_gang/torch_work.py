"""What the ranks of a torch gang do for a test."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
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
from relax_rt.roles.training.backend.settings import LoraTable
from relax_rt.roles.training.batch.budget import TokenBudget
from relax_rt.roles.training.batch.rows import Costs
from relax_rt.roles.training.torch import backend as torch_backend
from relax_rt.roles.training.torch.backend import TorchBackend
from relax_rt.roles.training.torch.sharding import TorchRanks

sys.path.append(str(Path(__file__).parents[2] / "unit" / "roles" / "training"))
from packing_ways import load_exactly

__all__ = [
    "Here",
    "build",
    "export",
    "grads",
    "held",
    "logprobs",
    "mine",
    "moved",
    "orders",
    "overlapped",
    "poor",
    "restore",
    "save",
    "step",
    "stepped",
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
    algorithm: dict[str, Any],
    budget: int = 4096,
    lora: dict[str, Any] | None = None,
    dtype: str = "float32",
    kept: Path | None = None,
    gather_s: float = 60.0,
    packed: bool = False,
    double: bool = False,
) -> None:
    """A backend over all ranks; one alone shares with none.

    Args:
        packed: whatever padding would cost. double: the model is in float64.
    """
    here.leave()
    here.ranks = TorchRanks(here.next_store(), here.rank, here.world, gather_s=gather_s) if here.world > 1 else None
    loader = SimpleNamespace(from_pretrained=lambda folder, **_: load_exactly(folder))
    with mock.patch.object(torch_backend, "AutoModelForCausalLM", loader) if double else nullcontext():
        here.backend = TorchBackend(
            model,
            AlgorithmTable(**algorithm),
            dtype=dtype,
            threads=1,
            tokens_per_micro_batch=TokenBudget(budget, kept),
            temperature=0.9,
            on_progress=lambda _: None,
            ranks=here.ranks,
            lora=LoraTable(**lora) if lora is not None else None,
            seed=3,
        )
    if packed:
        assert here.backend.costs is not None
        here.backend.costs = Costs(pair=1e6, call=0.0)
    here.whole = here.gradients = lambda: {
        piece.name: gradient for piece in here.backend.weights.trained if (gradient := piece.gradient()) is not None
    }


def held(here: Here) -> dict[str, int]:
    """Elements of each tensor that this rank keeps between passes, with its gradient's and its moments'."""
    found = {}
    for piece in here.backend.weights:
        state = here.backend._optimizer.state.get(piece.values, {})
        moments = sum(value.numel() for key, value in state.items() if key != "step")
        gradient = piece.gradient()
        found[piece.name] = piece.values.numel() + moments + (gradient.numel() if gradient is not None else 0)
    return found


def moved(here: Here) -> list[str]:
    """Names of what the optimizer updates."""
    return [piece.name for piece in here.backend.weights.trained]


def poor(here: Here, rank: int, calls: int) -> None:
    """From now on memory runs out on one rank in the pass after so many."""
    if here.rank != rank:
        return
    predicted, left = here.backend._predicted, [calls]

    def failing(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return predicted(*arguments, **options)

    here.backend._predicted = failing
