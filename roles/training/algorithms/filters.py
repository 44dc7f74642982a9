"""Group filters of dynamic sampling, and how many further groups replace those that were filtered out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from pydantic import Field, model_validator

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.advantages import EQUAL
from relax_rt.roles.training.algorithms.prompt_history import PromptHistory
from relax_rt.roles.training.algorithms.registry import BoundPart, describe, part
from relax_rt.roles.training.algorithms.settings import RefillOptions
from relax_rt.transport.rpc.errors import Refused

MASKED = "all its samples are masked"


class ScoredGroup(msgspec.Struct, frozen=True):
    """A whole group with its rewards.

    Attributes:
        key: whatever names the group to its owner. item: stable id of the data item.
        rewards: after the truncation policy, of those samples that it does not mask. truncated: of all its samples.
    """

    key: int
    item: str
    rewards: Sequence[float]
    truncated: Sequence[bool] = ()


class SpreadOptions(Table):
    """Smallest spread of rewards."""

    spread: Annotated[float, Field(gt=0)] = EQUAL
    """Groups whose largest and smallest reward differ by less are left out."""


class RateOptions(Table):
    """Shares of successes that are worth training on."""

    low: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Smallest share."""
    high: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Largest share."""

    @model_validator(mode="after")
    def _ordered(self) -> RateOptions:
        if self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}")
        return self


class TruncatedOptions(Table):
    """Share of truncated completions."""

    most: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Groups with a larger share are left out."""


@part("filter", "zero_variance", options=SpreadOptions, traits=["groups"])
def zero_variance(group: ScoredGroup, history: PromptHistory, options: SpreadOptions) -> str:
    """Groups of equal rewards are left out: no advantage comes of them.

    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2), together with `RefillPolicy`.
    """
    if not group.rewards:
        return MASKED
    if max(group.rewards) - min(group.rewards) < options.spread:
        return f"all rewards are {group.rewards[0]:g}"
    return ""


@part("filter", "pass_rate", options=RateOptions)
def pass_rate(group: ScoredGroup, history: PromptHistory, options: RateOptions) -> str:
    """Groups with too small or too large a share of successes are left out."""
    if not group.rewards:
        return MASKED
    share = sum(r > history.success for r in group.rewards) / len(group.rewards)
    if not options.low <= share <= options.high:
        return f"{share:.2f} of it succeeded"
    return ""


@part("filter", "truncated", options=TruncatedOptions)
def truncated(group: ScoredGroup, history: PromptHistory, options: TruncatedOptions) -> str:
    """Groups of which too many completions were cut at the length limit are left out."""
    share = sum(group.truncated) / max(1, len(group.truncated))
    if share > options.most:
        return f"{share:.2f} of it was cut at max_new_tokens"
    return ""


State = Literal["lacking", "full", "short", "none_passed"]
"""Of a step: groups are lacking; it has all; it is to be taken with fewer; nothing was kept of all it may cost."""


class FilteredGroup(msgspec.Struct, frozen=True):
    """A group is left out: by which rule, and why."""

    key: int
    rule: str
    why: str


class RefillPolicy:
    """A pure state machine: scored groups in, the verdict on them out.

    Of the groups that are under way it says only how many there should be. Which of them are lost, late or too stale is
    the queue's business, which makes others in their place.

    Args:
        wanted: groups of a step.
        filters: bound filters; the first that gives a reason decides.
    """

    def __init__(
        self, wanted: int, filters: Sequence[BoundPart], history: PromptHistory, options: RefillOptions | None = None
    ) -> None:
        self.wanted, self._filters, self.history = wanted, filters, history
        self._options = options or RefillOptions()
        self._kept = self._scored = 0
        self.clear()

    def clear(self) -> None:
        """No group was judged yet."""
        self._share = 1.0
        self.dropped: dict[str, int] = {}

    def begin(self) -> None:
        """A step begins."""
        self._kept = self._scored = 0

    def scored(self, group: ScoredGroup, step: int) -> FilteredGroup | None:
        """A group came with its rewards; answers whether it is left out.

        Raises:
            UserPartFailed: a user's filter failed, or returned something else than a text.
        """
        self.history.record(group.item, group.rewards, step)
        drop = self._judge(group)
        self._count(drop)
        return drop

    def filtered(self, group: ScoredGroup, step: int, drop: FilteredGroup) -> None:
        """A group came and was judged by another: it is left out."""
        self.history.record(group.item, group.rewards, step)
        self._count(drop)

    def _count(self, drop: FilteredGroup | None) -> None:
        self._scored += 1
        memory = self._options.memory
        self._share = memory * self._share + (1 - memory) * (drop is None)
        if drop is None:
            self._kept += 1
        else:
            self.dropped[drop.rule] = self.dropped.get(drop.rule, 0) + 1

    def _judge(self, group: ScoredGroup) -> FilteredGroup | None:
        for rule in self._filters:
            why = rule(group, self.history)
            if why is not None and not isinstance(why, str | bool | np.bool_):
                message = f"it returned {describe([why])}: a filter returns why a group is left out, or an empty text"
                raise rule.wrong(message, group)
            if why:
                return FilteredGroup(group.key, rule.part.name, f"{rule.part.name}: {why}")
        return None

    @property
    def state(self) -> State:
        """How the step stands."""
        if self._kept >= self.wanted:
            return "full"
        if self._scored < self._options.most * self.wanted:
            return "lacking"
        return "short" if self._kept else "none_passed"

    @property
    def pass_rate(self) -> float:
        """The running share of groups that pass."""
        return self._share

    @property
    def spare(self) -> int:
        """Groups that should be under way besides those that are lacking, so that enough of them are kept."""
        lacking = max(0, self.wanted - self._kept)
        # A share near 0 would ask for all prompts at once: what a step may cost bounds it.
        share = max(self._share, 1 / self._options.most)
        return math.ceil(lacking * self._options.over_sample / share - 1e-9) - lacking

    def copy(self) -> RefillPolicy:
        """The same machine with a history of its own, from now on apart."""
        other = RefillPolicy(self.wanted, self._filters, self.history.copy(), self._options)
        other._kept, other._scored = self._kept, self._scored
        other._share, other.dropped = self._share, dict(self.dropped)
        return other

    def save(self) -> dict[str, Any]:
        """Plain data for the checkpoint. Groups under way are not in it: they are the queue's."""
        return {"share": self._share, "dropped": dict(self.dropped)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `save` gave.

        Raises:
            Refused: it is something else.
        """
        try:
            share, dropped = float(state["share"]), msgspec.convert(state["dropped"], dict[str, int])
        except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
            raise Refused("dynamic sampling of a checkpoint", why=str(error)) from error
        self._share, self.dropped = share, dropped
