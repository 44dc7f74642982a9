"""What became of each prompt so far: what filters and samplers decide by. State that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from relax_rt.transport.rpc.errors import Refused

SUCCESS = 0.5
"""A sample whose reward is above this succeeded, by default."""


class PromptOutcomes(msgspec.Struct, array_like=True, frozen=True):
    """The outcomes of one prompt.

    Attributes:
        groups: that were scored. samples, successes: over all of them.
        rate: share of successes, recent groups weighing more. seen: step of the last group.
    """

    groups: int = 0
    samples: int = 0
    successes: int = 0
    rate: float = 0.0
    seen: int = 0


class PromptHistory:
    """Outcomes by the stable id of the data item, so that they survive a change of order or seed.

    Args:
        decay: weight of the rate so far when a further group is scored; 0: only the last group counts.
        success: rewards above it are successes.
    """

    def __init__(self, *, decay: float = 0.5, success: float = SUCCESS) -> None:
        self.decay, self.success = decay, success
        self._items: dict[str, PromptOutcomes] = {}

    def record(self, item: str, rewards: Sequence[float], step: int) -> None:
        """A group of this prompt was scored, whatever became of it then."""
        if not rewards:
            return
        found = self.outcomes(item)
        successes = sum(r > self.success for r in rewards)
        share = successes / len(rewards)
        self._items[item] = PromptOutcomes(
            groups=found.groups + 1,
            samples=found.samples + len(rewards),
            successes=found.successes + successes,
            rate=share if found.groups == 0 else self.decay * found.rate + (1 - self.decay) * share,
            seen=step,
        )

    def rate(self, item: str) -> float | None:
        """Share of successes, recent groups weighing more; None if no group was scored."""
        found = self._items.get(item)
        return found.rate if found else None

    def outcomes(self, item: str) -> PromptOutcomes:
        """The outcomes of a prompt; zeros if no group was scored."""
        return self._items.get(item, PromptOutcomes())

    def rare(self, below: float, before: int) -> Iterator[str]:
        """Prompts that succeeded at least once, at a rate of at most `below`, and were last seen before a step."""
        for item, found in self._items.items():
            if found.successes and found.rate <= below and found.seen < before:
                yield item

    def __len__(self) -> int:
        return len(self._items)

    def copy(self) -> PromptHistory:
        """The same outcomes, from now on apart."""
        other = PromptHistory(decay=self.decay, success=self.success)
        other._items = dict(self._items)
        return other

    def state(self) -> dict[str, Any]:
        """Plain data for the checkpoint."""
        return {"decay": self.decay, "success": self.success, "items": msgspec.to_builtins(self._items)}

    def clear(self) -> None:
        """No group was scored yet."""
        self._items = {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`.

        Raises:
            Refused: it is not what `state` gave.
        """
        try:
            items = msgspec.convert(state["items"], dict[str, PromptOutcomes])
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise Refused("prompt history of a checkpoint", why=str(error)) from error
        self._items = items
