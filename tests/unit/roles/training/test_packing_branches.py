"""The branches of an episode are computed each on its own, whatever lies beside them in their sample."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from packing_samples import SAMPLES, make_sample  # noqa: E402

from relax_rt.roles.base.sample import Sample  # noqa: E402
from relax_rt.roles.training.algorithms.settings import AlgorithmTable  # noqa: E402
from relax_rt.roles.training.batch.budget import TokenBudget  # noqa: E402
from relax_rt.roles.training.batch.collate import (  # noqa: E402
    MicroBatch,
    collate,
    compute_at_trained_tokens,
)
from relax_rt.roles.training.batch.rows import shared_rows  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402

TOGETHER = ("tokens", "loss_mask", "behaviour_logprobs", "advantages", "proximal_logprobs", "reference_logprobs")
PARTS = [
    make_sample(5, 0, [1, 2, 3], [4, 5, 6, 7], [1, 0, 0, 1]),
    make_sample(5, 1, [1, 2, 3, 4, 9], [10, 11]),
    make_sample(5, 2, [1, 2, 8], [12]),
]
"""What the branches would be as samples of their own."""


def joined(parts: list[Sample]) -> Sample:
    ends = np.cumsum([0, *(len(part.tokens) for part in parts)]).tolist()
    meta = msgspec.structs.replace(parts[0].meta, branches=list(itertools.pairwise(ends)))
    columns: Any = {name: np.concatenate([getattr(part, name) for part in parts]) for name in TOGETHER}
    return Sample(meta=meta, versions=[], **columns)


def gradients(model_dir: Path, samples: list[Sample], budget: int) -> dict[str, Any]:
    trainer = TorchBackend(
        model_dir,
        AlgorithmTable(learning_rate=1e-3, max_grad_norm=1e9),
        dtype="float32",
        threads=1,
        tokens_per_micro_batch=budget,
        temperature=0.8,
        on_progress=lambda _: None,
    )
    trainer._optimizer.step = lambda *a, **k: None  # type: ignore[method-assign]
    trainer.step(samples, 1)
    return {name: parameter.grad.clone() for name, parameter in trainer._model.named_parameters()}


@pytest.mark.parametrize("budget", [8, 4096])
def test_gradients_are_those_of_branches_apart(model_dir: Path, budget: int) -> None:
    expected = gradients(model_dir, [*SAMPLES, *PARTS], budget)
    for name, found in gradients(model_dir, [*SAMPLES, joined(PARTS)], budget).items():
        torch.testing.assert_close(found, expected[name], atol=1e-6, rtol=1e-4)


def test_what_is_found_at_a_token_is_put_at_its_place_in_the_whole_sample() -> None:
    def ids(batch: MicroBatch) -> Any:
        return batch.targets.float()

    whole = joined(PARTS)
    (found,) = compute_at_trained_tokens(ids, [whole], TokenBudget(4096), lambda _: None)
    assert found.tolist() == (whole.tokens * whole.loss_mask).tolist()


def test_branches_share_what_they_begin_with_in_one_row() -> None:
    (row,) = shared_rows([joined(PARTS)], 4096)
    assert row.prefix == 2 and row.length == 2 + 5 + 5 + 2
    batch = collate([row])
    assert batch.targets.tolist() == [4, 7, 10, 11, 12] and batch.sample.tolist() == [0] * 5
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 6, 2, 3]
    # The last branch's first own token sees the two common ones and itself.
    assert batch.mask is not None and batch.mask[0, 0][12].nonzero()[:, 0].tolist() == [0, 1, 12]


def test_branches_that_are_alike_have_a_token_each() -> None:
    (row,) = shared_rows([joined([PARTS[2], PARTS[2]])], 4096)
    assert row.prefix == 3 and collate([row]).targets.tolist() == [12, 12]
