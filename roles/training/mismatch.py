"""Trainer-engine mismatch of tokens whose gradients are not computed.

Samples whose advantages are all zero, as those of a group with equal rewards, have no part in the gradient of a loss
that depends on advantages, and are not computed with it. A step's mismatch metrics would then be of the other samples
alone, unless these are measured as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.training.algorithms.tensors import LOG_RATIO_LIMIT, Metrics
from relax_rt.roles.training.backend.interface import StepResult

if TYPE_CHECKING:
    from relax_rt.roles.training.algorithms.objective import Objective
    from relax_rt.roles.training.backend.interface import TrainerBackend

MEANS = {"ratio_mean": "ratio", "kl_behaviour": "kl", "difference_mean": "difference", "clip_fraction": "clipped"}
"""Fields of a StepResult that are means over tokens, and the sums that they are of."""
LARGEST = {"ratio_max_deviation": "ratio_deviation_max", "difference_max": "difference_max"}


def idle_token_metrics(
    samples: Sequence[Sample], backend: TrainerBackend, objective: Objective, over: Literal["trained", "all"]
) -> Metrics:
    """Sums over trained tokens that are not computed with the gradients; empty where there are none, or where they are
    not to be measured. Blocks; before the update.

    Args:
        samples: of a step, after `Objective.advantages`.
        over: "all" makes a forward pass for them. "trained" does so only where nothing else is computed in the step,
            which would leave it without a measure.
    """
    idle = [one for one in samples if objective.idle(one) and one.loss_mask[1:].any()]
    if not idle:
        return {}
    if "proximal" in objective.needs:
        found = [one.proximal_logprobs for one in idle if one.proximal_logprobs is not None]
        if len(found) == len(idle):
            # They are there already.
            return mismatch_sums(idle, found)
    if over == "trained" and any(not objective.idle(one) for one in samples):
        return {}
    return mismatch_sums(idle, backend.log_probabilities(idle))


def mismatch_sums(samples: Sequence[Sample], logprobs: Sequence[NDArray[np.float32]]) -> Metrics:
    """Return those sums of `Objective.loss` over the trained tokens that compare the two policies.

    Args:
        logprobs: under the trained policy, float32 [T] for each sample.
    """
    at = [np.flatnonzero(one.loss_mask[1:]) + 1 for one in samples]
    gaps = [
        values[places].astype(np.float64) - one.behaviour_logprobs[places]
        for one, values, places in zip(samples, logprobs, at, strict=True)
    ]
    gap = np.concatenate(gaps)
    held = gap.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = np.exp(held)
    return {
        "tokens": float(len(gap)),
        "ratio": float(ratio.sum()),
        "ratio_deviation_max": float(np.abs(ratio - 1.0).max(initial=0.0)),
        # k3 of KL(behaviour || trained): Schulman 2020, "Approximating KL Divergence".
        "kl": float((ratio - 1.0 - held).sum()),
        "difference": float(np.abs(gap).sum()),
        "difference_max": float(np.abs(gap).max(initial=0.0)),
    }


def with_idle_tokens(result: StepResult, rest: Mapping[str, float]) -> StepResult:
    """The result with what it says of the two policies over its own tokens and those of `idle_token_metrics`.

    A token without advantage is never clipped: no clip moves a gradient of zero.
    """
    more = rest.get("tokens", 0.0)
    if not more:
        return result
    seen, every = result.measured_tokens, result.measured_tokens + more
    means = {field: (getattr(result, field) * seen + rest.get(name, 0.0)) / every for field, name in MEANS.items()}
    largest = {field: max(getattr(result, field), rest[name]) for field, name in LARGEST.items()}
    return msgspec.structs.replace(result, measured_tokens=int(every), **means, **largest)


def measured_before_updates(result: StepResult, samples: Sequence[Sample]) -> StepResult:
    """The result with what it says of the two policies by the proximal log-probabilities of these samples, which are of
    the weights before the step's first update: without what its updates have moved."""
    found = mismatch_sums(samples, [one.proximal_logprobs for one in samples if one.proximal_logprobs is not None])
    every = found["tokens"]
    if not every:
        return result
    means = {field: found[name] / every for field, name in MEANS.items() if name in found}
    largest = {field: found[name] for field, name in LARGEST.items()}
    clipped = result.clip_fraction * result.measured_tokens / every
    return msgspec.structs.replace(result, measured_tokens=int(every), clip_fraction=clipped, **means, **largest)


def sampled_entropy(samples: Sequence[Sample]) -> float:
    """Estimate the entropy of the behaviour policy: minus the mean log-probability of the trained tokens that it
    sampled, nats a token; 0 without any."""
    drawn = [one.behaviour_logprobs[1:][one.loss_mask[1:] != 0] for one in samples]
    values = np.concatenate([np.zeros(0, np.float32), *drawn])
    return -float(values.mean(dtype=np.float64)) if len(values) else 0.0
