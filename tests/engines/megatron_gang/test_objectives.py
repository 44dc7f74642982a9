"""One step of every kind of objective: a gang, however divided, does what the torch backend does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_parts import Gang, samples

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.torch.backend import TorchBackend

TEMPERATURE = 0.8
RATE = 1e-2
TABLES: dict[str, dict[str, Any]] = {
    "gspo": {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    "decoupled": {"name": "decoupled_ppo"},
    "m2po": {"name": "m2po"},
    "corrected": {"loss": {"name": "ppo_clip", "ratio_to": "proximal"}, "corrections": [{"name": "tis"}]},
    "kl-entropy": {
        "loss": "decoupled_ppo",
        "kl": {"name": "unbiased", "coefficient": 0.3},
        "entropy": {"name": "bonus", "coefficient": 0.2},
    },
    "fixed-length": {"name": "dr_grpo", "aggregation": {"name": "fixed_length", "length": 6}},
    "sequence-mean": {"loss": "ppo_clip", "aggregation": "sequence_mean"},
    "dpo": {"name": "dpo"},
    "sft": {"name": "sft"},
}
DIVISIONS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "cp2": {"context_parallel": 2},
    "dp2": {},
}
FIELDS = ("loss", "grad_norm", "ratio_mean", "ratio_max_deviation", "clip_fraction", "kl_behaviour", "rejected_tokens")


def judged(table: dict[str, Any]) -> tuple[list[Sample], float]:
    """A batch with its advantages, and what its loss is divided by."""
    batch, objective = copy.deepcopy(samples(8)), Objective.of(AlgorithmTable(**table))
    objective.advantages(batch)
    return batch, objective.count(batch)


@pytest.fixture(scope="module", params=TABLES)
def wanted(request: pytest.FixtureRequest, model: Callable[[str], Path]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """An algorithm, and what a step of the torch backend gives: its result, the weights before and after."""
    table = {"learning_rate": RATE, **TABLES[request.param]}
    backend = TorchBackend(
        model("qwen3"),
        AlgorithmTable(**table),
        dtype="float32",
        threads=1,
        tokens_per_micro_batch=4096,
        temperature=TEMPERATURE,
        on_progress=lambda _: None,
    )
    before = {name: parameter.detach().clone() for name, parameter in backend._model.named_parameters()}
    batch, count = judged(table)
    backend.accumulate(batch)
    result = backend.apply(count, 1)
    return table, result, {name: (before[name], value.detach()) for name, value in backend._model.named_parameters()}


@pytest.mark.parametrize("division", DIVISIONS)
def test_a_step_is_that_of_the_torch_backend(
    division: str, wanted: tuple[dict[str, Any], Any, dict[str, Any]], gang: Callable[[int], Gang], model: Callable
) -> None:
    table, result, weights = wanted
    ranks = gang(2)
    divided = {"tokens_per_micro_batch": 40, **DIVISIONS[division]}
    ranks.call("build", model=model("qwen3"), division=divided, algorithm=table, temperature=TEMPERATURE)
    batch, count = judged(table)
    answers = ranks.call("step", batches=[batch], count=count)
    assert answers[0] == answers[1] and answers[0].applied
    for field in FIELDS:
        assert getattr(answers[0], field) == pytest.approx(getattr(result, field), rel=3e-4, abs=3e-5), field
    if result.entropy is not None:
        assert answers[0].entropy == pytest.approx(result.entropy, rel=1e-4)
        assert answers[0].kl_reference == pytest.approx(result.kl_reference, rel=1e-3)
    moved = [0, 0]
    for name, value in ranks.weights().items():
        before, after = weights[name]
        # Adam turns a gradient's rounding into a step where the gradient is nearly zero.
        moved[0] += int(((value - after).abs() > 0.02 * RATE).sum())
        moved[1] += int((before - after).abs().gt(0.5 * RATE).sum())
        assert float((value - after).abs().max()) <= 2.1 * RATE, name
    assert moved[0] < 0.005 * moved[1], f"{moved[0]} of {moved[1]} elements that moved have moved otherwise"
