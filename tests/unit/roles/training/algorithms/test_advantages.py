"""Every advantage against numbers worked out by hand, or against its definition written as plain loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from algorithm_samples import bound, sample, trajectories
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.base.sample import TurnSpan
from relax_rt.roles.training.algorithms.advantages import EPS, GaeOptions, estimate, estimates, token_rewards
from relax_rt.roles.training.algorithms.inputs import AdvantageInputs, Trajectory, trajectory
from relax_rt.transport.rpc.errors import Refused

FOUR = ((0, 1.0, 2), (0, 0.0, 1), (1, 3.0, 1), (1, 0.0, 2), (1, 0.0, 3))


def firsts(values: list[np.ndarray]) -> list[float]:
    """The advantage of each trajectory, equal on its tokens; none on its prompt."""
    for one in values:
        assert one.dtype == np.float32
        assert one[:2].tolist() == [0, 0]
        assert len(set(one[2:].tolist())) <= 1
    return [float(one[2]) for one in values]


def test_grpo_by_group() -> None:
    found = firsts(bound("advantage", "grpo")(trajectories(*FOUR)))
    half, root3 = math.sqrt(0.5), math.sqrt(3)
    assert found == pytest.approx(
        [0.5 / (half + EPS), -0.5 / (half + EPS), 2 / (root3 + EPS), -1 / (root3 + EPS), -1 / (root3 + EPS)]
    )


def test_dr_grpo_subtracts_the_mean_only() -> None:
    found = firsts(bound("advantage", "grpo", normalise_std=False)(trajectories(*FOUR)))
    assert found == pytest.approx([0.5, -0.5, 2, -1, -1])


def test_grpo_with_the_standard_deviation_of_the_batch() -> None:
    part = bound("advantage", {"name": "grpo", "std_of": "batch"})
    std = np.std([1, 0, 3, 0, 0], ddof=1)
    assert firsts(part(trajectories(*FOUR))) == pytest.approx(np.array([0.5, -0.5, 2, -1, -1]) / (std + EPS))
    assert "batch" in part.needs
    assert "batch" not in bound("advantage", "grpo").needs


def test_rloo_leaves_one_out() -> None:
    assert firsts(bound("advantage", "rloo")(trajectories(*FOUR))) == pytest.approx([1, -1, 3, -1.5, -1.5])
    assert firsts(bound("advantage", "rloo")(trajectories((0, 7.0, 2)))) == [0.0]


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
@pytest.mark.parametrize(
    "part",
    ["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", {"name": "reinforce_pp_baseline", "whiten": False}],
    ids=str,
)
def test_equal_rewards_leave_no_rounding_behind(part: Any, reward: float) -> None:
    """An advantage of 1e-17 would be a whole pass, and a step by the optimizer's momentum alone."""
    batch = trajectories(*((group, reward, 2) for group in (0, 1) for _ in range(3)))
    assert firsts(bound("advantage", part)(batch)) == [0.0] * 6


def test_a_cost_in_the_reward_counts_for_the_group() -> None:
    batch = trajectories((0, 1.0, 2), (0, 0.0, 1), penalty=[[0.1, 0.3], [0.5]])
    assert firsts(bound("advantage", "rloo")(batch)) == pytest.approx([0.6 + 0.5, -1.1])


def test_reinforce_pp_takes_the_cost_to_go_and_whitens_over_tokens() -> None:
    batch = trajectories((0, 1.0, 2), (1, 0.0, 1), penalty=[[0.1, 0.3], [0.5]])
    plain = bound("advantage", {"name": "reinforce_pp", "whiten": False})(batch)
    assert [p[2:].tolist() for p in plain] == [pytest.approx([0.6, 0.7]), pytest.approx([-0.5])]
    flat = np.array([0.6, 0.7, -0.5])
    wanted = (flat - flat.mean()) / flat.std()
    found = bound("advantage", "reinforce_pp")(batch)
    assert np.concatenate([f[2:] for f in found]) == pytest.approx(wanted, abs=1e-6)


