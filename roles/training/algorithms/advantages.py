"""Advantage estimators: group baselines (GRPO, Dr. GRPO, RLOO), REINFORCE++, GAE, distillation, and credit by turns.

An estimator returns a float32 [T] for each trajectory, 0 where nothing is trained, and refuses a sample that lacks a
column it needs. Also here: the reward of truncated completions, and the critic's loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.inputs import AdvantageInputs, Floats, Trajectory, require
from relax_rt.roles.training.algorithms.registry import part

if TYPE_CHECKING:
    import torch


Truncation = Literal["mask", "zero_reward", "soft_penalty", "none"]
EQUAL = 1e-6
"""Rewards of a group that differ by less are equal: the group says nothing about which member is better."""
EPS = 1e-4
"""Added to standard deviations, so that a nearly constant group does not blow up."""


def group_advantages(
    rewards: NDArray[np.floating], *, normalise_std: bool = True, eps: float = EPS
) -> NDArray[np.float64]:
    """Advantages of one group: (r - mean) / (std + eps), or r - mean.

    Args:
        rewards: [n], any real dtype.
        normalise_std: divide by the group's standard deviation (of n - 1, as the members are a sample of the policy).
        eps: keeps a nearly constant group from blowing up.

    Returns:
        float64 [n]; zeros for a group of one or of equal rewards.
    """
    values = np.asarray(rewards, np.float64)
    if len(values) < 2 or float(np.ptp(values)) < EQUAL:
        return np.zeros(len(values))
    centred: NDArray[np.float64] = values - values.mean()
    return centred / float(values.std(ddof=1) + eps) if normalise_std else centred


def apply_truncation(
    rewards: NDArray[np.float64], truncated: NDArray[np.bool_], policy: Truncation, soft_penalty: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """What completions cut at max_new_tokens count as.

    Args:
        rewards, truncated: [n] of one group.
        policy: mask: not trained on and in no group statistic; zero_reward: reward 0; soft_penalty: the penalty is
            subtracted; none: like any other.

    Returns:
        rewards [n], and which members are kept, bool [n].
    """
    kept = np.ones(len(rewards), bool)
    if policy == "mask":
        return rewards, ~truncated
    if policy == "zero_reward":
        return np.where(truncated, 0.0, rewards), kept
    if policy == "soft_penalty":
        return np.where(truncated, rewards - soft_penalty, rewards), kept
    return rewards, kept


class GroupOptions(Table):
    """How a group's rewards are normalised."""

    normalise_std: bool = True
    """Divide by a standard deviation (GRPO); false: only the mean is subtracted (Dr. GRPO)."""
    std_of: Literal["group", "batch"] = "group"
    """Whose standard deviation: the group's, or that of all rewards of the step."""


@part(
    "advantage",
    "grpo",
    options=GroupOptions,
    needs=lambda o: {"rewards", *({"batch"} & {o.std_of})},
    traits={"groups"},
)
def grpo(batch: AdvantageInputs, options: GroupOptions) -> list[NDArray[np.float32]]:
    """A = (r - mean of the group) / (std + 1e-4), equal on all tokens of a sample.

    GRPO: DeepSeekMath (arXiv 2402.03300, section 4.1.2), with the standard deviation of n - 1. Without the division it
    is Dr. GRPO's (arXiv 2503.20783, section 3.2). std_of = "batch": group mean with the batch's standard deviation
    (arXiv 2508.08221, "Lite PPO"; from memory).
    """
    found: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(batch.trajectories)
    scores = np.array([t.score for t in batch.trajectories], np.float64)
    by_group = options.normalise_std and options.std_of == "group"
    whole = float(scores.std(ddof=1)) + EPS if len(scores) > 1 else 1.0
    for members in batch.groups():
        advantages = group_advantages(scores[members], normalise_std=by_group)
        if options.normalise_std and not by_group:
            advantages = advantages / whole
        for index, advantage in zip(members, advantages, strict=True):
            found[index] = batch.trajectories[index].spread(advantage)
    return found


