"""Credit in episodes of several branches: what came after a turn in time, not what lies behind it in the sample."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from algorithm_samples import bound, sample

from relax_rt.roles.base.sample import Sample, TurnSpan
from relax_rt.roles.training.algorithms.advantages import GaeOptions, estimates
from relax_rt.roles.training.algorithms.inputs import AdvantageInputs, Trajectory, trajectory
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.transport.rpc.errors import Refused

ORDER = [0, 2, 1]
"""Two conversations: the first is asked, then the second, then the first goes on. They lie A1 A2 | B1."""
VALUES = {1: 1.0, 2: 2.0, 7: 3.0, 8: 4.0, 4: 5.0, 5: 6.0}


def lying(member: int, rewards: list[float], states: list[str], *, branches: bool) -> Sample:
    """Three turns of two tokens, each behind one of context.

    Args:
        rewards, states: as the turns came.
        branches: the second that came lies in a branch behind the third; else all lie as they came.
    """
    turns = [
        span
        for t in range(3)
        for span in (TurnSpan(3 * t, 3 * t + 1, "user"), TurnSpan(3 * t + 1, 3 * t + 3, "assistant"))
    ]
    came = [ORDER.index(t) for t in range(3)] if branches else [0, 1, 2]
    info = {"turn_rewards": [rewards[came[t]] for t in range(3)], "turn_states": [states[came[t]] for t in range(3)]}
    made = sample(0, [0, 1, 1] * 3, sum(rewards), member=member, turns=turns, info=info)
    # The same numbers on a token wherever its turn lies.
    columns = ("values", "reference_logprobs", "proximal_logprobs", "behaviour_logprobs")
    for seed, name in enumerate(columns):
        by_time = np.random.default_rng([member, seed]).normal(size=(3, 3)) * [0, 1, 1]
        setattr(made, name, by_time[came].reshape(-1).astype(np.float32))
    if branches:
        made.meta = msgspec.structs.replace(made.meta, branches=[(0, 6), (6, 9)], turn_order=ORDER)
    return made


def pair(branches: bool) -> list[Sample]:
    return [
        lying(0, [1.0, 2.0, 4.0], ["start", "door", "end"], branches=branches),
        lying(1, [0.0, 3.0, -1.0], ["start", "wall", "door"], branches=branches),
    ]


def group(branches: bool) -> AdvantageInputs:
    found = AdvantageInputs([trajectory(one, one.reward or 0.0) for one in pair(branches)])
    for one in found.trajectories:
        assert one.reference is not None
        one.penalty = np.where(one.mask, one.current - one.reference, 0.0)
    return found


PARTS: list[Any] = [
    "grpo",
    "reinforce_pp",
    {"name": "gae", "gamma": 0.9, "lam": 0.8},
    {"name": "turn_grpo", "outcome": 0.5},
    "process_grpo",
    {"name": "gigpo", "gamma": 0.5},
    "distillation",
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part if isinstance(part, str) else part["name"])
def test_a_turn_has_the_credit_that_it_would_have_if_the_turns_lay_as_they_came(part: Any) -> None:
    found, expected = (bound("advantage", part)(group(branches)) for branches in (True, False))
    for one, other in zip(found, expected, strict=True):
        assert other.any()
        np.testing.assert_allclose(one.reshape(3, 3), other.reshape(3, 3)[[0, 2, 1]], rtol=1e-6)


@pytest.mark.parametrize("advantage", ["grpo", "turn_grpo", {"name": "gigpo", "gamma": 0.5}], ids=str)
def test_m2po_leaves_out_the_tokens_that_it_would_if_the_turns_lay_as_they_came(advantage: Any) -> None:
    found, expected = pair(True), pair(False)
    for batch in (found, expected):
        Objective.of(AlgorithmTable(loss={"name": "m2po", "threshold": 0.5}, advantage=advantage)).advantages(batch)
    every = np.concatenate([one.advantages[one.loss_mask != 0] for one in expected if one.advantages is not None])
    assert every.any() and not every.all()
    for one, other in zip(found, expected, strict=True):
        assert one.advantages is not None and other.advantages is not None
        np.testing.assert_allclose(one.advantages.reshape(3, 3), other.advantages.reshape(3, 3)[[0, 2, 1]], rtol=1e-6)


def by_hand() -> Trajectory:
    one = trajectory(lying(0, [0.0, 0.0, 8.0], ["a", "b", "c"], branches=True), 8.0)
    one.values = np.array([VALUES.get(place, 99.0) for place in range(9)])
    return one


def test_generalised_advantages_by_hand() -> None:
    one = by_hand()
    ((advantages, returns),) = estimates(AdvantageInputs([one]), GaeOptions(gamma=0.5, lam=0.5, whiten=False))
    # Values 1 2 3 4 5 6 and the reward 8 at the last: differences 0, -0.5, -1, -1.5, -2, 2, carried with 0.25.
    expected = [-0.216796875, -0.8671875, -1.46875, -1.875, -1.5, 2.0]
    assert advantages.tolist() == pytest.approx(expected)
    assert returns.tolist() == pytest.approx([a + v for a, v in zip(expected, [1, 2, 3, 4, 5, 6], strict=True)])
    placed = one.place(advantages)
    assert placed[[1, 2, 7, 8, 4, 5]].tolist() == pytest.approx(expected) and not placed[[0, 3, 6]].any()


def test_rewards_to_come_by_hand() -> None:
    batch = AdvantageInputs([trajectory(lying(0, [1.0, 2.0, 3.0], [""] * 3, branches=True), 6.0)])
    (found,) = bound("advantage", "process_grpo")(batch)
    # Normalised: -1, 0, 1. The first is followed by all of them, the second, which lies last, by the third.
    assert found.tolist() == pytest.approx([0, 0, 0, 0, 1, 1, 0, 1, 1], abs=1e-3)


def test_masked_tokens_are_no_steps() -> None:
    made = lying(0, [0.0, 0.0, 1.0], [""] * 3, branches=True)
    made.loss_mask[[2, 7]] = 0
    assert trajectory(made, 1.0).steps.tolist() == [1, 8, 4, 5]


@pytest.mark.parametrize("order", [[], [0, 1], [0, 1, 1]])
def test_branches_without_their_order_are_refused(order: list[int]) -> None:
    made = lying(3, [0.0, 0.0, 1.0], [""] * 3, branches=True)
    made.meta = msgspec.structs.replace(made.meta, turn_order=order)
    with pytest.raises(Refused, match=r"sample 0\.3 with 2 branches: .*what came after what is not known"):
        trajectory(made, 1.0)


def test_trained_tokens_in_no_turn_are_refused() -> None:
    made = lying(3, [0.0, 0.0, 1.0], [""] * 3, branches=True)
    made.loss_mask[3] = 1
    with pytest.raises(Refused, match="7 tokens are trained, and 6 of them are in a turn"):
        trajectory(made, 1.0)
