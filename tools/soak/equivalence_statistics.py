"""Whether two ways of running learn the same: the interval of a paired difference, and what may be concluded from it.

The unit of replication is the run, not the item: what chaos does to learning differs from run to run, and a thousand
items of one run cannot show that. So the interval is Student's t over the differences of the seeds, n - 1 degrees of
freedom. Three or four differences may lie close together by luck, which would make it narrower than the held-out items
themselves allow; so its standard error is never taken as less than the binomial one of the items. The two arms are
taken as independent there, which on the same items is at worst too wide. It speaks of these held-out items.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

MARGIN = 0.08
LEAST_SEEDS, LEAST_ITEMS = 3, 500
T95 = (6.3138, 2.9200, 2.3534, 2.1318, 2.0150, 1.9432, 1.8946, 1.8595, 1.8331, 1.8125)
T95 += (1.7959, 1.7823, 1.7709, 1.7613, 1.7531, 1.7459, 1.7396, 1.7341, 1.7291)
"""0.95 quantiles of Student's t, from one degree of freedom on: the ends of a two-sided 90% interval."""
MAX_SEEDS = len(T95) + 1


class Score(msgspec.Struct, frozen=True):
    """Right answers among held-out items."""

    right: int
    items: int

    @property
    def share(self) -> float:
        """0 to 1."""
        return self.right / self.items

    @property
    def variance(self) -> float:
        """Of the share, by the items; not 0 where all or none are right."""
        smoothed = (self.right + 1) / (self.items + 2)
        return smoothed * (1 - smoothed) / self.items


class Pair(msgspec.Struct, frozen=True):
    """Two runs of one seed."""

    seed: int
    undisturbed: Score
    other: Score

    @property
    def difference(self) -> float:
        """The other's accuracy less the undisturbed one's."""
        return self.other.share - self.undisturbed.share


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """The mean difference and its 90% interval.

    Attributes:
        seeds_se, items_se: standard error by the spread over the seeds, and by the items; the larger one counts.
        seeds: pairs. items: the fewest that any of the scores rests on.
    """

    mean: float
    low: float
    high: float
    seeds_se: float
    items_se: float
    seeds: int
    items: int

    @property
    def inside(self) -> bool:
        """Within the margin on either side."""
        return self.low > -MARGIN and self.high < MARGIN

    @property
    def apart(self) -> bool:
        """A difference is shown, and the procedure would not call it equivalent."""
        return (self.high < 0 or self.low > 0) and not self.inside

    @property
    def lack(self) -> str:
        """What there is too little of to conclude anything; empty: enough."""
        if self.seeds < LEAST_SEEDS:
            return f"{self.seeds} seeds, at least {LEAST_SEEDS} are wanted"
        return f"{self.items} items, at least {LEAST_ITEMS} are wanted" if self.items < LEAST_ITEMS else ""


class Conclusion(msgspec.Struct, frozen=True):
    """equivalent, or not shown for these reasons."""

    verdict: str
    reasons: list[str]


def interval(pairs: Sequence[Pair]) -> Interval | None:
    """The 90% interval of the mean difference; None for fewer than two pairs.

    Raises:
        ValueError: more pairs than there are quantiles for.
    """
    count = len(pairs)
    if count > MAX_SEEDS:
        raise ValueError(f"{count} seeds: at most {MAX_SEEDS}")
    if count < 2:
        return None
    differences = [pair.difference for pair in pairs]
    mean = statistics.fmean(differences)
    seeds_se = statistics.stdev(differences) / math.sqrt(count)
    items_se = math.sqrt(sum(pair.undisturbed.variance + pair.other.variance for pair in pairs)) / count
    half = T95[count - 2] * max(seeds_se, items_se)
    return Interval(
        mean=mean,
        low=mean - half,
        high=mean + half,
        seeds_se=seeds_se,
        items_se=items_se,
        seeds=count,
        items=min(min(pair.undisturbed.items, pair.other.items) for pair in pairs),
    )


def conclude(
    disturbed: Interval | None,
    controls: Mapping[str, Interval | None],
    problems: Sequence[str] = (),
    *,
    name: str = "under chaos",
) -> Conclusion:
    """The verdict, by rules that were made before.

    Args:
        disturbed: chaos, or whatever `name` says, against undisturbed.
        controls: each broken on purpose; a test that does not tell every one of them apart has shown nothing.
        problems: runs that were not what they were to be.
    """
    reasons = list(problems)
    if disturbed is None:
        reasons.append(f"{name}: too few runs for an interval")
    elif disturbed.lack:
        reasons.append(f"{name}: {disturbed.lack}")
    elif not disturbed.inside:
        reasons.append(
            f"{name}: [{disturbed.low:+.3f}, {disturbed.high:+.3f}] is not inside ±{MARGIN}"
            + (": a DIFFERENCE is shown" if disturbed.apart else "")
        )
    if not controls:
        reasons.append("there is no negative control")
    for control, found in controls.items():
        if found is None or found.lack:
            reasons.append(f"{control}: {found.lack if found else 'too few runs for an interval'}")
        elif not found.apart:
            reasons.append(f"{control}: [{found.low:+.3f}, {found.high:+.3f}] is not told apart")
    return Conclusion("not shown" if reasons else "equivalent", reasons)
