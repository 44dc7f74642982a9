"""The proximal policy: what the only update of a publication finds itself, and what several are compared with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from packing_samples import SAMPLES  # noqa: E402
from small_backend import small_backend  # noqa: E402

from relax_rt.roles.base.sample import Sample  # noqa: E402
from relax_rt.roles.training.step import StepBatch, accumulate, set_proximal_logprobs  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402

PROXIMAL: list[dict[str, Any]] = [
    {"name": "decoupled_ppo"},
    {"loss": {"name": "ppo_clip", "ratio_to": "proximal"}, "corrections": ["tis"]},
    {"loss": {"name": "gspo", "ratio_to": "proximal"}, "corrections": [{"name": "mis", "cap": 50.0}]},
    {"kl": {"name": "unbiased", "coefficient": 0.3, "ratio_to": "proximal"}},
]
FIRST: list[dict[str, Any]] = [
    {"name": "m2po"},
    {"name": "distillation"},
    {"name": "rloo", "kl": {"name": "k1", "place": "reward"}},
    {"name": "decoupled_ppo", "kl": {"name": "k1", "place": "reward"}},
]
"""They look at the proximal policy before the pass that computes gradients."""


class Counting(TorchBackend):
    passes = 0

    def log_probabilities(self, samples: Any) -> Any:
        self.passes += 1
        return super().log_probabilities(samples)


def opened(model_dir: Path, table: dict[str, Any], **further: Any) -> Counting:
    """In float64."""
    backend = small_backend(Counting, model_dir, **table, **further)
    backend._model.double()
    return backend


def samples() -> list[Sample]:
    found = copy.deepcopy(SAMPLES)
    for sample in found:
        # Of an earlier publication: it has lapsed.
        sample.advantages, sample.proximal_version = None, 3
    return found


def gradients(backend: TorchBackend) -> dict[str, Any]:
    return {name: p.grad.clone() for name, p in backend._model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("table", PROXIMAL, ids=str)
def test_the_only_update_needs_no_pass_of_its_own(model_dir: Path, table: dict[str, Any]) -> None:
    backend = opened(model_dir, table)
    batch = StepBatch(samples=samples())
    accumulate(batch, backend, backend.objective, version=4)
    found = gradients(backend)
    assert backend.passes == 0 and all(sample.proximal_logprobs is None for sample in batch.samples)
    again, other = StepBatch(samples=samples()), opened(model_dir, table)
    set_proximal_logprobs(again.samples, other, 4)
    accumulate(again, other, other.objective, version=4)
    assert other.passes == 1 and max(float(g.abs().max()) for g in found.values()) > 1e-4
    for name, gradient in gradients(other).items():
        # The column is float32.
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("table", FIRST, ids=str)
def test_what_is_decided_before_the_gradients_gets_it_first(model_dir: Path, table: dict[str, Any]) -> None:
    backend = opened(model_dir, table)
    batch = StepBatch(samples=samples())
    accumulate(batch, backend, backend.objective, version=4)
    assert backend.passes == 1 and all(sample.proximal_version == 4 for sample in batch.samples)


def test_a_teacher_judges_the_policy_that_is_trained_not_the_one_that_sampled(model_dir: Path) -> None:
    backend = opened(model_dir, {"name": "distillation"})
    batch = StepBatch(samples=samples())
    accumulate(batch, backend, backend.objective, version=4)
    for sample, own in zip(batch.samples, backend.log_probabilities(batch.samples), strict=True):
        assert sample.reference_logprobs is not None and sample.advantages is not None
        wanted = (sample.reference_logprobs - own) * sample.loss_mask
        np.testing.assert_allclose(sample.advantages, wanted, atol=1e-6)
        assert not np.allclose(own, sample.behaviour_logprobs, atol=0.1)


def test_later_updates_are_compared_with_the_weights_before_the_first(model_dir: Path) -> None:
    backend = opened(model_dir, {"name": "decoupled_ppo"}, learning_rate=0.02)
    everything = samples()
    set_proximal_logprobs(everything, backend, 4)
    before = [sample.proximal_logprobs for sample in everything]
    clipped = []
    for number in (1, 2, 3):
        batch = StepBatch(samples=everything)
        accumulate(batch, backend, backend.objective, version=4)
        clipped.append(backend.apply(batch.count, number).clip_fraction)
    assert backend.passes == 1, "it is computed once, before the first update"
    assert all(sample.proximal_logprobs is kept for sample, kept in zip(everything, before, strict=True))
    assert clipped[0] == 0 and clipped[-1] > 0, "the ratio moves away from 1 as the weights do"
    # The next publication is another matter.
    set_proximal_logprobs(everything, backend, 5)
    assert backend.passes == 2 and all(sample.proximal_version == 5 for sample in everything)
    assert not all((sample.proximal_logprobs == kept).all() for sample, kept in zip(everything, before, strict=True))
