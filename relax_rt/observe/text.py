"""Formats numbers and phrases for people."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from relax_rt.config.problems import BadInput

BLOCKS = "▁▂▃▄▅▆▇█"
NOTHING = "–"
MIB, GIB = 1 << 20, 1 << 30
_DURATION = re.compile(r"^(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h)?$")
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def parse_duration(text: str) -> float:
    """Parse a duration to seconds: ``500ms``, ``5s``, ``2.5m``, ``1h``, or a number of seconds.

    Raises:
        BadInput: it is not a duration.
    """
    found = _DURATION.match(text.strip())
    if found is None:
        raise BadInput(f"{text!r} is not a duration", hint="as 500ms, 5s, 2m, 1h")
    return float(found[1]) * _UNIT_S[found[2]]


def duration(seconds: float) -> str:
    """``4.2 ms``, ``0.42 s``, ``9.1 s``, ``48 s``, ``3m 05s``, ``1h 02m``, ``2d 03h``."""
    if not math.isfinite(seconds):
        return NOTHING
    if 0 < seconds < 0.1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 9.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h {minutes:02d}m"
    return f"{hours // 24}d {hours % 24:02d}h"


def count(n: float) -> str:
    """``812``, ``11,520``, ``1.23 M``."""
    if not math.isfinite(n):
        return NOTHING
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if abs(n) >= size:
            return f"{n / size:.2f} {letter}"
    return f"{n:,.0f}"


def byte_size(n: float) -> str:
    """``640 MiB``, ``1.5 GiB``."""
    return f"{n / GIB:,.1f} GiB" if n >= GIB else f"{n / MIB:,.0f} MiB"


def number(value: Any, form: str = "") -> str:
    """A value of a record by a format specification; whole numbers without one as `count` writes them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, int | float) or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if math.isinf(value):
        return "inf"
    if form:
        return format(value, form)
    return count(value) if float(value).is_integer() else f"{value:.4g}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as blocks, from the lowest to the highest of them; gaps where one is not a number."""
    shown = list(values)[-width:] if width > 0 else []
    known = [value for value in shown if math.isfinite(value)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(BLOCKS) - 1

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return BLOCKS[round((value - low) / span * top)] if span > 0 else BLOCKS[top // 2]

    return "".join(block(value) for value in shown)


def waits(reason: str) -> str:
    """What a slot waits for, as a phrase."""
    return reason if reason.startswith("waits ") else f"waits: {reason}"


def pending_on(state: str) -> str:
    """What a slot without a report waits for, by its state; empty: nothing is known."""
    known = {"pending": "the tiers below it", "requested": "its process", "starting": "to be ready"}
    return known.get(state, "")


def clip(text: str, width: int) -> str:
    """Text on one line, cut to width with an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"
