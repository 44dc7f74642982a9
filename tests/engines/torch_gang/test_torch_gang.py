"""A model shared by several ranks (FSDP2) does as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gang_harness import Gang, check_digests, samples
from transformers import AutoModelForCausalLM

from relax_rt.roles.rollout.engines.weights import model_layout

ALGORITHM: dict[str, Any] = {"loss": "decoupled_ppo", "learning_rate": 1e-2}
Gangs = Callable[[int], Gang]
Models = Callable[[str], Path]


def built(gang: Gang, folder: Path, **options: Any) -> Gang:
    gang.call("build", model=folder, algorithm=ALGORITHM, **options)
    return gang


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], atol: float = 2e-5) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=atol, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("family", "world", "options"),
    [
        ("dense", 2, {}),
        ("dense", 2, {"budget": 16}),
        ("dense", 3, {}),
        ("dense", 2, {"packed": True}),
        ("experts", 2, {"budget": 40}),
        ("experts", 2, {"budget": 40, "packed": True}),
        ("dense", 2, {"lora": {"rank": 4, "alpha": 8}}),
    ],
    ids=str,
)
def test_the_numbers_are_those_of_one_process(
    family: str, world: int, options: dict[str, Any], torch_gang: Gangs, shared_model: Models
) -> None:
    folder = shared_model(family)
    lora = {"lora": options["lora"]} if "lora" in options else {}
    one, several = built(torch_gang(1), folder, **lora), built(torch_gang(world), folder, **options)
    before = one.weights()
    assert_close(several.weights(), before, atol=0)
    # A group less than ranks in the second step: one of them has nothing.
    batches = [samples(9), samples(2, seed=1), samples(7, seed=2)]
    for number, batch in enumerate(batches, start=1):
        wanted_logprobs, wanted = one.logprobs(batch), one.call("step", batches=[batch], count=40.0, number=number)[0]
        for ours, theirs in zip(several.logprobs(batch), wanted_logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=3e-5)
        # In unequal parts, one of them empty.
        answers = several.call("step", batches=[batch[:2], [], batch[2:]], count=40.0, number=number)
        assert len({answer.grad_norm for answer in answers}) == 1
        assert answers[0].applied and answers[0].grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
        assert answers[0].loss == pytest.approx(wanted.loss, abs=1e-5)
        assert answers[0].tokens == wanted.tokens
        assert answers[0].clip_fraction == pytest.approx(wanted.clip_fraction, abs=1e-6)
    after = one.weights()
    assert max(float((after[name] - value).abs().max()) for name, value in before.items()) > 1e-3
    assert_close(several.weights(), after, atol=3e-4)


@pytest.mark.parametrize("algorithm", [{"name": "decoupled_ppo"}, {"name": "dpo"}], ids=str)
def test_a_step_in_unequal_parts_has_the_gradients_of_a_whole_one(
    algorithm: dict[str, Any], torch_gang: Gangs, shared_model: Models
) -> None:
    two, batch = torch_gang(2), samples(9)
    two.call("build", model=shared_model("dense"), algorithm=algorithm, budget=40)
    whole = two.call("streamed", parts=[batch])
    assert max(float(np.abs(value).max()) for value in whole[0].values()) > 0.01
    # One part is a single group, which one rank computes alone; one is nothing.
    found = two.call("streamed", parts=[batch[2:4], [], batch[:2] + batch[6:], batch[4:6]])
    for ours, theirs in zip(found, whole, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=2e-6 * max(1.0, np.abs(value).max()))


@pytest.mark.parametrize("algorithm", [{"loss": "decoupled_ppo"}, {"name": "gspo", "clip_low": 0.01}], ids=str)
def test_several_updates_of_a_step_are_those_of_one_process(
    algorithm: dict[str, Any], torch_gang: Gangs, shared_model: Models
) -> None:
    one, two = torch_gang(1), torch_gang(2)
    for gang, budget in ((one, 4096), (two, 40)):
        gang.call("build", model=shared_model("dense"), algorithm={**ALGORITHM, **algorithm}, budget=budget)
    before = one.weights()
    for number in (1, 2):
        # Three updates of four, three and two samples.
        wanted, found = (gang.call("updates", batch=samples(9), number=number, parts=3)[0] for gang in (one, two))
        assert (found.updates, found.tokens) == (wanted.updates, wanted.tokens) and found.updates == 3
        assert found.clip_fraction == pytest.approx(wanted.clip_fraction, abs=1e-6)
        assert wanted.clip_fraction > 0, "the ratio moves with the weights"
        for name in ("loss", "grad_norm", "ratio_mean", "kl_behaviour"):
            assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=2e-3, abs=1e-5), name
    after = one.weights()
    assert max(float((after[name] - value).abs().max()) for name, value in before.items()) > 1e-3
    assert_close(two.weights(), after, atol=5e-4)


def test_each_rank_holds_its_share_and_the_layout_is_an_engine_s(torch_gang: Gangs, shared_model: Models) -> None:
    folder = shared_model("dense")
    one, two = built(torch_gang(1), folder), built(torch_gang(2), folder)
    for gang in (one, two):
        gang.call("step", batches=[samples(6)], count=20.0)
    whole, shares = one.call("held")[0], two.call("held")
    assert {name: sum(share[name] for share in shares) for name in whole} == whole
    assert max(sum(share.values()) for share in shares) <= 0.51 * sum(whole.values())
    model = AutoModelForCausalLM.from_pretrained(folder)
    layout, data = two.call("export", dtype="bfloat16")[0]
    assert layout == model_layout(model, torch.bfloat16) and len(data) == layout.nbytes
    assert_close(two.weights("bfloat16"), {k: v.bfloat16() for k, v in two.weights().items()}, atol=0)


def test_rank_0_speaks_for_all(torch_gang: Gangs, shared_model: Models, tmp_path: Path) -> None:
    folder, batch = shared_model("dense"), samples(8)
    saved, damaged = tmp_path / "saved", tmp_path / "damaged"
    saved.mkdir()
    damaged.mkdir()
    one, two = built(torch_gang(1), folder), built(torch_gang(2), folder, budget=32)
    before, logprobs = one.call("export")[0][1], one.logprobs(batch)
    wanted = one.call("step", batches=[batch], count=40.0)[0]
    found, followed = two.call("orders", batch=batch, count=40.0, folder=saved, damaged=damaged)
    for ours, theirs in zip(found["logprobs"], logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert found["exported"] == before, "the update waited for the copy of the weights before it"
    assert found["result"].grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
    assert "no state of an optimizer" in found["refused"]
    assert found["restored"] == two.call("export")[0][1] != before
    assert {"accumulate", "apply", "export", "snapshot", "write", "restore"} <= set(followed["orders"])
    check_digests(saved, 2)


def test_a_step_that_is_not_finite_is_thrown_away_by_all(torch_gang: Gangs, shared_model: Models) -> None:
    two = built(torch_gang(2), shared_model("dense"), budget=16)
    before, poisoned = two.weights(), samples(8)
    assert poisoned[2].advantages is not None
    poisoned[2].advantages[-1] = np.nan
    answers = two.call("step", batches=[poisoned], count=10.0)
    assert {answer.why for answer in answers} == {"loss is nan in step 1"}
    assert_close(two.weights(), before, atol=0)
    wanted = built(torch_gang(1), shared_model("dense")).call("step", batches=[samples(5)], count=12.0)[0]
    found = two.call("step", batches=[samples(5)], count=12.0, number=2)[0]
    assert found.applied and found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)


def test_a_batch_without_advantages_changes_nothing(torch_gang: Gangs, shared_model: Models) -> None:
    two = built(torch_gang(2), shared_model("dense"))
    two.call("step", batches=[samples(5)], count=10.0)
    before, batch = two.weights(), samples(4)
    for sample in batch:
        sample.advantages = np.zeros_like(sample.advantages)
    answer = two.call("step", batches=[batch], count=10.0, number=2)[0]
    assert answer.applied and not answer.changed
    assert_close(two.weights(), before, atol=0)


def test_another_objective_begins_with_fresh_moments(torch_gang: Gangs, shared_model: Models) -> None:
    folder, table = shared_model("dense"), {"name": "sft", "group_size": 1, "learning_rate": 3e-3}
    one, two = built(torch_gang(1), folder), built(torch_gang(2), folder)
    for gang in (one, two):
        gang.call("step", batches=[samples(6)], count=20.0)
        gang.call("use", algorithm=table)
        gang.call("step", batches=[samples(6, seed=1)], count=50.0)
    found, wanted = two.weights(), one.weights()
    assert list(found) == list(wanted)
    apart = torch.cat([(found[name] - value).abs().flatten() for name, value in wanted.items()])
    # The first step from fresh moments has the sign of the gradient: where that is mere rounding, it may be the other.
    assert float((apart > 3e-4).double().mean()) < 1e-3 and float(apart.max()) <= 2 * table["learning_rate"]


LORA = {"rank": 4, "alpha": 8}


@pytest.mark.parametrize(
    ("family", "lora", "old", "new"),
    [
        ("dense", None, 2, 1),
        ("dense", None, 1, 2),
        ("dense", None, 3, 2),
        ("experts", None, 2, 1),
        ("dense", LORA, 2, 1),
        ("dense", LORA, 1, 2),
    ],
)
def test_training_goes_on_from_a_checkpoint_of_other_ranks(
    family: str,
    lora: dict[str, Any] | None,
    old: int,
    new: int,
    torch_gang: Gangs,
    shared_model: Models,
    tmp_path: Path,
) -> None:
    folder = shared_model(family)
    first = built(torch_gang(old), folder, lora=lora)
    for number in (1, 2):
        first.call("step", batches=[samples(6, seed=number)], count=20.0, number=number)
    first.call("save", folder=tmp_path)
    kept = first.weights()
    wanted = [first.call("step", batches=[samples(6, seed=n)], count=20.0, number=n)[0] for n in (3, 4)]
    after = first.weights()

    second = built(torch_gang(new), folder, lora=lora)
    second.call("restore", folder=tmp_path)
    assert_close(second.weights(), kept, atol=0 if lora is None else 1e-6)
    found = [second.call("step", batches=[samples(6, seed=n)], count=20.0, number=n)[0] for n in (3, 4)]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=2e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)
    assert_close(second.weights(), after, atol=3e-4)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_close(dict(loaded.named_parameters()), kept, atol=0)


def test_an_incomplete_checkpoint_is_refused_and_changes_nothing(
    torch_gang: Gangs, shared_model: Models, tmp_path: Path
) -> None:
    two = built(torch_gang(2), shared_model("dense"))
    two.call("step", batches=[samples(6)], count=20.0)
    two.call("save", folder=tmp_path)
    two.call("step", batches=[samples(6)], count=20.0, number=2)
    before = two.weights()
    part = tmp_path / "optimizer-00002-of-00002.safetensors"
    data = part.read_bytes()
    part.write_bytes(data[: len(data) // 2])
    with pytest.raises(AssertionError, match="SafetensorError"):
        two.call("restore", folder=tmp_path)
    part.unlink()
    with pytest.raises(AssertionError, match="1 of the 2 ranks' files"):
        two.call("restore", folder=tmp_path)
    part.write_bytes(data)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(AssertionError, match="SafetensorError"):
        two.call("restore", folder=tmp_path)
    assert_close(two.weights(), before, atol=0)


def test_a_rank_without_memory_leaves_word_of_it(torch_gang: Gangs, shared_model: Models, tmp_path: Path) -> None:
    # All ranks in their first pass, so that none is left waiting for another.
    two = built(torch_gang(2), shared_model("dense"), kept=tmp_path / "kept.json")
    for rank in (0, 1):
        two.call("poor", rank=rank, calls=0)
    with pytest.raises(AssertionError, match=r"memory ran out on rank 0 of the trainer.*micro-batches of"):
        two.call("step", batches=[samples(8)], count=20.0)
    again = built(torch_gang(2), shared_model("dense"), kept=tmp_path / "kept.json")
    assert again.call("step", batches=[samples(8)], count=20.0)[0].applied
