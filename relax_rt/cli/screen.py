"""What is shown of a run on a terminal: by the agent to `relax-rt up`, and from outside to `attach`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from relax_rt.config.job import load_job, pacing_of
from relax_rt.config.schema import RunConfig
from relax_rt.observe.screen import Screen
from relax_rt.supervision.api import RunStatus


class Shown:
    """The screen as the agent wants it: called with each status, closed at the end."""

    def __init__(self, config: RunConfig, run_dir: Path, console: Console) -> None:
        job = load_job(config.run.job)
        self._run_dir = run_dir
        self._screen = Screen(run_dir, job.headline, job.steps(config), console, pacing=pacing_of(config))
        self._last: RunStatus | None = None

    def __call__(self, status: RunStatus) -> None:
        self._last = status
        self._screen.update(status)

    def close(self, summary_lines: Sequence[str] = ()) -> None:
        """Show the end, these lines, and where to look further."""
        lines = [*summary_lines, f"everything is in {self._run_dir}"]
        if self._last is not None and self._last.diagnosis is not None:
            lines.append(f"more: relax-rt why --run {self._run_dir}")
        self._screen.close(lines)


def live(config: RunConfig, run_dir: Path) -> Shown:
    """A live screen on a terminal, lines elsewhere."""
    return Shown(config, run_dir, Console())


def plain(config: RunConfig, run_dir: Path) -> Shown:
    """Lines, also on a terminal."""
    return Shown(config, run_dir, Console(force_terminal=False))
