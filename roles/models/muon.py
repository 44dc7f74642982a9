"""Muon in float32, for the warm start of `package:tiny`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon)."""
ITERATIONS = 5
MOMENTUM = 0.95


class Muon:
    """Muon: Nesterov momentum with orthogonalised update matrices (arXiv 2502.16982).

    `torch.optim.Muon` orthogonalises in bfloat16, whatever the dtype of the weights: on a CPU without bfloat16
    instructions the warm start took 489 s instead of 30 s. Matrices of one shape are batched.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], *, weight_decay: float) -> None:
        self._weight_decay = weight_decay
        alike: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            alike[matrix.shape].append(matrix)
        self._groups = [(group, torch.zeros(len(group), *shape)) for shape, group in alike.items()]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply the gradients, which every matrix must have."""
        for matrices, momentum in self._groups:
            gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
            momentum.lerp_(gradients, 1 - MOMENTUM)
            updates = orthogonal(gradients.lerp(momentum, MOMENTUM))
            rows, columns = momentum.shape[1:]
            for matrix, update in zip(matrices, updates, strict=True):
                matrix.mul_(1 - learning_rate * self._weight_decay)
                matrix.add_(update, alpha=-learning_rate * math.sqrt(max(1.0, rows / columns)))


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices with the same singular vectors and singular values of about 1 (0.7 to 1.2).

    Args:
        matrices: [n, rows, columns].
    """
    tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if tall else matrices
    # The spectral norm must be at most 1, and is at most Frobenius' norm.
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if tall else found
