"""Plots of a run: what it learned, how stale its samples were, what its processes did. One colour a role."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from relax_rt.roles.report.history import Evaluation, History, SlotLife, StepRecord

# Okabe and Ito's palette: distinguishable with any colour vision.
COLOURS = {
    "registry": "#7f7f7f",
    "queue": "#CC79A7",
    "rollout": "#56B4E9",
    "reward": "#E69F00",
    "trainer": "#009E73",
    "evaluator": "#0072B2",
}
OTHER_COLOUR = "#8C6D46"
PHASES = (("wait", "#D9D9D9"), ("train", COLOURS["trainer"]), ("publish", "#D55E00"))
INK, FAINT = "#222222", "#9A9A9A"
MAX_ROWS = 40

STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E6E6E6",
    "axes.axisbelow": True,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": 150,
    "savefig.facecolor": "white",
}


def draw_plots(history: History, directory: Path, *, bound: float | None = None, title: str = "") -> list[Path]:
    """Draw every plot for which there is data into `directory`; answers with the files.

    Args:
        bound: max_staleness, marked in the histogram when it is finite.
        title: stands over each plot; the run's name.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    drawn: list[Path] = []

    def save(name: str, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
        figure = Figure(figsize=size, layout="constrained")
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=FAINT)
        draw(figure)
        path = directory / name
        figure.savefig(path)
        drawn.append(path)

    directory.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        if history.steps or history.evaluations:
            save("learning_by_step.png", (8, 6), lambda f: _learning(f, history, by_step=True))
            save("learning_by_time.png", (8, 6), lambda f: _learning(f, history, by_step=False))
        if any(step.staleness for step in history.steps):
            save("staleness.png", (6.4, 4), lambda f: _staleness(f, history.steps, bound))
        if history.lives or history.steps:
            rows = min(MAX_ROWS, len({life.slot for life in history.lives})) + bool(history.steps)
            save("timeline.png", (10, 2.0 + 0.34 * rows), lambda f: _timeline(f, history))
    return drawn


def _learning(figure: Any, history: History, *, by_step: bool) -> None:
    top, bottom = figure.subplots(2, 1, sharex=True)
    scale, unit = _time_unit(history.wall_s)

    def at(point: StepRecord | Evaluation) -> float:
        return point.step if by_step else history.active(point.t) / scale

    _reward(top, history, at)
    _accuracy(bottom, history.evaluations, at)
    bottom.set_xlabel("optimizer step" if by_step else f"time since the start ({unit})")
    points: list[StepRecord | Evaluation] = [*history.steps, *history.redone, *history.evaluations]
    last = max((at(point) for point in points), default=1.0)
    bottom.set_xlim(-0.02 * last if by_step else 0.0, max(last * 1.04, 1e-9))
    if by_step:
        bottom.xaxis.get_major_locator().set_params(integer=True)
    else:
        _mark_trainer_deaths((top, bottom), history, scale)


