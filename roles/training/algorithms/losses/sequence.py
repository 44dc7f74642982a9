"""Policy losses with the ratio of whole sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from relax_rt.roles.training.algorithms.losses.ppo import RatioOptions, clipped, ratio_needs
from relax_rt.roles.training.algorithms.registry import part
from relax_rt.roles.training.algorithms.tensors import Metrics, TokenTensors, log_ratio

if TYPE_CHECKING:
    import torch


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

    Returns:
        The loss [m], not aggregated; `clipped`: tokens of which the clip stopped the gradient.
    """
    whole = tokens.sequence_mean((tokens.logprobs - tokens.old(options.ratio_to)).detach())
    ratio = log_ratio(whole + tokens.logprobs - tokens.logprobs.detach(), whole.new_zeros(())).exp()
    loss, stopped = clipped(ratio, tokens.advantages, options.clip_low, options.clip_high)
    return loss, {"clipped": float(stopped.sum())}
