"""Policy losses that bound what a token weighs without silencing it: CISPO, SAPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from relax_rt.roles.training.algorithms.losses.ppo import RatioOptions, ratio_needs
from relax_rt.roles.training.algorithms.registry import part
from relax_rt.roles.training.algorithms.tensors import Metrics, TokenTensors, log_ratio

if TYPE_CHECKING:
    import torch


class CispoOptions(RatioOptions):
    """Bounds of the weight."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The weight is at least 1 - clip_low; 1 is no lower bound, as in the paper's experiments."""
    clip_high: Annotated[float, Field(gt=0)] = 4.0
    """The weight is at most 1 + clip_high."""


class SapoOptions(RatioOptions):
    """Temperatures of the gate."""

    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """Where the advantage is positive."""
    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """Elsewhere; larger, so that these gradients fade sooner."""


@part("loss", "cispo", options=CispoOptions, needs=ratio_needs, traits={"by_advantage", "ratio"})
def cispo(tokens: TokenTensors, options: CispoOptions) -> tuple[torch.Tensor, Metrics]:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi with r = pi / pi_old: the weight is clipped, no token loses
    its gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5). The paper names no value of the upper bound; 1 + 4 is in
    the range that ScaleRL (arXiv 2510.13786) found it not to matter in (from memory).

    Returns:
        The loss [m], not aggregated; `clipped`: tokens whose weight was bounded.
    """
    ratio = log_ratio(tokens.logprobs, tokens.old(options.ratio_to)).exp().detach()
    weight = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    return -weight * tokens.advantages * tokens.logprobs, {"clipped": float((weight != ratio).sum())}


@part("loss", "sapo", options=SapoOptions, needs=ratio_needs, traits={"by_advantage", "ratio"})
def sapo(tokens: TokenTensors, options: SapoOptions) -> tuple[torch.Tensor, Metrics]:
    """-f(r) A with the gate f(r) = sigmoid(tau (r - 1)) 4 / tau, tau by the sign of the advantage.

    SAPO (arXiv 2511.20347): f has slope 1 at r = 1, and fades smoothly on both sides of it.

    Returns:
        The loss [m], not aggregated, and no metrics: nothing is clipped.
    """
    import torch

    ratio = log_ratio(tokens.logprobs, tokens.old(options.ratio_to)).exp()
    positive = torch.full_like(ratio, options.tau_positive)
    tau = torch.where(tokens.advantages > 0, positive, options.tau_negative)
    return -(tau * (ratio - 1.0)).sigmoid() * (4.0 / tau) * tokens.advantages, {}