def test_reinforce_pp_baseline_subtracts_the_group_mean_first() -> None:
    found = bound("advantage", "reinforce_pp_baseline")(trajectories(*FOUR))
    flat = np.array([0.5, 0.5, -0.5, 2, -1, -1, -1, -1, -1])
    wanted = (flat - flat.mean()) / flat.std()
    assert np.concatenate([f[2:] for f in found]) == pytest.approx(wanted, abs=1e-6)


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=8), st.floats(0, 1), st.floats(0, 1)
)
def test_gae_is_the_weighted_sum_of_temporal_differences(
    steps: list[tuple[float, float]], gamma: float, lam: float
) -> None:
    rewards, values = (np.array(column) for column in zip(*steps, strict=True))
    after = [*values[1:], 0.0]
    deltas = [r + gamma * v1 - v for r, v, v1 in zip(rewards, values, after, strict=True)]
    wanted = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]
    advantages, returns = estimate(rewards, values, gamma, lam)
    np.testing.assert_allclose(advantages, wanted, atol=1e-9)
    np.testing.assert_allclose(returns, np.array(wanted) + values, atol=1e-9)


def test_gae_skips_tokens_of_the_environment_and_pays_on_the_last_trained_one() -> None:
    one = Trajectory(
        group=0,
        reward=1.0,
        mask=np.array([0, 1, 0, 0, 1, 0], bool),
        behaviour=np.zeros(6),
        values=np.array([9, 0.25, np.nan, 9, 0.5, 9.0]),
        penalty=np.array([0, 0.1, 0, 0, 0.2, 0.0]),
    )
    assert token_rewards(one).tolist() == pytest.approx([-0.1, 0.8])
    found = bound("advantage", {"name": "gae", "whiten": False, "lam": 0.5})(AdvantageInputs([one]))[0]
    last = 0.8 - 0.5
    assert found.tolist() == pytest.approx([0, -0.1 + 0.5 - 0.25 + 0.5 * last, 0, 0, last, 0])
    ((_, returns),) = estimates(AdvantageInputs([one]), GaeOptions(lam=1.0))
    assert returns.tolist() == pytest.approx([0.7, 0.8])


def test_gae_is_whitened_over_the_batch_and_refuses_samples_without_values() -> None:
    batch = trajectories((0, 1.0, 2), (1, 0.0, 1), values=[[0.5, 0.5], [0.25]])
    flat = np.concatenate([a[2:] for a in bound("advantage", "gae")(batch)])
    assert flat.mean() == pytest.approx(0, abs=1e-6)
    assert flat.std() == pytest.approx(1, abs=1e-6)
    with pytest.raises(Refused, match="a sample of group 4 has no values"):
        bound("advantage", "gae")(trajectories((4, 1.0, 1)))


def test_distillation_is_the_teacher_less_the_student() -> None:
    batch = trajectories((0, 0.0, 2), (1, 0.0, 1), proximal=[[-1, -2], [-3]], reference=[[-0.5, -9], [-3]])
    found = bound("advantage", {"name": "distillation", "coefficient": 2.0, "limit": 4.0})(batch)
    assert [f[2:].tolist() for f in found] == [[1.0, -8.0], [0.0]]
    batch.trajectories[0].proximal = np.array([9, 9, -0.5, -9.0])
    assert bound("advantage", "distillation")(batch)[0][2:].tolist() == [0.0, 0.0]
    # What was sampled from is no stand-in for the policy.
    batch.trajectories[1].proximal = None
    with pytest.raises(Refused, match="a sample of group 1: it has no proximal log-probabilities"):
        bound("advantage", "distillation")(batch)


def episodes(*given: tuple[float, list[float], list[str]]) -> AdvantageInputs:
    """Episodes of one group, a turn each two tokens behind one of the environment."""
    made = []
    for reward, turn_rewards, states in given:
        count = len(turn_rewards)
        made.append(
            Trajectory(
                group=0,
                reward=reward,
                mask=np.array([0, 1, 1] * count, bool),
                behaviour=np.zeros(3 * count),
                turns=[(3 * t + 1, 3 * t + 3) for t in range(count)],
                turn_rewards=turn_rewards,
                turn_states=states,
            )
        )
    return AdvantageInputs(made)


