"""Log-probabilities and entropies over a cut vocabulary, against torch's softmax."""

from __future__ import annotations

import pytest
import torch

from relax_rt.roles.training.megatron.passes import VocabularySlice, log_probabilities


class Parts(VocabularySlice):
    """All parts of the vocabulary in one process: what the others would add is put in from a list."""

    def __init__(self, first: int, rows: int, vocabulary: int, others: list[torch.Tensor]) -> None:
        super().__init__(first, rows, vocabulary, None)
        self.others = others

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values, *(other.amax(-1) for other in self.others)]).amax(0)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        top = torch.stack([self.mine.amax(-1), *(other.amax(-1) for other in self.others)]).amax(0)
        for start, other in self.placed:
            z = other - top[:, None]
            there = (self.targets >= start) & (self.targets < start + z.shape[1])
            at = torch.where(there, self.targets - start, 0)
            found = torch.where(there, z.gather(1, at[:, None])[:, 0], 0.0)
            values = values + torch.stack([z.exp().sum(-1), (z.exp() * z).sum(-1), found])
        return values


def wanted(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits, -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def example(rows: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * 4
    return logits, torch.randint(0, vocabulary, (rows,), generator=generator)


def test_values_and_gradients_are_those_of_the_softmax_and_padding_has_no_probability() -> None:
    logits, targets = example(5, 7)
    weights = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    plain = logits.clone().requires_grad_()
    expected = wanted(plain, targets)
    (weights * torch.stack(expected)).sum().backward()

    padded = torch.cat([logits, torch.full((5, 2), 9.0, dtype=torch.float64)], 1).requires_grad_()
    found = log_probabilities(padded / 1.0, targets, VocabularySlice(0, 9, 7, None))
    (weights * torch.stack(found)).sum().backward()
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))
    assert padded.grad is not None and plain.grad is not None
    torch.testing.assert_close(padded.grad[:, :7], plain.grad)
    assert not padded.grad[:, 7:].any()


@pytest.mark.parametrize("part", [0, 1])
def test_each_part_of_the_vocabulary_gives_the_same_values_and_its_own_gradients(part: int) -> None:
    logits, targets = example(6, 10)
    halves = list(logits.split(5, 1))
    plain = logits.clone().requires_grad_()
    expected = wanted(plain, targets)
    (expected[0].sum() + 0.3 * expected[1].sum()).backward()

    here = Parts(5 * part, 5, 10, [halves[1 - part]])
    here.mine, here.targets, here.placed = halves[part], targets, [(5 * (1 - part), halves[1 - part])]  # type: ignore[attr-defined]
    mine = halves[part].clone().requires_grad_()
    logprobs, entropy = log_probabilities(mine / 1.0, targets, here)
    (logprobs.sum() + 0.3 * entropy.sum()).backward()
    torch.testing.assert_close(logprobs, expected[0])
    torch.testing.assert_close(entropy, expected[1])
    assert plain.grad is not None
    torch.testing.assert_close(mine.grad, plain.grad.split(5, 1)[part])


def test_an_impossible_token_leaves_the_entropy_finite() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    logprobs, entropy = log_probabilities(logits / 1.0, torch.tensor([1]), VocabularySlice(0, 3, 3, None))
    (logprobs + entropy).sum().backward()
    assert torch.isfinite(entropy).all() and logits.grad is not None and torch.isfinite(logits.grad).all()
