"""Torch backends for tests: one thread, float32, and gradients that are not clipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.torch.backend import TorchBackend

B = TypeVar("B", bound=TorchBackend)


def torch_backend(
    model_dir: Path, kind: type[B] = TorchBackend, budget: Any = 4096, temperature: float = 1.0, **options: Any
) -> B:
    """A backend of these keys of [algorithm]; further arguments of its class go by their names.

    Args:
        budget: tokens of a micro-batch.
    """
    own = {name: options.pop(name) for name in ("device", "lora", "seed", "objective") if name in options}
    return kind(
        model_dir,
        AlgorithmTable(**{"max_grad_norm": 1e9, **options}),
        dtype="float32",
        threads=1,
        tokens_per_micro_batch=budget,
        temperature=temperature,
        on_progress=lambda _: None,
        **own,
    )


def small_backend(kind: type[B], model_dir: Path, **table: Any) -> B:
    """A backend with micro-batches of 16 tokens at the most, so that its steps have several."""
    objective = Objective.of(AlgorithmTable(**{"max_grad_norm": 1e9, **table}), longest=6)
    return torch_backend(model_dir, kind, 16, 0.8, objective=objective, **table)


def without_updates(backend: B) -> B:
    """The backend, whose optimizer leaves weights and gradients as they are."""
    backend._optimizer.step = lambda *a, **k: None  # type: ignore[method-assign]
    return backend