def by_turn(values: np.ndarray) -> list[float]:
    table = values.reshape(-1, 3)
    assert not table[:, 0].any()
    assert np.array_equal(table[:, 1], table[:, 2])
    return [float(v) for v in table[:, 1]]


def test_turn_grpo_adds_the_turns_own_credit_before_the_last() -> None:
    batch = episodes((1.0, [2.0, 7.0], []), (0.0, [0.0, 9.0], []), (0.5, [5.0], []))
    part = bound("advantage", {"name": "turn_grpo", "normalise_std": False, "outcome": 0.5})
    found = [by_turn(f) for f in part(batch)]
    # Outcomes are 0.5, -0.5, 0; the first turn of the two long episodes +1, -1; the short one has its last turn only.
    assert found == [pytest.approx([1 + 0.25, 0.5]), pytest.approx([-1 - 0.25, -0.5]), pytest.approx([0.0])]


def test_process_grpo_sums_normalised_step_rewards_to_come() -> None:
    batch = episodes((0, [1.0, 0.0], []), (0, [0.0, 3.0], []))
    found = [by_turn(f) for f in bound("advantage", "process_grpo")(batch)]
    std = np.std([1, 0, 0, 3], ddof=1) + EPS
    assert found == [
        pytest.approx(np.array([0 - 1, -1]) / std, abs=1e-6),
        pytest.approx(np.array([-1 + 2, 2]) / std, abs=1e-6),
    ]


def test_gigpo_compares_steps_from_one_state() -> None:
    batch = episodes((1.0, [0.0, 1.0], ["start", "door"]), (0.0, [0.0, 0.0], ["start", "wall"]))
    part = bound("advantage", {"name": "gigpo", "gamma": 0.5, "omega": 2.0, "normalise_std": False})
    # From `start` the discounted returns are 0.5 and 0; `door` and `wall` were met once.
    assert [by_turn(f) for f in part(batch)] == [pytest.approx([0.5 + 2 * 0.25, 0.5]), pytest.approx([-1.0, -0.5])]


def test_gigpo_credits_an_outcome_that_comes_at_the_end_to_the_steps_before_it() -> None:
    batch = episodes((1.0, [0.0, 1.0], ["start", "hall"]), (0.0, [0.0, 0.0], ["start", "hall"]))
    found = bound("advantage", {"name": "gigpo", "gamma": 0.5})(batch)
    # Returns of `start` 0.5 and 0, of `hall` 1 and 0; the episodes' rewards 1 and 0, once.
    assert [by_turn(f) for f in found] == [pytest.approx([0.5 + 0.25, 0.5 + 0.5]), pytest.approx([-0.75, -1.0])]


def test_turn_rewards_come_from_the_samples_info_and_must_fit_its_turns() -> None:
    turns = [TurnSpan(0, 1, "user"), TurnSpan(1, 3, "assistant")]
    made = trajectory(sample(0, [0, 1, 1], turns=turns, info={"turn_rewards": [0.5], "turn_states": ["s"]}), 1.0)
    assert (made.turns, made.turn_rewards, made.turn_states) == ([(1, 3)], [0.5], ["s"])
    with pytest.raises(Refused, match=r"turn_rewards has 2 entries, and the assistant has 1 turns"):
        trajectory(sample(0, [0, 1, 1], turns=turns, info={"turn_rewards": [0.5, 1.0]}), 1.0)
    with pytest.raises(Refused, match="has no turn_rewards"):
        bound("advantage", "process_grpo")(trajectories((0, 1.0, 2)))


def test_preference_marks_the_best_and_the_worst() -> None:
    batch = trajectories((0, 0.5, 1), (0, 1.0, 2), (0, 0.0, 1), (0, 1.0, 1), (1, 2.0, 1), (1, 2.0, 1))
    assert firsts(bound("advantage", "preference")(batch)) == [0, 1, -1, 0, 0, 0]


def test_no_advantage_is_one_on_every_trained_token() -> None:
    assert firsts(bound("advantage", "none")(trajectories((0, 0.0, 2), (1, 5.0, 1)))) == [1, 1]
