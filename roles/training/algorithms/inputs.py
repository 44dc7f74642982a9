"""The samples of a step as plain numbers: what advantage estimators compute from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.base.sample import Sample
from relax_rt.transport.rpc.errors import Refused

Floats = NDArray[np.float64]
TURN_REWARDS, TURN_STATES = "turn_rewards", "turn_states"


@dataclass(slots=True)
class Trajectory:
    """One sample.

    Attributes:
        group: number of the group of its prompt.
        reward: after the truncation policy.
        mask: bool [T], the trained tokens.
        behaviour: float64 [T]. proximal, reference, values: float64 [T], or None.
        penalty: float64 [T], what each token costs besides the reward (KL placed in the reward); zeros if nothing.
        turns: (start, end) of each turn of the assistant, in the order in which they were asked for; in an episode with
            branches they need not lie so.
        turn_rewards: one for each turn; turn_states: what the policy saw before each turn, equal where it saw the same.
        steps: int [n], places of the trained tokens in the order in which they were sampled.
    """

    group: int
    reward: float
    mask: NDArray[np.bool_]
    behaviour: Floats
    proximal: Floats | None = None
    reference: Floats | None = None
    values: Floats | None = None
    penalty: Floats = field(default_factory=lambda: np.zeros(0))
    turns: list[tuple[int, int]] = field(default_factory=list)
    turn_rewards: list[float] | None = None
    turn_states: list[str] | None = None
    steps: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))

    def __post_init__(self) -> None:
        if not len(self.penalty):
            self.penalty = np.zeros(len(self.mask))
        if not len(self.steps):
            self.steps = np.flatnonzero(self.mask)

    @property
    def score(self) -> float:
        """The reward less what all trained tokens cost."""
        return self.reward - float(self.penalty[self.mask].sum())

    @property
    def current(self) -> Floats:
        """The policy's own log-probabilities, by the trainer's numerics; [T].

        Raises:
            Refused: they were not computed. An objective computes them for parts of the trait `policy`.
        """
        if self.proximal is None:
            hint = 'an advantage that looks at them says so: @part("advantage", traits={"policy"})'
            raise Refused(f"a sample of group {self.group}", why="it has no proximal log-probabilities", hint=hint)
        return self.proximal

    def spread(self, value: float) -> NDArray[np.float32]:
        """One value on every trained token, 0 elsewhere; float32 [T]."""
        return (self.mask * np.float64(value)).astype(np.float32)

    def place(self, values: Floats) -> NDArray[np.float32]:
        """Values of the trained tokens, as `steps` has them, at their places; 0 elsewhere; float32 [T]."""
        placed = np.zeros(len(self.mask))
        placed[self.steps] = values
        return placed.astype(np.float32)


@dataclass(slots=True)
class AdvantageInputs:
    """The trajectories of a step, whole groups; those that the truncation policy masks are not among them."""

    trajectories: list[Trajectory]

    def groups(self) -> list[list[int]]:
        """Indices of the trajectories of each group, groups by first appearance."""
        found: dict[int, list[int]] = defaultdict(list)
        for index, trajectory in enumerate(self.trajectories):
            found[trajectory.group].append(index)
        return list(found.values())


def trajectory(sample: Sample, reward: float) -> Trajectory:
    """A sample as plain numbers.

    The branches of an episode are one trajectory: what the policy sampled, as it came in time, each token behind the
    context of its own branch. So what a turn is credited with is what came after it, wherever that lies.

    Raises:
        Refused: its `info` holds turn rewards or states in another number than it has turns, or it has branches and
            does not say in which order its turns came.
    """

    def column(values: NDArray[np.float32] | None) -> Floats | None:
        return None if values is None else values.astype(np.float64)

    lying = [(span.start, span.end) for span in sample.meta.turns if span.role == "assistant"]
    order = _order(sample, len(lying))
    turns = [lying[number] for number in order]
    mask = sample.loss_mask != 0
    return Trajectory(
        group=sample.meta.group,
        reward=reward,
        mask=mask,
        behaviour=sample.behaviour_logprobs.astype(np.float64),
        proximal=column(sample.proximal_logprobs),
        reference=column(sample.reference_logprobs),
        values=column(sample.values),
        turns=turns,
        turn_rewards=_by_turn(sample, TURN_REWARDS, order),
        turn_states=_by_turn(sample, TURN_STATES, order),
        steps=_steps(sample, mask, turns),
    )


def _order(sample: Sample, turns: int) -> list[int]:
    """Numbers of the turns as they came. Raises: Refused, if the sample has branches and does not say."""
    if not sample.meta.branches:
        return list(range(turns))
    if sorted(sample.meta.turn_order) != list(range(turns)):
        raise Refused(
            f"sample {sample.meta.group}.{sample.meta.member} with {len(sample.meta.branches)} branches",
            why=f"meta.turn_order names the turns {sample.meta.turn_order[:16]}, and the assistant has {turns}: what "
            "came after what is not known",
            hint="credit needs the order in which the turns were sampled; give all of them, first to last",
        )
    return sample.meta.turn_order


def _steps(sample: Sample, mask: NDArray[np.bool_], turns: Sequence[tuple[int, int]]) -> NDArray[np.intp]:
    """Return `Trajectory.steps`. Raises: Refused, if branches have trained tokens in no turn."""
    if not sample.meta.branches:
        return np.flatnonzero(mask)
    steps = np.concatenate([np.zeros(0, np.intp), *(start + np.flatnonzero(mask[start:end]) for start, end in turns)])
    if len(steps) != int(mask.sum()):
        why = f"{int(mask.sum())} tokens are trained, and {len(steps)} of them are in a turn of the assistant"
        raise Refused(f"sample {sample.meta.group}.{sample.meta.member} with branches", why=why)
    return steps


def _by_turn(sample: Sample, name: str, order: Sequence[int]) -> Any:
    values = sample.meta.info.get(name)
    if name == TURN_REWARDS and sample.turn_rewards is not None:
        values = [float(one) for one in sample.turn_rewards]
    if values is not None and len(values) != len(order):
        why = f"{name} has {len(values)} entries, and the assistant has {len(order)} turns"
        raise Refused(f"sample {sample.meta.group}.{sample.meta.member}", why=why)
    return None if values is None else [values[number] for number in order]


def require(inputs: AdvantageInputs, column: str, who: str) -> Sequence[Trajectory]:
    """The trajectories, each of which has the column.

    Raises:
        Refused: one lacks it.
    """
    for one in inputs.trajectories:
        if getattr(one, column) is None:
            raise Refused(f"advantage {who}", why=f"a sample of group {one.group} has no {column}")
    return inputs.trajectories
