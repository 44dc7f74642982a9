"""A Megatron rank that runs out of memory in the middle of a micro-batch, and its random generators in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_parts import Gang, samples

ALGORITHM: dict[str, Any] = {"learning_rate": 1e-2}
Gangs = Callable[[int], Gang]
Models = Callable[[str], Path]


def built(gang: Gang, folder: Path, kept: Path | None = None, **division: Any) -> Gang:
    gang.call("build", model=folder, division=division, algorithm=ALGORITHM, kept=kept)
    return gang


def grads(gang: Gang) -> list[dict[str, np.ndarray]]:
    """Of each rank, of a batch in two parts."""
    batch = samples(11)
    found: list[dict[str, np.ndarray]] = gang.call("grads", batches=[batch[:6], batch[6:]])
    return found


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_rank_that_passes_alone_begins_the_step_anew(family: str, gang: Gangs, model: Models, tmp_path: Path) -> None:
    one = built(gang(1), model(family), tmp_path, tokens_per_micro_batch=80)
    # The first pack of each part has gone through when the second one does not fit.
    one.call("starve", fits=30, ranks=[0], after=1)
    (found,) = grads(one)
    (tokens,) = one.call("budget")
    assert tokens <= 40
    (wanted,) = grads(built(gang(1), model(family), tokens_per_micro_batch=tokens))
    assert max(float(np.abs(value).max()) for value in wanted.values()) > 0.1
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    # It is kept for those that come after.
    assert built(gang(1), model(family), tmp_path, tokens_per_micro_batch=80).call("budget") == [tokens]


def test_a_replica_begins_anew_while_the_other_goes_on(gang: Gangs, model: Models) -> None:
    two = built(gang(2), model("qwen3"), tokens_per_micro_batch=80)
    two.call("starve", fits=22, ranks=[1])
    batch = samples(11)
    answers = two.call("step", batches=[batch[:6], batch[6:]], count=60.0)
    whole = two.call("budget")
    assert whole[0] == 80 and whole[1] <= 40 and answers[0].others["micro_batches_halved"] > 0
    wanted = built(gang(2), model("qwen3"), tokens_per_micro_batch=80)
    expected = wanted.call("step", batches=[batch[:6], batch[6:]], count=60.0)[0]
    assert answers[0].applied and answers[0].tokens == expected.tokens
    assert answers[0].grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert answers[0].loss == pytest.approx(expected.loss, abs=1e-6)


def test_ranks_that_pass_together_begin_again_with_one_number(gang: Gangs, model: Models, tmp_path: Path) -> None:
    division = {"tokens_per_micro_batch": 80, "tensor_parallel": 2}
    two = built(gang(2), model("qwen3"), tmp_path, **division)
    # Both in the same pass, so that none is left waiting for the other.
    two.call("starve", fits=30, ranks=[0, 1])
    with pytest.raises(AssertionError, match=r"memory ran out on rank 0 of the trainer.*micro-batches of"):
        grads(two)
    # One of them knows nothing of it, as on a machine of its own.
    (tmp_path / "0.json").unlink()
    tokens = built(gang(2), model("qwen3"), tmp_path, **division).call("budget")
    assert tokens[0] == tokens[1] <= 40
    found = grads(gang(2))
    wanted = grads(built(gang(2), model("qwen3"), **{**division, "tokens_per_micro_batch": tokens[0]}))
    for ours, theirs in zip(found, wanted, strict=True):
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_one_sequence_that_does_not_fit_ends_it_with_what_to_do(gang: Gangs, model: Models) -> None:
    one = built(gang(1), model("qwen3"), tokens_per_micro_batch=80)
    one.call("starve", fits=1, ranks=[0])
    with pytest.raises(AssertionError, match=r"one sequence of \d+ tokens does not fit into memory"):
        grads(one)


def test_random_draws_go_on_from_a_checkpoint(gang: Gangs, model: Models, tmp_path: Path) -> None:
    two = built(gang(2), model("qwen3"), tensor_parallel=2)
    two.call("draw")
    two.call("save", folder=tmp_path)
    wanted = two.call("draw")
    assert two.call("draw") != wanted
    two.call("restore", folder=tmp_path)
    assert two.call("draw") == wanted
    # In another process, whose generators stand elsewhere; ranks divided otherwise keep theirs.
    built(two, model("qwen3"), tensor_parallel=2).call("restore", folder=tmp_path)
    assert two.call("draw") == wanted
    built(two, model("qwen3"), pipeline_parallel=2).call("restore", folder=tmp_path)
    assert two.call("draw") != wanted
