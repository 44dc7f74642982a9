"""One optimizer step: its batch, gradients and updates, and what its metrics say. Called by the trainer role.

The metrics include the trainer-engine mismatch. Samples whose advantages are all zero, as those of a group with equal
rewards, have no part in the gradient and are not computed with it; `zero_advantage_token_metrics` measures them as
well, so that the mismatch is not that of the other samples alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.sample import Sample, content_digest
from relax_rt.roles.base.settings import ProgressTable
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.training.algorithms.inputs import LOG_RATIO_LIMIT, Metrics, merge
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.backend.interface import StepResult
from relax_rt.roles.training.backend.shares import SharedSample
from relax_rt.roles.training.batch.rows import mini_batches, pick
from relax_rt.transport.base.versions import VersionRecord

if TYPE_CHECKING:
    from relax_rt.roles.training.backend.interface import TrainerBackend
    from relax_rt.transport.queue.batch import LeasedBatch, LeasedSample


MEANS = {"ratio_mean": "ratio", "kl_behaviour": "kl", "difference_mean": "difference", "clip_fraction": "clipped"}
"""Fields of a StepResult that are means over tokens, and the sums that they are of."""
LARGEST = {"ratio_max_deviation": "ratio_deviation_max", "difference_max": "difference_max"}


def zero_advantage_token_metrics(
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


def with_zero_advantage_tokens(result: StepResult, rest: Mapping[str, float]) -> StepResult:
    """The result with its trainer-engine mismatch over its own tokens and those of `zero_advantage_token_metrics`.

    A token without advantage is never clipped: no clip moves a gradient of zero.
    """
    more = rest.get("tokens", 0.0)
    if not more:
        return result
    seen, every = result.measured_tokens, result.measured_tokens + more
    means = {field: (getattr(result, field) * seen + rest.get(name, 0.0)) / every for field, name in MEANS.items()}
    largest = {field: max(getattr(result, field), rest[name]) for field, name in LARGEST.items()}
    return msgspec.structs.replace(result, measured_tokens=int(every), **means, **largest)


def with_pre_update_mismatch(result: StepResult, samples: Sequence[Sample]) -> StepResult:
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
    total, count = 0.0, 0
    for one in samples:
        trained = one.loss_mask[1:] != 0
        count += int(trained.sum())
        if not isinstance(one, SharedSample):
            total += float(one.behaviour_logprobs[1:][trained].sum(dtype=np.float64))
        elif trained.any():
            total += one.sampled_logprob
    return -total / count if count else 0.0


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
        idle_metrics: trainer-engine mismatch over tokens without gradients (`zero_advantage_token_metrics`).
        masked_tokens: tokens whose advantage the loss set to 0 before the update.
        refused_tokens: tokens of samples that the queue refused as over-stale since the step before.
        stage_wait_s: how long the update waited for the weights to be copied to the stage.
        received_bytes: payload that came from other nodes, by the node that received it; of a gang over several nodes.
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
    received_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, lease: LeasedBatch, samples: list[Sample]) -> None:
        """Add the groups of a lease, with its samples as they were read."""
        self.leases.append(lease)
        self.leased += lease.samples
        self.samples += samples
        self.digests += [s.digest if isinstance(s, SharedSample) else content_digest(s) for s in samples]
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
    several updates to a publication (`optimizer_updates`) this is called before the first one, with the samples of
    all, so that each update is compared with the weights before the first. For a single update the pass that computes
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


def optimizer_updates(
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
    """Take the optimizer updates of a step, one per mini-batch, once all its groups are collected. Blocks.

    Advantages are of the whole batch, and so are the proximal log-probabilities, where they are needed: both are
    computed before the first update, and what the latter say of trainer and engine stands in the result. Each update
    is divided by the count of its own mini-batch. One that is not finite is skipped, the others are applied.

    Args:
        version: the published one that the step begins with. number: of the step; all its updates have its rate.
        over: see `zero_advantage_token_metrics`. before_update: called, and may block, before each update.
    """
    proximal = "proximal" in objective.needs
    if proximal:
        set_proximal_logprobs(batch.samples, backend, version)
    batch.masked_tokens = objective.advantages(batch.samples)
    if not proximal:
        batch.idle_metrics = zero_advantage_token_metrics(batch.samples, backend, objective, over)
    divided = mini_batches([sample.meta.group for sample in batch.samples], updates)
    parts, results = [pick(batch.samples, places) for places in divided], []
    for part in parts:
        count = backend.accumulate(part).count
        results.append(backend.apply(count, number, before_update))
        batch.parts += 1
    batch.accumulated = len(batch.samples)
    result = combine_results(results)
    if not proximal:
        return result
    counted = [part for part, one in zip(parts, results, strict=True) if one.applied or not result.applied]
    return with_pre_update_mismatch(result, [sample for part in counted for sample in part])


def combine_results(results: Sequence[StepResult]) -> StepResult:
    """The result of a step with these updates.

    Skipped updates are only counted: what they measured may not be finite. If all were skipped, the step was.

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
    result = with_zero_advantage_tokens(result, batch.idle_metrics)
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
        # What filters did, where there are any.
        **(
            {"scored": batch.scored, "filtered": batch.filtered, "kept_fraction": batch.groups / batch.scored}
            if batch.scored
            else {}
        ),
        "skipped": "" if result.applied else result.why,
        "wait_s": batch.timer["wait"],
        "train_s": batch.timer["train"],
        "stage_wait_s": batch.stage_wait_s,
        **({"received_bytes": batch.received_bytes} if batch.received_bytes else {}),
        "publish_s": batch.timer["publish"],
        "elapsed_s": elapsed_s,
        "digests": batch.digests,
    }


