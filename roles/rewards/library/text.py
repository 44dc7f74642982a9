"""Texts that rewards and evaluation compare: normalised white space, integers, lists."""

from __future__ import annotations

import re
from typing import Any

from relax_rt.roles.data.items import answer_text

MINUS = str.maketrans("\u2212\ufe63\uff0d\uff0b\uff0c", "---+,")
"""Signs and the comma as other keyboards and LaTeX renderers write them."""
NUMBER = re.compile(r"[+-]?\d+(?:,\d{3})*(?!\d)(\.\d+)?")
BROKEN_OFF = re.compile(r"(?:\^|\d[/:]|(?:^|[\d\s(\[{=$:,+-])\.)$")
"""What stands before a number that is a part of another one: `2^`, `2/`, `3:`, and the point of `1.2.3` or `.5`."""
BARE_INTEGER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)")


def bare_integer(text: str) -> int | None:
    """The integer that is all of the text but surrounding white space; commas may group its thousands."""
    text = text.strip()
    if len(text) >= 1000 or BARE_INTEGER.fullmatch(text := text.translate(MINUS)) is None:
        return None
    return int(text.replace(",", ""))


def last_integer(text: str) -> int | None:
    """The last number anywhere in the text, if it is an integer; commas may group its thousands, a minus belongs to it
    unless a digit or letter stands before (as in `3-2`). A part of a number is none: the 5 of 3.5, .5, 2/5, 3:5, 2^5;
    the 5 of `Answer:5` and `so...5` is one."""
    text = text.translate(MINUS)
    match = None
    for match in NUMBER.finditer(text):  # noqa: B007 the last one is wanted
        pass
    if match is None or len(match[0]) >= 1000 or (match[1] or "").strip(".0"):
        return None
    before = text[max(0, match.start() - 2) : match.start()]
    if BROKEN_OFF.search(before):
        return None
    number = match[0].removesuffix(match[1] or "")
    return int((number.lstrip("+-") if before[-1:].isalnum() else number).replace(",", ""))


def squeeze(text: str) -> str:
    """Text to compare: white space squeezed, case kept."""
    return " ".join(text.split())


def listed(answer: Any) -> str:
    """As answer_text, with the members of a list side by side: 1, 2, 3."""
    return ", ".join(answer_text(one) for one in answer) if isinstance(answer, list | tuple) else answer_text(answer)
