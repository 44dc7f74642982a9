"""The order of prompts: none is skipped, none is issued twice at the same time."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import msgspec

ORDERED_ITEM = -1
"""The prompt's data item follows the order of the run's data."""


class Prompt(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One place in the prompt order.

    Attributes:
        attempt: how often it was issued before. failures: how often it failed.
        item: the data item that was chosen for it, or ORDERED_ITEM.
        losses: consecutive attempts that were lost without progress.
    """

    index: int
    attempt: int = 0
    failures: int = 0
    item: int = ORDERED_ITEM
    losses: int = 0

    def next_attempt(self, *, failed: bool = False) -> Prompt:
        """The same place with the same item, issued once more."""
        losses = 0 if failed else self.losses
        return Prompt(self.index, self.attempt + 1, self.failures + failed, self.item, losses)

    def with_losses(self, times: int) -> Prompt:
        """The same prompt with this number of losses."""
        return msgspec.structs.replace(self, losses=self.losses + times)

    def without_losses(self) -> Prompt:
        """The same prompt with no losses."""
        return msgspec.structs.replace(self, losses=0) if self.losses else self

    @property
    def chosen_item(self) -> int | None:
        """The item that was chosen for it; None: the one of the run's order."""
        return None if self.item == ORDERED_ITEM else self.item


class PromptPool(msgspec.Struct):
    """Cursor over the prompt order, and the returned prompts, which go first (lowest index first).

    Attributes:
        issued, returned: counts. retired: places that are not tried again. filtered: number of prompts filtered out.
        skipped: how many others were of retired items.
        chosen: the items of places not yet issued.
    """

    cursor: int = 0
    waiting: list[Prompt] = []
    issued: int = 0
    returned: int = 0
    retired: list[int] = []
    filtered: int = 0
    chosen: dict[int, int] = {}
    skipped: int = 0

    def available(self, limit: int | None) -> bool:
        """Whether a prompt can be issued; `limit` is the length of the prompt order, if it has one."""
        return bool(self.waiting) or limit is None or self.cursor < limit

    def issue(self) -> Prompt:
        """The next prompt."""
        self.issued += 1
        if self.waiting:
            return heapq.heappop(self.waiting)
        self.cursor += 1
        return Prompt(self.cursor - 1, item=self.chosen.pop(self.cursor - 1, ORDERED_ITEM))

    def choose(self, items: Mapping[int, int]) -> bool:
        """Set the items of places that are not yet issued. Returns whether anything changed."""
        new = {index: item for index, item in items.items() if index >= self.cursor}
        changed = any(self.chosen.get(index) != item for index, item in new.items())
        self.chosen.update(new)
        return changed

    def give_back(self, prompt: Prompt, *, failed: bool = False) -> None:
        """Return a prompt to the pool; it is issued again with its index and the next attempt."""
        self.returned += 1
        heapq.heappush(self.waiting, prompt.next_attempt(failed=failed))

    def retire(self, prompt: Prompt) -> None:
        """The prompt is not tried again."""
        self.retired.append(prompt.index)
