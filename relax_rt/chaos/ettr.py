"""Effective training time ratio: undisturbed ÷ disturbed wall-clock to the same step; no I/O."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

Record = dict[str, Any]
MIN_GAPS = 5
"""Undisturbed steps that an estimate needs."""


class Ettr(msgspec.Struct, frozen=True, kw_only=True):
    """The ratio, and what it is made of.

    Attributes:
        value: None when it cannot be told, for the reason in `why`.
        measured: both wall-clocks were measured; otherwise the undisturbed one is an estimate from this run's own
            undisturbed steps, which knows nothing of checkpoints and of what slow steps cost.
        first, last: the steps between which the time was taken.
        undisturbed_s, disturbed_s: the two wall-clocks.
    """

    value: float | None = None
    measured: bool = False
    first: int = 0
    last: int = 0
    undisturbed_s: float = 0.0
    disturbed_s: float = 0.0
    why: str = ""


def path_of(steps: Sequence[Record]) -> dict[int, Record]:
    """The records on the path to the last step: a higher epoch's steps replace those that they repeat."""
    path: dict[int, Record] = {}
    for record in sorted(steps, key=lambda r: r.get("epoch", 0)):
        for later in [s for s in path if s >= record["step"]]:
            del path[later]
        path[record["step"]] = record
    return path


def at(record: Record) -> float:
    """When a record was written, seconds: by the monotonic clock where it is told, as a role's wall clock may jump."""
    return float(record["m"] if "m" in record else record["t"])


def elapsed_s(steps: Sequence[Record], first: int, last: int) -> float | None:
    """Wall-clock from the first time that step `first` was done to the time when `last` stood for good."""
    path = path_of(steps)
    began = [at(r) for r in steps if r["step"] == first]
    if last not in path or not began:
        return None
    return at(path[last]) - min(began)


def ettr(steps: Sequence[Record], baseline: Sequence[Record] | None, faults: Sequence[tuple[float, float]]) -> Ettr:
    """The ratio of a run.

    Args:
        steps: its step records, in the order written.
        baseline: those of an undisturbed run of the same config; None: estimate.
        faults: begin and end of each disturbance, recovery included, on the clock of the records (see `at`).
    """
    path = path_of(steps)
    if len(path) < 2:
        return Ettr(why="fewer than two steps were made")
    first, last = min(path), max(path)
    if baseline is not None:
        last = min(last, max(path_of(baseline), default=0))
        undisturbed_s = elapsed_s(baseline, first, last)
        if not undisturbed_s or last <= first:
            return Ettr(why="the baseline run has not made the same steps")
    else:
        gaps = _undisturbed_gaps(steps, faults)
        if len(gaps) < MIN_GAPS:
            return Ettr(why=f"only {len(gaps)} undisturbed steps; give an undisturbed run as baseline")
        undisturbed_s = statistics.median(gaps) * (last - first)
    disturbed_s = elapsed_s(steps, first, last)
    if not disturbed_s:
        return Ettr(why=f"step {last} was not reached")
    return Ettr(
        value=undisturbed_s / disturbed_s,
        measured=baseline is not None,
        first=first,
        last=last,
        undisturbed_s=undisturbed_s,
        disturbed_s=disturbed_s,
    )


def _undisturbed_gaps(steps: Sequence[Record], faults: Sequence[tuple[float, float]]) -> list[float]:
    ordered = sorted(steps, key=at)
    return [
        at(b) - at(a)
        for a, b in pairwise(ordered)
        if b.get("epoch") == a.get("epoch")
        and b["step"] == a["step"] + 1
        and not any(begin < at(b) and end > at(a) for begin, end in faults)
    ]
