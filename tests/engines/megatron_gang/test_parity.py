"""Megatron, however its ranks divide the model, computes and learns what transformers and the torch backend do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_parts import Gang, samples

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.rollout.engines.weights import model_layout
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.torch.backend import TorchBackend

ALGORITHM = {
    "loss": "decoupled_ppo",
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "adam_betas": (0.9, 0.95),
}
TEMPERATURE = 0.7
DIVISIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "tp2-whole-norms": (2, {"tensor_parallel": 2, "sequence_parallel": False}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "dp2": (2, {}),
    "dp2-whole-optimizer": (2, {"distributed_optimizer": False}),
    "ep2": (2, {"expert_parallel": 2}),
    "tp2-etp2": (2, {"tensor_parallel": 2, "expert_tensor_parallel": 2}),
    "tp2-ep2": (2, {"tensor_parallel": 2, "expert_parallel": 2}),
    "tp2-whole-layers-again": (2, {"tensor_parallel": 2, "recompute": "full"}),
    "tp2-attention-again": (2, {"tensor_parallel": 2, "recompute": "selective"}),
    "cp2": (2, {"context_parallel": 2}),
    "cp2-ep2": (2, {"context_parallel": 2, "expert_parallel": 2}),
    "cp2-attention-again": (2, {"context_parallel": 2, "recompute": "selective"}),
    "tp2-cp2": (4, {"tensor_parallel": 2, "context_parallel": 2}),
    "cp2-pp2": (4, {"context_parallel": 2, "pipeline_parallel": 2}),
    "tp2-pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "ep2-pp2": (4, {"expert_parallel": 2, "pipeline_parallel": 2}),
}
CASES = [
    *(("qwen3", name) for name in ("tp1", "tp2", "tp2-whole-norms", "pp2", "dp2", "dp2-whole-optimizer", "tp2-pp2")),
    *(("qwen3", name) for name in ("cp2", "tp2-cp2", "cp2-pp2")),
    *(("qwen3_moe", name) for name in ("cp2", "cp2-ep2")),
    ("llama", "cp2-attention-again"),
    *(("qwen3_moe", name) for name in ("tp1", "tp2", "pp2", "dp2", "ep2", "tp2-etp2", "tp2-ep2", "ep2-pp2")),
    *(("qwen2", name) for name in ("tp1", "tp2", "pp2")),
    *(("llama", name) for name in ("tp2", "pp2", "tp2-whole-layers-again", "tp2-attention-again")),
]


class Reference:
    """What a family's model gives in one process: log-probabilities, and the weights after each of two steps."""

    def __init__(self, folder: Path) -> None:
        self.batch = samples(9)
        self.later = samples(7, seed=1)
        backend = TorchBackend(
            folder,
            AlgorithmTable(**ALGORITHM),
            dtype="float32",
            threads=1,
            tokens_per_micro_batch=4096,
            temperature=TEMPERATURE,
            on_progress=lambda _: None,
        )
        self.layout = model_layout(backend._model, torch.float32)
        self.before = weights(backend)
        self.logprobs = [_logprobs(backend._model, sample) for sample in self.batch]
        self.results = []
        self.after = []
        for number, batch in enumerate((self.batch, self.later), start=1):
            backend.accumulate(batch)
            self.results.append(backend.apply(count(batch), number))
            self.after.append(weights(backend))


def weights(backend: TorchBackend) -> dict[str, torch.Tensor]:
    """Copies of its parameters."""
    return {name: parameter.detach().clone() for name, parameter in backend._model.named_parameters()}


def _logprobs(model: Any, sample: Sample) -> np.ndarray:
    ids = torch.from_numpy(sample.tokens.astype(np.int64))
    with torch.no_grad():
        scores = torch.log_softmax(model(ids[None]).logits[0] / TEMPERATURE, -1)
    found: np.ndarray = scores[:-1].gather(1, ids[1:, None])[:, 0].numpy()
    return np.concatenate([np.zeros(1, np.float32), found])


@pytest.fixture(scope="module")
def reference(model: Callable[[str], Path]) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def of(family: str) -> Reference:
        if family not in made:
            made[family] = Reference(model(family))
        return made[family]

    return of


def count(batch: Sequence[Sample]) -> float:
    """Trained tokens."""
    return float(sum(int(sample.loss_mask.sum()) for sample in batch))


def built(gang: Gang, folder: Path, division: dict[str, Any], **rest: Any) -> Gang:
    gang.call("build", model=folder, division=division, algorithm=ALGORITHM, temperature=TEMPERATURE, **rest)
    return gang


@pytest.mark.parametrize(("family", "name"), CASES, ids=[f"{family}-{name}" for family, name in CASES])
def test_same_log_probabilities_steps_and_weights(
    family: str,
    name: str,
    gang: Callable[[int], Gang],
    model: Callable[[str], Path],
    reference: Callable[[str], Reference],
) -> None:
    wanted, (world, division) = reference(family), DIVISIONS[name]
    ranks = built(gang(world), model(family), {"tokens_per_micro_batch": 48, **division})

    found = ranks.weights()
    assert list(found) == [entry.name for entry in wanted.layout.entries]
    for key, value in wanted.before.items():
        assert torch.equal(found[key], value), f"{key} is not bit-equal"

    for sample, ours, theirs in zip(wanted.batch, ranks.logprobs(wanted.batch), wanted.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs * sample.loss_mask, atol=2e-5)

    for number, batch in enumerate((wanted.batch, wanted.later)):
        answers = ranks.call("step", batches=[batch], count=count(batch), number=number + 1)
        assert all(answer == answers[0] for answer in answers), "the ranks disagree"
        result, other = answers[0], wanted.results[number]
        assert result.applied and result.tokens == other.tokens
        for field in ("loss", "grad_norm", "ratio_mean", "ratio_max_deviation", "clip_fraction", "kl_behaviour"):
            assert getattr(result, field) == pytest.approx(getattr(other, field), rel=2e-4, abs=2e-5), field
        found = ranks.weights()
        for key, value in wanted.after[number].items():
            assert_updated(found[key], value, wanted.before[key], key)


def assert_updated(ours: torch.Tensor, theirs: torch.Tensor, before: torch.Tensor, key: str) -> None:
    """Adam divides by the root of a gradient's square: where a gradient is nearly zero, its direction is that of
    rounding. Such elements may differ by what a step moves at most; they must be few."""
    moved = float((theirs - before).abs().max())
    gap = (ours - theirs).abs()
    odd = int((gap > 1e-4 * max(moved, 1e-3) + 2e-5).sum())
    assert odd <= max(2, gap.numel() // 100), f"{key}: {odd} of {gap.numel()}, {float(gap.max()):.2e}"
    assert float(gap.max()) <= 2.1 * ALGORITHM_STEP, f"{key}: {float(gap.max()):.2e}"


ALGORITHM_STEP = 2 * 1e-2
"""Two steps of Adam move an element by about the learning rate each."""
