"""The live screen of a run from outside: the run does not know of it, and goes on when it is left."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from relax_rt.cli.app import FAILED, INTERRUPTED
from relax_rt.cli.runs import resolved_config
from relax_rt.config.job import load_job, pacing_of
from relax_rt.observe.screen import Screen
from relax_rt.supervision import control
from relax_rt.supervision.api import RunStatus
from relax_rt.transport.rpc.errors import RelaxError

POLL_S = 0.25
SILENT_S = 30.0
"""An agent that has not answered for so long is given up."""


def attach(run_dir: Path, *, plain: bool) -> int:
    """Show a living run until it ends or Ctrl-C; answers with the run's exit code, or that of an interrupt.

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
