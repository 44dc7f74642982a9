"""How many sequences an engine is to have at once, by what its KV cache holds. Pure.

Above the high-water mark nothing is taken in, and the cap comes down to a share of what is in flight; nothing is taken
in until the use has fallen to the low-water mark. From there on the cap rises again, by one at a time and only while
about as many are in flight. Between the marks nothing changes, so that it does not swing with every sequence that ends.
"""

from __future__ import annotations

import msgspec

from relax_rt.transport.rpc.errors import Refused


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """Where the cap changes, and how.

    Attributes:
        most: in flight at once, never more. least: may always be.
        high, low: shares of the KV cache in use.
        shrink: share of what is in flight that the cap comes down to.
        every_s: between two changes of the cap: a change takes its time to show.
    """

    most: int
    least: int = 1
    high: float = 0.85
    low: float = 0.6
    shrink: float = 0.75
    every_s: float = 5.0

    def __post_init__(self) -> None:
        if not (1 <= self.least <= self.most and 0 <= self.low < self.high <= 1 and 0 < self.shrink < 1):
            raise Refused(
                f"marks {self}", why="they contradict each other", hint="1 <= least <= most, 0 <= low < high <= 1"
            )


class Intake:
    """The cap of one engine."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.cap = marks.most
        self.shut = False
        """The cache was too full, and has not emptied enough since."""
        self._changed_at = float("-inf")

    def observe(self, now: float, kv_used: float, in_flight: int) -> None:
        """What the engine says of its cache (0..1), with so many sequences in it."""
        marks = self.marks
        if kv_used >= marks.high:
            self.shut = True
            if self._may_change(now):
                self._set(now, max(marks.least, int(min(self.cap, in_flight) * marks.shrink)))
        elif kv_used <= marks.low:
            self.shut = False
            # Near the cap, not at it: this may be looked at just after one has ended.
            if self.cap < marks.most and in_flight > marks.shrink * self.cap and self._may_change(now):
                self._set(now, self.cap + 1)

    def room(self, in_flight: int) -> int:
        """Further sequences that may be taken in now."""
        if in_flight < self.marks.least:
            return self.marks.least - in_flight if self.shut else max(self.cap, self.marks.least) - in_flight
        return 0 if self.shut else max(0, self.cap - in_flight)

    def why(self, in_flight: int) -> str:
        """Why nothing is taken in, in words; empty if something is."""
        if self.room(in_flight):
            return ""
        if self.shut:
            return f"the KV cache to empty to {self.marks.low:.0%}"
        return f"one of {in_flight} sequences to end: the cap is {self.cap}"

    def _may_change(self, now: float) -> bool:
        return now - self._changed_at >= self.marks.every_s

    def _set(self, now: float, cap: int) -> None:
        if cap != self.cap:
            self.cap, self._changed_at = cap, now
