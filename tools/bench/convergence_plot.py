"""The picture of tools/bench/convergence.py."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Okabe and Ito's palette: told apart with any colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#7f7f7f", "#CC79A7")
WINDOW = 20
POINTS = 200


class Curve(NamedTuple):
    """One arm: for each seed the seconds and rewards of its steps; and samples by age, of all of them."""

    name: str
    runs: list[tuple[list[float], list[float]]]
    ages: Counter[int]


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Reward by step and by time, mean over the seeds with their range; below, the ages of the samples."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 5.6), layout="constrained")
        rows = figure.subfigures(2, 1, height_ratios=(3, 2))
        by_step, by_time = rows[0].subplots(1, 2, sharey=True)
        panels = rows[1].subplots(1, max(len(curves), 1), sharey=True, squeeze=False)[0]
        for curve, colour, panel in zip(curves, COLOURS, panels, strict=False):
            _band(by_step, curve, colour, by_time=False)
            _band(by_time, curve, colour, by_time=True)
            _ages(panel, curve, colour)
        by_step.set(xlabel="optimizer step", ylabel=f"reward, mean of {WINDOW} steps")
        by_time.set(xlabel="time since the trainer began (min)")
        by_step.legend(loc="upper left")
        panels[0].set_ylabel("share of samples")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and those before it, at most WINDOW together."""
    return [sum(near) / len(near) for i in range(len(values)) if (near := values[max(0, i + 1 - WINDOW) : i + 1])]


def at(times: Sequence[float], values: Sequence[float], when: float) -> float:
    """The last value that there was by then; the first one before."""
    return values[max(0, bisect_right(times, when) - 1)]


def _band(axes: Any, curve: Curve, colour: str, *, by_time: bool) -> None:
    runs = [
        (seconds if by_time else [float(n + 1) for n in range(len(rewards))], rewards)
        for seconds, rewards in curve.runs
    ]
    end = min(times[-1] for times, _ in runs)
    grid = [end * (n + 1) / POINTS for n in range(POINTS)]
    lines = [[at(times, smooth, when) for when in grid] for times, rewards in runs if (smooth := smoothed(rewards))]
    columns = list(zip(*lines, strict=True))
    shown = [when / 60 for when in grid] if by_time else grid
    axes.fill_between(shown, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.2, linewidth=0)
    axes.plot(shown, [sum(c) / len(c) for c in columns], color=colour, linewidth=1.6, label=curve.name)


def _ages(axes: Any, curve: Curve, colour: str) -> None:
    total = sum(curve.ages.values())
    axes.bar(list(curve.ages), [count / total for count in curve.ages.values()], color=colour, width=0.8)
    axes.set_title(curve.name, fontsize=9, loc="left")
    axes.set_xlabel("age when trained on (updates)")
    axes.set_xlim(min(curve.ages, default=0) - 1, max(curve.ages, default=0) + 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
