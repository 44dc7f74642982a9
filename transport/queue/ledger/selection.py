"""What a sampler is, and the rules that hold whichever one is plugged in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

import msgspec

from relax_rt.transport.queue.ledger.messages import SampleKey, Want
from relax_rt.transport.rpc.errors import Refused

WINDOW = 4096
"""Units that a sampler looks at, unless it says otherwise."""


class Unit(msgspec.Struct, frozen=True):
    """What a sampler chooses or leaves as a whole: one ready sample, or all samples of a group.

    Attributes:
        id: its group.
        lengths: tokens of each of its samples; -1: no producer said.
        staleness: as of now; -1 outside training.
        urgent: the next update of the weights would make it over-stale.
        priority: higher is sooner.
        order: grows with the time at which it became ready.
    """

    id: int
    keys: tuple[SampleKey, ...]
    lengths: tuple[int, ...]
    staleness: int = -1
    urgent: bool = False
    priority: float = 0.0
    order: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all its samples.

        Raises:
            Refused: the length of one is not known.
        """
        if min(self.lengths, default=0) < 0:
            key = self.keys[self.lengths.index(-1)] if -1 in self.lengths else self.keys[0]
            raise Refused(
                f"choosing by length, of sample {key}",
                why="no producer said how many tokens it has",
                hint="name the column that holds a sample's tokens where the samples are put (length_field)",
            )
        return sum(self.lengths)


class Choice(msgspec.Struct, frozen=True):
    """The units to lease, in the order in which they go out; none, and why, while there are not enough."""

    units: list[Unit]
    waiting_on: str = ""


class Sampler(Protocol):
    """Chooses among what is ready for a task. Pure: the same units and want give the same choice.

    It is named in a config as `package.module:Class` or `file.py:Class` and made with its options as keyword
    arguments. Two attributes are optional: `window`, how many units it looks at (4096), and `newest_first`, whether
    it wants to see the latest ready ones first.
    """

    @property
    def whole_groups(self) -> bool:
        """Whether units are to be whole groups even if samples are asked for."""

    def choose(self, units: Iterable[Unit], want: Want) -> Choice:
        """At most what is wanted, each unit once.

        Args:
            units: what is ready, oldest first; made as it is read, so read no more than needed.
            want: with groups, exactly so many units, or none and `waiting_on`; fewer only where `tokens` end the batch.
        """


def limit_of(want: Want) -> float:
    """How many groups, or else samples, may be chosen; inf if tokens are the only bound.

    Raises:
        Refused: nothing is wanted, or less than nothing.
    """
    if min(want.samples, want.groups, want.tokens) < 0:
        raise Refused("take", why=f"it asks for {want.samples} samples, {want.groups} groups, {want.tokens} tokens")
    if not (want.samples or want.groups or want.tokens):
        raise Refused("take", why="neither samples nor groups nor tokens were asked for")
    return want.groups or want.samples or math.inf


def within(units: Iterable[Unit], window: int, want: Want) -> Iterator[Unit]:
    """The first `window` units, or as many as are wanted if that is more."""
    limit = limit_of(want)
    return islice(units, max(window, int(limit) if limit < math.inf else 0))


def fill(units: Iterable[Unit], want: Want, *, skip: bool = False) -> Choice:
    """Take units in their order until there are enough. The first one goes even if it is over the token budget.

    Args:
        skip: pass over a unit that is too large for what is left of the budget, instead of ending there.
    """
    room, left = limit_of(want), float(want.tokens) if want.tokens else math.inf
    chosen: list[Unit] = []
    seen, smallest, closed = 0, 0, False
    for unit in units:
        seen += 1
        size = 1 if want.groups else len(unit.keys)
        tokens = unit.tokens if want.tokens else 0
        smallest = min(smallest or size, size)
        if size <= room and not closed and (tokens <= left or not chosen):
            chosen.append(unit)
            room, left = room - size, left - tokens
        elif chosen and tokens > left:
            closed = closed or not skip
        # Groups are counted on when the budget is spent: whether enough are ready decides if the batch goes at all.
        if room < 1 or ((closed or left <= 0) and seen >= want.groups):
            break
    if want.groups and seen < want.groups:
        return Choice([], f"{seen} of {want.groups} groups are ready")
    if not chosen and seen:
        return Choice([], f"the smallest of {seen} ready groups has {smallest} samples, {want.samples} are asked for")
    return Choice(chosen, "" if chosen else "no sample is ready")


