"""What a step leaves in the run's metrics."""

from __future__ import annotations

from typing import Any

import numpy as np

from relax_rt.roles.training.base import StepResult
from relax_rt.roles.training.mismatch import completed, sampled_entropy
from relax_rt.roles.training.step import Batch
from relax_rt.transport.base.versions import VersionRecord


def step_record(
    batch: Batch, result: StepResult, *, step: int, weights: VersionRecord, epoch: int, elapsed_s: float
) -> dict[str, Any]:
    """The record of a step that is done.

    Args:
        weights: those that the step made. epoch: of the trainer. elapsed_s: since the run began to train.
    """
    samples = batch.samples
    rewards = np.array([s.reward or 0.0 for s in samples])
    names = sorted({name for s in samples for name in s.rewards})
    result = completed(result, batch.beside)
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
        "masked_tokens": batch.left_out_tokens,
        "parts": batch.parts,
        **_filtered(batch),
        "skipped": "" if result.applied else result.why,
        "wait_s": batch.spent["wait"],
        "train_s": batch.spent["train"],
        "stage_wait_s": batch.stage_wait_s,
        "publish_s": batch.spent["publish"],
        "elapsed_s": elapsed_s,
        "digests": batch.digests,
    }


def _filtered(batch: Batch) -> dict[str, Any]:
    """What filters did, where there are any: groups that came, those left out by filter, the share kept."""
    if not batch.scored:
        return {}
    return {"scored": batch.scored, "filtered": batch.filtered, "kept_fraction": batch.groups / batch.scored}
