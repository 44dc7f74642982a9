"""Filters: which scored groups are worth training on. Each gives the reason why a group is left out, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from pydantic import Field, model_validator

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.advantages.group import EQUAL
from relax_rt.roles.training.algorithms.filters.history import PromptHistory
from relax_rt.roles.training.algorithms.registry import part

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

    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2), together with `Refill`.
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