class EmptySteps:
    """Counts consecutive steps of which no sample had a part in the gradient.

    They are reported after `progress.empty_steps` of them, and whenever their number has doubled.
    """

    def __init__(self, ctx: RoleContext, objective: Objective) -> None:
        self._ctx, self._objective = ctx, objective
        self._limit = ctx.config.table(ProgressTable).empty_steps
        self._count, self._reason = 0, ""

    def note(self, batch: StepBatch, result: StepResult, step: int, *, empty: bool) -> None:
        """Count a step. A skipped update says nothing about its samples: the count stays.

        Args:
            empty: the step had no token to train.
        """
        if not result.applied:
            return
        self._reason = ""
        if empty:
            config, cut = self._ctx.config, sum(sample.meta.truncated for sample in batch.samples)
            limit, truncated = config.table(SamplingTable).max_new_tokens, config.table(AlgorithmTable).truncated
            self._reason = (
                f"none of {len(batch.samples)} samples has a token to train; {cut} were cut at "
                f'sampling.max_new_tokens = {limit} (algorithm.truncated = "{truncated}")'
            )
            self._ctx.event("step_empty", step=step, why=self._reason)
        elif all(self._objective.idle(sample) for sample in batch.samples):
            self._reason = _no_advantage(self._ctx.config, batch.samples, batch.masked_tokens)
        self._count = self._count + 1 if self._reason else 0
        times, rest = divmod(self._count, self._limit)
        if times and not rest and not times & (times - 1):
            self._ctx.event("steps_empty", step=step, steps=self._count, why=self._reason)
            self._ctx.log.warning("steps that trained nothing", steps=self._count, why=self._reason)

    def record(self) -> dict[str, Any]:
        """Fields of a step's metrics."""
        return {"empty_steps": self._count, "empty_reason": self._reason if self._count >= self._limit else ""}


def _no_advantage(config: RunConfig, samples: Sequence[Sample], masked_tokens: int) -> str:
    """Say why the advantages of a step are all 0, and what helps.

    Args:
        masked_tokens: tokens whose advantage the loss set to 0 before the update.
    """
    if masked_tokens:
        hint = "a lower algorithm.max_staleness, or a wider trust region in algorithm.loss"
        return f"the loss set the advantages of all {masked_tokens} tokens that had one to 0; what helps: {hint}"
    rewards: dict[int, set[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.meta.group, set()).add(sample.reward or 0.0)
    equal = all(len(values) == 1 for values in rewards.values())
    mean = sum(sample.reward or 0.0 for sample in samples) / len(samples)
    cause = "rewards are equal within each group" if equal else "all advantages are 0"
    table = config.table(AlgorithmTable)
    hints = ["easier or harder prompts", "a reward with more than one value"]
    hints.append(f"more samples a prompt (algorithm.group_size = {table.group_size})")
    if not table.filters:
        hints.append('dynamic sampling (algorithm.filters = ["zero_variance"])')
    return f"{cause}, mean reward {mean:.3g}; what helps: {', '.join(hints)}"
