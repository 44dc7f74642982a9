"""Log-probabilities and entropies of logits whose vocabulary is cut over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class VocabularySlice:
    """The part of the vocabulary that this rank's logits are of.

    Args:
        first: number of the first token. rows: logits of this rank, padding included. vocabulary: tokens of the model;
            logits from there on are padding and have no probability. group: the ranks that hold the other parts, or
            None where there are none.
    """

    def __init__(self, first: int, rows: int, vocabulary: int, group: dist.ProcessGroup | None) -> None:
        self.first, self.rows, self.real = first, rows, max(0, min(rows, vocabulary - first))
        self.group = group

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Over all parts, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Over all parts, in place."""
        if self.group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values


def log_probabilities(
    logits: torch.Tensor, targets: torch.Tensor, part: VocabularySlice, *, entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax at the targets, and the entropy of the distribution, both differentiable.

    With p = softmax(z) over all parts: d log p_t / d z_j = [j = t] - p_j, and for H = -sum p log p
    d H / d z_j = -p_j (log p_j + H). Only p is kept for the backward pass.

    Args:
        logits: float [m, part.rows], at temperature 1 or divided by it. It is overwritten.
        targets: int64 [m], numbers in the whole vocabulary.
        entropy: unless it is wanted it is not computed, and is 0.

    Returns:
        log-probabilities [m] and entropies [m] in nats, the same on all ranks of the group, in the logits' dtype but at
        least float32.
    """
    apply: Any = _VocabularyParallel.apply
    found: tuple[torch.Tensor, torch.Tensor] = apply(logits, targets, part, entropy)
    return found


class _VocabularyParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, part: VocabularySlice, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        z = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        z[:, part.real :] = -torch.inf
        z = z - part.max(z.amax(-1))[:, None]
        here = (targets >= part.first) & (targets < part.first + part.real)
        local = torch.where(here, targets - part.first, 0)
        at_target = z.gather(-1, local[:, None])[:, 0].masked_fill(~here, 0.0)
        weight = z.exp()
        mean = _dot(weight, z) if with_entropy else torch.zeros_like(at_target)
        sums = part.sum(torch.stack([weight.sum(-1), mean, at_target]))
        log_total = sums[0].log()
        p = weight / sums[0][:, None]
        entropy = log_total - sums[1] / sums[0] if with_entropy else torch.zeros_like(log_total)
        ctx.save_for_backward(p, entropy, local, here)
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return sums[2] - log_total, entropy

    @staticmethod
    def backward(
        ctx: Any, of_logprob: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        p, entropy, local, here = ctx.saved_tensors
        gradient = torch.zeros_like(p)
        if of_logprob is not None:
            gradient = p * -of_logprob[:, None]
            gradient.scatter_add_(-1, local[:, None], (of_logprob * here)[:, None])
        if of_entropy is not None:
            gradient = gradient - of_entropy[:, None] * (torch.special.xlogy(p, p) + p * entropy[:, None])
        return gradient.to(ctx.dtype), None, None, None


class GatherContext(torch.autograd.Function):
    """Values of all ranks of a group, of which each has some: float [m] from float [k] and their places, int64 [k].

    Every rank computes the same loss of the whole, so that a rank's own values get their whole gradient from its own
    loss; those of parameters are added up over the ranks afterwards.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, places: torch.Tensor, size: int, group: dist.ProcessGroup) -> Any:
        """Add up vectors that are 0 at the others' places."""
        ctx.save_for_backward(places)
        whole = values.detach().new_zeros(size)
        whole[places] = values.detach()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """That of this rank's places."""
        (places,) = ctx.saved_tensors
        return gradient[places], None, None, None


def _dot(weight: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """sum w z over the vocabulary; what has no weight counts for nothing, also at minus infinity."""
    return (weight * z.masked_fill(weight == 0, 0.0)).sum(-1)
