"""Which rows of a batch are attended together: those of about one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

QUANTUM = 64
"""Lengths up to this are one class; each further class is twice as long."""
CALL_COST = 2048
"""What one more attention call costs, in key positions that it could read instead (measured: tools/bench/engine.py)."""


class Segment(NamedTuple):
    """Rows [start, end), all of them at most `upto` positions long."""

    start: int
    end: int
    upto: int


def length_class(length: int) -> int:
    """0 up to QUANTUM positions, and one more for each doubling."""
    return max(0, (length - 1) // QUANTUM).bit_length()


def segments(lengths: Sequence[int]) -> list[Segment]:
    """Cut rows into runs, so that reading each run as far as its longest row costs little; rows as they stand.

    Short runs go with their neighbour where that costs less than a call of their own, and all rows with each other
    where cutting them does not pay. Rows that are ordered by
    length_class give the best runs; any order gives a right answer.
    """
    found: list[Segment] = []
    start = 0
    for row in range(1, len(lengths) + 1):
        if row < len(lengths) and length_class(lengths[row]) == length_class(lengths[start]):
            continue
        found.append(Segment(start, row, max(lengths[start:row])))
        start = row
        while len(found) > 1 and _merged_cost(found[-2], found[-1]) <= CALL_COST:
            last, before = found.pop(), found.pop()
            found.append(Segment(before.start, last.end, max(before.upto, last.upto)))
    longest = max(lengths, default=0)
    cut = sum((s.end - s.start) * s.upto + CALL_COST for s in found)
    if len(found) > 1 and len(lengths) * longest + CALL_COST <= cut:
        return [Segment(0, len(lengths), longest)]
    return found


def _merged_cost(one: Segment, other: Segment) -> int:
    """Positions read for nothing if both are read as far as the longer one."""
    upto = max(one.upto, other.upto)
    return (one.end - one.start) * (upto - one.upto) + (other.end - other.start) * (upto - other.upto)
