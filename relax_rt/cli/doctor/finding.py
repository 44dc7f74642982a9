"""What a check found."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail"]
MIB = 1 << 20
GIB = 1 << 30


class Finding(msgspec.Struct, frozen=True):
    """One line of the doctor.

    Attributes:
        section: ``machine``, ``limits``, ``gpu``, ``software``, ``run``.
        level: fail: a run cannot work; warn: it may be slow, or break later.
        value: what was seen.
        advice: what to do about it; empty when there is nothing to do.
    """

    section: str
    name: str
    level: Level
    value: str
    advice: str = ""


def ok(section: str, name: str, value: str) -> Finding:
    """Nothing to do."""
    return Finding(section, name, "ok", value)


def judged(section: str, name: str, value: str, *, fail: str = "", warn: str = "") -> Finding:
    """The finding whose advice is given first; ok when there is none."""
    if fail:
        return Finding(section, name, "fail", value, fail)
    return Finding(section, name, "warn" if warn else "ok", value, warn)


def size(count: float) -> str:
    """Bytes as people read them."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / MIB:,.0f} MiB"
