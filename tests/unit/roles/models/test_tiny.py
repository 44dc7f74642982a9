"""Muon in float32 beside torch's, which is in bfloat16."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from relax_rt.roles.models.tiny import MOMENTUM, Muon, orthogonal  # noqa: E402


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24), (1, 5)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    found = orthogonal(matrices)
    assert found.shape == matrices.shape and found.dtype == torch.float32
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    inner = u.mT @ found @ v.mT
    values = torch.diagonal(inner, dim1=1, dim2=2)
    assert bool(((values > 0.3) & (values < 1.3)).all())
    torch.testing.assert_close(inner, torch.diag_embed(values), atol=1e-4, rtol=0)


def test_a_step_is_that_of_torch_but_for_its_rounding() -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = [(16, 16), (48, 16), (16, 48), (16, 16)]
    ours = [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    mine = Muon(ours, weight_decay=0.01)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.01, momentum=MOMENTUM)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(*one.shape, generator=generator)
            other.grad = one.grad.clone()
        mine.step(0.02)
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        # bfloat16 has 8 bits: an update of 0.02 is off by some percent.
        torch.testing.assert_close(one, other, atol=3 * 0.02 * 0.1, rtol=0)


def test_gradients_of_zero_change_nothing_but_by_the_decay() -> None:
    matrix = torch.nn.Parameter(torch.ones(4, 4))
    matrix.grad = torch.zeros(4, 4)
    Muon([matrix], weight_decay=0.5).step(0.1)
    assert torch.equal(matrix.detach(), torch.full((4, 4), 0.95))
