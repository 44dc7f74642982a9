"""What the parts of an objective compute from, and checks of what they return.

Advantages are computed from the samples of a step as plain numbers (`AdvantageInputs`), losses from flat tensors over
the tokens of one micro-batch (`TokenTensors`). A user's own part may return anything: `check_arrays` and its
neighbours turn a wrong value into an error that names the part, its arguments and its line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.training.algorithms.registry import BoundPart, describe
from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    import torch


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


LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within this bound: e^20 is beyond every clip, and e^89 is infinite in float32."""
MAXIMA = "_max"
"""Ending of the metrics of which micro-batches and ranks keep the largest; all others are added."""

Metrics = dict[str, float]


@dataclass(frozen=True)
class TokenTensors:
    """The tokens of one micro-batch, whole sequences together; every tensor is [m], floating ones of one dtype.

    What stands under mask 0 never matters, also if it is inf or nan: it is replaced by 0 when this is made, so that
    neither values nor gradients of functions of these tensors see it.

    Attributes:
        logprobs: under the weights that are trained; gradients flow through it.
        behaviour: under the distribution that was sampled from.
        proximal: under the weights before the first update of the publication, by the trainer's own numerics.
        reference: under the reference policy or the teacher.
        advantages: any scale.
        mask: bool, True on the tokens that are trained.
        sequence: int64, index of the token's sample in the micro-batch.
        group: int64, index of the token's group in the micro-batch.
        entropy: of the policy at the token's position, nats; gradients flow through it.
    """

    logprobs: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    sequence: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    group: torch.Tensor | None = None
    entropy: torch.Tensor | None = None

    def __post_init__(self) -> None:
        counted = self.mask != 0
        object.__setattr__(self, "mask", counted)
        for name in ("logprobs", "behaviour", "advantages", "proximal", "reference", "entropy"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, value.masked_fill(~counted, 0))

    @cached_property
    def sequences(self) -> int:
        """Number of samples of the micro-batch."""
        return int(self.sequence.max()) + 1 if self.sequence.numel() else 0

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums of [m] over the trained tokens of each sample, given to each of its tokens: [m]."""
        counted = values.masked_fill(~self.mask, 0)
        return counted.new_zeros(self.sequences).index_add(0, self.sequence, counted)[self.sequence]

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Trained tokens of the sample that each token belongs to, at least 1; [m]."""
        return self.sequence_sum(self.mask.to(self.logprobs.dtype)).clamp(min=1)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Means of [m] over the trained tokens of each sample, given to each of its tokens: [m]."""
        return self.sequence_sum(values) / self.lengths

    def old(self, ratio_to: str) -> torch.Tensor:
        """Log-probabilities of the policy that ratios are taken to, "behaviour" or "proximal"; [m]."""
        if ratio_to == "behaviour":
            return self.behaviour
        if self.proximal is None:
            raise ValueError("proximal log-probabilities are needed and were not computed")
        return self.proximal

    @property
    def trained(self) -> torch.Tensor:
        """Log-probabilities by the trainer's numerics, without gradient: the proximal ones, else the current; [m]."""
        return self.logprobs.detach() if self.proximal is None else self.proximal


def log_ratio(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """new - old, held within LOG_RATIO_LIMIT; [m]."""
    return (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def merge(into: MutableMapping[str, float], metrics: Mapping[str, float]) -> None:
    """Add the metrics of a further micro-batch, or rank; of those called `…_max` the largest stays."""
    for name, value in metrics.items():
        if name.endswith(MAXIMA):
            into[name] = max(into.get(name, value), value)
        else:
            into[name] = into.get(name, 0.0) + value


def check_arrays(
    part: BoundPart, values: Any, inputs: AdvantageInputs, *, extra: str = ""
) -> list[NDArray[np.float32]]:
    """An array [T] for each trajectory, in float32.

    Args:
        extra: the further function of the part that returned them.

    Raises:
        UserPartFailed: the part is a user's own, and they are something else. Refused: another part's are.
    """
    wanted = f"{part.who(extra)} returns an array [T] for each of the {len(inputs.trajectories)} trajectories"
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        raise part.wrong(f"it returned {describe([values])}: {wanted}", inputs, extra=extra)
    if len(values) != len(inputs.trajectories):
        why = f"it returned {len(values)} arrays for {len(inputs.trajectories)} trajectories: {wanted}"
        raise part.wrong(why, inputs, extra=extra)
    return [
        check_array(part, found, one.mask, extra=extra) for found, one in zip(values, inputs.trajectories, strict=True)
    ]


def check_array(
    part: BoundPart, value: Any, like: NDArray[Any], *, extra: str = "", dtype: type[np.floating[Any]] = np.float32
) -> NDArray[Any]:
    """An array of the shape of `like`; for what is raised see `check_arrays`."""
    try:
        found = np.asarray(value, dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        why = f"it returned {describe([value])}, which is no array of numbers: {error}"
        raise part.wrong(why, like, extra=extra) from error
    if found.shape != like.shape:
        why = f"it returned shape {found.shape} for a sample of {len(like)} tokens"
        raise part.wrong(why, like, extra=extra)
    return found


def check_metrics(part: BoundPart, returned: Any, tokens: TokenTensors) -> tuple[torch.Tensor, Metrics]:
    """A tensor [m] and metrics, of a loss or a correction; for what is raised see `check_arrays`."""
    if not part.target:
        each, found = returned
        return each, found
    a = "loss" if part.part.kind == "loss" else "weight"
    if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != 2:
        why = (
            f"it returned {describe([returned])}: a {part.part.kind} returns ({a} [m], metrics), and m is {_m(tokens)}"
        )
        raise part.wrong(why, tokens)
    each, metrics = returned
    if not isinstance(metrics, Mapping):
        why = f"its metrics are {describe([metrics])}: they are a table of sums over tokens, or {{}}"
        raise part.wrong(why, tokens)
    checked: Metrics = {}
    for name, value in metrics.items():
        try:
            checked[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            why = f"its metric {name!r} is {describe([value])}, and no number, as a sum over tokens is: {error}"
            raise part.wrong(why, tokens) from error
    return check_tensor(part, each, tokens), checked


def check_tensor(part: BoundPart, value: Any, tokens: TokenTensors, *, extra: str = "") -> torch.Tensor:
    """A tensor [m]; for what is raised see `check_arrays`."""
    import torch

    if part.target and not (isinstance(value, torch.Tensor) and value.shape == tokens.mask.shape):
        why = f"it returned {describe([value])}: a {part.part.kind} is of each token, a tensor [{_m(tokens)}]"
        raise part.wrong(why, tokens, extra=extra)
    found: torch.Tensor = value
    return found


def check_number(part: BoundPart, value: Any, *given: Any, extra: str = "") -> float:
    """A number; for what is raised see `check_arrays`."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise part.wrong(f"it returned {describe([value])}, and no number: {error}", *given, extra=extra) from error


def check_pair(part: BoundPart, value: Any, *given: Any) -> tuple[float, float]:
    """The coefficient that counts and the one that is carried on; for what is raised see `check_arrays`."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise part.wrong(f"it returned {describe([value])}: it returns (coefficient, its next argument)", *given)
    return check_number(part, value[0], *given), check_number(part, value[1], *given)


def _m(tokens: TokenTensors) -> int:
    return len(tokens.mask)
