"""How the losses of tokens become one number: a weight for each token, and one count for the whole batch.

The sum of weight x loss over all micro-batches and ranks is divided once, by the count of the whole batch, so that
the result depends neither on how the batch was cut nor on who computed which part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.base.sample import Sample
from relax_rt.roles.training.algorithms.registry import part
from relax_rt.roles.training.algorithms.tensors import TokenTensors

if TYPE_CHECKING:
    import torch


class LengthOptions(Table):
    """The fixed length."""

    length: Annotated[int, Field(ge=1)]
    """Tokens that each sequence counts as having (default: sampling.max_new_tokens)."""


def _trained(sample: Sample) -> int:
    return int(sample.loss_mask.sum())


def count_tokens(samples: Sequence[Sample], options: object) -> float:
    """Trained tokens of the samples."""
    return float(sum(_trained(s) for s in samples))


def count_sequences(samples: Sequence[Sample], options: object) -> float:
    """Samples with trained tokens."""
    return float(sum(_trained(s) > 0 for s in samples))


def count_pairs(samples: Sequence[Sample], options: object) -> float:
    """Groups with a chosen and a rejected sample."""
    return float(len({s.meta.group for s in samples if s.advantages is not None and bool((s.advantages > 0).any())}))


@part("aggregation", "token_mean", count=count_tokens)
def token_mean(tokens: TokenTensors, options: object) -> torch.Tensor:
    """1 for each token: every token of the batch counts alike (DAPO, arXiv 2503.14476, section 3.3). [m]"""
    return tokens.mask.to(tokens.logprobs.dtype)


@part("aggregation", "sequence_mean", count=count_sequences)
def sequence_mean(tokens: TokenTensors, options: object) -> torch.Tensor:
    """1 / (trained tokens of the sequence): every sequence counts alike (GRPO, arXiv 2402.03300, equation 3). [m]"""
    return tokens.mask.to(tokens.logprobs.dtype) / tokens.lengths


@part("aggregation", "fixed_length", options=LengthOptions, count=count_sequences)
def fixed_length(tokens: TokenTensors, options: LengthOptions) -> torch.Tensor:
    """1 / length: sums of sequences, scaled by one constant (Dr. GRPO, arXiv 2503.20783, section 3.2). [m]"""
    return tokens.mask.to(tokens.logprobs.dtype) / options.length


@part("aggregation", "pair_mean", count=count_pairs, traits={"pairs"})
def pair_mean(tokens: TokenTensors, options: object) -> torch.Tensor:
    """1 for each token: for losses that deal a pair's loss out over its tokens (dpo); the count is of pairs. [m]"""
    return tokens.mask.to(tokens.logprobs.dtype)
