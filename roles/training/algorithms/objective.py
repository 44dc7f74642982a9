"""What is optimised, put together from the parts that [algorithm] names."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.roles.base.sample import Sample
from relax_rt.roles.training.algorithms.advantages import apply_truncation
from relax_rt.roles.training.algorithms.inputs import (
    AdvantageInputs,
    Metrics,
    TokenTensors,
    Trajectory,
    check_array,
    check_arrays,
    check_metrics,
    check_number,
    check_pair,
    check_tensor,
    log_ratio,
    merge,
    trajectory,
)
from relax_rt.roles.training.algorithms.registry import BoundPart, Kind, bind
from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    import torch

    from relax_rt.roles.training.algorithms.settings import AlgorithmTable

BELONGS = {"aggregation": "count", "entropy": "first"}
"""Kinds of part that have a second function, by its name."""
COMMON_OPTIONS = ("clip_low", "clip_high", "normalise_std")
"""Keys of [algorithm] that, written or set by the preset, count over a part's own default of the same name."""


@dataclass(frozen=True, slots=True)
class ObjectiveParts:
    """The parts of an objective."""

    advantage: BoundPart
    loss: BoundPart
    aggregation: BoundPart
    corrections: tuple[BoundPart, ...] = ()
    kl: BoundPart | None = None
    entropy: BoundPart | None = None

    def all(self) -> list[BoundPart]:
        """Every part that is there."""
        rest = [part for part in (self.kl, self.entropy) if part is not None]
        return [self.advantage, self.loss, self.aggregation, *self.corrections, *rest]


def read_parts(
    table: AlgorithmTable, *, base: Path = Path(), longest: int | None = None
) -> ObjectiveParts | list[Problem]:
    """The parts that a table names, or everything that is wrong with how it names them.

    Args:
        base: folder that paths of a user's files are relative to.
        longest: tokens of the longest completion, the default of fixed_length.
    """
    # Not by model_fields_set: a table that was stored, or sent to another rank, has every key.
    common = {key: value for key in COMMON_OPTIONS if (value := getattr(table, key)) is not None}
    if longest is not None:
        common["length"] = longest
    problems: list[Problem] = []

    def one(kind: Kind, given: Any, *place: str | int) -> BoundPart:
        path: KeyPath = ("algorithm", *place)
        found = bind(kind, given, path, base=base, defaults=common)
        problems.extend(found if isinstance(found, list) else _missing_functions(found))
        return cast(BoundPart, found)

    parts = ObjectiveParts(
        advantage=one("advantage", table.advantage, "advantage"),
        loss=one("loss", table.loss, "loss"),
        aggregation=one("aggregation", table.aggregation, "aggregation"),
        corrections=tuple(one("correction", c, "corrections", i) for i, c in enumerate(table.corrections)),
        kl=None if table.kl is None else one("kl", table.kl, "kl"),
        entropy=None if table.entropy is None else one("entropy", table.entropy, "entropy"),
    )
    return problems or parts


def _missing_functions(bound: BoundPart) -> list[Problem]:
    """What a user's part lacks of what its kind must have."""
    kind, name = bound.part.kind, bound.part.name
    if (second := BELONGS.get(kind)) and second not in bound.part.extras:
        message = f"{kind} '{name}' has no function '{second}'"
        return [Problem(bound.place, message, f'declare it with @part("{kind}", {second}=…)')]
    if kind == "kl" and not hasattr(bound.options, "coefficient"):
        return [Problem(bound.place, f"kl '{name}' has no coefficient", f'{{ name = "{name}", coefficient = 0.001 }}')]
    return []


