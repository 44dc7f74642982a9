"""Advantages and the clipped loss against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.algorithms.grpo import apply_truncation, clipped_policy_loss, group_advantages

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


@given(REWARDS)
def test_advantages_are_centred_and_ordered_like_rewards(rewards: list[float]) -> None:
    values = np.array(rewards)
    advantages = group_advantages(values)
    assert advantages.sum() == pytest.approx(0, abs=1e-6)
    assert np.all(np.diff(advantages[np.argsort(values)]) >= 0)
    assert np.abs(advantages).max() <= (len(rewards) - 1) / math.sqrt(len(rewards)) + 1e-9


@given(REWARDS, st.floats(0.5, 5), st.floats(-3, 3))
def test_a_normalised_group_ignores_scale_and_shift(rewards: list[float], scale: float, shift: float) -> None:
    values = np.array(rewards)
    if np.ptp(values) > 0.01:
        np.testing.assert_allclose(
            group_advantages(values, eps=0), group_advantages(values * scale + shift, eps=0), atol=1e-6
        )


def test_known_groups() -> None:
    np.testing.assert_allclose(group_advantages(np.array([1.0, 0.0]), eps=0), [0.5**0.5, -(0.5**0.5)])
    np.testing.assert_allclose(group_advantages(np.array([1.0, 0, 0, 0]), normalise_std=False), [0.75] + [-0.25] * 3)
    assert not group_advantages(np.array([0.3] * 8)).any()
    assert not group_advantages(np.array([5.0])).any()
    assert len(group_advantages(np.array([]))) == 0


def test_truncation_policies() -> None:
    rewards, cut = np.array([1.0, 0.4, -1.0]), np.array([False, True, True])
    for policy, wanted, kept in (
        ("none", [1.0, 0.4, -1.0], [True, True, True]),
        ("mask", [1.0, 0.4, -1.0], [True, False, False]),
        ("zero_reward", [1.0, 0.0, 0.0], [True, True, True]),
        ("soft_penalty", [1.0, -0.1, -1.5], [True, True, True]),
    ):
        changed, keeps = apply_truncation(rewards, cut, policy, 0.5)  # type: ignore[arg-type]
        np.testing.assert_allclose(changed, wanted)
        assert keeps.tolist() == kept
    assert rewards.tolist() == [1.0, 0.4, -1.0]


def scalar_loss(ratio: float, advantage: float, low: float, high: float) -> float:
    """The definition, for one token."""
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(-2, 2), st.booleans()), min_size=1, max_size=20))
def test_loss_is_the_sum_of_the_definition_over_counted_tokens(tokens: list[tuple[float, float, bool]]) -> None:
    behaviour = torch.linspace(-3, -0.1, len(tokens), dtype=torch.float64)
    gaps, advantages, counted = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    loss, metrics = clipped_policy_loss(behaviour + gaps, behaviour, advantages, counted, clip_low=0.2, clip_high=0.28)
    used = [(math.exp(gap), a) for gap, a, keep in tokens if keep]
    assert loss.item() == pytest.approx(sum(scalar_loss(r, a, 0.2, 0.28) for r, a in used), abs=1e-9)
    assert metrics["tokens"] == len(used)
    assert metrics["ratio_sum"] == pytest.approx(sum(r for r, _ in used), abs=1e-9)
    assert metrics["kl_sum"] == pytest.approx(sum(r - 1 - math.log(r) for r, _ in used), abs=1e-9)
    assert metrics["ratio_max_deviation"] == pytest.approx(max((abs(r - 1) for r, _ in used), default=0), abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "stopped"),
    [(1.5, 1, True), (1.25, 1, False), (0.5, 1, False), (0.5, -1, True), (0.85, -1, False), (1.5, -1, False)],
)
def test_the_clip_stops_the_gradient_where_it_should(ratio: float, advantage: float, stopped: bool) -> None:
    behaviour = torch.tensor([-1.0])
    logprobs = (behaviour + math.log(ratio)).requires_grad_()
    loss, metrics = clipped_policy_loss(
        logprobs, behaviour, torch.tensor([float(advantage)]), torch.ones(1), clip_low=0.2, clip_high=0.28
    )
    loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad.item() == 0) == stopped
    assert metrics["clipped_sum"] == float(stopped)


def test_values_under_mask_zero_reach_neither_loss_nor_gradient() -> None:
    logprobs = torch.tensor([-1.0, float("-inf"), float("nan")], requires_grad=True)
    behaviour = torch.tensor([-1.0, float("-inf"), 0.0])
    loss, metrics = clipped_policy_loss(
        logprobs,
        behaviour,
        torch.tensor([1.0, float("nan"), 2.0]),
        torch.tensor([1, 0, 0]),
        clip_low=0.2,
        clip_high=0.28,
    )
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == -1.0
    assert logprobs.grad.tolist() == [-1.0, 0.0, 0.0]
    assert all(math.isfinite(value) for value in metrics.values())


def test_micro_batches_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    behaviour, gap, advantages = (torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(12)

    def loss(part: slice) -> float:
        found, _ = clipped_policy_loss(
            (behaviour + 0.3 * gap)[part], behaviour[part], advantages[part], mask[part], clip_low=0.2, clip_high=0.28
        )
        return found.item()

    assert loss(slice(None)) == pytest.approx(loss(slice(0, 5)) + loss(slice(5, 12)))