@part("advantage", "rloo", needs={"rewards"}, traits={"groups"})
def rloo(batch: AdvantageInputs, options: object) -> list[NDArray[np.float32]]:
    """A_i = r_i - mean of the other members' rewards (REINFORCE leave-one-out).

    Ahmadian et al. (arXiv 2402.14740, section 2.3), after Kool et al. 2019. With KL placed in the reward, r is the
    reward less the sequence's KL penalty, as there. A group of one has no baseline, and one of equal rewards nothing to
    tell: their advantages are 0.
    """
    found: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(batch.trajectories)
    for members in batch.groups():
        rewards = np.array([batch.trajectories[i].score for i in members], np.float64)
        # r - mean of the others = (r - mean of all) n / (n - 1)
        scale = len(rewards) / max(1, len(rewards) - 1)
        for index, advantage in zip(members, scale * group_advantages(rewards, normalise_std=False), strict=True):
            found[index] = batch.trajectories[index].spread(advantage)
    return found


WHITEN_EPS = 1e-8


class WhitenOptions(Table):
    """Normalisation over the batch."""

    whiten: bool = True
    """Subtract the mean over all trained tokens of the step and divide by their standard deviation."""


def whitened(values: list[Floats]) -> list[Floats]:
    """(x - mean) / (std + 1e-8) over all entries of all arrays together; zeros if there are none that differ."""
    whole = np.concatenate(values) if values else np.zeros(0)
    # Of equal ones the mean may be off by a rounding, which the standard deviation would not take out.
    if len(whole) < 2 or not float(np.ptp(whole)):
        return [np.zeros(len(v)) for v in values]
    mean, std = float(whole.mean()), float(whole.std())
    return [(v - mean) / (std + WHITEN_EPS) for v in values]


def _placed(batch: AdvantageInputs, values: list[Floats], whiten: bool) -> list[NDArray[np.float32]]:
    final = whitened(values) if whiten else values
    return [one.place(v) for one, v in zip(batch.trajectories, final, strict=True)]


def _whiten_needs(options: WhitenOptions) -> set[str]:
    return {"rewards", "batch"} if options.whiten else {"rewards"}


@part("advantage", "reinforce_pp", options=WhitenOptions, needs=_whiten_needs)
def reinforce_pp(batch: AdvantageInputs, options: WhitenOptions) -> list[NDArray[np.float32]]:
    """A_t = r - sum of the KL penalties of token t and all after it; then normalised over all tokens of the batch.

    REINFORCE++ (arXiv 2501.03262, section 3: global advantage normalisation; k1 KL in the reward, which is
    `kl = { name = "k1", place = "reward", … }` here).
    """
    values = [t.reward - np.cumsum(t.penalty[t.steps][::-1])[::-1] for t in batch.trajectories]
    return _placed(batch, values, options.whiten)


@part("advantage", "reinforce_pp_baseline", options=WhitenOptions, needs=_whiten_needs, traits={"groups"})
def reinforce_pp_baseline(batch: AdvantageInputs, options: WhitenOptions) -> list[NDArray[np.float32]]:
    """A = r - mean of the group, 0 in one of equal rewards; then normalised over all tokens of the batch.

    REINFORCE++ with baseline (arXiv 2501.03262, section 3; there with k2 as the KL loss).
    """
    values: list[Floats] = [np.zeros(0)] * len(batch.trajectories)
    for members in batch.groups():
        scores = np.array([batch.trajectories[i].score for i in members], np.float64)
        for index, advantage in zip(members, group_advantages(scores, normalise_std=False), strict=True):
            values[index] = np.full(int(batch.trajectories[index].mask.sum()), advantage)
    return _placed(batch, values, options.whiten)


class GaeOptions(Table):
    """Discounts, and normalisation over the batch."""

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of a reward for each trained token that it comes later."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Weight of longer estimates: 0 is the temporal difference, 1 the return less the value."""
    whiten: bool = True
    """Normalise the advantages over all trained tokens of the step."""


def estimate(rewards: Floats, values: Floats, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Advantages and returns of one finished trajectory.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1} with V = A = 0 behind the last token;
    returns are A + V (GAE, arXiv 1506.02438, equation 16; the recursive form as in PPO, arXiv 1707.06347, equation 11).

    Args:
        rewards, values: float64 [n], of the trained tokens alone, as they were sampled: tokens of the environment are
            no steps of the policy. Where an episode goes on in another branch, V_{t+1} is of the state there.

    Returns:
        float64 [n] each.
    """
    advantages = np.zeros(len(rewards))
    carried, following = 0.0, 0.0
    for t in range(len(rewards) - 1, -1, -1):
        carried = rewards[t] + gamma * following - values[t] + gamma * lam * carried
        advantages[t], following = carried, values[t]
    return advantages, advantages + values


def token_rewards(one: Trajectory) -> Floats:
    """The reward on the trained token that was sampled last, less what each token costs; float64 [n], as `steps`."""
    rewards = -one.penalty[one.steps]
    if len(rewards):
        rewards[-1] += one.reward
    return rewards


def estimates(batch: AdvantageInputs, options: GaeOptions) -> list[tuple[Floats, Floats]]:
    """Advantages, not normalised, and returns of the trained tokens of each trajectory; what the critic learns from."""
    found = []
    for one in require(batch, "values", "gae"):
        assert one.values is not None
        found.append(estimate(token_rewards(one), one.values[one.steps], options.gamma, options.lam))
    return found


def gae_returns(batch: AdvantageInputs, options: GaeOptions) -> list[NDArray[np.float32]]:
    """What the critic's values should have been: advantages, not normalised, plus values; see `estimate`."""
    found = estimates(batch, options)
    return [one.place(returns) for one, (_, returns) in zip(batch.trajectories, found, strict=True)]


