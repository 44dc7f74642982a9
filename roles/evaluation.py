"""Scoring held-out completions, and how sure the numbers are. Pure functions."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Z95 = 1.959963984540054
"""Two-sided 95% quantile of the normal distribution."""
INTEGER = re.compile(r"[+-]?\d+(?:,\d{3})*(?!\d)")
BARE_INTEGER = re.compile(r"[+-]?\d+")


def bare_integer(text: str) -> int | None:
    """The integer that is all of the text but surrounding white space."""
    text = text.strip()
    return int(text) if BARE_INTEGER.fullmatch(text) and len(text) < 1000 else None


def last_integer(text: str) -> int | None:
    """The last integer anywhere in the text; commas may group its thousands, a minus belongs to it unless a digit or
    letter stands before (as in `3-2`)."""
    found = None
    for match in INTEGER.finditer(text):
        sign_of_subtraction = match.start() > 0 and text[match.start() - 1].isalnum()
        found = match.group().lstrip("+-") if sign_of_subtraction else match.group()
    return int(found.replace(",", "")) if found is not None and len(found) < 1000 else None


def answers_are_integers(answers: Sequence[str]) -> bool:
    """Whether every answer is a bare integer, so that answers are compared as numbers."""
    return bool(answers) and all(bare_integer(answer) is not None for answer in answers)


def squeeze(text: str) -> str:
    """Text to compare: white space squeezed, case kept."""
    return " ".join(text.split())


def exact(completion: str, answer: str, *, integers: bool) -> bool:
    """The whole completion is the answer (as a number if `integers`)."""
    if integers:
        return bare_integer(completion) is not None and bare_integer(completion) == bare_integer(answer)
    return squeeze(completion) == squeeze(answer)


def lenient(completion: str, answer: str, *, integers: bool) -> bool:
    """Right whatever stands around it: the last integer anywhere, or the answer as whole words of the text, any case.

    It tells learning the task from learning the format.
    """
    if integers:
        return last_integer(completion) == bare_integer(answer)
    wanted = squeeze(answer).casefold()
    return bool(wanted) and re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", squeeze(completion).casefold()) is not None


def constant_answer(answers: Sequence[str]) -> tuple[str, float]:
    """The answer that is right most often when given to every question, and how often."""
    if not answers:
        return "", 0.0
    # The smallest of equally frequent ones, so that the order of the items changes nothing.
    counts = Counter(squeeze(answer) for answer in answers)
    best = min(counts, key=lambda answer: (-counts[answer], answer))
    return best, counts[best] / len(answers)


def wilson(successes: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share (E. B. Wilson 1927); (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    share, zz = successes / n, z * z
    centre = (share + zz / (2 * n)) / (1 + zz / n)
    half = z * math.sqrt(share * (1 - share) / n + zz / (4 * n * n)) / (1 + zz / n)
    # At 0 and n the bound is exact; rounding must not push it past.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def difference(before: tuple[int, int], after: tuple[int, int], z: float = Z95) -> tuple[float, float]:
    """Interval of after's share minus before's, each (successes, n): Newcombe's hybrid of Wilson's (1998, method 10).

    It takes the two as independent; on the same items that is at worst too wide when right answers go together.
    """
    (s1, n1), (s2, n2) = after, before
    if n1 == 0 or n2 == 0:
        return -1.0, 1.0
    p1, p2 = s1 / n1, s2 / n2
    low1, high1 = wilson(s1, n1, z)
    low2, high2 = wilson(s2, n2, z)
    gap = p1 - p2
    return gap - math.hypot(p1 - low1, high2 - p2), gap + math.hypot(high1 - p1, p2 - low2)


def evaluate(
    completions: Sequence[str], answers: Sequence[str], stopped: Sequence[bool], before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Scores of held-out completions.

    Args:
        completions, answers: one an item, special tokens left out.
        stopped: whether the completion ended by itself; one that was cut is never exact nor of the right format.
        before: an earlier result of this function, to compare with.

    Returns:
        items; format, exact, lenient (shares) with `*_low` and `*_high` (Wilson 95%); constant and constant_answer, the
        best that one fixed answer could do; with `before`, gain of exact and lenient_gain, with their 95% intervals.

    Raises:
        ValueError: the sequences differ in length.
    """
    n = len(completions)
    integers = answers_are_integers(answers)
    rows = list(zip(completions, answers, stopped, strict=True))
    counts = {
        "format": sum(ended and (not integers or bare_integer(text) is not None) for text, _, ended in rows),
        "exact": sum(ended and exact(text, answer, integers=integers) for text, answer, ended in rows),
        "lenient": sum(lenient(text, answer, integers=integers) for text, answer, _ in rows),
    }
    answer, constant = constant_answer(answers)
    result: dict[str, Any] = {"items": n, "constant": constant, "constant_answer": answer}
    for name, count in counts.items():
        low, high = wilson(count, n)
        result |= {name: count / n if n else 0.0, f"{name}_low": low, f"{name}_high": high}
    if before is not None:
        for name, gain in (("exact", "gain"), ("lenient", "lenient_gain")):
            earlier = (round(before[name] * before["items"]), int(before["items"]))
            low, high = difference(earlier, (counts[name], n))
            result |= {gain: result[name] - before[name], f"{gain}_low": low, f"{gain}_high": high}
    return result