def _reward(axes: Any, history: History, at: Callable[[StepRecord], float]) -> None:
    axes.set_title("Reward, mean of the step's samples")
    axes.set_ylabel("reward")
    colour = COLOURS["trainer"]
    if history.redone:
        xs, ys = [at(step) for step in history.redone], [step.reward for step in history.redone]
        axes.plot(xs, ys, ".", color=FAINT, markersize=4, label="done again after a restart", zorder=1)
    window = max(3, len(history.steps) // 15 | 1)
    smooth = len(history.steps) > 2 * window
    raw = [step.reward for step in history.steps]
    style = {"alpha": 0.35, "linewidth": 1.0} if smooth else {"linewidth": 1.8, "marker": "o", "markersize": 3}
    axes.plot([at(step) for step in history.steps], raw, color=colour, label="each step", **style)
    if smooth:
        axes.plot(
            [at(step) for step in history.steps],
            _smoothed(raw, window),
            color=colour,
            linewidth=2.2,
            label=f"mean of {window} steps",
        )
    if history.redone or smooth:
        axes.legend(loc="lower right")


def _accuracy(axes: Any, evaluations: Sequence[Evaluation], at: Callable[[Evaluation], float]) -> None:
    axes.set_title("Held-out accuracy, exact match, with 95% intervals")
    axes.set_ylabel("accuracy")
    known = sorted((e for e in evaluations if math.isfinite(e.exact)), key=at)
    if not known:
        axes.text(0.5, 0.5, "not evaluated", transform=axes.transAxes, ha="center", color=FAINT)
        return
    xs, ys = [at(e) for e in known], [e.exact for e in known]
    below = [max(0.0, e.exact - e.exact_low) if math.isfinite(e.exact_low) else 0.0 for e in known]
    above = [max(0.0, e.exact_high - e.exact) if math.isfinite(e.exact_high) else 0.0 for e in known]
    colour = COLOURS["evaluator"]
    axes.errorbar(xs, ys, yerr=[below, above], color=colour, marker="o", markersize=5, linewidth=1.6, capsize=3)
    # The newest numbers of both ends are read off most often.
    for i in sorted({0, len(known) - 1}):
        axes.annotate(
            f"{ys[i]:.3f}", (xs[i], ys[i]), (7, -12 if i == 0 else 8), textcoords="offset points", color=colour
        )
    constant = known[-1].constant
    if math.isfinite(constant):
        axes.axhline(constant, color=FAINT, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"best constant answer, {constant:.3f}",
            (1.0, constant),
            (0, 4),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color="#666666",
        )
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)


def _mark_trainer_deaths(panels: Iterable[Any], history: History, scale: float) -> None:
    deaths = [life.end for life in history.lives if life.failure and life.slot.startswith("trainer/")]
    for axes in panels:
        for t in deaths:
            axes.axvline(history.active(t) / scale, color=INK, linewidth=0.9, linestyle=":")
    if deaths:
        first = next(iter(panels))
        first.annotate(
            "trainer died",
            (history.active(deaths[0]) / scale, 1.0),
            (4, -10),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=9,
            color=INK,
        )


def _smoothed(values: Sequence[float], window: int) -> list[float]:
    """Centred mean; at the ends of what there is."""
    half = window // 2
    smooth = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        smooth.append(sum(near) / len(near) if near else math.nan)
    return smooth


