"""Advantages of one group, and what truncated completions count as."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.training.algorithms.advantages import apply_truncation, group_advantages

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
