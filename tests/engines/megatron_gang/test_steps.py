"""What a step must not depend on, what a gang does with a step that went wrong, and checkpoints across divisions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_parts import Gang, samples
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from relax_rt.roles.base.sample import Sample

ALGORITHM: dict[str, Any] = {"learning_rate": 1e-2}


def built(gang: Gang, folder: Path, **division: Any) -> Gang:
    gang.call("build", model=folder, division=division, algorithm=ALGORITHM)
    return gang


def summed(gang: Gang, batches: list[list[Sample]]) -> dict[str, np.ndarray]:
    """Gradient sums of a gang without tensor parallelism, over all its ranks."""
    total: dict[str, np.ndarray] = {}
    for part in gang.call("grads", batches=batches):
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    return total


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=2e-6 * max(1.0, float(np.abs(value).max())), err_msg=name)


def test_gradients_do_not_depend_on_the_split(gang: Callable[[int], Gang], model: Callable[[str], Path]) -> None:
    batch, folder = samples(11), model("qwen3")
    whole = summed(built(gang(1), folder), [batch])
    assert max(float(np.abs(value).max()) for value in whole.values()) > 0.1
    for budget in (1, 40):
        assert_same(summed(built(gang(1), folder, tokens_per_micro_batch=budget), [batch]), whole)
    # Streamed in unequal parts, one of them without anything to train on.
    assert_same(summed(gang(1), [batch[:1], batch[4:5], batch[1:4], batch[5:]]), whole)


@pytest.mark.parametrize("division", [{"tensor_parallel": 2}, {}], ids=["tp2", "dp2"])
def test_a_step_of_a_gang_in_unequal_parts_has_the_gradients_of_a_whole_one(
    division: dict[str, Any], gang: Callable[[int], Gang], model: Callable[[str], Path]
) -> None:
    ranks, batch = gang(2), samples(9)
    options = {"tokens_per_micro_batch": 40, **division}
    ranks.call("build", model=model("qwen3"), division=options, algorithm={"name": "decoupled_ppo"})
    parts = [batch[2:4], [], batch[:2] + batch[6:], batch[4:6]]
    whole, found = (ranks.call("streamed", parts=each) for each in ([batch], parts))
    assert max(float(np.abs(value).max()) for value in whole[0].values()) > 0.01
    # What both ranks hold has a part of its sum on each.
    assert_same(*({name: each[0][name] + each[1][name] for name in each[0]} for each in (found, whole)))
    if division:
        for ours, theirs in zip(found, whole, strict=True):
            assert_same(*({n: v for n, v in one.items() if "norm" not in n} for one in (ours, theirs)))


@pytest.mark.parametrize("division", [{"tensor_parallel": 2}, {}], ids=["tp2", "dp2"])
def test_several_updates_of_a_step_are_those_of_one_process(
    division: dict[str, Any], gang: Callable[[int], Gang], model: Callable[[str], Path]
) -> None:
    one, two, found = gang(1), gang(2), []
    algorithm = {**ALGORITHM, "loss": "decoupled_ppo"}
    for ranks, options in ((one, {}), (two, {"tokens_per_micro_batch": 40, **division})):
        ranks.call("build", model=model("qwen3"), division=options, algorithm=algorithm)
        # Three updates of four, three and two samples.
        found.append([ranks.call("updates", batch=samples(9), number=number, parts=3)[0] for number in (1, 2)])
    for wanted, ours in zip(*found, strict=True):
        assert (ours.updates, ours.tokens) == (3, wanted.tokens) and wanted.clip_fraction > 0
        for name in ("loss", "grad_norm", "ratio_mean", "kl_behaviour", "clip_fraction"):
            assert getattr(ours, name) == pytest.approx(getattr(wanted, name), rel=2e-3, abs=1e-5), name
    for name, value in one.weights().items():
        torch.testing.assert_close(two.weights()[name], value, atol=5e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_gradients_do_not_depend_on_the_replicas(
    family: str, gang: Callable[[int], Gang], model: Callable[[str], Path]
) -> None:
    batch, folder = samples(11), model(family)
    whole = summed(built(gang(1), folder), [batch])
    assert_same(summed(built(gang(2), folder, tokens_per_micro_batch=40), [batch[:4], batch[4:]]), whole)
    # One replica has nothing at all.
    alone = summed(built(gang(1), folder), [batch[:1]])
    assert_same(summed(built(gang(2), folder), [batch[:1]]), alone)


def test_an_empty_replica_keeps_step_with_the_experts_of_the_other(
    gang: Callable[[int], Gang], model: Callable[[str], Path]
) -> None:
    one = built(gang(1), model("qwen3_moe"), tokens_per_micro_batch=16)
    two = built(gang(2), model("qwen3_moe"), tokens_per_micro_batch=16, expert_parallel=2)
    batch = samples(1)
    np.testing.assert_allclose(two.logprobs(batch)[0], one.logprobs(batch)[0], atol=1e-5)
    wanted, found = (each.call("step", batches=[batch], count=9.0)[0] for each in (one, two))
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4) and found.loss == pytest.approx(wanted.loss)


def test_a_step_that_is_not_finite_is_thrown_away_by_all_ranks(
    gang: Callable[[int], Gang], model: Callable[[str], Path]
) -> None:
    ranks = built(gang(2), model("qwen3"), tensor_parallel=1)
    before = ranks.weights()
    poisoned = samples(4)
    assert poisoned[1].advantages is not None
    poisoned[1].advantages[-1] = np.nan
    answers = ranks.call("step", batches=[poisoned], count=10.0)
    assert all(not answer.applied and "not applied" not in answer.why for answer in answers)
    assert "nan in step 1" in answers[0].why and answers[0].why == answers[1].why
    assert all(torch.equal(value, before[name]) for name, value in ranks.weights().items())
    # Nothing of it is left in the next one.
    wanted = built(gang(1), model("qwen3")).call("step", batches=[samples(5)], count=12.0)[0]
    found = ranks.call("step", batches=[samples(5)], count=12.0, number=2)[0]
    assert found.applied and found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)


def test_a_batch_without_advantages_changes_nothing(gang: Callable[[int], Gang], model: Callable[[str], Path]) -> None:
    ranks = built(gang(2), model("qwen3"), tensor_parallel=2)
    ranks.call("step", batches=[samples(5)], count=10.0)
    before = ranks.weights()
    batch = samples(4)
    for sample in batch:
        sample.advantages = np.zeros_like(sample.advantages)
    answer = ranks.call("step", batches=[batch], count=10.0, number=2)[0]
    assert answer.applied and not answer.changed and answer.tokens == sum(int(s.loss_mask.sum()) for s in batch)
    assert all(torch.equal(value, before[name]) for name, value in ranks.weights().items())


def test_a_checkpoint_before_the_first_update_is_whole(
    gang: Callable[[int], Gang], model: Callable[[str], Path], tmp_path: Path
) -> None:
    ranks = built(gang(2), model("qwen3"), tensor_parallel=2)
    with pytest.raises(AssertionError, match="no snapshot was taken"):
        ranks.call("write", folder=tmp_path)
    ranks.call("save", folder=tmp_path)
    wanted = ranks.call("step", batches=[samples(6)], count=20.0)[0]
    one = built(gang(1), model("qwen3"))
    one.call("step", batches=[samples(6, seed=1)], count=20.0)
    one.call("restore", folder=tmp_path)
    found = one.call("step", batches=[samples(6)], count=20.0)[0]
    assert found.loss == pytest.approx(wanted.loss, abs=1e-5)
    one.call("restore", folder=tmp_path)
    assert one.call("steps") == [0]


MOVES = [
    ("qwen3", (2, {"tensor_parallel": 2}), (1, {})),
    ("qwen3", (1, {}), (2, {"tensor_parallel": 2})),
    ("qwen3", (2, {}), (2, {"pipeline_parallel": 2})),
    ("qwen2", (2, {"pipeline_parallel": 2}), (2, {"tensor_parallel": 2})),
    ("qwen3", (2, {"distributed_optimizer": False}), (2, {})),
    ("qwen3_moe", (2, {"expert_parallel": 2}), (2, {"tensor_parallel": 2})),
    ("qwen3_moe", (2, {"tensor_parallel": 2, "expert_tensor_parallel": 2}), (1, {})),
]


@pytest.mark.parametrize(("family", "old", "new"), MOVES)
def test_training_goes_on_from_a_checkpoint_of_another_division(
    family: str,
    old: tuple[int, dict[str, Any]],
    new: tuple[int, dict[str, Any]],
    gang: Callable[[int], Gang],
    model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    first = built(gang(old[0]), model(family), **old[1])
    for number in (1, 2):
        first.call("step", batches=[samples(6, seed=number)], count=20.0, number=number)
    first.call("save", folder=tmp_path)
    kept = first.weights()
    wanted = [first.call("step", batches=[samples(6, seed=n)], count=20.0, number=n)[0] for n in (3, 4)]

    second = built(gang(new[0]), model(family), **new[1])
    second.call("restore", folder=tmp_path)
    assert all(torch.equal(value, kept[name]) for name, value in second.weights().items())
    found = [second.call("step", batches=[samples(6, seed=n)], count=20.0, number=n)[0] for n in (3, 4)]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=2e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)


def test_a_checkpoint_is_a_hugging_face_folder(
    gang: Callable[[int], Gang], model: Callable[[str], Path], tmp_path: Path
) -> None:
    ranks = built(gang(2), model("qwen3_moe"), expert_parallel=2)
    ranks.call("step", batches=[samples(6)], count=20.0)
    ranks.call("save", folder=tmp_path)
    loaded, ours = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), ranks.weights()
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, ours[name]), name


def test_an_incomplete_checkpoint_is_refused(
    gang: Callable[[int], Gang], model: Callable[[str], Path], tmp_path: Path
) -> None:
    ranks = built(gang(2), model("qwen3"), tensor_parallel=2)
    ranks.call("step", batches=[samples(6)], count=20.0)
    ranks.call("save", folder=tmp_path)
    part = tmp_path / "optimizer-00002-of-00002.safetensors"
    data = part.read_bytes()
    part.write_bytes(data[: len(data) // 2])
    with pytest.raises(AssertionError, match="SafetensorError"):
        ranks.call("restore", folder=tmp_path)
    part.unlink()
    with pytest.raises(AssertionError, match="1 of the 2 ranks' files"):
        built(gang(1), model("qwen3")).call("restore", folder=tmp_path)


def test_a_checkpoint_that_lacks_something_is_refused_and_changes_nothing(
    gang: Callable[[int], Gang], model: Callable[[str], Path], tmp_path: Path
) -> None:
    ranks = built(gang(1), model("qwen3"))
    ranks.call("step", batches=[samples(6)], count=20.0)
    ranks.call("save", folder=tmp_path)
    ranks.call("step", batches=[samples(6, seed=1)], count=20.0, number=2)
    before, moments = ranks.weights(), tmp_path / "optimizer-00001-of-00001.safetensors"
    whole = load_file(moments)
    with safe_open(moments, framework="pt") as file:
        metadata = file.metadata()
    lost = next(key for key in reversed(list(whole)) if "|exp_avg_sq|" in key)
    save_file({key: value for key, value in whole.items() if key != lost}, moments, metadata=metadata)
    with pytest.raises(AssertionError, match=f"lacks exp_avg_sq of .* {lost.partition('|')[0]}"):
        ranks.call("restore", folder=tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in ranks.weights().items())
    assert ranks.call("steps") == [2]
    # With all of it there again, it is gone on from.
    save_file(whole, moments, metadata=metadata)
    ranks.call("restore", folder=tmp_path)
    assert ranks.call("steps") == [1]


def test_bfloat16_keeps_float32_masters(
    gang: Callable[[int], Gang], model: Callable[[str], Path], tmp_path: Path
) -> None:
    ranks = built(gang(2), model("qwen3"), tensor_parallel=2, dtype="bfloat16")
    original = load_file(model("qwen3") / "model.safetensors")
    assert all(torch.equal(value, original[name].bfloat16()) for name, value in ranks.weights("bfloat16").items())
    # Steps that bfloat16 cannot resolve add up in the masters.
    for number in range(1, 4):
        answer = ranks.call("step", batches=[samples(6)], count=20.0, number=number)[0]
        assert answer.applied
    ranks.call("save", folder=tmp_path)
    wanted = ranks.call("step", batches=[samples(6, seed=1)], count=20.0, number=4)[0]
    one = built(gang(1), model("qwen3"), dtype="bfloat16")
    one.call("restore", folder=tmp_path)
    found = one.call("step", batches=[samples(6, seed=1)], count=20.0, number=4)[0]
    assert found.loss == pytest.approx(wanted.loss, abs=5e-3)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=3e-2)
