"""The report on trained and sampled policy at each step: over which tokens, and every item of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_backend import torch_backend

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from packing_samples import SAMPLES  # noqa: E402

from relax_rt.roles.base.sample import Sample  # noqa: E402
from relax_rt.roles.training.algorithms.inputs import Metrics  # noqa: E402
from relax_rt.roles.training.backend.interface import StepResult  # noqa: E402
from relax_rt.roles.training.step import (  # noqa: E402  # noqa: E402
    StepBatch,
    accumulate,
    step_record,
    with_zero_advantage_tokens,
    zero_advantage_token_metrics,
)
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402
from relax_rt.transport.base.versions import VersionRecord  # noqa: E402

WEIGHTS = VersionRecord(3, 2, 1)
EQUAL = {0: 1.0, 2: 0.5}
"""Rewards of groups whose members have all the same: they have no part in the gradient."""


class Counted(TorchBackend):
    """Knows the samples of which log-probabilities were asked for."""

    def log_probabilities(self, samples: Sequence[Sample]) -> list[Any]:
        self.asked = [*getattr(self, "asked", []), *samples]
        return super().log_probabilities(samples)


def backend(model_dir: Path, **table: Any) -> Counted:
    return torch_backend(model_dir, Counted, 64, 0.8, learning_rate=1e-4, max_grad_norm=1.0, **table)


def batch_of(rewards: dict[int, float]) -> StepBatch:
    """A batch with these rewards in place of those that differ within a group."""
    batch = StepBatch()
    for one in copy.deepcopy(SAMPLES):
        one.reward = rewards.get(one.meta.group, one.reward)
        one.proximal_logprobs = None
        batch.samples.append(one)
        key = f"{one.meta.group}.{one.meta.member}"
        leased: Any = SimpleNamespace(key=key, staleness=one.meta.group, masked=[(0, 2)] if one.meta.member else [])
        batch.leased.append(leased)
    batch.refused_tokens = 17
    return batch


def wanted(samples: Sequence[Sample], trainer: TorchBackend) -> dict[str, float]:
    """The report over the trained tokens of these samples, by the definitions of docs/reference/metrics.md."""
    found = TorchBackend.log_probabilities(trainer, samples)
    pairs = [(f[m], s.behaviour_logprobs[m]) for f, s in zip(found, samples, strict=True) for m in [s.loss_mask != 0]]
    ours, theirs = (np.concatenate(part).astype(np.float64) for part in zip(*pairs, strict=True))
    gap = ours - theirs
    return {
        "measured_tokens": len(gap),
        "ratio_mean": np.exp(gap).mean(),
        "ratio_max_deviation": np.abs(np.exp(gap) - 1).max(),
        "kl_behaviour": (np.exp(gap) - 1 - gap).mean(),
        "difference_mean": np.abs(gap).mean(),
        "difference_max": np.abs(gap).max(),
    }


def step(trainer: Counted, batch: StepBatch, over: Any) -> tuple[StepResult, dict[str, Any]]:
    accumulate(batch, trainer, trainer.objective, 2)
    batch.idle_metrics = zero_advantage_token_metrics(batch.samples, trainer, trainer.objective, over)
    result = trainer.apply(batch.count, 1)
    return result, step_record(batch, result, step=1, weights=WEIGHTS, epoch=1, elapsed_s=1.0)


CASES = [
    # Rewards that are equal, over, groups measured, groups of which a forward pass is made besides.
    ({}, "trained", {0, 1, 2}, set()),
    (EQUAL, "trained", {1}, set()),
    (EQUAL, "all", {0, 1, 2}, {0, 2}),
    ({**EQUAL, 1: 0.0}, "trained", {0, 1, 2}, {0, 1, 2}),
]


@pytest.mark.parametrize(("rewards", "over", "measured", "asked"), CASES)
def test_the_report_is_over_the_tokens_it_says(
    model_dir: Path, rewards: dict[int, float], over: str, measured: set[int], asked: set[int]
) -> None:
    trainer, batch = backend(model_dir), batch_of(rewards)
    report = wanted([s for s in batch.samples if s.meta.group in measured], trainer)
    _, record = step(trainer, batch, over)
    assert {s.meta.group for s in getattr(trainer, "asked", [])} == asked
    for name, value in report.items():
        assert record[name] == pytest.approx(value, rel=1e-4), name
    assert record["tokens"] == sum(int(s.loss_mask.sum()) for s in batch.samples)


def test_every_item_is_there_at_each_step(model_dir: Path) -> None:
    table = {
        "corrections": [{"name": "icepop", "low": 0.9, "high": 1.1}],
        "entropy": {"name": "bonus", "coefficient": 0.1},
    }
    trainer, batch = backend(model_dir, **table), batch_of({})
    _, record = step(trainer, batch, "trained")
    for name in ("difference_mean", "difference_max", "ratio_mean", "ratio_max_deviation", "kl_behaviour", "entropy"):
        assert np.isfinite(record[name]) and record[name] != 0, name
    assert 0 <= record["clip_fraction"] <= 1
    assert record["staleness"] == [s.meta.group for s in batch.samples]
    drawn = np.concatenate([s.behaviour_logprobs[s.loss_mask != 0] for s in batch.samples])
    assert record["sampled_entropy"] == pytest.approx(-drawn.mean(), rel=1e-5)
    # Refused by the queue, put out of training as over-stale, given no weight by a correction.
    masked = sum(2 for s in batch.samples if s.meta.member)
    assert (record["refused_tokens"], record["stale_tokens"]) == (17, masked) and record["rejected_tokens"] > 0


def test_what_a_trust_region_takes_out_before_the_update_is_reported(model_dir: Path) -> None:
    trainer, batch = backend(model_dir, name="m2po", loss={"name": "m2po", "threshold": 1e-9}), batch_of({})
    _, record = step(trainer, batch, "trained")
    left = sum(int((s.advantages != 0).sum()) for s in batch.samples if s.advantages is not None)
    plain, whole = backend(model_dir), batch_of({})
    step(plain, whole, "trained")
    every = sum(int((s.advantages != 0).sum()) for s in whole.samples if s.advantages is not None)
    assert 0 < record["masked_tokens"] == every - left < every
    assert record["rejected_tokens"] == 0
    assert step(plain, batch_of({}), "trained")[1]["masked_tokens"] == 0


def test_a_step_that_is_thrown_away_has_its_report(model_dir: Path) -> None:
    trainer, batch = backend(model_dir), batch_of({})
    loss, calls = trainer.objective.loss, []

    def spoilt(tokens: Any) -> tuple[torch.Tensor, Metrics]:
        calls.append(1)
        total, metrics = loss(tokens)
        return (total * float("nan") if len(calls) == 2 else total), metrics

    trainer._budget.tokens = 16
    trainer.objective.loss = spoilt  # type: ignore[method-assign]
    result, record = step(trainer, batch, "trained")
    assert not result.applied and record["skipped"] == "loss is nan in step 1" and np.isnan(record["loss"])
    assert 0 < record["measured_tokens"] < record["tokens"] and record["difference_mean"] > 0


def test_a_mean_is_over_both_parts_and_the_largest_of_both() -> None:
    base = {"applied": True, "changed": True, "why": "", "tokens": 10, "loss": 0.0, "grad_norm": 1.0}
    zeros = {"learning_rate": 0.1, "computed_tokens": 4}
    one = StepResult(
        **base,
        **zeros,
        ratio_mean=1.0,
        ratio_max_deviation=0.5,
        clip_fraction=0.5,
        kl_behaviour=0.1,
        difference_mean=0.2,
        difference_max=0.3,
        measured_tokens=4,
    )
    rest = {"tokens": 6.0, "ratio": 12.0, "ratio_deviation_max": 0.4, "kl": 0.6, "difference": 3.0, "difference_max": 2}
    both = with_zero_advantage_tokens(one, rest)
    assert (both.measured_tokens, both.ratio_mean, both.ratio_max_deviation) == (10, pytest.approx(1.6), 0.5)
    assert (both.clip_fraction, both.difference_mean) == (pytest.approx(0.2), pytest.approx(0.38))
    assert (both.kl_behaviour, both.difference_max) == (pytest.approx(0.1), 2) and with_zero_advantage_tokens(
        one, {}
    ) is one