@part(
    "advantage",
    "gae",
    options=GaeOptions,
    needs=lambda o: {"rewards", "values", *({"batch"} if o.whiten else ())},
    returns=gae_returns,
)
def gae(batch: AdvantageInputs, options: GaeOptions) -> list[NDArray[np.float32]]:
    """PPO's advantages from a critic's values; see `estimate`. Normalised over the batch as in PPO's implementations
    (arXiv 2005.12729, section 3).
    """
    values = [advantages for advantages, _ in estimates(batch, options)]
    final = whitened(values) if options.whiten else values
    return [one.place(v) for one, v in zip(batch.trajectories, final, strict=True)]


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, clip: float | None
) -> tuple[torch.Tensor, dict[str, float]]:
    """The critic's loss of each token: max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2.

    Squared error: PPO (arXiv 1707.06347, equation 9); its clipping is of PPO's published implementation, described in
    arXiv 2005.12729, section 3.

    Args:
        values: float [m], under the critic that is trained; gradients flow through it.
        old_values: [m], under the critic that the returns were computed with.
        returns: [m]. mask: [m], 0: counts for nothing, whatever stands in the others.
        clip: how far values may move in one update; None: not clipped.

    Returns:
        The loss [m], 0 under mask 0, not aggregated; and sums over the trained tokens: `clipped` (tokens whose
        gradient the clip stopped), `value`, `return`, `error` (squared), `tokens`.
    """
    import torch

    counted = mask != 0
    values, old_values, returns = (x.masked_fill(~counted, 0.0) for x in (values, old_values, returns))
    error = (values - returns) ** 2
    if clip is None:
        loss, stopped = error, torch.zeros_like(counted)
    else:
        held = (old_values + (values - old_values).clamp(-clip, clip) - returns) ** 2
        loss, stopped = torch.maximum(error, held), held > error
    with torch.no_grad():
        metrics = {
            "clipped": float(stopped.sum()),
            "value": float(values.sum()),
            "return": float(returns.sum()),
            "error": float(error.sum()),
            "tokens": float(counted.sum()),
        }
    return loss / 2, metrics


class DistillationOptions(Table):
    """How the teacher's judgement counts."""

    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the advantages."""
    limit: Annotated[float, Field(gt=0)] | None = None
    """Hold each token's difference of log-probabilities within this bound, nats."""


@part("advantage", "distillation", options=DistillationOptions, needs={"reference"}, traits={"no_cost", "policy"})
def distillation(batch: AdvantageInputs, options: DistillationOptions) -> list[NDArray[np.float32]]:
    """A_t = coefficient (log p_teacher(token) - log p_policy(token)): minus the one-sample reverse KL of each token.

    Thinking Machines Lab, "On-Policy Distillation" (2025), with no discount into the future, as there; the objective is
    MiniLLM's (arXiv 2306.08543) and GKD's (arXiv 2306.13649) on-policy reverse KL, taken token by token. The teacher's
    log-probabilities are the reference's column, the policy's those of the weights before the step's first update: with
    what was sampled from in their place, and the samples weighted to be the policy's (tis), the gradient would be that
    of -KL(policy || teacher) + KL(policy || behaviour).

    Raises:
        Refused: a sample has no reference or proximal log-probabilities.
    """
    found = []
    for one in require(batch, "reference", "distillation"):
        assert one.reference is not None
        gap = (one.reference - one.current)[one.steps]
        if options.limit is not None:
            gap = gap.clip(-options.limit, options.limit)
        found.append(one.place(options.coefficient * gap))
    return found


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
