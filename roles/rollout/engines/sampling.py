"""Drawing tokens from logits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK = 256
"""Probabilities are summed in blocks of so many; the block that a draw falls into is then searched alone."""
WORK_FLOATS = 1 << 18
"""Rows are worked on so many logits at a time, which stay in a core's cache: all of them at once do not."""


def member_uniforms(seed: int, count: int) -> NDArray[np.float32]:
    """The draws of a member by position: the first ones do not depend on how many are made."""
    return np.random.Generator(np.random.Philox(seed)).random(count, dtype=np.float32)


class Sampler:
    """Draws by inverting the cumulative distribution; holds the memory it works in, one thread at a time."""

    def __init__(self, vocabulary: int, device: torch.device | None = None) -> None:
        self._vocabulary = vocabulary
        padded = -(-vocabulary // BLOCK) * BLOCK
        self._rows = max(1, WORK_FLOATS // padded)
        self._work = torch.empty(self._rows, padded, device=device)

    def __call__(
        self, logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token a row.

        Args:
            logits: [rows, vocabulary], any float dtype.
            temperatures, uniforms: float32 [rows]; temperature 0 is greedy.

        Returns:
            tokens int64 [rows] and their log-probability float32 [rows] under log-softmax(logits / temperature), the
            distribution drawn from (greedy: at temperature 1).
        """
        greedy = temperatures == 0
        divisors = torch.where(greedy, torch.ones_like(temperatures), temperatures)[:, None]
        highest, sums = self._block_sums(logits, divisors)
        reached = sums.cumsum(-1)
        total = reached[:, -1:]
        # Rounding may leave the draw at the total itself; an index must have weight.
        wanted = (uniforms[:, None] * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
        block = torch.searchsorted(reached, wanted, right=True).clamp_(max=reached.shape[1] - 1)
        before = torch.where(block > 0, reached.gather(-1, (block - 1).clamp_(min=0)), torch.zeros_like(wanted))
        drawn = self._within(logits, divisors, highest, block, wanted - before)
        if bool(greedy.any()):
            drawn = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), drawn)
        chosen = logits.gather(-1, drawn).float() / divisors
        return drawn[:, 0], (chosen - highest - total.log())[:, 0]

    def _block_sums(self, logits: torch.Tensor, divisors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The highest scaled logit of each row, and the sums of exp(scaled - highest) over each block."""
        rows, vocabulary = logits.shape
        highest = torch.empty(rows, 1, device=logits.device)
        sums = torch.empty(rows, self._work.shape[1] // BLOCK, device=logits.device)
        tempered = bool((divisors != 1).any())
        for start in range(0, rows, self._rows):
            part = slice(start, min(start + self._rows, rows))
            work = self._work[: part.stop - part.start]
            work[:, :vocabulary].copy_(logits[part])
            work[:, vocabulary:].fill_(-torch.inf)
            if tempered:
                work.div_(divisors[part])
            torch.amax(work, -1, keepdim=True, out=highest[part])
            work.sub_(highest[part]).exp_()
            torch.sum(work.view(len(work), -1, BLOCK), -1, out=sums[part])
        return highest, sums

    def _within(
        self,
        logits: torch.Tensor,
        divisors: torch.Tensor,
        highest: torch.Tensor,
        block: torch.Tensor,
        rest: torch.Tensor,
    ) -> torch.Tensor:
        """The index, in each row's block, at which the weight from the block's start on passes `rest`."""
        indices = block * BLOCK + torch.arange(BLOCK, device=logits.device)
        inside = indices < self._vocabulary
        found = logits.gather(-1, indices.clamp(max=self._vocabulary - 1)).float()
        weights = torch.exp(found / divisors - highest).masked_fill_(~inside, 0.0)
        # The block's sum may differ by rounding from the difference of two running sums: its last weight above 0 ends
        # it, and its first begins it.
        last = BLOCK - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
        at = torch.searchsorted(weights.cumsum(-1), rest.clamp_(min=0.0), right=True).minimum(last)
        return indices.gather(-1, at)
