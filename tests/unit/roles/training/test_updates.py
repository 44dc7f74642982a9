"""Several updates of a step: each is a step on its own groups, by advantages and a proximal policy of the batch."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from packing_samples import SAMPLES  # noqa: E402
from small_backend import small_backend  # noqa: E402
from trainer_parts import GROUPS, Lives, lives_of, model_with_tokenizer  # noqa: E402

from relax_rt.roles.base.sample import Sample  # noqa: E402
from relax_rt.roles.training.backend.interface import StepResult, skipped_result, step_result  # noqa: E402
from relax_rt.roles.training.batch.rows import mini_batches  # noqa: E402
from relax_rt.roles.training.step import (  # noqa: E402  # noqa: E402
    StepBatch,
    accumulate,
    combine_results,
    optimizer_updates,
    with_zero_advantage_tokens,
)
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402
from relax_rt.roles.training.trainer import SKIPPED_IN_A_ROW, TrainerRole  # noqa: E402
from relax_rt.transport.rpc.errors import RelaxError  # noqa: E402

RATE = 0.02
"""Large, so that the second update finds ratios beyond the bounds."""


class Counting(TorchBackend):
    """Keeps what it is asked for."""

    def log_probabilities(self, samples: Any) -> Any:
        self.__dict__.setdefault("passes", []).append(len(samples))
        return super().log_probabilities(samples)

    def accumulate(self, samples: Any) -> Any:
        self.__dict__.setdefault("parts", []).append([sample.meta.group for sample in samples])
        return super().accumulate(samples)


def opened(model_dir: Path, **table: Any) -> Counting:
    return small_backend(Counting, model_dir, **{"learning_rate": RATE, **table})


def samples() -> list[Sample]:
    found = copy.deepcopy(SAMPLES)
    for sample in found:
        sample.advantages = None
    return found


def weights(backend: TorchBackend) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in backend._model.named_parameters()}


def taken(backend: TorchBackend, updates: int, batch: StepBatch | None = None, **more: Any) -> StepResult:
    batch = StepBatch(samples=samples()) if batch is None else batch
    return optimizer_updates(batch, backend, backend.objective, updates=updates, version=4, number=1, **more)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=9), updates=st.integers(1, 12), seed=st.integers(0, 9))
def test_groups_are_dealt_out_whole_and_evenly(sizes: list[int], updates: int, seed: int) -> None:
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    np.random.default_rng(seed).shuffle(groups)
    parts = mini_batches(groups, updates)
    assert len(parts) == min(updates, len(sizes))
    assert sorted(place for part in parts for place in part) == list(range(len(groups)))
    held = [{groups[place] for place in part} for part in parts]
    assert sum(len(one) for one in held) == len(sizes), "no group is in two"
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert all(part == sorted(part) for part in parts)


TABLES: list[dict[str, Any]] = [
    {"loss": "decoupled_ppo"},
    {"loss": {"name": "ppo_clip", "ratio_to": "proximal"}, "aggregation": "sequence_mean", "corrections": ["tis"]},
    {"name": "gspo", "clip_low": 0.02, "clip_high": 0.02},
    {"name": "reinforce_pp_baseline", "entropy": {"name": "bonus", "coefficient": 0.1}},
    {"name": "rloo"},
]


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_each_update_is_a_step_of_its_own_groups(model_dir: Path, table: dict[str, Any]) -> None:
    backend, by_hand = opened(model_dir, **table), opened(model_dir, **table)
    result = taken(backend, 3)
    batch = samples()
    if "proximal" in by_hand.objective.needs:
        before = TorchBackend.log_probabilities(by_hand, batch)
        for sample, values in zip(batch, before, strict=True):
            sample.proximal_logprobs = values
    by_hand.objective.advantages(batch)
    found = []
    for group in range(3):
        part = [sample for sample in batch if sample.meta.group == group]
        found.append(by_hand.apply(by_hand.accumulate(part).count, 1))
    for name, value in weights(by_hand).items():
        assert torch.equal(weights(backend)[name], value), name
    assert result.applied and result.changed and (result.updates, result.updates_skipped) == (3, 0)
    assert result.loss == pytest.approx(np.mean([one.loss for one in found]))
    assert result.grad_norm == pytest.approx(np.mean([one.grad_norm for one in found]))
    assert result.others["grad_norm_max"] == max(one.grad_norm for one in found) > result.grad_norm
    assert result.tokens == result.measured_tokens == sum(int(sample.loss_mask.sum()) for sample in batch)
    assert len(getattr(backend, "passes", [])) == ("proximal" in backend.objective.needs)


def test_clips_act_from_the_second_update_on(model_dir: Path) -> None:
    narrow = {"clip_low": 0.01, "clip_high": 0.01}
    assert taken(opened(model_dir, **narrow), 1).clip_fraction == 0
    assert taken(opened(model_dir, **narrow), 3).clip_fraction > 0
    free = taken(opened(model_dir, clip_low=1.0, clip_high=1e9), 3)
    assert free.clip_fraction == 0 and free.updates == 3


def test_the_report_is_of_the_weights_before_the_first_update(model_dir: Path) -> None:
    backend, by_hand, batch = opened(model_dir), opened(model_dir), samples()
    result = taken(backend, 3)
    before = TorchBackend.log_probabilities(by_hand, batch)
    for sample, values in zip(batch, before, strict=True):
        sample.proximal_logprobs = values
    by_hand.objective.advantages(batch)
    drift: list[Any] = []
    for group in range(3):
        part = [sample for sample in batch if sample.meta.group == group]
        for sample, values in zip(part, TorchBackend.log_probabilities(by_hand, part), strict=True):
            drift += list(np.abs(values - sample.proximal_logprobs)[sample.loss_mask != 0])
        by_hand.apply(by_hand.accumulate(part).count, 1)
    pairs = zip(before, batch, strict=True)
    gap = np.concatenate([(values - one.behaviour_logprobs)[one.loss_mask != 0] for values, one in pairs])
    assert result.difference_mean == pytest.approx(np.abs(gap).mean(), rel=1e-5)
    assert result.difference_max == pytest.approx(np.abs(gap).max(), rel=1e-5)
    assert result.ratio_mean == pytest.approx(np.exp(gap).mean(), rel=1e-5)
    assert result.ratio_max_deviation == pytest.approx(np.abs(np.exp(gap) - 1).max(), rel=1e-5)
    assert result.kl_behaviour == pytest.approx((np.exp(gap) - 1 - gap).mean(), rel=1e-5)
    assert result.drift_mean == pytest.approx(np.mean(drift), rel=1e-3) and result.drift_mean > 0.01
    assert result.others["drift_max"] == pytest.approx(np.max(drift), rel=1e-3)
    assert taken(opened(model_dir), 1).drift_mean == pytest.approx(0, abs=1e-6)
    # A loss that looks at the behaviour policy alone has no pass before the updates.
    free = taken(opened(model_dir, loss="ppo_clip"), 3)
    assert free.drift_mean is None and free.difference_mean != pytest.approx(result.difference_mean, rel=1e-3)


def test_one_update_of_several_is_a_step_of_one(model_dir: Path) -> None:
    backend, plain = opened(model_dir), opened(model_dir)
    result, batch = taken(backend, 1), StepBatch(samples=samples())
    accumulate(batch, plain, plain.objective, 4)
    wanted = plain.apply(batch.count, 1)
    assert result.loss == pytest.approx(wanted.loss, abs=1e-6) and result.grad_norm == pytest.approx(wanted.grad_norm)
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(backend)[name], value, msg=name)


def test_fewer_groups_than_updates_take_as_many_updates(model_dir: Path) -> None:
    backend, calls = opened(model_dir), []
    batch = StepBatch(samples=samples())
    result = taken(backend, 8, batch, before_update=lambda: calls.append(1))
    assert result.updates == len(calls) == batch.parts == 3 and batch.accumulated == len(batch.samples)
    assert backend.__dict__["parts"] == [[0] * 3, [1] * 2, [2] * 2]


def test_a_mini_batch_without_advantages_is_no_update(model_dir: Path) -> None:
    batch = StepBatch(samples=samples())
    for sample in batch.samples:
        sample.reward = 1.0 if sample.meta.group == 1 else sample.reward
    result = taken(opened(model_dir), 3, batch)
    assert (result.updates, result.updates_skipped, result.changed) == (2, 0, True) and result.why == ""
    # They were compared beforehand, by the proximal log-probabilities.
    assert (
        with_zero_advantage_tokens(result, batch.idle_metrics).measured_tokens
        == result.measured_tokens
        == result.tokens
    )
    assert result.others["tokens"] == sum(int(s.loss_mask.sum()) for s in batch.samples if s.meta.group != 1)
    for sample in batch.samples:
        sample.reward = 1.0
    before = weights(backend := opened(model_dir))
    idle = taken(backend, 3, StepBatch(samples=batch.samples))
    assert not idle.changed and idle.applied and idle.why == "no group has an advantage: all its rewards are equal"
    assert all(torch.equal(weights(backend)[name], value) for name, value in before.items())


def test_an_update_that_is_not_finite_is_thrown_away_and_the_others_are_taken(model_dir: Path) -> None:
    batch = StepBatch(samples=samples())
    for sample in batch.samples:
        if sample.meta.group == 1:
            sample.behaviour_logprobs = np.where(sample.loss_mask, np.nan, 0).astype(np.float32)
    backend, other = opened(model_dir), opened(model_dir)
    result = taken(backend, 3, batch)
    assert result.applied and (result.updates, result.updates_skipped) == (2, 1)
    assert result.why == "update 2 of 3: loss is nan in step 1"
    assert np.isfinite([result.loss, result.grad_norm, result.ratio_mean, result.kl_behaviour]).all()
    rest = [sample for sample in samples() if sample.meta.group != 1]
    taken(other, 2, StepBatch(samples=rest))
    for name, value in weights(other).items():
        torch.testing.assert_close(weights(backend)[name], value, msg=name)


def update(tokens: float, loss: float, norm: float, **sums: float) -> StepResult:
    found = {"tokens": tokens, "trained": tokens, "computed": 2 * tokens, "loss": loss, **sums}
    return step_result(found, count=1.0, grad_norm=norm, learning_rate=0.1)


def test_a_step_tells_of_all_its_updates() -> None:
    none = update(0, 0.0, 0.0)
    one = update(6, 1.0, 2.0, ratio=6.6, clipped=3, difference_max=0.5, entropy=6, rejected=1, capped=1, micro_max=3)
    two = update(2, 3.0, 4.0, ratio=1.0, clipped=0, difference_max=0.9, entropy=4, rejected=2, capped=2, micro_max=1)
    bad = skipped_result("loss is nan", {"tokens": 5.0, "ratio": float("nan"), "computed": 4.0}, 0.1)
    found = combine_results([none, one, two, bad])
    assert (found.applied, found.changed, found.updates, found.updates_skipped) == (True, True, 2, 1)
    assert found.why == "update 4 of 4: loss is nan"
    assert (found.tokens, found.measured_tokens, found.computed_tokens, found.rejected_tokens) == (8, 8, 20, 3)
    assert found.loss == pytest.approx(4 / 3) and found.grad_norm == 3.0 and found.learning_rate == 0.1
    assert found.ratio_mean == pytest.approx(7.6 / 8) and found.clip_fraction == pytest.approx(3 / 8)
    assert found.difference_max == 0.9 and found.entropy == pytest.approx(10 / 8) and found.kl_reference is None
    assert found.others["grad_norm_max"] == 4.0 and found.others["capped"] == 3 and found.others["micro_max"] == 3
    lost = combine_results([bad, bad])
    assert not lost.applied and not lost.changed and np.isnan(lost.loss) and np.isnan(lost.grad_norm)
    assert lost.why == "update 1 of 2: loss is nan; update 2 of 2: loss is nan" and lost.updates_skipped == 2


@pytest.fixture
async def lives(tmp_path: Path) -> AsyncIterator[Lives]:
    async with lives_of(tmp_path) as found:
        yield found


def spoil(role: TrainerRole, spoilt: set[tuple[int, int]]) -> None:
    """Make losses no numbers, by step and update."""
    backend: Any = role.backend
    accumulate, seen = backend.accumulate, [0, 0]

    def harmed(part: list[Sample]) -> Any:
        seen[:] = [role.step + 1, seen[1] + 1 if seen[0] == role.step + 1 else 1]
        if tuple(seen) in spoilt:
            for sample in part:
                sample.behaviour_logprobs = np.full(len(sample.tokens), np.nan, np.float32)
        return accumulate(part)

    backend.accumulate = harmed


async def test_a_run_publishes_each_step_once(lives: Lives, model_dir: Path, tmp_path: Path) -> None:
    model = model_with_tokenizer(model_dir, tmp_path)
    harm = {(2, 1), (3, 1), (3, 2)}
    ctx = await lives.life(model, steps=5, updates_per_step=2, harm=lambda role: spoil(role, harm))
    records = [record for record in ctx.records if record["kind"] == "step"]
    assert [record["updates"] for record in records] == [2, 1, 0, 2, 2]
    assert [record["updates_skipped"] for record in records] == [0, 1, 2, 0, 0]
    assert [bool(record["skipped"]) for record in records] == [False, False, True, False, False]
    told = [[one["step"] for one in ctx.told(kind)] for kind in ("update_skipped", "step_skipped")]
    assert told == [[2], [3]]
    versions = {record.version: record for record in await lives.registry.versions()}
    assert [versions[record["version"]].changed for record in records] == [True, True, False, True, True]
    assert [record["trained_version"] for record in records[1:]] == [record["version"] for record in records[:-1]]
    account = await lives.world.account()
    assert account["skipped"] == 2 * GROUPS
    assert len({key for record in records for key in record["keys"]}) == 5 * 2 * GROUPS
    assert all(np.isfinite(record["loss"]) for record in records if not record["skipped"])


async def test_updates_thrown_away_step_after_step_end_the_run(lives: Lives, model_dir: Path, tmp_path: Path) -> None:
    harm = {(step, 2) for step in range(2, 20)}
    with pytest.raises(RelaxError, match=f"{SKIPPED_IN_A_ROW} steps in a row had a skipped update"):
        await lives.life(
            model_with_tokenizer(model_dir, tmp_path),
            steps=20,
            updates_per_step=2,
            harm=lambda role: spoil(role, harm),
        )
