"""Corrections for samples that are not quite the trained policy's: its engine computes in other numerics (mismatch),
or sampled with older weights (staleness).

Each compares the trainer's log-probabilities with those recorded at sampling, rho = pi_train / pi_behaviour, and gives
a weight for the loss of each token, without gradient. pi_train is the proximal policy if it was computed, else the
policy that is trained, held fixed. Tokens of weight 0 count in the aggregation, like clipped ones; metric
`rejected`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.inputs import Metrics, TokenTensors, log_ratio
from relax_rt.roles.training.algorithms.registry import part

if TYPE_CHECKING:
    import torch

Level = Literal["token", "sequence", "geometric"]


class CapOptions(Table):
    """An upper bound."""

    level: Literal["token", "sequence"] = "token"
    """rho of the token, or the product over its sequence."""
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Largest weight."""


class SequenceCapOptions(CapOptions):
    """An upper bound, of sequences by default."""

    level: Literal["token", "sequence"] = "sequence"
    """rho of the token, or the product over its sequence."""


class BandOptions(Table):
    """Two bounds."""

    low: Annotated[float, Field(ge=0)] = 0.5
    """Smallest rho that counts."""
    high: Annotated[float, Field(gt=0)] = 5.0
    """Largest rho that counts."""

    @model_validator(mode="after")
    def _ordered(self) -> BandOptions:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} is not below high = {self.high:g}")
        return self


class RejectionOptions(BandOptions):
    """Two bounds, and of what."""

    level: Level = "token"
    """rho of the token; the product over its sequence; or its geometric mean over the sequence."""
    low: Annotated[float, Field(ge=0)] = 0.5
    """Smallest rho that counts."""
    high: Annotated[float, Field(gt=0)] = 2.0
    """Largest rho that counts."""


class StaleSequenceOptions(Table):
    """Off-policy sequence masking."""

    limit: Annotated[float, Field(gt=0)] = 0.1
    """Largest mean of log pi_behaviour / pi_train over a sequence with negative advantages, nats a token."""


def rho(tokens: TokenTensors, level: Level) -> torch.Tensor:
    """pi_train / pi_behaviour at a level, for each token, without gradient; [m], 1 under mask 0 at token level."""
    import torch

    gap = (tokens.trained - tokens.behaviour).detach()
    if level == "sequence":
        gap = tokens.sequence_sum(gap)
    elif level == "geometric":
        gap = tokens.sequence_mean(gap)
    return log_ratio(gap, torch.zeros_like(gap)).exp()


def _measured(tokens: TokenTensors, weight: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    rejected = tokens.mask & (weight == 0)
    return weight, {"rejected": float(rejected.sum())}


@part("correction", "tis", options=CapOptions, traits={"weights"})
def tis(tokens: TokenTensors, options: CapOptions) -> tuple[torch.Tensor, Metrics]:
    """min(rho, cap): truncated importance sampling.

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (token level); Liu et al.
    2025, "When Speed Kills Stability" (sequence level). The estimator is Ionides' (2008).

    Returns:
        The weight [m], without gradient; `truncated`: tokens at the cap, `rejected`: 0.
    """
    ratio = rho(tokens, options.level)
    weight, metrics = _measured(tokens, ratio.clamp(max=options.cap))
    return weight, {**metrics, "truncated": float((tokens.mask & (ratio > options.cap)).sum())}


@part("correction", "mis", options=SequenceCapOptions, traits={"weights"})
def mis(tokens: TokenTensors, options: SequenceCapOptions) -> tuple[torch.Tensor, Metrics]:
    """rho where it is at most cap, else 0: masked importance sampling.

    Liu et al. 2025, "When Speed Kills Stability" (sequence level; from memory).
    """
    ratio = rho(tokens, options.level)
    return _measured(tokens, ratio.masked_fill(ratio > options.cap, 0.0))


@part("correction", "icepop", options=BandOptions, traits={"weights"})
def icepop(tokens: TokenTensors, options: BandOptions) -> tuple[torch.Tensor, Metrics]:
    """rho of the token where it lies in [low, high], else 0.

    IcePop (Ring-1T, arXiv 2510.18855, there with 0.5 and 5).
    """
    ratio = rho(tokens, "token")
    return _measured(tokens, ratio.masked_fill((ratio < options.low) | (ratio > options.high), 0.0))


@part("correction", "rejection", options=RejectionOptions)
def rejection(tokens: TokenTensors, options: RejectionOptions) -> tuple[torch.Tensor, Metrics]:
    """1 where rho lies in [low, high], else 0: tokens or sequences are taken or left, not weighted.

    Liu et al. 2025, "When Speed Kills Stability" (sequence and geometric level; from memory). Geometric bounds are
    narrow, as 0.99 and 1.001.
    """
    ratio = rho(tokens, options.level)
    return _measured(tokens, ((ratio >= options.low) & (ratio <= options.high)).to(ratio.dtype))


@part("correction", "stale_sequences", options=StaleSequenceOptions)
def stale_sequences(tokens: TokenTensors, options: StaleSequenceOptions) -> tuple[torch.Tensor, Metrics]:
    """0 on tokens of negative advantage in sequences whose mean of log pi_behaviour / pi_train is above the limit.

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, section 3.1; from memory; the limit is not published).
    """
    gap = tokens.sequence_mean((tokens.behaviour - tokens.trained).detach())
    out = (gap > options.limit) & (tokens.advantages < 0)
    return _measured(tokens, (~out).to(gap.dtype))
