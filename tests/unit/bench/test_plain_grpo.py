"""The loss of the plain process against the system's, which it is to be compared with."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "bench"))

from plain_grpo import Plain

from relax_rt.roles.training.algorithms.inputs import TokenTensors
from relax_rt.roles.training.algorithms.losses import DecoupledOptions, decoupled_ppo


def test_its_loss_and_gradient_are_those_of_the_jobs_loss() -> None:
    drawn = torch.Generator().manual_seed(3)
    behaviour = -2 * torch.rand(200, generator=drawn, dtype=torch.float64)
    drift = torch.randn(200, generator=drawn, dtype=torch.float64)
    advantages = torch.randn(200, generator=drawn, dtype=torch.float64)
    options = DecoupledOptions()
    ours = (behaviour + drift).requires_grad_()
    tokens = TokenTensors(
        logprobs=ours,
        behaviour=behaviour,
        proximal=ours.detach(),
        advantages=advantages,
        mask=torch.ones(200, dtype=torch.bool),
        sequence=torch.zeros(200, dtype=torch.int64),
    )
    expected, metrics = decoupled_ppo(tokens, options)
    expected.sum().backward()  # type: ignore[no-untyped-call]
    assert metrics["capped"] > 0
    theirs = (behaviour + drift).requires_grad_()
    own: Any = SimpleNamespace(weight_cap=options.weight_cap)
    found = Plain._loss(own, theirs - behaviour, advantages)
    found.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(theirs.grad, ours.grad)
