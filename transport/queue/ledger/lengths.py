"""Samples used and lost by their length: long generations must not be lost more often than short ones.

Kept in memory only, as what the broker has seen since it started: figures for people, nothing is decided by them."""

from __future__ import annotations

import bisect
from collections import Counter, deque

RECENT = 4096
"""Lengths from which the deciles are computed."""


class LengthStatistics:
    """Counts by length decile of the samples generated lately, and a histogram of staleness by length decile."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._cuts: list[int] = []
        self._by_decile: dict[str, Counter[int]] = {}
        self._staleness: dict[int, Counter[int]] = {}
        self._seen = 0

    def generated(self, length: int) -> None:
        """A sample of this many tokens was put."""
        if length < 0:
            return
        self._recent.append(length)
        self._seen += 1
        # Each doubling, then every RECENT: the cuts cost a sort.
        if self._seen & (self._seen - 1) == 0 or self._seen % RECENT == 0:
            ordered = sorted(self._recent)
            self._cuts = [ordered[len(ordered) * tenth // 10] for tenth in range(1, 10)]

    def decile(self, length: int) -> int:
        """0 for the shortest tenth to 9 for the longest."""
        return bisect.bisect_right(self._cuts, length)

    def used(self, length: int) -> None:
        """A sample was consumed to the end."""
        if length >= 0:
            self._by_decile.setdefault("used", Counter())[self.decile(length)] += 1

    def lost(self, length: int, state: str) -> None:
        """A generated sample ended unused."""
        if length >= 0:
            self._by_decile.setdefault(state, Counter())[self.decile(length)] += 1

    def consumed(self, length: int, staleness: int) -> None:
        """A sample was leased for a step at this staleness."""
        if length >= 0:
            self._staleness.setdefault(staleness, Counter())[self.decile(length)] += 1

    def by_decile(self) -> dict[str, list[int]]:
        """Ten counts, shortest first, for each way in which samples ended."""
        return {state: [counts[n] for n in range(10)] for state, counts in sorted(self._by_decile.items())}

    def staleness(self) -> dict[str, list[int]]:
        """Ten counts, shortest first, for each staleness at consumption."""
        return {str(lag): [counts[n] for n in range(10)] for lag, counts in sorted(self._staleness.items())}
