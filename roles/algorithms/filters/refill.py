"""Dynamic sampling: groups that teach nothing are left out, and others asked for, until a step is full."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.algorithms.filters.history import PromptHistory
from relax_rt.roles.algorithms.filters.rules import ScoredGroup
from relax_rt.roles.algorithms.registry import Bound
from relax_rt.transport.errors import Refused


class Ask(msgspec.Struct, frozen=True):
    """So many further groups are wanted."""

    groups: int


class Drop(msgspec.Struct, frozen=True):
    """A group is left out."""

    key: int
    why: str


class Full(msgspec.Struct, frozen=True):
    """The step is to be taken with these groups, oldest first."""

    keys: tuple[int, ...]


Action = Ask | Drop | Full


class RefillOptions(Table):
    """How many groups a step may cost."""

    over_sample: Annotated[float, Field(ge=1, le=16)] = 1.0
    """Groups asked for at once, by those still lacking; beside what the share of groups left out so far calls for."""
    most: Annotated[float, Field(ge=1, le=64)] = 10.0
    """A step is taken with what there is after this many times its groups were scored."""
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Weight of the past in the running share of groups that are kept."""


class Refill:
    """A pure state machine: scored groups in, actions out. Groups above what a step takes are carried over to the next.

    Staleness is not its business: the queue refuses what is too old, and `lost` says so here.

    Args:
        wanted: groups of a step.
        filters: bound filters; the first that gives a reason decides.
    """

    def __init__(
        self, wanted: int, filters: Sequence[Bound], history: PromptHistory, options: RefillOptions | None = None
    ) -> None:
        self.wanted, self._filters, self._history = wanted, filters, history
        self._options = options or RefillOptions()
        self._kept: list[int] = []
        self._pending = 0
        self._scored = 0
        self._share = 1.0
        self.dropped: dict[str, int] = {}

    def begin(self) -> list[Action]:
        """A step begins; groups that were carried over count for it."""
        self._scored = 0
        return self._next()

    def scored(self, group: ScoredGroup, step: int) -> list[Action]:
        """A group came back with its rewards."""
        self._pending = max(0, self._pending - 1)
        self._scored += 1
        self._history.record(group.item, group.rewards, step)
        name, why = self._judge(group)
        memory = self._options.memory
        self._share = memory * self._share + (1 - memory) * (not why)
        if not why:
            self._kept.append(group.key)
            return self._next()
        self.dropped[name] = self.dropped.get(name, 0) + 1
        return [Drop(group.key, f"{name}: {why}"), *self._next()]

    def lost(self, key: int | None = None) -> list[Action]:
        """A group will not come, or one that was kept can no longer be trained on (its key)."""
        if key is None:
            self._pending = max(0, self._pending - 1)
        elif key in self._kept:
            self._kept.remove(key)
        return self._next()

    def _judge(self, group: ScoredGroup) -> tuple[str, str]:
        for rule in self._filters:
            why = rule(group, self._history)
            if why:
                return rule.part.name, str(why)
        return "", ""

    def _next(self) -> list[Action]:
        lacking = self.wanted - len(self._kept)
        enough = self._scored >= self._options.most * self.wanted
        if lacking <= 0 or (enough and self._kept):
            keys, self._kept = tuple(self._kept[: self.wanted]), self._kept[self.wanted :]
            self._scored = 0
            return [Full(keys)]
        # A share near 0 would ask for all prompts at once: what a step may cost bounds it.
        share = max(self._share, 1 / self._options.most)
        ask = math.ceil(lacking * self._options.over_sample / share) - self._pending
        if ask <= 0:
            return []
        self._pending += ask
        return [Ask(ask)]

    def state(self) -> dict[str, Any]:
        """Plain data for the checkpoint. Groups under way are not in it: the queue gives their prompts out again."""
        return {"share": self._share, "dropped": dict(self.dropped)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`.

        Raises:
            Refused: it is not what `state` gave.
        """
        try:
            self._share = float(state["share"])
            self.dropped = msgspec.convert(state["dropped"], dict[str, int])
        except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
            raise Refused("dynamic sampling of a checkpoint", why=str(error)) from error
