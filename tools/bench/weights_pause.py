"""What an update of an engine costs who waits for its tokens, by that one's clock; see weights.py."""

from __future__ import annotations

import bisect
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

ROUNDS = 2000
"""Of the bootstrap."""


@dataclass(frozen=True)
class Loss:
    """Of a window: generation time that it lost against the usual, and its longest gap between tokens (s)."""

    lost_s: float
    longest_s: float


@dataclass
class Compared:
    """Windows with something in them, and windows of the same length, cut the same way, with nothing."""

    disturbed: list[Loss] = field(default_factory=list)
    calm: list[Loss] = field(default_factory=list)

    def lost(self) -> tuple[float, float]:
        """Generation time that is lost (s), and the noise of that; see `difference`."""
        return difference([one.lost_s for one in self.disturbed], [one.lost_s for one in self.calm])

    def longest(self) -> tuple[float, float]:
        """How much longer the longest gap is than that of a window with nothing in it (s), and the noise of that."""
        return difference([one.longest_s for one in self.disturbed], [one.longest_s for one in self.calm])


def window(arrivals: Sequence[float], began: float, ended: float, usual_s: float) -> Loss | None:
    """From the last token before `began` to the first behind `ended`; None where the record does not reach so far.

    Args:
        arrivals: of tokens, ascending. usual_s: the mean gap where nothing happens.
    """
    first = bisect.bisect_right(arrivals, began) - 1
    last = bisect.bisect_right(arrivals, ended)
    if first < 0 or last >= len(arrivals):
        return None
    gaps = [arrivals[n + 1] - arrivals[n] for n in range(first, last)]
    return Loss(sum(gaps) - len(gaps) * usual_s, max(gaps))


def mean_gap(arrivals: Sequence[float], spans: Sequence[tuple[float, float]]) -> float:
    """Between tokens that arrived in these spans of time (s).

    Raises:
        ValueError: in none of them two did.
    """
    seconds, count = 0.0, 0
    for began, ended in spans:
        inside = arrivals[bisect.bisect_left(arrivals, began) : bisect.bisect_right(arrivals, ended)]
        if len(inside) > 1:
            seconds, count = seconds + inside[-1] - inside[0], count + len(inside) - 1
    if not count:
        raise ValueError(f"no two tokens in {spans}")
    return seconds / count


def compare(
    arrivals: Sequence[float],
    disturbed: Sequence[tuple[float, float]],
    calm: Sequence[tuple[float, float]],
) -> Compared:
    """Each window that something happens in, with windows of its length out of the calm spans before and behind it.

    Where a window is cut it has a long gap in it more often than a short one. As those it is compared with are cut the
    same way that falls out, unless the cuts are made by tokens.

    Args:
        disturbed: windows that begin and end at no token's word.
        calm: one more than `disturbed`; the n-th lies before the n-th window.
    """
    found = Compared()
    for number, (began, ended) in enumerate(disturbed):
        beside = calm[number : number + 2]
        usual_s = mean_gap(arrivals, beside)
        loss = window(arrivals, began, ended, usual_s)
        if loss is None:
            continue
        found.disturbed.append(loss)
        length = ended - began
        step = length + 2 * usual_s
        for start, end in beside:
            at = start + usual_s
            while at + step <= end:
                one = window(arrivals, at, at + length, usual_s)
                if one is not None:
                    found.calm.append(one)
                at += step
    return found


def difference(values: Sequence[float], control: Sequence[float]) -> tuple[float, float]:
    """Median less median, and its noise: half of the interval that holds it in 90% of resamplings of both.

    Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 13.3 (percentile interval).
    """
    dice = random.Random(0)

    def drawn_of(what: Sequence[float]) -> float:
        return statistics.median(dice.choices(what, k=len(what)))

    drawn = sorted(drawn_of(values) - drawn_of(control) for _ in range(ROUNDS))
    noise = (drawn[int(0.95 * ROUNDS)] - drawn[int(0.05 * ROUNDS)]) / 2
    return statistics.median(values) - statistics.median(control), noise
