"""Policy losses with a clipped ratio of token probabilities: PPO, with two bounds, with a dual clip, decoupled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.registry import part
from relax_rt.roles.training.algorithms.tensors import Metrics, TokenTensors, log_ratio

if TYPE_CHECKING:
    import torch


class RatioOptions(Table):
    """Which policy a ratio of probabilities is taken to."""

    ratio_to: Literal["behaviour", "proximal"] = "behaviour"
    """behaviour: what was sampled from, as the engine recorded it; proximal: the trainer's weights before the first
    update of a publication, by its own numerics."""


def ratio_needs(options: RatioOptions) -> set[str]:
    """What a loss with a ratio needs."""
    return {"proximal"} & {options.ratio_to}


class ClipOptions(RatioOptions):
    """Bounds of the ratio."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio counts down to 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio counts up to 1 + clip_high; above clip_low it is DAPO's clip-higher."""


class DualClipOptions(ClipOptions):
    """Bounds of the ratio, and of the loss of tokens with a negative advantage."""

    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """The ratio counts up to this where the advantage is negative."""


class DecoupledOptions(Table):
    """Bounds of the ratio to the proximal policy, and of the weight for the behaviour policy."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio counts down to 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio counts up to 1 + clip_high."""
    weight_cap: Annotated[float, Field(gt=0)] = 5.0
    """Tokens whose weight pi_proximal / pi_behaviour is larger are left out; inf: none are."""


def clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) and where the clip stopped the gradient; [m] each."""
    import torch

    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    return loss, (bounded * advantages < ratio * advantages).detach()


@part("loss", "ppo_clip", options=ClipOptions, needs=ratio_needs, traits={"by_advantage", "ratio"})
def ppo_clip(tokens: TokenTensors, options: ClipOptions) -> tuple[torch.Tensor, Metrics]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi / pi_old, for each token.

    PPO (arXiv 1707.06347, equation 7); two bounds as in DAPO's clip-higher (arXiv 2503.14476, section 3.1).

    Returns:
        The loss [m], not aggregated; `clipped`: tokens whose gradient the clip stopped.
    """
    ratio = log_ratio(tokens.logprobs, tokens.old(options.ratio_to)).exp()
    loss, stopped = clipped(ratio, tokens.advantages, options.clip_low, options.clip_high)
    return loss, {"clipped": float(stopped.sum())}


@part("loss", "dual_clip", options=DualClipOptions, needs=ratio_needs, traits={"by_advantage", "ratio"})
def dual_clip(tokens: TokenTensors, options: DualClipOptions) -> tuple[torch.Tensor, Metrics]:
    """As ppo_clip where A >= 0; where A < 0 the objective is max(min(r A, clip(r) A), c A).

    Dual-clip PPO (arXiv 1912.09729, equation 5).

    Returns:
        The loss [m], not aggregated; `clipped`: tokens whose gradient a clip stopped, `dual_clipped` by the second.
    """
    import torch

    ratio = log_ratio(tokens.logprobs, tokens.old(options.ratio_to)).exp()
    loss, stopped = clipped(ratio, tokens.advantages, options.clip_low, options.clip_high)
    most = -options.dual_clip * tokens.advantages
    negative = tokens.advantages < 0
    second = (negative & (loss > most)).detach()
    metrics = {"clipped": float((stopped | second).sum()), "dual_clipped": float(second.sum())}
    return torch.where(negative, torch.minimum(loss, most), loss), metrics


def _behaviour_weight(tokens: TokenTensors) -> torch.Tensor:
    """pi_proximal / pi_behaviour; [m]."""
    return log_ratio(tokens.old("proximal"), tokens.behaviour).exp()


def over_cap(tokens: TokenTensors, options: DecoupledOptions) -> torch.Tensor:
    """Where the weight is above the cap; bool [m]."""
    return _behaviour_weight(tokens) > options.weight_cap


@part(
    "loss",
    "decoupled_ppo",
    options=DecoupledOptions,
    needs={"proximal"},
    traits={"by_advantage", "ratio", "weights"},
    left_out=over_cap,
)
def decoupled_ppo(tokens: TokenTensors, options: DecoupledOptions) -> tuple[torch.Tensor, Metrics]:
    """-(pi_prox / pi_behav) min(r A, clip(r) A) with r = pi / pi_prox, for each token.

    Decoupled PPO (arXiv 2110.00641, section 3), for language models in AReaL (arXiv 2505.24298, equation 5). The weight
    carries no gradient. weight_cap is of AReaL's implementation, not of the papers: `behav_imp_weight_cap`, 5.0 in its
    published configurations (examples/math/gsm8k_grpo.yaml), off in its code. Tokens left out by it count in the
    aggregation like clipped ones.

    Returns:
        The loss [m], not aggregated; `clipped`, `capped` (tokens left out by the cap).
    """
    weight = _behaviour_weight(tokens)
    ratio = log_ratio(tokens.logprobs, tokens.old("proximal")).exp()
    loss, stopped = clipped(ratio, tokens.advantages, options.clip_low, options.clip_high)
    over = over_cap(tokens, options)
    return weight.masked_fill(over, 0.0) * loss, {"clipped": float(stopped.sum()), "capped": float(over.sum())}


@part("loss", "policy_gradient", traits={"by_advantage"})
def policy_gradient(tokens: TokenTensors, options: object) -> tuple[torch.Tensor, Metrics]:
    """-A log pi for each token: REINFORCE, without a ratio (arXiv 2402.14740, section 2.2).

    It is right on-policy; with samples of other policies, add a correction that weights (tis, mis, icepop).

    Returns:
        The loss [m], not aggregated, and no metrics.
    """
    return -tokens.advantages * tokens.logprobs, {}
