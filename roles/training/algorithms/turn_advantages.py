"""Credit finer than a sample: by turns and steps of a trajectory with several turns of the assistant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.advantages import group_advantages
from relax_rt.roles.training.algorithms.inputs import AdvantageInputs, Floats, Trajectory, require
from relax_rt.roles.training.algorithms.registry import part


class TurnOptions(Table):
    """Turn-level credit."""

    normalise_std: bool = True
    """Divide by standard deviations."""
    outcome: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the outcome's advantage in turns before the last (lambda of MT-GRPO)."""


class ProcessOptions(Table):
    """Step-level credit from the rewards of steps."""

    normalise_std: bool = True
    """Divide by the standard deviation of all step rewards of the group."""


class AnchorOptions(Table):
    """Step-level credit from states that several trajectories of a group went through."""

    normalise_std: bool = False
    """Divide by standard deviations; false is the form that GiGPO recommends for agents (F_norm = 1)."""
    omega: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the step's advantage beside the episode's."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Discount of rewards for each turn that they come later."""


def _by_turn(one: Trajectory, values: Sequence[float] | Floats) -> NDArray[np.float32]:
    """One value a turn on its trained tokens, 0 elsewhere; float32 [T]."""
    advantages = np.zeros(len(one.mask))
    for (start, end), value in zip(one.turns, values, strict=True):
        advantages[start:end] = value
    return (advantages * one.mask).astype(np.float32)


def _turn_rewards(one: Trajectory) -> Floats:
    assert one.turn_rewards is not None
    return np.array(one.turn_rewards, np.float64)


@part("advantage", "turn_grpo", options=TurnOptions, needs={"rewards", "turn_rewards"}, traits={"groups"})
def turn_grpo(batch: AdvantageInputs, options: TurnOptions) -> list[NDArray[np.float32]]:
    """A of a turn before the last = A_turn + lambda A_outcome; of the last = A_outcome.

    MT-GRPO (arXiv 2505.11821 v1, section 4, given there for two turns; from memory): A_turn compares the turn's reward
    with those of the same turn in the group's other trajectories, A_outcome their rewards as a whole; both by GRPO. A
    turn that no other member reached has A_turn = 0.

    Returns:
        float32 [T] for each trajectory.

    Raises:
        Refused: a sample has no turn rewards.
    """
    trajectories = require(batch, "turn_rewards", "turn_grpo")
    found: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(trajectories)
    for members in batch.groups():
        of_outcome = group_advantages(
            np.array([trajectories[i].score for i in members]), normalise_std=options.normalise_std
        )
        values = {i: np.full(len(trajectories[i].turns), a) for i, a in zip(members, of_outcome, strict=True)}
        for turn in range(max(len(trajectories[i].turns) for i in members)):
            going_on = [i for i in members if turn < len(trajectories[i].turns) - 1]
            rewards = np.array([_turn_rewards(trajectories[i])[turn] for i in going_on], np.float64)
            of_turn = group_advantages(rewards, normalise_std=options.normalise_std)
            for index, advantage in zip(going_on, of_turn, strict=True):
                values[index][turn] = advantage + options.outcome * values[index][turn]
        for index in members:
            found[index] = _by_turn(trajectories[index], values[index])
    return found


@part("advantage", "process_grpo", options=ProcessOptions, needs={"turn_rewards"}, traits={"no_cost", "groups"})
def process_grpo(batch: AdvantageInputs, options: ProcessOptions) -> list[NDArray[np.float32]]:
    """A of a step = sum of the normalised rewards of this step and all after it.

    GRPO with process supervision: DeepSeekMath (arXiv 2402.03300, section 4.1.3): step rewards are normalised by mean
    and standard deviation of all step rewards of the group. A step is a turn of the assistant.

    Returns:
        float32 [T] for each trajectory.

    Raises:
        Refused: a sample has no turn rewards.
    """
    trajectories = require(batch, "turn_rewards", "process_grpo")
    found: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(trajectories)
    for members in batch.groups():
        rewards = [_turn_rewards(trajectories[i]) for i in members]
        flat = group_advantages(np.concatenate(rewards), normalise_std=options.normalise_std)
        ends = np.cumsum([len(r) for r in rewards])
        for index, part_ in zip(members, np.split(flat, ends[:-1]), strict=True):
            found[index] = _by_turn(trajectories[index], np.cumsum(part_[::-1])[::-1])
    return found


@part(
    "advantage",
    "gigpo",
    options=AnchorOptions,
    needs={"rewards", "turn_rewards", "turn_states"},
    traits={"groups"},
)
def gigpo(batch: AdvantageInputs, options: AnchorOptions) -> list[NDArray[np.float32]]:
    """A of a step = A_episode + omega A_step.

    GiGPO (arXiv 2505.10978, section 4): A_episode compares the rewards of the group's trajectories; A_step compares the
    discounted returns sum_k gamma^(k - t) r_k of all steps of the group that started from the same state. A state that
    was met once has A_step = 0. r_k are the turn rewards, the last of which holds what an episode is given at its end:
    the trajectory's reward is their sum, and added to the last step it would count twice.

    Returns:
        float32 [T] for each trajectory.

    Raises:
        Refused: a sample has no turn rewards or states.
    """
    trajectories = require(batch, "turn_rewards", "gigpo")
    require(batch, "turn_states", "gigpo")
    found: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(trajectories)
    for members in batch.groups():
        scores = np.array([trajectories[i].score for i in members])
        of_episode = group_advantages(scores, normalise_std=options.normalise_std)
        returns = {i: _discounted(_turn_rewards(trajectories[i]), options.gamma) for i in members}
        met: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for index in members:
            for turn, state in enumerate(trajectories[index].turn_states or ()):
                met[state].append((index, turn))
        values = {i: np.full(len(trajectories[i].turns), a) for i, a in zip(members, of_episode, strict=True)}
        for places in met.values():
            of_step = group_advantages(
                np.array([returns[i][t] for i, t in places]), normalise_std=options.normalise_std
            )
            for (index, turn), advantage in zip(places, of_step, strict=True):
                values[index][turn] += options.omega * advantage
        for index in members:
            found[index] = _by_turn(trajectories[index], values[index])
    return found


def _discounted(rewards: Floats, gamma: float) -> Floats:
    returns, carried = np.zeros(len(rewards)), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        carried = rewards[t] + gamma * carried
        returns[t] = carried
    return returns
