"""The torch backend under any objective: one gradient however a batch is packed, cut or streamed, and the report."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_backend import torch_backend, without_updates

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from packing_samples import SAMPLES, make_sample  # noqa: E402

from relax_rt.roles.base.sample import Sample  # noqa: E402
from relax_rt.roles.training.algorithms.inputs import TokenTensors  # noqa: E402
from relax_rt.roles.training.algorithms.objective import Objective  # noqa: E402
from relax_rt.roles.training.algorithms.settings import AlgorithmTable  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402

TEMPERATURE = 0.8
TABLES: list[dict[str, Any]] = [
    {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    {"name": "decoupled_ppo"},
    {"name": "sapo"},
    {"name": "m2po"},
    {"loss": {"name": "ppo_clip", "ratio_to": "proximal"}, "corrections": [{"name": "tis", "level": "sequence"}]},
    {"kl": {"name": "unbiased", "coefficient": 0.3}, "entropy": {"name": "bonus", "coefficient": 0.2}},
    {"name": "dr_grpo", "aggregation": {"name": "fixed_length", "length": 6}},
    {"name": "dpo"},
    {"name": "sft"},
]


def backend(model_dir: Path, budget: int = 4096, **table: Any) -> TorchBackend:
    made = torch_backend(model_dir, budget=budget, temperature=TEMPERATURE, learning_rate=1e-3, **table)
    return without_updates(made)


def judged(table: dict[str, Any]) -> tuple[Objective, list[Sample]]:
    samples = copy.deepcopy(SAMPLES)
    objective = Objective.of(AlgorithmTable(**table))
    objective.advantages(samples)
    return objective, samples


def forward(model: Any, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of one sequence alone, [T]; of the first token 0."""
    ids = torch.from_numpy(sample.tokens.astype(np.int64))
    every = torch.log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, -1)
    picked = every.gather(-1, ids[1:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    return tuple(torch.cat([torch.zeros(1), x]) for x in (picked, entropy))  # type: ignore[return-value]


def gradients_one_by_one(model_dir: Path, objective: Objective, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """All sequences, each computed alone, in one loss; tokens that are not trained under the mask."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    columns: dict[str, list[torch.Tensor]] = {}
    for index, s in enumerate(samples):
        logprobs, entropy = forward(model, s)
        found = {"logprobs": logprobs, "entropy": entropy, "mask": torch.from_numpy(s.loss_mask)}
        for name in ("behaviour_logprobs", "proximal_logprobs", "reference_logprobs", "advantages"):
            found[name.removesuffix("_logprobs")] = torch.from_numpy(getattr(s, name))
        found["sequence"] = torch.full((len(s.tokens),), index)
        found["group"] = torch.full((len(s.tokens),), s.meta.group)
        for name, values in found.items():
            columns.setdefault(name, []).append(values)
    loss, _ = objective.loss(TokenTensors(**{name: torch.cat(values) for name, values in columns.items()}))
    (loss / objective.count(samples)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_equal(trainer: TorchBackend, wanted: dict[str, torch.Tensor]) -> None:
    for name, parameter in trainer._model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], atol=2e-6, rtol=2e-4, msg=name)


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_packed_and_cut_gradients_equal_those_of_separate_sequences(model_dir: Path, table: dict[str, Any]) -> None:
    objective, samples = judged(table)
    wanted = gradients_one_by_one(model_dir, objective, samples)
    assert max(float(g.abs().max()) for g in wanted.values()) > 1e-4
    for budget in (8, 4096):
        trainer = backend(model_dir, budget, **table)
        assert trainer.step(samples, 1).applied
        assert_equal(trainer, wanted)


OWN = """
def held(tokens, options):
    return -tokens.advantages * tokens.logprobs + (tokens.logprobs - tokens.behaviour) ** 2, {}
"""


def test_a_loss_of_ones_own_is_that_of_groups_with_equal_rewards_too(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(OWN)
    objective = Objective.of(AlgorithmTable(loss="held.py:held"), base=tmp_path)
    samples = copy.deepcopy(SAMPLES)
    for sample in samples:
        sample.reward = 1.0 if sample.meta.group else sample.reward
    objective.advantages(samples)
    trainer = backend(model_dir)
    trainer.objective = objective
    assert trainer.step(samples, 1).measured_tokens == sum(int(s.loss_mask.sum()) for s in samples)
    assert_equal(trainer, gradients_one_by_one(model_dir, objective, samples))


def test_a_batch_in_parts_some_of_them_empty_is_one_step(model_dir: Path) -> None:
    objective, samples = judged({})
    trainer = backend(model_dir)
    parts = [trainer.accumulate(part) for part in (samples[:3], [], samples[3:5], samples[5:])]
    assert sum(part.tokens for part in parts) == sum(int(s.loss_mask.sum()) for s in samples)
    result = trainer.apply(sum(part.count for part in parts), 1)
    whole = backend(model_dir).step(samples, 1)
    assert (result.tokens, result.changed) == (whole.tokens, True)
    for name in ("loss", "grad_norm", "ratio_mean", "kl_behaviour", "difference_max"):
        assert getattr(result, name) == pytest.approx(getattr(whole, name), rel=1e-5)
    assert_equal(trainer, gradients_one_by_one(model_dir, objective, samples))


def test_a_step_begins_with_no_gradients_of_the_one_before(model_dir: Path) -> None:
    objective, samples = judged({})
    trainer = backend(model_dir)
    trainer.step(samples[:3], 1)
    assert trainer.step(samples, 2).applied
    assert_equal(trainer, gradients_one_by_one(model_dir, objective, samples))


def test_a_part_that_is_not_finite_spoils_its_step_only(model_dir: Path) -> None:
    objective, samples = judged({})
    bad = make_sample(3, 0, [1, 2], [3, 4])
    bad.advantages = np.array([0, 0, np.nan, 1], np.float32)
    trainer = backend(model_dir)
    trainer.accumulate([*samples, bad])
    trainer.accumulate(samples)
    result = trainer.apply(objective.count(samples), 7)
    assert not result.applied and result.why == "loss is nan in step 7"
    assert trainer.step(samples, 8).applied
    assert_equal(trainer, gradients_one_by_one(model_dir, objective, samples))


def test_the_clip_bounds_the_norm_and_reports_it_unclipped(model_dir: Path) -> None:
    _, samples = judged({})
    free = backend(model_dir)
    norm = free.step(samples, 1).grad_norm
    tight = backend(model_dir)
    tight._algorithm = AlgorithmTable(max_grad_norm=norm / 4)
    assert tight.step(samples, 1).grad_norm == pytest.approx(norm, rel=1e-6)
    for (name, a), b in zip(free._model.named_parameters(), tight._model.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad / 4, rtol=1e-4, atol=1e-9, msg=name)


@pytest.mark.parametrize("budget", [8, 4096])
def test_log_probabilities_are_those_of_each_sequence_alone(model_dir: Path, budget: int) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    nothing = make_sample(4, 0, [1, 2], [3], [0])
    samples = [nothing, *SAMPLES]
    found = backend(model_dir, budget).log_probabilities(samples)
    for sample, values in zip(samples, found, strict=True):
        assert values.dtype == np.float32 and values.shape == sample.tokens.shape
        with torch.no_grad():
            wanted = forward(model, sample)[0].numpy() * sample.loss_mask
        np.testing.assert_allclose(values, wanted, atol=1e-5)


def test_the_report_compares_trainer_and_engine(model_dir: Path) -> None:
    corrections = [{"name": "rejection", "low": 0.9, "high": 1.1}]
    table = {"loss": "ppo_clip", "corrections": corrections, "entropy": "bonus", "kl": "k3"}
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    _, samples = judged(table)
    gaps, entropies, references, behaviours = [], [], [], []
    for s in samples:
        with torch.no_grad():
            logprobs, entropy = (x.numpy()[s.loss_mask != 0] for x in forward(model, s))
        gaps.append(logprobs - s.behaviour_logprobs[s.loss_mask != 0])
        entropies.append(entropy)
        behaviours.append(s.behaviour_logprobs[s.loss_mask != 0])
        assert s.reference_logprobs is not None
        references.append(logprobs - s.reference_logprobs[s.loss_mask != 0])
    gap, distance = np.concatenate(gaps).astype(np.float64), np.concatenate(references)
    result = backend(model_dir, **table).step(samples, 1)
    assert result.difference_mean == pytest.approx(np.abs(gap).mean(), rel=1e-4)
    assert result.difference_max == pytest.approx(np.abs(gap).max(), rel=1e-4)
    assert result.ratio_mean == pytest.approx(np.exp(gap).mean(), rel=1e-4)
    assert result.ratio_max_deviation == pytest.approx(np.abs(np.exp(gap) - 1).max(), rel=1e-4)
    assert result.kl_behaviour == pytest.approx((np.exp(gap) - 1 - gap).mean(), rel=1e-4)
    assert result.sampled_entropy == pytest.approx(-np.concatenate(behaviours).mean(), rel=1e-5)
    assert result.entropy == pytest.approx(np.concatenate(entropies).mean(), rel=1e-5)
    assert result.kl_reference == pytest.approx((np.exp(-distance) - 1 + distance).mean(), rel=1e-4)
    kept = (np.exp(gap) >= 0.9) & (np.exp(gap) <= 1.1)
    assert result.rejected_tokens == int((~kept).sum()) > 0
    assert result.others["weight"] == int(kept.sum()) > 0
    assert result.others["tokens"] == len(gap)
