"""One optimizer step: its batch, gradients and updates, and its record in the metrics. Called by the trainer role."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from relax_rt.roles.base.sample import Sample, content_digest
from relax_rt.roles.training.algorithms.tensors import Metrics, merge
from relax_rt.roles.training.backend.interface import StepResult
from relax_rt.roles.training.batch.rows import mini_batches, pick
from relax_rt.roles.training.mismatch import (
    idle_token_metrics,
    measured_before_updates,
    sampled_entropy,
    with_idle_tokens,
)
from relax_rt.transport.base.versions import VersionRecord

if TYPE_CHECKING:
    from relax_rt.roles.training.algorithms.objective import Objective
    from relax_rt.roles.training.backend.interface import TrainerBackend
    from relax_rt.transport.queue.batch import LeasedBatch, LeasedSample


class StepTimer:
    """Charges the time of a step to its activities, without gaps; seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.since = clock()
        self.seconds: dict[str, float] = {}

    def lap(self, what: str) -> None:
        """Charge the time since the last call, or since the start, to this activity."""
        now = self._clock()
        self.seconds[what] = self.seconds.get(what, 0.0) + now - self.since
        self.since = now

    def __getitem__(self, what: str) -> float:
        return self.seconds.get(what, 0.0)


@dataclass(slots=True, eq=False)
class StepBatch:
    """The groups of one step, as far as they have arrived.

    Attributes:
        timer: laps `wait`, `train` and `publish`.
        full: no more groups are waited for.
        leases: under which the samples are held; the step completes them together.
        leased, samples: the same samples, as they were leased and as they were read. digests: of what was read.
        groups: number of groups in the batch.
        accumulated: number of samples, from the first on, whose gradients are computed, in so many `parts`.
        count: divisor of the gradients so far.
        scored: groups that arrived, filtered ones included. filtered: groups that were filtered out, by filter.
        idle_metrics: trainer-engine mismatch over tokens without gradients (`mismatch.idle_token_metrics`).
        masked_tokens: tokens whose advantage the loss set to 0 before the update.
        refused_tokens: tokens of samples that the queue refused as over-stale since the step before.
        stage_wait_s: how long the update waited for the weights to be copied to the stage.
    """

    timer: StepTimer = field(default_factory=StepTimer)
    full: bool = False
    leases: list[LeasedBatch] = field(default_factory=list)
    leased: list[LeasedSample] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    groups: int = 0
    accumulated: int = 0
    parts: int = 0
    count: float = 0.0
    scored: int = 0
    filtered: dict[str, int] = field(default_factory=dict)
    idle_metrics: Metrics = field(default_factory=dict)
    masked_tokens: int = 0
    refused_tokens: int = 0
    stage_wait_s: float = 0.0

    def add(self, lease: LeasedBatch, samples: list[Sample]) -> None:
        """Add the groups of a lease, with its samples as they were read."""
        self.leases.append(lease)
        self.leased += lease.samples
        self.samples += samples
        self.digests += [content_digest(sample) for sample in samples]
        self.groups += len(lease.groups())

    def pending_tokens(self) -> int:
        """Tokens whose gradients are not there yet; those of a common prompt count once."""
        prompts = {(s.meta.group, s.prompt_length) for s in self.samples[self.accumulated :]}
        own = sum(len(s.tokens) - s.prompt_length for s in self.samples[self.accumulated :])
        return own + sum(length for _, length in prompts)


def accumulate(batch: StepBatch, backend: TrainerBackend, objective: Objective, version: int) -> None:
    """Compute the gradients of those samples of a batch that have none yet. Blocks.

    Args:
        batch: all groups of the step, unless the objective streams.
        version: the published policy version that the step begins with.
    """
    samples = batch.samples[batch.accumulated :]
    if "proximal" in objective.needs:
        set_proximal_logprobs(samples, backend, version, wanted=objective.proximal_first)
    batch.masked_tokens += objective.advantages(samples)
    batch.count += backend.accumulate(samples).count
    batch.accumulated = len(batch.samples)
    batch.parts += 1


def set_proximal_logprobs(
    samples: Sequence[Sample], backend: TrainerBackend, version: int, *, wanted: bool = True
) -> None:
    """Give samples the proximal log-probabilities of the backend's weights, or none. Blocks.

    Values of another version, from an engine or an earlier publication, have lapsed; those of this version stay. With
    several updates to a publication (`take_updates`) this is called before the first one, with the samples of all, so
    that each update is compared with the weights before the first. For a single update the pass that computes
    gradients finds them itself (`Objective.proximal_first`).

    Args:
        version: published version of the weights. wanted: compute missing values.
    """
    for sample in samples:
        if sample.proximal_version != version:
            sample.proximal_logprobs = sample.proximal_version = None
    if wanted and any(sample.proximal_logprobs is None for sample in samples):
        for sample, values in zip(samples, backend.log_probabilities(samples), strict=True):
            sample.proximal_logprobs, sample.proximal_version = values, version


T = TypeVar("T")

TOKEN_MEANS = ("ratio_mean", "clip_fraction", "kl_behaviour", "difference_mean", "sampled_entropy")
"""Fields of a StepResult that are means over its measured tokens; so are those that may be None."""
OPTIONAL_MEANS = ("drift_mean", "entropy", "kl_reference")
SUMS = ("tokens", "measured_tokens", "rejected_tokens", "updates")
MAXIMA = ("ratio_max_deviation", "difference_max")