def _staleness(figure: Any, steps: Sequence[StepRecord], bound: float | None) -> None:
    axes = figure.subplots()
    samples: Counter[int] = Counter()
    for step in steps:
        samples.update(step.staleness)
    total = sum(samples.values())
    finite = bound is not None and math.isfinite(bound)
    last = max([*samples, int(bound) if finite and bound is not None else 0])
    xs = list(range(last + 1))
    shares = [100 * samples[x] / total for x in xs]
    bars = axes.bar(xs, shares, width=0.7, color=COLOURS["queue"])
    if len(xs) <= 12:
        axes.bar_label(bars, [f"{share:.1f}%" if share else "" for share in shares], padding=2, fontsize=9)
        axes.set_xticks(xs)
    if finite and bound is not None:
        axes.axvline(bound + 0.5, color="#D55E00", linestyle="--", linewidth=1.4)
        axes.annotate(
            f"max_staleness = {bound:g}",
            (bound + 0.5, 1.0),
            (-5, -4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            fontsize=9,
            color="#D55E00",
        )
    axes.set_xlim(-0.6, last + 0.75)
    axes.margins(y=0.12)
    mean = sum(s * n for s, n in samples.items()) / total
    axes.set_title(f"Staleness at consumption, {total:,} samples, mean {mean:.2f}")
    axes.set_xlabel("staleness (policy versions)")
    axes.set_ylabel("share of samples (%)")


def _timeline(figure: Any, history: History) -> None:
    axes = figure.subplots()
    scale, unit = _time_unit(history.wall_s)
    rows = _timeline_rows(history)

    def span(start: float, end: float) -> tuple[float, float]:
        left = history.active(start) / scale
        return left, max(0.0, history.active(end) / scale - left)

    labels: list[str] = []
    for y, (slot, lives) in enumerate(rows):
        labels.append(slot or "trainer's steps")
        if slot:
            colour = COLOURS.get(slot.partition("/")[0], OTHER_COLOUR)
            alive = [span(life.ready, life.end) for life in lives if life.ready is not None]
            starting = [span(life.start, life.ready if life.ready is not None else life.end) for life in lives]
            axes.broken_barh(starting, (y - 0.3, 0.6), facecolors=colour, alpha=0.35, linewidth=0)
            axes.broken_barh(alive, (y - 0.3, 0.6), facecolors=colour, linewidth=0)
            deaths = [span(life.end, life.end)[0] for life in lives if life.failure]
            axes.plot(
                deaths, [y] * len(deaths), linestyle="", marker="X", markersize=9, color=INK, markeredgecolor="white"
            )
        else:
            _phase_row(axes, y, history, span)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(0, max(history.wall_s / scale, 1e-9))
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time since the start ({unit})")
    axes.set_title("What the processes did")
    _timeline_legend(figure, history)


def _timeline_rows(history: History) -> list[tuple[str, list[SlotLife]]]:
    """Slots in the order first started, the trainer's steps under the trainer. Too many: those that died first."""
    by_slot: dict[str, list[SlotLife]] = {}
    for life in history.lives:
        by_slot.setdefault(life.slot, []).append(life)
    shown = sorted(by_slot, key=lambda slot: -sum(bool(life.failure) for life in by_slot[slot]))[:MAX_ROWS]
    rows: list[tuple[str, list[SlotLife]]] = []
    for slot, lives in by_slot.items():
        if slot in shown:
            rows.append((slot, lives))
            if slot == "trainer/0" and history.steps:
                rows.append(("", []))
    if history.steps and ("", []) not in rows:
        rows.append(("", []))
    return rows


Span = Callable[[float, float], tuple[float, float]]


def _phase_row(axes: Any, y: int, history: History, span: Span) -> None:
    for steps, alpha in ((history.redone, 0.4), (history.steps, 1.0)):
        for (_, colour), spans in zip(PHASES, _phase_spans(steps), strict=True):
            bars = [span(start, end) for start, end in spans]
            axes.broken_barh(bars, (y - 0.3, 0.6), facecolors=colour, linewidth=0, alpha=alpha)


def _phase_spans(steps: Sequence[StepRecord]) -> list[list[tuple[float, float]]]:
    """Start and end of each step's wait, training and publication; the record is written at the end of the last."""
    spans: list[list[tuple[float, float]]] = [[], [], []]
    for step in steps:
        end = step.t
        for i, seconds in ((2, step.publish_s), (1, step.train_s), (0, step.wait_s)):
            if math.isfinite(seconds):
                spans[i].append((end - seconds, end))
                end -= seconds
    return spans


def _timeline_legend(figure: Any, history: History) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    if history.lives:
        handles.append(Patch(facecolor=COLOURS["rollout"], alpha=0.35, label="pale: starting"))
    if any(life.failure for life in history.lives):
        handles.append(Line2D([], [], linestyle="", marker="X", markersize=8, color=INK, label="died"))
    every = [*history.steps, *history.redone]
    seconds = {name: sum(s for step in every if (s := getattr(step, f"{name}_s")) == s) for name, _ in PHASES}
    total = sum(seconds.values())
    if total:
        handles += [
            Patch(facecolor=colour, label=f"trainer: {name} ({seconds[name] / total:.0%})") for name, colour in PHASES
        ]
    if history.redone:
        handles.append(Patch(facecolor=COLOURS["trainer"], alpha=0.4, label="done again after a restart"))
    figure.legend(handles=handles, loc="outside lower left", ncols=3)


def _time_unit(seconds: float) -> tuple[float, str]:
    if seconds < 180:
        return 1.0, "s"
    return (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")
