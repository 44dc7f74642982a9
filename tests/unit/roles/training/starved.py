"""A stand-in for an allocator that has no memory for large micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def failing_backward(values: torch.Tensor, error: Callable[[], BaseException], spoil: Callable[[], None]) -> Any:
    """The values, whose backward pass fails after `spoil` has done what the layers above would have."""

    class Halfway(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            spoil()
            raise error()

    return Halfway.apply(values)


def spoil_last(module: torch.nn.Module) -> None:
    """Something is in the gradient of the uppermost layer."""
    parameter = next(reversed(list(module.parameters())))
    parameter.grad = torch.full_like(parameter, 7.0)
