"""From a metrics record to named numbers at a step. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

MOST = 256
"""Numbers of one record; a reward function may have many components."""
NAME_CHARACTERS = 200
LEFT_OUT = frozenset(
    {
        "t",
        "m",
        "by",
        "kind",
        "step",
        "slot",
        "epoch",
        "keys",
        "digests",
        "prompts",
        "versions",
        "samples",
        "set",
        "when",
    }
)
"""Identity and evidence, not measurements; `samples` is a list of names in some records."""
SPREAD = frozenset({"staleness"})
"""Lists of numbers of which mean and maximum are told."""


class Point(msgspec.Struct, frozen=True):
    """Numbers of one record.

    Attributes:
        step: optimizer step that they belong to. t: wall-clock time, s since 1970.
        values: by name, `train/reward_mean`; all finite.
        redone: the trainer went back: what was told of this step and later ones no longer counts.
    """

    step: int
    t: float
    values: dict[str, float]
    redone: bool = False


class Scalars:
    """Names the numbers of records as they come, and knows at which step the run is.

    Args:
        step: of the last step that was told before.
    """

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def take(self, record: Mapping[str, Any]) -> Point | None:
        """The numbers of one record; None if it has none."""
        kind, own = str(record.get("kind", "")), record.get("step")
        prefix, redone = _prefix(kind, record), False
        if prefix is None:
            return None
        step = own if isinstance(own, int) and not isinstance(own, bool) else self.step
        if kind == "step":
            redone = step <= self.step
            self.step = step
        values = dict(_first(_numbers(prefix, record), MOST))
        t = record.get("t")
        if not values:
            return None
        return Point(step, float(t) if isinstance(t, int | float) else 0.0, values, redone)


def _prefix(kind: str, record: Mapping[str, Any]) -> str | None:
    """What the record's numbers stand under; None: it has none to show."""
    if kind in ("", "produced"):
        return None
    if kind == "step":
        return "train"
    if kind in ("evaluation", "evaluation_set"):
        return str(record.get("set") or "held_out")
    slot = record.get("slot")
    return f"{kind}/{str(slot).rpartition('/')[2]}" if slot else kind


def _first(pairs: Iterator[tuple[str, float]], most: int) -> Iterator[tuple[str, float]]:
    for _, pair in zip(range(most), pairs, strict=False):
        yield pair


def _numbers(prefix: str, record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        name = f"{prefix}/{key}"[:NAME_CHARACTERS]
        if key in LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            yield from _numbers(name, value)
        elif key in SPREAD and isinstance(value, list):
            found = [float(one) for one in value if isinstance(one, int | float) and math.isfinite(one)]
            if found:
                yield f"{name}_mean", math.fsum(one / len(found) for one in found)
                yield f"{name}_max", max(found)
        elif isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)
