"""Drawing tokens from logits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK = 256
"""Probabilities are summed in blocks of so many, and the block that a draw falls into is searched alone."""


def member_uniforms(seed: int, count: int) -> NDArray[np.float32]:
    """The draws of a member by position: the first ones do not depend on how many are made."""
    return np.random.Generator(np.random.Philox(seed)).random(count, dtype=np.float32)


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution at `uniforms`.

    Args:
        logits: [rows, vocabulary], any float dtype. temperatures, uniforms: float32 [rows]; temperature 0 is greedy.

    Returns:
        tokens int64 [rows] and their log-probability float32 [rows] under log-softmax(logits / temperature), the
        distribution drawn from (greedy: at temperature 1).
    """
    greedy = temperatures == 0
    scaled = logits.float()
    if not bool(((temperatures == 1) | greedy).all()):
        scaled = scaled / torch.where(greedy, torch.ones_like(temperatures), temperatures)[:, None]
    highest, likeliest = scaled.max(-1)
    weights = torch.exp(scaled - highest[:, None])
    drawn, total = _invert(weights, uniforms)
    if bool(greedy.any()):
        drawn = torch.where(greedy, likeliest, drawn)
    chosen = scaled.gather(-1, drawn[:, None])[:, 0]
    return drawn, chosen - highest - total.log()


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index at which the cumulative weight passes uniform x total, and the total. Sums are over blocks first: a
    running sum over a whole vocabulary is slow, and loses small weights to rounding."""
    rows, vocabulary = weights.shape
    if vocabulary % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocabulary % BLOCK))
    blocks = weights.view(rows, -1, BLOCK)
    reached = blocks.sum(-1).cumsum(-1)
    total = reached[:, -1]
    # Rounding may leave the draw at the total itself; an index must have weight.
    wanted = (uniforms * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(reached, wanted[:, None], right=True).clamp_(max=reached.shape[1] - 1)
    before = torch.where(block > 0, reached.gather(-1, (block - 1).clamp(min=0)), torch.zeros_like(wanted)[:, None])
    inner = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]
    # A block's own sum may differ from the difference of two running sums: its last weight above 0 ends it.
    last = BLOCK - 1 - (inner > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    within = torch.searchsorted(inner.cumsum(-1), wanted[:, None] - before, right=True).minimum(last)
    return (block * BLOCK + within)[:, 0], total
