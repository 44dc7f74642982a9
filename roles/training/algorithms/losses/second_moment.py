"""Second-moment trust policy optimisation: a trust region over the batch instead of a clip of each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.inputs import AdvantageInputs, Floats, require
from relax_rt.roles.training.algorithms.registry import part
from relax_rt.roles.training.algorithms.tensors import Metrics, TokenTensors, log_ratio

if TYPE_CHECKING:
    import torch


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

    Returns:
        The loss [m], not aggregated, and no metrics.
    """
    return -log_ratio(tokens.logprobs, tokens.behaviour).exp() * tokens.advantages, {}
