"""A group's shared prompt is computed once; loss and gradients are those of separate sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_backend import torch_backend

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from packing_samples import SAMPLES, make_sample  # noqa: E402
from packing_ways import APART  # noqa: E402

from relax_rt.roles.training.batch.collate import collate  # noqa: E402
from relax_rt.roles.training.batch.rows import micro_batches, shared_rows  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402


def backend(model_dir: Path, budget: int) -> TorchBackend:
    return torch_backend(model_dir, budget=budget, temperature=0.8, loss="ppo_clip", learning_rate=1e-3)


def gradients_one_by_one(model_dir: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    total = sum(int(s.loss_mask.sum()) for s in SAMPLES)
    for s in SAMPLES:
        ids = torch.from_numpy(s.tokens.astype(np.int64))
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1] / 0.8, -1).gather(-1, ids[1:, None])[:, 0]
        assert s.advantages is not None
        behaviour, advantages = torch.from_numpy(s.behaviour_logprobs[1:]), torch.from_numpy(s.advantages[1:])
        ratio = (logprobs - behaviour)[s.loss_mask[1:] != 0].exp()
        mine = advantages[s.loss_mask[1:] != 0]
        loss = -torch.minimum(ratio * mine, ratio.clamp(0.8, 1.28) * mine).sum()
        (loss / total).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("budget", [8, 16, 4096])
def test_gradients_equal_those_of_separate_sequences(model_dir: Path, budget: int) -> None:
    trainer = backend(model_dir, budget)
    trainer._optimizer.step = lambda *a, **k: None  # type: ignore[method-assign]
    result = trainer.step(SAMPLES, 1)
    expected = gradients_one_by_one(model_dir)
    assert result.tokens == sum(int(s.loss_mask.sum()) for s in SAMPLES)
    for name, parameter in trainer._model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6, rtol=1e-4)


def test_the_shared_prompt_is_computed_once(model_dir: Path) -> None:
    rows = shared_rows(SAMPLES, 4096)
    assert [row.length for row in rows] == [4 + 2 + 1 + 5, 1 + 3 + 2, 2 + 5 + 3]
    trainer = backend(model_dir, 4096)
    trainer.costs = None
    assert trainer.step(SAMPLES, 1).computed_tokens == 3 * 12  # padding included
    trainer.costs = APART
    assert trainer.step(SAMPLES, 1).computed_tokens == 12 + 6 + 10


def test_no_micro_batch_is_above_the_budget_unless_one_sample_is() -> None:
    rows = shared_rows(SAMPLES, 9)
    for batch in micro_batches(rows, 9):
        longest = max(r.length for r in batch)
        assert len(batch) * longest <= 9 or (len(batch) == 1 and len(batch[0].members) == 1)
    assert sorted(i for r in rows for i, _ in r.members) == list(range(len(SAMPLES)))


def test_a_member_sees_the_prompt_and_itself_only() -> None:
    batch = collate(shared_rows(SAMPLES[:3], 4096))
    assert batch.mask is not None
    mask = batch.mask[0, 0]
    assert mask[5, :6].tolist() == [True] * 6  # second token of the first member
    assert mask[6].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 6]  # the second member's only token
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 4, 4, 5, 6, 7, 8]


def test_a_loss_that_is_not_finite_throws_the_step_away(model_dir: Path) -> None:
    trainer = backend(model_dir, 4096)
    before = [p.detach().clone() for p in trainer._model.parameters()]
    bad = make_sample(3, 0, [1, 2], [3, 4])
    bad.advantages = np.array([0, 0, np.nan, 1], np.float32)
    result = trainer.step([*SAMPLES, bad], 1)
    assert not result.applied
    assert "step 1" in result.why
    assert all(torch.equal(a, b) for a, b in zip(before, trainer._model.parameters(), strict=True))
    assert trainer.step(SAMPLES, 1).applied


def test_state_comes_back_from_a_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    straight, resumed = backend(model_dir, 64), backend(model_dir, 64)
    straight.step(SAMPLES, 1)
    straight.snapshot()
    straight.step(SAMPLES, 2)
    straight.write(tmp_path)  # of the snapshot, not of the step after it
    resumed.restore(tmp_path)
    resumed.step(SAMPLES, 2)
    for a, b in zip(straight._model.parameters(), resumed._model.parameters(), strict=True):
        assert torch.equal(a, b)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.num_hidden_layers == 2
