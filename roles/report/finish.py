"""Write what remains of a run: summary.json and the plots, after the last role has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.report.history import History, read_history
from relax_rt.roles.report.plots import draw_plots
from relax_rt.roles.report.summary import summarise

SUMMARY = "summary.json"
PLOTS = "plots"


def finish(run_dir: Path, config: RLConfig) -> dict[str, Any]:
    """Write summary.json and the plots of a run that has ended; return the summary."""
    return report(
        run_dir,
        name=config.run.name,
        target=config.algorithm.steps,
        bound=config.algorithm.max_staleness,
    )


def report(run_dir: Path, *, name: str = "", target: int | None = None, bound: float | None = None) -> dict[str, Any]:
    """Write summary.json and the plots of a run without its config.

    Args:
        name: the run's name, in the summary and over the plots.
        target: steps that the run was to make.
        bound: max_staleness; None or infinity: unbounded.

    Raises:
        OSError: summary.json cannot be written.
    """
    history = read_history(run_dir)
    summary = {"name": name, **summarise(history, run_dir=run_dir, target=target, bound=bound)}
    # Written before the plots too: whatever happens to them, the numbers are there.
    _write(run_dir / SUMMARY, summary)
    summary["plots"] = _draw(history, run_dir, bound, name)
    _write(run_dir / SUMMARY, summary)
    return summary


def _draw(history: History, run_dir: Path, bound: float | None, name: str) -> dict[str, Any]:
    try:
        files = draw_plots(history, run_dir / PLOTS, bound=bound, title=name)
    except ImportError as error:
        return {"files": [], "skipped": f"{error}; install matplotlib, or relax-rt[cpu] or relax-rt[gpu]"}
    except OSError as error:
        return {"files": [], "skipped": str(error)}
    return {"files": [str(path) for path in files], "skipped": "" if files else "there is nothing to draw"}


def _write(path: Path, summary: dict[str, Any]) -> None:
    fresh = path.with_name(f".{path.name}")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")
    fresh.replace(path)
