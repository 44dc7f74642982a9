"""What was computed of prompts under the present weights, for prompts that begin alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PrefixStore(Generic[T]):
    """What the last prompts are kept with, as their KV, by policy version: what older weights computed is never found.

    Bounded by `capacity` positions in all; the one that was not used for the longest time goes first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[tuple[int, ...], T] = OrderedDict()
        self._version = -1
        self.positions = 0

    def find(self, version: int, prompt: tuple[int, ...]) -> tuple[int, T | None]:
        """The longest common beginning with a prompt of this version, and what that one is kept with; (0, None) if
        there is none."""
        if version != self._version:
            return 0, None
        exact = self._held.get(prompt)
        best, length = (prompt, len(prompt)) if exact is not None else ((), 0)
        if exact is None:
            for other in self._held:
                common = common_prefix(prompt, other)
                if common > length:
                    best, length = other, common
        if not length:
            return 0, None
        self._held.move_to_end(best)
        return length, self._held[best]

    def put(self, version: int, prompt: tuple[int, ...], copy: Callable[[], T]) -> None:
        """Keep a prompt with what `copy` gives, if it is not there yet."""
        if version != self._version:
            self.clear()
            self._version = version
        if prompt in self._held or len(prompt) > self._capacity:
            return
        self._held[prompt] = copy()
        self.positions += len(prompt)
        while self.positions > self._capacity:
            gone, _ = self._held.popitem(last=False)
            self.positions -= len(gone)

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()
        self.positions = 0


def common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens they have in common from the start."""
    least, most = 0, min(len(one), len(other))
    while least < most:  # by halves: comparing slices is done in C
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
