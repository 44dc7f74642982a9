"""Losses of each token (PPO, GSPO, CISPO, SAPO, M2PO, supervised, DPO), and their aggregation to one number.

A loss returns a value for each token, not aggregated, and metrics, which are sums over the trained tokens. An
aggregation is a weight for each token and one count for the whole batch: the sum of weight x loss over all
micro-batches and ranks is divided once, by that count, so that the result depends neither on how the batch was cut
nor on who computed which part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.base.sample import Sample
from relax_rt.roles.training.algorithms.advantages import EQUAL
from relax_rt.roles.training.algorithms.inputs import AdvantageInputs, Floats, Metrics, TokenTensors, log_ratio, require
from relax_rt.roles.training.algorithms.registry import part

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

    Metrics: `clipped`: tokens whose gradient the clip stopped.
    """
    ratio = log_ratio(tokens.logprobs, tokens.old(options.ratio_to)).exp()
    loss, stopped = clipped(ratio, tokens.advantages, options.clip_low, options.clip_high)
    return loss, {"clipped": float(stopped.sum())}


@part("loss", "dual_clip", options=DualClipOptions, needs=ratio_needs, traits={"by_advantage", "ratio"})
def dual_clip(tokens: TokenTensors, options: DualClipOptions) -> tuple[torch.Tensor, Metrics]:
    """As ppo_clip where A >= 0; where A < 0 the objective is max(min(r A, clip(r) A), c A).

    Dual-clip PPO (arXiv 1912.09729, equation 5).

    Metrics: `clipped`: tokens whose gradient a clip stopped, `dual_clipped` by the second.
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

    Metrics: `clipped`, `capped` (tokens left out by the cap).
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
    """
    return -tokens.advantages * tokens.logprobs, {}


class SequenceClipOptions(RatioOptions):
    """Bounds of the ratio of sequences; they are narrow, as the ratio is a geometric mean over tokens."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """The ratio counts down to 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 4e-4
    """The ratio counts up to 1 + clip_high."""


@part("loss", "gspo", options=SequenceClipOptions, needs=ratio_needs, traits={"by_advantage", "ratio"})
def gspo(tokens: TokenTensors, options: SequenceClipOptions) -> tuple[torch.Tensor, Metrics]:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with s = exp(mean over the sequence of log pi / pi_old).

    GSPO (arXiv 2507.18071): each token carries its value and the gradient sg[s] pi / sg[pi] of GSPO-token (equation 14
    there), which under the sequence mean of the paper and equal advantages in a sequence is GSPO itself (equations 5
    to 7), and takes advantages of tokens too. Bounds: section 5.1.

    Metrics: `clipped`: tokens of which the clip stopped the gradient.
    """
    whole = tokens.sequence_mean((tokens.logprobs - tokens.old(options.ratio_to)).detach())
    ratio = log_ratio(whole + tokens.logprobs - tokens.logprobs.detach(), whole.new_zeros(())).exp()
    loss, stopped = clipped(ratio, tokens.advantages, options.clip_low, options.clip_high)
    return loss, {"clipped": float(stopped.sum())}


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

    Metrics: `clipped`: tokens whose weight was bounded.
    """
    ratio = log_ratio(tokens.logprobs, tokens.old(options.ratio_to)).exp().detach()
    weight = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    return -weight * tokens.advantages * tokens.logprobs, {"clipped": float((weight != ratio).sum())}


@part("loss", "sapo", options=SapoOptions, needs=ratio_needs, traits={"by_advantage", "ratio"})
def sapo(tokens: TokenTensors, options: SapoOptions) -> tuple[torch.Tensor, Metrics]:
    """-f(r) A with the gate f(r) = sigmoid(tau (r - 1)) 4 / tau, tau by the sign of the advantage.

    SAPO (arXiv 2511.20347): f has slope 1 at r = 1, and fades smoothly on both sides of it.
    """
    import torch

    ratio = log_ratio(tokens.logprobs, tokens.old(options.ratio_to)).exp()
    positive = torch.full_like(ratio, options.tau_positive)
    tau = torch.where(tokens.advantages > 0, positive, options.tau_negative)
    return -(tau * (ratio - 1.0)).sigmoid() * (4.0 / tau) * tokens.advantages, {}


class SecondMomentOptions(Table):
    """The trust region."""

    threshold: Annotated[float, Field(gt=0)] = 0.04
    """Largest mean of (log r)^2 over the tokens that move away from the behaviour policy."""


def outliers(log_ratios: Floats, advantages: Floats, threshold: float) -> NDArray[np.bool_]:
    """The tokens to leave out, so that (log r)^2 of the trust-region tokens that stay is at most threshold on average.

    M2PO (arXiv 2510.01161, algorithm 1): of the tokens with A > 0 and r > 1, or A < 0 and r < 1, the largest go first.
    The mean is over those that stay. The authors' code (Infini-AI-Lab/M2PO, `kpo_clip_harmful_tokens`) looks at the
    same tokens, but cuts them at a bound, and counts those that it has cut.

    Args:
        log_ratios: float64 [n], log pi / pi_behaviour. advantages: float64 [n].

    Returns:
        bool [n].
    """
    left_out = np.zeros(len(log_ratios), bool)
    region = np.flatnonzero(log_ratios * advantages > 0)
    if not len(region):
        return left_out
    moments = log_ratios[region] ** 2
    largest_first = np.argsort(-moments, kind="stable")
    # Means of what stays when the first k go, for k = 0, 1, …
    remaining = np.cumsum(moments[largest_first][::-1])[::-1] / np.arange(len(region), 0, -1)
    within = np.flatnonzero(remaining <= threshold)
    drop = int(within[0]) if len(within) else len(region)
    left_out[region[largest_first[:drop]]] = True
    return left_out


