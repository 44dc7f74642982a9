"""A backend whose steps are quick, and whose gradients are not clipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.torch.backend import TorchBackend

B = TypeVar("B", bound=TorchBackend)


def small_backend(kind: type[B], model_dir: Path, **table: Any) -> B:
    """One of this algorithm table; micro-batches of 16 tokens at the most."""
    settings = AlgorithmTable(**{"max_grad_norm": 1e9, **table})
    return kind(
        model_dir,
        settings,
        dtype="float32",
        threads=1,
        tokens_per_micro_batch=16,
        temperature=0.8,
        on_progress=lambda _: None,
        objective=Objective.of(settings, longest=6),
    )
