"""Scores of held-out completions and their confidence intervals. Pure functions."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from relax_rt.roles.rewards.library.final_answer import bare_integer, last_integer, squeeze

Z95 = 1.959963984540054
"""Two-sided 95% quantile of the normal distribution."""


def answers_are_integers(answers: Sequence[str]) -> bool:
    """Whether every answer is a bare integer, so that answers are compared as numbers."""
    return bool(answers) and all(bare_integer(answer) is not None for answer in answers)


def exact(completion: str, answer: str, *, integers: bool) -> bool:
    """Whether the whole completion is the answer (as a number if `integers`)."""
    if integers:
        return bare_integer(completion) is not None and bare_integer(completion) == bare_integer(answer)
    return squeeze(completion) == squeeze(answer)


def lenient(completion: str, answer: str, *, integers: bool) -> bool:
    """Whether the answer is there: the last integer anywhere, or the answer as whole words of the text, any case.

    It separates learning the task from learning the format.
    """
    if integers:
        return last_integer(completion) == bare_integer(answer)
    wanted = squeeze(answer).casefold()
    return bool(wanted) and re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", squeeze(completion).casefold()) is not None


def constant_answer(answers: Sequence[str]) -> tuple[str, float]:
    """Return the answer that is right most often when given to every question, and how often."""
    if not answers:
        return "", 0.0
    # The smallest of equally frequent ones, so that the order of the items changes nothing.
    counts = Counter(squeeze(answer) for answer in answers)
    best = min(counts, key=lambda answer: (-counts[answer], answer))
    return best, counts[best] / len(answers)


def pass_at(n: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k completions is right, from n of which `right` are.

    1 - C(n - right, k) / C(n, k), as a product: Chen et al. 2021 (arXiv 2107.03374), equation 1.

    Raises:
        ValueError: unless 0 <= right <= n and 1 <= k <= n.
    """
    if not (0 <= right <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} completions of which {right} are right")
    if n - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - right + 1, n + 1))


def wilson(successes: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share (E. B. Wilson 1927); (0, 1) for n = 0.

    `successes` may be a sum of numbers between 0 and 1: the interval is then rather too wide, because such numbers vary
    at most as much as zeros and ones of the same mean.
    """
    if n == 0:
        return 0.0, 1.0
    share, zz = successes / n, z * z
    centre = (share + zz / (2 * n)) / (1 + zz / n)
    half = z * math.sqrt(share * (1 - share) / n + zz / (4 * n * n)) / (1 + zz / n)
    # At 0 and n the bound is exact; rounding must not push it past.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def difference(before: tuple[float, int], after: tuple[float, int], z: float = Z95) -> tuple[float, float]:
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


GAINS = {"exact": "gain", "lenient": "lenient_gain", "success": "success_gain"}


def evaluate(
    completions: Sequence[str],
    answers: Sequence[str],
    stopped: Sequence[bool],
    before: Mapping[str, Any] | None = None,
    *,
    samples: int = 1,
    right: Sequence[bool] | None = None,
    ks: Sequence[int] = (1,),
) -> dict[str, Any]:
    """Score held-out completions.

    Args:
        completions: `samples` of each item, item by item, special tokens left out. answers: one an item.
        stopped: whether the completion ended by itself; one that was cut is never exact nor of the right format.
        before: an earlier result of this function, to compare with.
        right: which completions a reward function found right; None: those that are exact.
        ks: the k of pass@k, each at most `samples`.

    Returns:
        items, samples; format, exact, lenient (shares of all completions), with `right` also success, each with `*_low`
        and `*_high`; pass_at, pass_at_low, pass_at_high: by k, means over the items of `pass_at`; constant and
        constant_answer, the best that one fixed answer could do; with `before`, gain of exact, lenient_gain and
        success_gain. Intervals are 95% (Wilson) of as many draws as there are items: completions of one item go
        together.

    Raises:
        ValueError: the sequences differ in length, or pass@k has too few samples.
    """
    n = len(answers)
    integers = answers_are_integers(answers)
    every = [answer for answer in answers for _ in range(samples)]
    rows = list(zip(completions, every, stopped, strict=True))
    exactly = [ended and exact(text, answer, integers=integers) for text, answer, ended in rows]
    hits = {
        "format": [ended and (not integers or bare_integer(text) is not None) for text, _, ended in rows],
        "exact": exactly,
        "lenient": [lenient(text, answer, integers=integers) for text, answer, _ in rows],
    }
    if right is not None:
        hits["success"] = [found for found, _ in zip(right, rows, strict=True)]
    answer, constant = constant_answer(answers)
    result: dict[str, Any] = {"items": n, "samples": samples, "constant": constant, "constant_answer": answer}
    for name, found in hits.items():
        result |= _share(name, sum(found) / samples, n)
    result |= _pass_at(hits.get("success", exactly), n, samples, ks)
    for name, gain in GAINS.items():
        if before is not None and name in before and name in result:
            items = int(before["items"])
            low, high = difference((before[name] * items, items), (result[name] * n, n))
            result |= {gain: result[name] - before[name], f"{gain}_low": low, f"{gain}_high": high}
    return result


def _share(name: str, total: float, n: int) -> dict[str, float]:
    low, high = wilson(total, n)
    return {name: total / n if n else 0.0, f"{name}_low": low, f"{name}_high": high}


def _pass_at(right: Sequence[bool], n: int, samples: int, ks: Sequence[int]) -> dict[str, dict[str, float]]:
    counts = [sum(right[i * samples : (i + 1) * samples]) for i in range(n)]
    found: dict[str, dict[str, float]] = {"pass_at": {}, "pass_at_low": {}, "pass_at_high": {}}
    for k in ks:
        total = math.fsum(pass_at(samples, count, k) for count in counts)
        for name, value in _share("pass_at", total, n).items():
            found[name][str(k)] = value
    return found