def mask_outliers(
    batch: AdvantageInputs, advantages: list[NDArray[np.float32]], options: SecondMomentOptions
) -> list[NDArray[np.float32]]:
    """The advantages with 0 at the tokens that M2PO leaves out, chosen over the whole batch.

    r is that of the weights before the update: validation holds the step to one.

    Raises:
        Refused: a sample has no proximal log-probabilities.
    """
    # In the order of `steps`, by which `place` puts them back.
    gaps = [(t.proximal - t.behaviour)[t.steps] for t in require(batch, "proximal", "m2po") if t.proximal is not None]
    counted = [a[t.steps].astype(np.float64) for a, t in zip(advantages, batch.trajectories, strict=True)]
    if not gaps:
        return advantages
    out = outliers(np.concatenate(gaps), np.concatenate(counted), options.threshold)
    ends = np.cumsum([len(g) for g in gaps])[:-1]
    return [
        one.place(np.where(dropped, 0.0, values))
        for one, values, dropped in zip(batch.trajectories, counted, np.split(out, ends), strict=True)
    ]


@part(
    "loss",
    "m2po",
    options=SecondMomentOptions,
    needs={"proximal", "batch"},
    traits={"by_advantage", "ratio", "weights"},
    prepare=mask_outliers,
)
def m2po(tokens: TokenTensors, options: SecondMomentOptions) -> tuple[torch.Tensor, Metrics]:
    """-M r A with r = pi / pi_behaviour for each token; M is in the advantages already (`mask_outliers`).

    M2PO (arXiv 2510.01161, equation 5). Tokens left out count in the mean, as there (footnote 2).
    """
    return -log_ratio(tokens.logprobs, tokens.behaviour).exp() * tokens.advantages, {}


@part("loss", "sft", traits={"unjudged"})
def sft(tokens: TokenTensors, options: object) -> tuple[torch.Tensor, Metrics]:
    """-log pi of each token of mask 1: the cross-entropy of the given completion. Advantages play no part."""
    return -tokens.logprobs, {}


@part("advantage", "none", traits={"no_cost", "unjudged"})
def no_advantage(batch: AdvantageInputs, options: object) -> list[NDArray[np.float32]]:
    """1 on every trained token, for losses that judge none (sft); float32 [T] for each trajectory."""
    return [one.spread(1.0) for one in batch.trajectories]


class DpoOptions(Table):
    """The preference loss."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the policy is held to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a preference is the wrong way round (conservative DPO)."""


@part("advantage", "preference", needs={"rewards"}, traits={"no_cost", "groups"})
def preference(batch: AdvantageInputs, options: object) -> list[NDArray[np.float32]]:
    """+1 on the tokens of each group's sample of the highest reward, -1 on those of the lowest, 0 on all others; of
    equal ones the first. A group of equal rewards has no pair.

    Online preferences as in arXiv 2402.04792 (from memory), with the reward as the judge. A data set of pairs comes as
    groups of two with rewards 1 and 0.

    Returns:
        float32 [T] for each trajectory.
    """
    found = [one.spread(0.0) for one in batch.trajectories]
    for members in batch.groups():
        rewards = np.array([batch.trajectories[i].reward for i in members])
        if float(np.ptp(rewards)) >= EQUAL:
            for place, sign in ((int(rewards.argmax()), 1.0), (int(rewards.argmin()), -1.0)):
                found[members[place]] = batch.trajectories[members[place]].spread(sign)
    return found


@part("loss", "dpo", options=DpoOptions, needs={"reference", "pairs"}, traits={"by_advantage"})
def dpo(tokens: TokenTensors, options: DpoOptions) -> tuple[torch.Tensor, Metrics]:
    """-log sigmoid(beta (h_chosen - h_rejected)) of each pair, h the sequence's log pi / pi_reference.

    DPO (arXiv 2305.18290, equation 7); label smoothing is conservative DPO's (Mitchell 2023, from memory). The pair is
    the samples of a group whose advantages are positive and negative.

    Returns:
        [m]: the pair's loss, dealt out evenly over its tokens, so that their plain sum is the sum over pairs; and
        `pairs`, `preferred` (pairs whose chosen sample has the larger h), `margin` (sum of beta (h_c - h_r)).

    Raises:
        ValueError: groups or reference log-probabilities are lacking.
    """
    import torch.nn.functional as functional

    if tokens.group is None or tokens.reference is None:
        raise ValueError("dpo needs the group of each token and reference log-probabilities")
    sign = tokens.advantages.sign()
    groups = int(tokens.group.max()) + 1 if tokens.group.numel() else 0
    zeros = tokens.logprobs.new_zeros(groups)
    margin = options.beta * zeros.index_add(0, tokens.group, sign * (tokens.logprobs - tokens.reference))
    size = zeros.index_add(0, tokens.group, sign.abs())
    smoothing = options.label_smoothing
    loss = -(1 - smoothing) * functional.logsigmoid(margin) - smoothing * functional.logsigmoid(-margin)
    real = size > 0
    metrics = {
        "pairs": float(real.sum()),
        "preferred": float((real & (margin > 0)).sum()),
        "margin": float(margin.detach().sum()),
    }
    return (loss / size.clamp(min=1))[tokens.group] * sign.abs(), metrics