class Objective:
    """Advantages of a batch, the loss of a micro-batch, and what the sum of losses is divided by.

    Attributes:
        parts: what it is made of.
        base, longest: what `of` was given, so that other ranks can make the same.
        needs: what must be on the samples, or be computed with the log-probabilities (see `registry.Need`).
        entropy_coefficient: of the entropy term of the step.
    """

    def __init__(
        self, table: AlgorithmTable, parts: ObjectiveParts, *, base: Path = Path(), longest: int | None = None
    ) -> None:
        self._table, self.base, self.longest = table, base, longest
        self.parts = parts
        own = {"proximal"} if self._looks_at_policy else set()
        self.needs = frozenset(own.union(*(part.needs for part in parts.all())))
        self.entropy_coefficient = self._entropy_base = float(parts.entropy.extra("first")) if parts.entropy else 0.0

    @classmethod
    def of(cls, table: AlgorithmTable, *, base: Path = Path(), longest: int | None = None) -> Objective:
        """The objective of a table; for the arguments see `read_parts`.

        Raises:
            Refused: a part or option is unknown or wrong.
        """
        found = read_parts(table, base=base, longest=longest)
        if isinstance(found, list):
            raise Refused("algorithm", why="; ".join(p.message for p in found), hint=found[0].hint)
        return cls(table, found, base=base, longest=longest)

    @property
    def proximal_first(self) -> bool:
        """Whether the proximal log-probabilities must be there before the pass that computes gradients, also where a
        publication has a single update.

        There they are what that pass finds, held fixed, and the ratio is exactly 1. What is decided before it needs
        them earlier: advantages and costs that look at the policy, what a loss prepares.
        """
        loss = self.parts.loss
        prepares = "prepare" in loss.part.extras and "proximal" in loss.needs
        return self._looks_at_policy or "proximal" in self.parts.advantage.needs or prepares

    @property
    def reads_columns(self) -> bool:
        """Whether rank 0 of a gang needs the columns of all samples, besides masks and rewards, for what is decided
        before the pass that computes gradients.

        Where the proximal log-probabilities come first, the columns that advantages and losses read come with them
        (`Leader.log_probabilities`). A user's own part may read any column, declared or not; a user's aggregation also
        gets the samples themselves.
        """
        parts = self.parts
        if parts.aggregation.target:
            return True
        prepares = parts.loss.target and "prepare" in parts.loss.part.extras
        needed = parts.advantage.target or prepares or "reference" in parts.advantage.needs
        return bool(needed) and not self.proximal_first

    @property
    def updates_per_step(self) -> int:
        """Updates that a step's groups are divided over."""
        return self._table.updates_per_step

    @property
    def streams(self) -> bool:
        """Whether a group can be trained on before the rest of the batch is there."""
        return "batch" not in self.needs

    def advantages(self, samples: Sequence[Sample]) -> int:
        """Give each sample its advantages, float32 [T], 0 where nothing is trained.

        The truncation policy is applied first; a sample that it masks counts in no statistic and is not trained on.

        Args:
            samples: whole groups; all of the step, unless `streams`.

        Returns:
            Tokens whose advantage the loss took away beforehand (its `prepare`, as that of `m2po`).

        Raises:
            Refused: a sample lacks what is needed. UserPartFailed: a user's function failed, or returned another shape.
        """
        kept, rewards = self._truncated(samples)
        inputs = AdvantageInputs([self._trajectory(s, r) for s, r in zip(kept, rewards, strict=True)])
        values, left_out = check_arrays(self.parts.advantage, self.parts.advantage(inputs), inputs), 0
        if "prepare" in self.parts.loss.part.extras:
            before = [one.copy() for one in values]
            prepared = self.parts.loss.extra("prepare", inputs, values)
            values = check_arrays(self.parts.loss, prepared, inputs, extra="prepare")
            left_out = sum(int(((was != 0) & (now == 0)).sum()) for was, now in zip(before, values, strict=True))
        for sample in samples:
            sample.advantages = np.zeros(len(sample.tokens), np.float32)
        for sample, advantages in zip(kept, values, strict=True):
            sample.advantages = advantages
        return left_out

    def returns(self, samples: Sequence[Sample]) -> list[NDArray[np.float32] | None]:
        """What a critic's values of these samples should have been, as the advantage's `returns` says.

        Args:
            samples: after `advantages`.

        Returns:
            float32 [T] each, 0 where nothing is trained; None for samples that the truncation policy masks.

        Raises:
            Refused: the advantage does not say. UserPartFailed: a user's function failed, or returned another shape.
        """
        advantage = self.parts.advantage
        if "returns" not in advantage.part.extras:
            why = "it has no function 'returns'"
            hint = 'declare it with @part("advantage", returns=…)'
            raise Refused(f"advantage {advantage.part.name}: a critic learns returns", why=why, hint=hint)
        kept, rewards = self._truncated(samples)
        inputs = AdvantageInputs([self._trajectory(s, r) for s, r in zip(kept, rewards, strict=True)])
        found = check_arrays(advantage, advantage.extra("returns", inputs), inputs, extra="returns")
        by_sample = {id(sample): returns for sample, returns in zip(kept, found, strict=True)}
        return [by_sample.get(id(sample)) for sample in samples]

    def rewards(self, samples: Sequence[Sample]) -> list[float]:
        """Rewards after the truncation policy, of those samples that it does not mask."""
        return self._truncated(samples)[1]

    def _truncated(self, samples: Sequence[Sample]) -> tuple[list[Sample], list[float]]:
        """The samples that are trained on, in order, with their rewards; the others are masked."""
        groups: dict[int, list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            if sample.reward is None and "rewards" in self.needs:
                raise Refused(f"sample {sample.meta.group}.{sample.meta.member}", why="it has no reward")
            groups[sample.meta.group].append(index)
        final: dict[int, float] = {}
        for members in groups.values():
            rewards, keeps = apply_truncation(
                np.array([samples[i].reward or 0.0 for i in members], np.float64),
                np.array([samples[i].meta.truncated for i in members], bool),
                self._table.truncated,
                self._table.soft_penalty,
            )
            for index, reward, keep in zip(members, rewards, keeps, strict=True):
                if keep:
                    final[index] = float(reward)
                else:
                    samples[index].loss_mask = np.zeros_like(samples[index].loss_mask)
        order = sorted(final)
        return [samples[i] for i in order], [final[i] for i in order]

    def _trajectory(self, sample: Sample, reward: float) -> Trajectory:
        one = trajectory(sample, reward)
        if "proximal" not in self.needs:
            one.proximal = None
        kl = self.parts.kl
        if kl is not None and self._kl_in_reward:
            if one.reference is None:
                raise Refused(f"sample {sample.meta.group}.{sample.meta.member}", why="it has no reference_logprobs")
            gap = np.where(one.mask, one.current - one.reference, 0.0)
            cost = check_array(kl, kl.extra("cost", gap), gap, extra="cost", dtype=np.float64)
            one.penalty = kl.options.coefficient * cost
        return one

    @property
    def _looks_at_policy(self) -> bool:
        """Whether advantages or costs are of the policy's own log-probabilities. They must be those of the weights that
        are trained: with what was sampled from in their place, samples of older weights would be drawn away from
        these, log pi - log pi_behaviour being rewarded (see `distillation`)."""
        return "policy" in self.parts.advantage.part.traits or self._kl_in_reward

    @property
    def _kl_in_reward(self) -> bool:
        return self.parts.kl is not None and getattr(self.parts.kl.options, "place", "loss") == "reward"

    def count(self, samples: Sequence[Sample]) -> float:
        """What the summed loss of these samples is divided by, once, after `advantages`; it adds up over parts of a
        batch that keep groups whole."""
        return check_number(
            self.parts.aggregation, self.parts.aggregation.extra("count", samples), samples, extra="count"
        )

    def idle(self, sample: Sample) -> bool:
        """Whether a sample, after `advantages`, has no part in the gradient: it need not be computed."""
        if not sample.loss_mask.any():
            return True
        terms = (self.parts.kl is not None and not self._kl_in_reward) or self.parts.entropy is not None
        if terms or "by_advantage" not in self.parts.loss.part.traits:
            return False
        return sample.advantages is None or not bool(sample.advantages.any())

    def loss(self, tokens: TokenTensors) -> tuple[torch.Tensor, Metrics]:
        """The loss of a micro-batch, summed with the aggregation's weights and not divided by any count.

        Args:
            tokens: whole sequences; whole groups if "pairs" is needed.

        Returns:
            A scalar, and sums over trained tokens (largest values under names ending in `_max`): `tokens`; between the
            trained and the behaviour policy `ratio`, `ratio_deviation_max`, `kl` (k3 of KL(behaviour || trained),
            nats), `difference` and `difference_max` (of log-probabilities, absolute); `drift` and `drift_max`, the
            same between the trained and the proximal policy, where that was computed before; `sampled_entropy`, minus
            the behaviour log-probabilities; `entropy` and `kl_reference` where they are computed; with corrections
            `weight`, with corrections or a loss that leaves tokens out `rejected`; and the loss's own, as `clipped`.

        Raises:
            UserPartFailed: a user's function failed, or returned something else.
        """
        if "proximal" not in self.needs and tokens.proximal is not None:
            # Whoever computed it, it is not of the weights that this step begins with.
            tokens = dataclasses.replace(tokens, proximal=None)
        metrics = _mismatch(tokens)
        if "proximal" in self.needs and tokens.proximal is None:
            tokens = dataclasses.replace(tokens, proximal=tokens.logprobs.detach())
        each, own = check_metrics(self.parts.loss, self.parts.loss(tokens), tokens)
        merge(metrics, own)
        left_out = self.parts.loss.extra("left_out", tokens) if "left_out" in self.parts.loss.part.extras else None
        if left_out is not None:
            left_out = check_tensor(self.parts.loss, left_out, tokens, extra="left_out") != 0
            metrics["rejected"] = float((tokens.mask & left_out).sum())
        if self.parts.corrections:
            each = self._corrected(each, tokens, left_out, metrics)
        if self.parts.kl is not None and not self._kl_in_reward:
            distance = check_tensor(self.parts.kl, self.parts.kl(tokens), tokens)
            metrics["kl_reference"] = float(distance.detach().sum())
            each = each + self.parts.kl.options.coefficient * distance
        if tokens.entropy is not None:
            metrics["entropy"] = float(tokens.entropy.detach().sum())
            if self.parts.entropy is not None:
                each = each - self.entropy_coefficient * tokens.entropy
        weight = check_tensor(self.parts.aggregation, self.parts.aggregation(tokens), tokens)
        return (weight * each).sum(), metrics

    def _corrected(
        self, each: torch.Tensor, tokens: TokenTensors, left_out: torch.Tensor | None, metrics: Metrics
    ) -> torch.Tensor:
        """The loss under the corrections' weights. left_out: bool [m], tokens to which the loss itself gives none."""
        weight = tokens.mask.to(each.dtype)
        for correction in self.parts.corrections:
            factor, found = check_metrics(correction, correction(tokens), tokens)
            merge(metrics, {k: v for k, v in found.items() if k != "rejected"})
            weight = weight * factor.detach()
        rejected = weight == 0 if left_out is None else (weight == 0) | left_out
        metrics["rejected"] = float((tokens.mask & rejected).sum())
        metrics["weight"] = float(weight.sum())
        return weight * each

    def after_step(self, metrics: Metrics) -> None:
        """The entropy's coefficient for the next update, from the sums of this one over all micro-batches and ranks."""
        if self.parts.entropy is not None and metrics.get("tokens"):
            entropy = metrics.get("entropy", 0.0) / metrics["tokens"]
            found = self.parts.entropy(self._entropy_base, entropy)
            self.entropy_coefficient, self._entropy_base = check_pair(
                self.parts.entropy, found, self._entropy_base, entropy
            )

    def state(self) -> dict[str, float]:
        """What changes from step to step, for the checkpoint."""
        return {"entropy_coefficient": self.entropy_coefficient, "entropy_base": self._entropy_base}

    def restore(self, state: dict[str, float]) -> None:
        """Resume from `state`."""
        self.entropy_coefficient, self._entropy_base = state["entropy_coefficient"], state["entropy_base"]


def _mismatch(tokens: TokenTensors) -> Metrics:
    """How far the trained policy is from the one that was sampled from, and from the proximal one where that is there;
    sums over the trained tokens."""
    import torch

    gap = (tokens.logprobs - tokens.behaviour).detach()
    held = log_ratio(gap, torch.zeros_like(gap))
    ratio = held.exp()
    counted = tokens.mask.to(gap.dtype)
    largest = [_largest(x) for x in ((ratio - 1.0).abs(), gap.abs())]
    sums = {
        "tokens": counted.sum(),
        "ratio": (ratio * counted).sum(),
        "ratio_deviation_max": largest[0],
        "kl": (ratio - 1.0 - held).sum(),
        "difference": gap.abs().sum(),
        "difference_max": largest[1],
        "sampled_entropy": -tokens.behaviour.sum(),
    }
    if tokens.proximal is not None:
        moved = (tokens.logprobs - tokens.proximal).detach().abs()
        sums |= {"drift": moved.sum(), "drift_max": _largest(moved)}
    # One copy from the device for all of them.
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.max() if values.numel() else values.sum()
