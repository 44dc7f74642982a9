"""Advantages and costs that look at the policy: their gradients are those of the objective, also off-policy.

One token is sampled from a softmax over five. Expectations over what was sampled from are taken exactly, and held
against gradients worked by hand: with p the policy, q the teacher or reference, d = log p - log q and KL = sum p d,

    dKL / d logit_k = p_k (d_k - KL),        d E_p[r] / d logit_k = p_k (r_k - E_p[r]).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from algorithm_samples import sample

from relax_rt.roles.training.algorithms.inputs import TokenTensors
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable

LOGITS = torch.tensor([0.3, -0.5, 1.1, 0.0, -1.2], dtype=torch.float64)
BEHAVIOUR = torch.tensor([-0.9, 0.8, 0.1, 0.4, -0.3], dtype=torch.float64).log_softmax(0)
OTHER = torch.tensor([0.7, 0.2, -0.6, 0.9, 0.0], dtype=torch.float64).log_softmax(0)
"""The teacher, or the reference."""
REWARDS = torch.tensor([0.5, -1.0, 0.25, 2.0, -0.75], dtype=torch.float64)
POLICY = LOGITS.log_softmax(0)
TIS = [{"name": "tis", "cap": 1e6}]
FREE = {"name": "decoupled_ppo", "weight_cap": float("inf")}


def slope_of_kl(q: torch.Tensor) -> torch.Tensor:
    """d KL(policy, q) / d logits."""
    p, d = POLICY.exp(), POLICY - q
    return p * (d - (p * d).sum())


def slope_of_reward() -> torch.Tensor:
    """d E_policy[r] / d logits."""
    p = POLICY.exp()
    return p * (REWARDS - (p * REWARDS).sum())


def expected_gradient(table: dict[str, Any], trained: torch.Tensor = POLICY) -> torch.Tensor:
    """Of the loss, over tokens as BEHAVIOUR samples them. trained: by the trainer, before the update."""
    objective = Objective.of(AlgorithmTable(**table))
    assert objective.proximal_first, "the trainer computes them before the advantages"
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(len(LOGITS)):
        columns = {"reference_logprobs": [0, float(OTHER[token])], "proximal_logprobs": [0, float(trained[token])]}
        one = sample(token, [0, 1], float(REWARDS[token]), **columns)
        one.behaviour_logprobs = np.array([0, float(BEHAVIOUR[token])], np.float32)
        objective.advantages([one])
        assert one.advantages is not None
        found = TokenTensors(
            logprobs=policy[token : token + 1],
            behaviour=BEHAVIOUR[token : token + 1],
            advantages=torch.tensor([float(one.advantages[1])], dtype=torch.float64),
            mask=torch.ones(1),
            sequence=torch.zeros(1, dtype=torch.int64),
            proximal=trained[token : token + 1],
        )
        total = total + BEHAVIOUR[token].exp() * objective.loss(found)[0]
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient


@pytest.mark.parametrize("parts", [{"corrections": TIS}, {"loss": FREE, "corrections": []}], ids=["tis", "decoupled"])
def test_distillation_minimises_the_distance_to_the_teacher_whoever_sampled(parts: dict[str, Any]) -> None:
    found = expected_gradient({"name": "distillation", **parts})
    torch.testing.assert_close(found, slope_of_kl(OTHER), rtol=1e-5, atol=1e-6)
    # With what was sampled from in the policy's place it would be another: samples would draw away from their source.
    astray = slope_of_kl(OTHER) - slope_of_kl(BEHAVIOUR)
    assert (found - astray).abs().max() > 0.05


PLAIN = {"name": "reinforce_pp", "whiten": False}


@pytest.mark.parametrize("parts", [{"corrections": TIS, "loss": "policy_gradient"}, {"loss": FREE}], ids=["tis", "own"])
def test_a_distance_in_the_reward_is_that_of_the_trained_policy(parts: dict[str, Any]) -> None:
    kl = {"name": "k1", "coefficient": 0.3, "place": "reward"}
    found = expected_gradient({"advantage": PLAIN, "kl": kl, **parts})
    # A reward is maximised: sum over p of the score is 0, so that r - 0.3 d has the slope of both.
    torch.testing.assert_close(found, 0.3 * slope_of_kl(OTHER) - slope_of_reward(), rtol=1e-5, atol=1e-6)
    astray = 0.3 * (slope_of_kl(OTHER) - slope_of_kl(BEHAVIOUR)) - slope_of_reward()
    assert (found - astray).abs().max() > 0.01
