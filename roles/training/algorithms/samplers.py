"""Samplers: which prompt the run's n-th group is of, by what became of the prompts so far."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.prompt_history import PromptHistory
from relax_rt.roles.training.algorithms.registry import BoundPart, part


class SamplerContext(msgspec.Struct, frozen=True):
    """What a sampler chooses from.

    Attributes:
        index: number of the group in the run. step: of the trainer, as far as it is known.
        usual: place in `items` that the run's order has for this index.
        items: ids of all training prompts. place: from id to place in `items`.
        draw: the i-th uniform number in [0, 1) of this index, the same on every machine.
    """

    index: int
    step: int
    usual: int
    items: Sequence[str]
    place: Mapping[str, int]
    draw: Callable[[int], float]


class CurriculumOptions(Table):
    """Prompts of a wanted difficulty."""

    target: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of successes to aim at."""
    width: Annotated[float, Field(gt=0)] = 0.25
    """Prompts whose share is so far from the target weigh 0.6 of one at it (a Gaussian's standard deviation)."""
    unknown: Annotated[float, Field(ge=0)] = 0.5
    """Weight of a prompt that was not tried."""
    floor: Annotated[float, Field(ge=0)] = 0.05
    """Least weight of any prompt: none is given up."""
    candidates: Annotated[int, Field(ge=2, le=1024)] = 16
    """Prompts that each choice is made among: the run's order's own and others drawn evenly."""


class ReplayOptions(Table):
    """Prompts that rarely succeed."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of groups that are of such prompts, while there are any."""
    below: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Largest share of successes of a prompt that is tried again."""
    after: Annotated[int, Field(ge=1)] = 5
    """Steps before a prompt comes again."""


@part("sampler", "curriculum", options=CurriculumOptions)
def curriculum(choice: SamplerContext, history: PromptHistory, options: CurriculumOptions) -> int:
    """A prompt among a few, drawn with weights by how near its share of successes is to the target.

    Prompts of middling difficulty teach most: the variance of a group's rewards is largest there (online difficulty
    filtering, arXiv 2504.03380; from memory; the Gaussian weight is ours).

    Returns:
        Its place in `choice.items`.
    """
    count = len(choice.items)
    places = [choice.usual, *(int(choice.draw(i) * count) for i in range(1, options.candidates))]

    def weight(place: int) -> float:
        rate = history.rate(choice.items[place])
        if rate is None:
            return max(options.unknown, options.floor)
        return max(math.exp(-0.5 * ((rate - options.target) / options.width) ** 2), options.floor)

    weights = [weight(place) for place in places]
    left = choice.draw(0) * sum(weights)
    for place, own in zip(places, weights, strict=True):
        left -= own
        if left < 0:
            return place
    return choice.usual


@part("sampler", "replay", options=ReplayOptions)
def replay(choice: SamplerContext, history: PromptHistory, options: ReplayOptions) -> int:
    """Now and then a prompt that succeeded rarely and not lately; else the one of the run's order.

    The prompt is sampled anew: its old completions are of old weights and beyond the staleness bound.

    Returns:
        Its place in `choice.items`.
    """
    if choice.draw(0) >= options.share:
        return choice.usual
    known = [item for item in history.rare(options.below, choice.step - options.after + 1) if item in choice.place]
    return choice.place[known[int(choice.draw(1) * len(known))]] if known else choice.usual


class PromptSampler:
    """Chooses which prompts the next groups of the run are of.

    Choices that were given out are kept by the queue; the others are made again, by what is known then.

    Args:
        items: ids of the training prompts, without duplicates. usual: the run's order, from index to place.
        seed: run.seed. places: map from an id to its place in `items`; None: built from `items`.
        ahead: how many groups `choose_next` chooses for. end: the run's order ends before this index.
    """

    def __init__(
        self,
        rule: BoundPart,
        items: Sequence[str],
        usual: Callable[[int], int],
        *,
        seed: int,
        history: PromptHistory,
        places: Mapping[str, int] | None = None,
        ahead: int = 1,
        end: int | None = None,
    ) -> None:
        self._rule, self._items, self._usual, self._seed, self.history = rule, items, usual, seed, history
        self._place = {item: place for place, item in enumerate(items)} if places is None else places
        self._ahead, self._end = ahead, end

    def choose(self, index: int, step: int) -> int:
        """Choose the place in `items` of the run's index-th group.

        Args:
            step: of the trainer, as far as it is known.

        Raises:
            UserPartFailed: a user's sampler failed, or returned no place.
        """

        def draw(number: int) -> float:
            return uniform(self._seed, index, number)

        choice = SamplerContext(index, step, self._usual(index), self._items, self._place, draw)
        found = self._rule(choice, self.history)
        if not isinstance(found, int) or not 0 <= found < len(self._items):
            why = f"it chose {found!r:.80}, and a sampler returns a place, an int below {len(self._items)}"
            raise self._rule.wrong(why, choice)
        return found

    def choose_next(self, step: int, next_index: int) -> dict[int, int]:
        """Choose for the groups that come next: so many that admission finds a choice each time. Raises as `choose`.

        Args:
            next_index: the first that was not given out.
        """
        end = next_index + self._ahead
        indices = range(next_index, end if self._end is None else min(end, self._end))
        return {index: self.choose(index, step) for index in indices}

    def state(self) -> dict[str, Any]:
        """Return plain data for the checkpoint."""
        return {"history": self.history.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`; an empty one starts anew.

        Raises:
            Refused: it is not what `state` gave.
        """
        if state:
            self.history.restore(state.get("history", {}))
        else:
            self.history.clear()


def uniform(seed: int, index: int, i: int) -> float:
    """A number in [0, 1) from blake2b-64(index, i; seed): the same on every machine."""
    key = struct.pack("<Q", seed)
    digest = hashlib.blake2b(struct.pack("<QQ", index, i), key=key, digest_size=8, person=b"relax-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)
