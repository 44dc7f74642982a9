"""What a loss is computed from: flat tensors over the tokens of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within this bound: e^20 is beyond every clip, and e^89 is infinite in float32."""
MAXIMA = "_max"
"""Ending of the metrics of which micro-batches and ranks keep the largest; all others are added."""

Metrics = dict[str, float]


@dataclass(frozen=True)
class TokenTensors:
    """The tokens of one micro-batch, whole sequences together; every tensor is [m], floating ones of one dtype.

    What stands under mask 0 never matters, also if it is inf or nan: it is replaced by 0 when this is made, so that
    neither values nor gradients of functions of these tensors see it.

    Attributes:
        logprobs: under the weights that are trained; gradients flow through it.
        behaviour: under the distribution that was sampled from.
        proximal: under the weights before the first update of the publication, by the trainer's own numerics.
        reference: under the reference policy or the teacher.
        advantages: any scale.
        mask: bool, True on the tokens that are trained.
        sequence: int64, index of the token's sample in the micro-batch.
        group: int64, index of the token's group in the micro-batch.
        entropy: of the policy at the token's position, nats; gradients flow through it.
    """

    logprobs: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    sequence: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    group: torch.Tensor | None = None
    entropy: torch.Tensor | None = None

    def __post_init__(self) -> None:
        counted = self.mask != 0
        object.__setattr__(self, "mask", counted)
        for field in ("logprobs", "behaviour", "advantages", "proximal", "reference", "entropy"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, value.masked_fill(~counted, 0))

    @cached_property
    def sequences(self) -> int:
        """Number of samples of the micro-batch."""
        return int(self.sequence.max()) + 1 if self.sequence.numel() else 0

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums of [m] over the trained tokens of each sample, given to each of its tokens: [m]."""
        counted = values.masked_fill(~self.mask, 0)
        return counted.new_zeros(self.sequences).index_add(0, self.sequence, counted)[self.sequence]

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Trained tokens of the sample that each token belongs to, at least 1; [m]."""
        return self.sequence_sum(self.mask.to(self.logprobs.dtype)).clamp(min=1)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Means of [m] over the trained tokens of each sample, given to each of its tokens: [m]."""
        return self.sequence_sum(values) / self.lengths

    def old(self, ratio_to: str) -> torch.Tensor:
        """Log-probabilities of the policy that ratios are taken to, "behaviour" or "proximal"; [m]."""
        if ratio_to == "behaviour":
            return self.behaviour
        if self.proximal is None:
            raise ValueError("proximal log-probabilities are needed and were not computed")
        return self.proximal

    @property
    def trained(self) -> torch.Tensor:
        """Log-probabilities by the trainer's numerics, without gradient: the proximal ones, else the current; [m]."""
        return self.logprobs.detach() if self.proximal is None else self.proximal


def log_ratio(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """new - old, held within LOG_RATIO_LIMIT; [m]."""
    return (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def merge(into: MutableMapping[str, float], metrics: Mapping[str, float]) -> None:
    """Add the metrics of a further micro-batch, or rank; of those called `…_max` the largest stays."""
    for name, value in metrics.items():
        if name.endswith(MAXIMA):
            into[name] = max(into.get(name, value), value)
        else:
            into[name] = into.get(name, 0.0) + value
