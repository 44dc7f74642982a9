"""A step whose groups come in parts: the gradients of the whole, through the real backend."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from packing_samples import SAMPLES  # noqa: E402
from small_backend import small_backend, without_updates  # noqa: E402

from relax_rt.roles.base.sample import Sample  # noqa: E402
from relax_rt.roles.training.algorithms.objective import Objective  # noqa: E402
from relax_rt.roles.training.algorithms.settings import AlgorithmTable  # noqa: E402
from relax_rt.roles.training.backend.interface import StepResult  # noqa: E402
from relax_rt.roles.training.step import StepBatch, accumulate  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402

GROUPS = (SAMPLES[:3], SAMPLES[3:5], SAMPLES[5:])
ORDERS = ([[0, 1, 2]], [[0], [1], [2]], [[2], [0, 1]], [[1, 2], [], [0]])
TABLES: list[dict[str, Any]] = [
    {},
    {"name": "dr_grpo"},
    {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    {"name": "rloo"},
    {"name": "decoupled_ppo"},
    {"loss": {"name": "ppo_clip", "ratio_to": "proximal"}, "aggregation": "sequence_mean", "corrections": ["icepop"]},
    {"kl": {"name": "k3", "coefficient": 0.3}, "entropy": {"name": "bonus", "coefficient": 0.2}},
    {"name": "dpo"},
    {"name": "sft"},
    {"truncated": "soft_penalty"},
]


def opened(model_dir: Path, table: dict[str, Any]) -> TorchBackend:
    """A backend in float64 whose update is left out."""
    backend = small_backend(TorchBackend, model_dir, **table)
    backend._model.double()
    return without_updates(backend)


def step(backend: TorchBackend, parts: list[list[int]]) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """A step over the groups as they come in parts; its gradients are not clipped."""
    batch = StepBatch()
    for part in parts:
        batch.samples += copies([sample for group in part for sample in GROUPS[group]])
        accumulate(batch, backend, backend.objective, version=4)
    assert batch.accumulated == len(SAMPLES) and batch.parts == len(parts)
    result = backend.apply(batch.count, 1)
    return result, {n: p.grad.clone() for n, p in backend._model.named_parameters() if p.grad is not None}


def copies(samples: list[Sample]) -> list[Sample]:
    """Without what a step has to compute for itself."""
    found = copy.deepcopy(samples)
    for sample in found:
        sample.advantages = sample.proximal_logprobs = None
    return found


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_a_streamed_step_has_the_gradients_of_a_whole_one(model_dir: Path, table: dict[str, Any]) -> None:
    assert Objective.of(AlgorithmTable(**table), longest=6).streams
    backend = opened(model_dir, table)
    wanted, gradients = step(backend, ORDERS[0])
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-4
    for parts in ORDERS[1:]:
        result, found = step(backend, parts)
        assert (result.applied, result.tokens) == (True, wanted.tokens)
        assert result.loss == pytest.approx(wanted.loss, rel=1e-6, abs=1e-9)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9, msg=name)


def test_tokens_of_a_common_prompt_wait_once() -> None:
    batch = StepBatch()
    batch.samples += GROUPS[0]
    assert batch.pending_tokens() == 4 + 2 + 1 + 5
    batch.accumulated = 3
    batch.samples += GROUPS[1]
    assert batch.pending_tokens() == 1 + 3 + 2
