"""A run on a terminal: shown by its agent to `relax-rt up`, and from outside to `relax-rt attach`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from relax_rt.cli.app import FAILED, INTERRUPTED
from relax_rt.cli.runs import resolved_config
from relax_rt.config.job import load_job, pacing_of
from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.agent import RunStatus
from relax_rt.observe.screen import Screen
from relax_rt.supervision import control
from relax_rt.transport.rpc.errors import RelaxError

POLL_S = 0.25
SILENT_S = 30.0
"""Attaching fails when the agent has not answered for this long."""


class AgentScreen:
    """The screen in the form that the agent uses: called with each status, closed at the end."""

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


def live(config: RunConfig, run_dir: Path) -> AgentScreen:
    """A live screen on a terminal, lines elsewhere."""
    return AgentScreen(config, run_dir, Console())


def plain(config: RunConfig, run_dir: Path) -> AgentScreen:
    """Lines, also on a terminal."""
    return AgentScreen(config, run_dir, Console(force_terminal=False))


def attach_screen(run_dir: Path, *, plain: bool) -> int:
    """Show a living run until it ends or Ctrl-C; returns the run's exit code, or INTERRUPTED.

    Raises:
        NoRun: no run lives there.
        RelaxError: its agent does not answer.
    """
    status = control.status(run_dir)
    if status.ended:
        why = f"it is over: {status.status}" + (f", {status.reason}" if status.reason else "")
        raise control.NoRun(f"no run lives in {run_dir}", why=why, hint="`relax-rt why` tells of its end")
    config = resolved_config(run_dir)
    job = load_job(config.run.job)
    steps = job.steps(config)
    console = Console(force_terminal=False) if plain else Console()
    # A picture shows what happened last; lines would repeat all of it.
    began = 0.0 if console.is_terminal and not plain else None
    screen = Screen(run_dir, job.headline, steps, console, began=began, pacing=pacing_of(config), starts=False)
    try:
        status = _follow(run_dir, screen)
    except KeyboardInterrupt:
        screen.close([f"left; the run goes on: {run_dir}"])
        return INTERRUPTED
    except BaseException:
        screen.close()
        raise
    screen.close([f"{status.name} is {status.status}: {status.reason}", f"everything is in {run_dir}"])
    return FAILED if status.exit_code is None else status.exit_code


def _follow(run_dir: Path, screen: Screen) -> RunStatus:
    heard = time.monotonic()
    while True:
        try:
            status = control.status(run_dir)
            heard = time.monotonic()
        except RelaxError:
            if time.monotonic() - heard > SILENT_S:
                raise
        else:
            screen.update(status)
            if status.ended:
                return status
        time.sleep(POLL_S)
