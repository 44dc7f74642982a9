"""What critic and reference do when memory runs out in a micro-batch, and the piece that all have in common."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from packing_samples import SAMPLES  # noqa: E402
from starved import failing_backward, spoil_last  # noqa: E402

from relax_rt.roles.training.backend.settings import CriticSettings  # noqa: E402
from relax_rt.roles.training.batch.budget import GradientAccumulation, MemoryRetry, TokenBudget  # noqa: E402
from relax_rt.roles.training.batch.rows import shared_rows  # noqa: E402
from relax_rt.roles.training.critic.model import CriticModel  # noqa: E402
from relax_rt.roles.training.reference.model import FrozenModel  # noqa: E402
from relax_rt.transport.rpc.errors import RelaxError  # noqa: E402

FITS = 12


def no_memory() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def critic(model_dir: Path, budget: TokenBudget) -> CriticModel:
    settings = CriticSettings(dtype="float32", learning_rate=1e-2, max_grad_norm=1e9)
    return CriticModel(model_dir, settings, lambda _: None, budget=budget)


def starve_critic(model: CriticModel, fits: int) -> None:
    compute = model._values

    def scarce(batch: Any) -> torch.Tensor:
        found = compute(batch)
        if batch.ids.numel() <= fits:
            return found
        if not torch.is_grad_enabled():
            raise no_memory()
        return failing_backward(found, no_memory, lambda: spoil_last(model._model))

    model._values = scarce  # type: ignore[method-assign]


def test_a_critic_s_step_is_that_of_one_with_smaller_micro_batches(model_dir: Path) -> None:
    told: list[tuple[int, int, str]] = []
    model = critic(model_dir, TokenBudget(4096, on_smaller=lambda *what: told.append(what)))
    model.values(SAMPLES)
    starve_critic(model, FITS)
    old = [np.full(len(one.tokens), 0.1, np.float32) for one in SAMPLES]
    returns = [np.full(len(one.tokens), 1.0, np.float32) * one.loss_mask for one in SAMPLES]
    report = model.learn(SAMPLES, old, returns)
    assert report.applied and told and "CUDA out of memory" in told[0][2]
    smaller = critic(model_dir, TokenBudget(told[-1][1]))
    assert smaller.learn(SAMPLES, old, returns) == report
    for ours, theirs in zip(model._model.parameters(), smaller._model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad) and torch.equal(ours, theirs)
    # It is kept, for values too.
    seen = len(told)
    for ours, theirs in zip(model.values(SAMPLES), smaller.values(SAMPLES), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(told) == seen


def test_a_critic_that_has_no_room_for_one_sequence_ends_with_what_to_do(model_dir: Path) -> None:
    model = critic(model_dir, TokenBudget(4096))
    before = [parameter.detach().clone() for parameter in model._model.parameters()]
    starve_critic(model, 3)
    zeros = [np.zeros(len(one.tokens), np.float32) for one in SAMPLES]
    with pytest.raises(RelaxError, match=r"one sequence of \d+ tokens does not fit.*CUDA out of memory.*max_new_tok"):
        model.learn(SAMPLES, zeros, zeros)
    assert all(torch.equal(a, b) for a, b in zip(before, model._model.parameters(), strict=True))


def test_a_reference_computes_in_smaller_parts(model_dir: Path, tmp_path: Path) -> None:
    def frozen(budget: TokenBudget | int) -> FrozenModel:
        return FrozenModel(model_dir, dtype="float32", threads=1, budget=budget, temperature=0.8)

    events: list[tuple[str, dict[str, Any]]] = []
    ctx: Any = SimpleNamespace(
        who=SimpleNamespace(slot="reference/1"),
        run_dir=tmp_path,
        event=lambda kind, **fields: events.append((kind, fields)),
    )
    model = frozen(TokenBudget.of(ctx, 4096))
    compute = model._compute

    def scarce(batch: Any) -> torch.Tensor:
        if batch.ids.numel() > FITS:
            raise MemoryError
        return compute(batch)

    model._compute = scarce  # type: ignore[method-assign]
    found = model.log_probabilities(SAMPLES)
    assert {kind for kind, _ in events} == {"micro_batch_halved"}
    after = events[-1][1]["from_now_on"]
    for ours, theirs in zip(found, frozen(after).log_probabilities(SAMPLES), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # The other slots of the pool begin with it, other roles do not.
    assert TokenBudget.of(ctx, 4096).tokens == after and TokenBudget.of(ctx, 2048).tokens == 2048
    ctx.who.slot = "critic/0"
    assert TokenBudget.of(ctx, 4096).tokens == 4096


def test_branches_of_one_sample_cannot_be_computed_apart() -> None:
    one = copy.deepcopy(SAMPLES[2])
    one.meta = msgspec.structs.replace(one.meta, branches=[(0, 5), (5, 9)])
    budget = TokenBudget(64)
    budget.attempting(shared_rows([one], 64), 9)
    with pytest.raises(RelaxError, match="one sequence"):
        budget.halve("no memory")


def test_a_step_is_begun_anew_with_all_of_its_parts() -> None:
    calls: list[str] = []
    budget = TokenBudget(64)

    def add(part: str) -> None:
        budget.attempting_units(budget.tokens, 4)
        calls.append(f"{part}{budget.tokens}")
        if part == "b" and budget.tokens > 16:
            raise MemoryError

    fitting = MemoryRetry(budget)
    accumulation = GradientAccumulation[str](fitting, lambda: calls.append("begin"), add)
    accumulation("a")
    accumulation("b")
    accumulation("c")
    wanted = ["begin", "a64", "b64", "begin", "a32", "b32", "begin", "a16", "b16", "c16"]
    assert calls == wanted and fitting.taken() == {"micro_batches_halved": 2.0} and fitting.taken() == {}
    accumulation.forget()
    accumulation("d")
    assert calls == [*wanted, "begin", "d16"]


def test_one_of_several_ranks_ends_with_word_of_it_and_all_agree_on_the_smallest(tmp_path: Path) -> None:
    budget = TokenBudget(64, tmp_path / "kept.json")

    def work() -> None:
        budget.attempting_units(60, 3)
        raise MemoryError

    with pytest.raises(RelaxError, match=r"memory ran out on rank 1 of the trainer.*micro-batches of 30 tokens"):
        MemoryRetry(budget, rank="rank 1 of the trainer")(work)
    ranks = [TokenBudget(64), TokenBudget(64, tmp_path / "kept.json")]
    told = [rank.tokens for rank in ranks]
    for rank in ranks:
        rank.agree(lambda _: told)
    assert [rank.tokens for rank in ranks] == [30, 30]