def take_updates(
    batch: StepBatch,
    backend: TrainerBackend,
    objective: Objective,
    *,
    updates: int,
    version: int,
    number: int,
    over: Literal["trained", "all"] = "trained",
    before_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """The updates of a step whose groups are all there. Blocks.

    Advantages are of the whole batch, and so are the proximal log-probabilities, where they are needed: both are
    computed before the first update, and what the latter say of trainer and engine stands in the result. Each update
    is divided by the count of its own mini-batch. One that is not finite is thrown away, and the others are taken.

    Args:
        version: the published one that the step begins with. number: of the step; all its updates have its rate.
        over: see `idle_token_metrics`. before_update: called, and may block, before each update.
    """
    proximal = "proximal" in objective.needs
    if proximal:
        set_proximal_logprobs(batch.samples, backend, version)
    batch.masked_tokens = objective.advantages(batch.samples)
    if not proximal:
        batch.idle_metrics = idle_token_metrics(batch.samples, backend, objective, over)
    parts, results = list(_parts(batch.samples, updates)), []
    for part in parts:
        count = backend.accumulate(part).count
        results.append(backend.apply(count, number, before_update))
        batch.parts += 1
    batch.accumulated = len(batch.samples)
    result = combine_results(results)
    if not proximal:
        return result
    counted = [part for part, one in zip(parts, results, strict=True) if one.applied or not result.applied]
    return measured_before_updates(result, [sample for part in counted for sample in part])


def _parts(samples: Sequence[Sample], updates: int) -> Iterator[list[Sample]]:
    for places in mini_batches([sample.meta.group for sample in samples], updates):
        yield pick(samples, places)


def combine_results(results: Sequence[StepResult]) -> StepResult:
    """The result of a step with these updates.

    Of updates that were thrown away only that they were: what they measured may be no numbers. If all were, the step
    was.

    Args:
        results: of at least one update.
    """
    applied = [one for one in results if one.applied]
    counted = applied or results
    moved = [one for one in applied if one.changed]
    others: Metrics = {}
    for one in counted:
        merge(others, one.others)
    if moved:
        others["grad_norm_max"] = max(one.grad_norm for one in moved)
    bad = [f"update {place} of {len(results)}: {one.why}" for place, one in enumerate(results, 1) if not one.applied]
    fields: dict[str, Any] = {name: _mean(counted, name) for name in TOKEN_MEANS}
    fields |= {
        name: _mean(counted, name) for name in OPTIONAL_MEANS if any(getattr(one, name) is not None for one in counted)
    }
    fields |= {name: sum(getattr(one, name) for one in counted) for name in SUMS}
    fields |= {name: max(getattr(one, name) for one in counted) for name in MAXIMA}
    return StepResult(
        applied=bool(applied),
        changed=bool(moved),
        why="; ".join(bad) if bad or moved else results[0].why,
        loss=float(np.mean([one.loss for one in counted])),
        grad_norm=float(np.mean([one.grad_norm for one in moved])) if moved else counted[0].grad_norm,
        learning_rate=results[0].learning_rate,
        computed_tokens=sum(one.computed_tokens for one in results),
        updates_skipped=len(bad),
        others=others,
        **fields,
    )


def _mean(results: Sequence[StepResult], name: str) -> float:
    """Over the measured tokens of all of them."""
    tokens = sum(one.measured_tokens for one in results)
    whole = math.fsum((getattr(one, name) or 0.0) * one.measured_tokens for one in results if one.measured_tokens)
    return whole / max(tokens, 1)


def step_record(
    batch: StepBatch, result: StepResult, *, step: int, weights: VersionRecord, epoch: int, elapsed_s: float
) -> dict[str, Any]:
    """The record of a step that is done.

    Args:
        weights: those that the step made. epoch: of the trainer. elapsed_s: since the run began to train.
    """
    samples = batch.samples
    rewards = np.array([s.reward or 0.0 for s in samples])
    names = sorted({name for s in samples for name in s.rewards})
    result = with_idle_tokens(result, batch.idle_metrics)
    return {
        "kind": "step",
        "step": step,
        "version": weights.version,
        "epoch": epoch,
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "rewards": {n: float(np.mean([s.rewards.get(n, 0.0) for s in samples])) for n in names},
        "staleness": [s.staleness for s in batch.leased],
        "versions": [sorted({span.version for span in s.versions}) for s in samples],
        "trained_version": weights.parent,
        "keys": [str(s.key) for s in batch.leased],
        "sample_rewards": rewards.tolist(),
        "prompts": sorted({s.meta.prompt for s in samples}),
        "truncated_fraction": float(np.mean([s.meta.truncated for s in samples])),
        "length_mean": float(np.mean([int(s.loss_mask.sum()) for s in samples])),
        **{k: getattr(result, k) for k in result.__struct_fields__ if k not in ("applied", "why")},
        "sampled_entropy": sampled_entropy(samples),
        "refused_tokens": batch.refused_tokens,
        "stale_tokens": sum(end - start for s in batch.leased for start, end in s.masked),
        "masked_tokens": batch.masked_tokens,
        "parts": batch.parts,
        **_filtered(batch),
        "skipped": "" if result.applied else result.why,
        "wait_s": batch.timer["wait"],
        "train_s": batch.timer["train"],
        "stage_wait_s": batch.stage_wait_s,
        "publish_s": batch.timer["publish"],
        "elapsed_s": elapsed_s,
        "digests": batch.digests,
    }


def _filtered(batch: StepBatch) -> dict[str, Any]:
    """What filters did, where there are any: groups that arrived, those filtered out by filter, the fraction kept."""
    if not batch.scored:
        return {}
    return {"scored": batch.scored, "filtered": batch.filtered, "kept_fraction": batch.groups / batch.scored}
