"""The job's columns on the live screen, filled from the metrics."""

from __future__ import annotations

import string
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from relax_rt.cli.time_left import Estimate, Estimator
from relax_rt.config.job import Column, Pacing
from relax_rt.observe.text import NOTHING, number

SPARK = 40
FRESH_S = 10.0
"""A sender without a record for so long no longer counts."""
RATE_OVER_S = 20.0
"""A rate is averaged over this time: where roles share a GPU in turn, two consecutive records often span only work or
only waiting."""
RATE_POINTS = 32
MAX_SENDERS = 4096


class Value(msgspec.Struct, frozen=True):
    """A column's present state: heading, text, and values of its sparkline if it has one."""

    title: str
    text: str
    spark: Sequence[float] = ()


class _LenientFormatter(string.Formatter):
    """Template fields that a record lacks, or that are not numbers, are shown as a dash."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Any) -> Any:
        return kwargs.get(key) if isinstance(key, str) else None

    def format_field(self, value: Any, format_spec: str) -> str:
        return number(value, format_spec)


class _Counters:
    """One counter of each sender over the last seconds, and their growth together."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._senders: dict[str, tuple[str, deque[tuple[float, float]]]] = {}

    def update(self, slot: str, record: dict[str, Any]) -> None:
        """Process a record; another incarnation of a slot counts from its own start."""
        by, t, value = str(record.get("by", "")), _float(record.get("t")), _float(record.get(self._key))
        known = self._senders.get(slot)
        if t != t or value != value or (known is None and len(self._senders) >= MAX_SENDERS):
            return
        if known is None or known[0] != by:
            known = self._senders[slot] = (by, deque(maxlen=RATE_POINTS))
        points = known[1]
        points.append((t, value))
        # The point before the window stays: a sender that reports seldom has a rate all the same.
        while len(points) > 2 and t - points[1][0] >= RATE_OVER_S:
            points.popleft()

    def rate(self, now: float) -> float | None:
        """Growth a second of all live senders together; None until one has two points."""
        heard = [points for _, points in self._senders.values() if len(points) > 1]
        if not heard:
            return None
        fresh = [points for points in heard if now - points[-1][0] <= FRESH_S]
        return sum((p[-1][1] - p[0][1]) / (p[-1][0] - p[0][0]) for p in fresh if p[-1][0] > p[0][0])


class Headline:
    """Newest values of the job's columns and progress of the run. Bounded; no I/O.

    Args:
        columns: the job's columns.
        target: steps of the run, if known.
        progress: kind and key of the records that count steps.
        pacing: which metrics the time of a step consists of.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        target: int | None = None,
        progress: tuple[str, str] = ("step", "step"),
        pacing: Pacing | None = None,
    ) -> None:
        self.columns, self.target = tuple(columns), target
        self.step: int | None = None
        self.versions: dict[str, int] = {}
        self._progress = progress
        self._kinds = {column.kind for column in columns} | {progress[0]}
        self._newest: dict[str, dict[str, Any]] = {}
        self._counters = {i: _Counters(column.key) for i, column in enumerate(columns) if column.aggregate == "rate"}
        self._sparks: dict[int, deque[tuple[int, float]]] = {
            i: deque(maxlen=SPARK) for i, column in enumerate(columns) if column.spark
        }
        self._estimator = None if target is None else Estimator(target, pacing or Pacing(), *progress)

    def update(self, record: dict[str, Any]) -> bool:
        """Process one metrics record; True if it counts a step."""
        kind = str(record.get("kind", ""))
        slot = str(record.get("by", "")).partition("#")[0]
        if slot and isinstance(version := record.get("version"), int) and len(self.versions) < MAX_SENDERS:
            self.versions[slot] = version
        if self._estimator is not None:
            self._estimator.update(record)
        if kind not in self._kinds:
            return False
        self._newest[kind] = record
        for i, counters in self._counters.items():
            if self.columns[i].kind == kind:
                counters.update(slot, record)
        step = record.get(self._progress[1])
        counts = kind == self._progress[0] and isinstance(step, int)
        if counts:
            self.step = int(step or 0)
        self._add_to_sparks(kind, record)
        return counts

    def _add_to_sparks(self, kind: str, record: dict[str, Any]) -> None:
        for i, spark in self._sparks.items():
            if self.columns[i].kind == kind:
                at = self.step or 0
                # Steps made again after a restart replace what stood there.
                while kind == self._progress[0] and spark and spark[-1][0] >= at:
                    spark.pop()
                spark.append((at, _float(record.get(self.columns[i].key))))

    def values(self, now: float) -> list[Value]:
        """Every column at wall-clock time `now` (s)."""
        return [
            Value(column.title, self._text(i, now), tuple(v for _, v in self._sparks.get(i, ())))
            for i, column in enumerate(self.columns)
            if column.title
        ]

    def step_line(self, now: float) -> str:
        """The line for a step: every column that has a value and no line of its own, and the time left."""
        of = f"/{self.target}" if self.target else ""
        parts = [f"{self._progress[1]} {self.step if self.step is not None else 0}{of}"]
        for i, column in enumerate(self.columns):
            text = self._text(i, now)
            if not column.line and text != NOTHING:
                parts.append(f"{column.title} {text.replace(' / ', '/')}")
        if (estimate := self.estimate(now)) is not None and estimate.left_s:
            parts.append(str(estimate))
        return "  ".join(parts)

    def lines(self, record: dict[str, Any]) -> list[str]:
        """Lines for this record, from the columns that have a template."""
        return [
            _LenientFormatter().vformat(column.line, (), record)
            for column in self.columns
            if column.line and column.kind == record.get("kind") and record.get(column.key) is not None
        ]

    def estimate(self, now: float) -> Estimate | None:
        """The time left at wall-clock time `now` (s); None where the number of steps is not known."""
        return None if self._estimator is None else self._estimator.estimate(now)

    def _text(self, index: int, now: float) -> str:
        column = self.columns[index]
        newest = self._newest.get(column.kind)
        if newest is None:
            return NOTHING
        if (counters := self._counters.get(index)) is not None:
            rate = counters.rate(now)
            return NOTHING if rate is None else number(rate, column.form)
        value = newest.get(column.key)
        if column.aggregate == "mean_max":
            known = [float(v) for v in value if isinstance(v, int | float)] if isinstance(value, list) else []
            if not known:
                return NOTHING
            return f"{number(sum(known) / len(known), column.form)} / {number(max(known))}"
        text = number(value, column.form)
        return f"{text} / {number(newest.get(column.of))}" if column.of and text != NOTHING else text


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
