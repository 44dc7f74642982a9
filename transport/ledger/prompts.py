"""The order of prompts: none is skipped, none is given out twice at the same time."""

from __future__ import annotations

import heapq

import msgspec


class Prompt(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One place in the prompt order, and how often it was given out before (`attempt`) and failed (`failures`)."""

    index: int
    attempt: int = 0
    failures: int = 0

    def again(self, *, failed: bool = False) -> Prompt:
        """The same place, given out once more."""
        return Prompt(self.index, self.attempt + 1, self.failures + failed)


class PromptPool(msgspec.Struct):
    """Cursor over the prompt order, and the returned prompts, which go first (lowest index first)."""

    cursor: int = 0
    waiting: list[Prompt] = []
    issued: int = 0
    returned: int = 0
    retired: list[int] = []

    def available(self, limit: int | None) -> bool:
        """Whether a prompt can be given out; `limit` is the length of the prompt order, if it has one."""
        return bool(self.waiting) or limit is None or self.cursor < limit

    def issue(self) -> Prompt:
        """The next prompt."""
        self.issued += 1
        if self.waiting:
            return heapq.heappop(self.waiting)
        self.cursor += 1
        return Prompt(self.cursor - 1)

    def give_back(self, prompt: Prompt, *, failed: bool = False) -> None:
        """The prompt will be given out again, with its index and the next attempt."""
        self.returned += 1
        heapq.heappush(self.waiting, prompt.again(failed=failed))

    def retire(self, prompt: Prompt) -> None:
        """The prompt is not tried again."""
        self.retired.append(prompt.index)