def choose(sampler: Sampler, units: Iterable[Unit], want: Want) -> Choice:
    """What the sampler chooses, held to what it was asked.

    Raises:
        Refused: the sampler failed, chose more than was wanted, a unit twice, or one that it was not offered.
    """
    offered: dict[tuple[SampleKey, ...], Unit] = {}

    def noted() -> Iterator[Unit]:
        for unit in units:
            offered[unit.keys] = unit
            yield unit

    name = f"sampler {type(sampler).__name__}"
    try:
        choice = sampler.choose(noted(), want)
    except Refused:
        raise
    except Exception as error:
        raise Refused(name, why=f"it raised {type(error).__name__}: {error}") from error
    if not isinstance(choice, Choice) or not all(isinstance(unit, Unit) for unit in choice.units):
        raise Refused(name, why=f"its choose returned a {type(choice).__name__}", hint="return Choice([units…])")
    keys = [unit.keys for unit in choice.units]
    tokens = sum(unit.tokens for unit in choice.units) if want.tokens else 0
    samples = sum(map(len, keys))
    wrong = ""
    if len(set(keys)) != len(keys):
        wrong = "it chose a sample twice"
    elif not offered.keys() >= set(keys):
        wrong = "it chose a sample that it was not offered"
    elif want.groups and (len(keys) > want.groups or (0 < len(keys) < want.groups and not want.tokens)):
        wrong = f"it chose {len(keys)} groups, {want.groups} are wanted"
    elif not want.groups and samples > limit_of(want):
        wrong = f"it chose {samples} samples, {want.samples} are wanted"
    elif len(keys) > 1 and tokens > want.tokens > 0:
        wrong = f"it chose {tokens} tokens, {want.tokens} are wanted"
    if wrong:
        raise Refused(name, why=wrong)
    return Choice([offered[key] for key in keys], choice.waiting_on)


def choose_urgent_first(sampler: Sampler, units: Iterable[Unit], want: Want) -> Choice:
    """The sampler's choice, in which what the next update would make over-stale comes before all else.

    The whole window is read for it; where nothing can be urgent, `choose` reads no more than the sampler needs. A
    ledger that knows of urgent units beyond the window puts them in front.

    Raises:
        Refused: see `choose`.
    """
    pool = list(within(units, int(getattr(sampler, "window", WINDOW)), want))
    urgent = [unit for unit in pool if unit.urgent]
    if want.groups and len(pool) < want.groups:
        return Choice([], f"{len(pool)} of {want.groups} groups are ready")
    groups = min(want.groups, len(urgent))
    first = choose(sampler, urgent, msgspec.structs.replace(want, groups=groups)).units if urgent else []
    if not first:
        return choose(sampler, pool, want)
    left = _left(want, first)
    if left is None or len(first) < len(urgent):
        # What was left of the urgent ones had no room; it goes first in the next batch.
        return Choice(first)
    rest = [unit for unit in pool if not unit.urgent and not (left.tokens and unit.tokens > left.tokens)]
    if not rest:
        return Choice(first)
    second = choose(sampler, rest, msgspec.structs.replace(left, groups=min(left.groups, len(rest))))
    if want.groups and not want.tokens and len(first) + len(second.units) < want.groups:
        return Choice([], second.waiting_on)
    return Choice(first + second.units)


def _left(want: Want, chosen: list[Unit]) -> Want | None:
    """What is still wanted besides these units; None: nothing."""
    groups = want.groups - len(chosen)
    samples = want.samples - sum(len(unit.keys) for unit in chosen)
    tokens = want.tokens - sum(unit.tokens for unit in chosen) if want.tokens else 0
    if want.tokens and tokens < 1:
        return None
    if want.groups:
        return msgspec.structs.replace(want, groups=groups, tokens=tokens) if groups > 0 else None
    if want.samples:
        return msgspec.structs.replace(want, samples=samples, tokens=tokens) if samples > 0 else None
    return msgspec.structs.replace(want, tokens=tokens)
