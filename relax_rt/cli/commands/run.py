"""Bringing a run up and ending it."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from relax_rt.cli.app import DEFAULT_CONFIG, OK, RUN, Config, Overrides, Run, app
from relax_rt.transport.errors import RelaxError


@app.command(group=RUN)
def up(
    config: Config = DEFAULT_CONFIG,
    *,
    overrides: Overrides = None,
    plain: Annotated[bool, Parameter(help="Print lines instead of the live screen.")] = False,
) -> int:
    """Bring a run up, or resume it, and stay with it to its end. Ctrl-C drains it, twice ends it at once."""
    from relax_rt.config.loader import load_config
    from relax_rt.config.problems import BadInput
    from relax_rt.supervision import launch

    # The slow checks; `launch.up` makes the quick ones again before it starts anything.
    load_config(config, overrides or (), preflight=True)
    screen = "relax_rt.cli.screen:plain" if plain else "relax_rt.cli.screen:live"
    try:
        return launch.up(config, overrides or (), screen=screen)
    except BadInput:
        raise
    except RelaxError as error:
        raise BadInput(error.what, why=error.why, hint=error.hint) from error


@app.command(group=RUN)
def down(
    run: Run = None,
    *,
    kill: Annotated[bool, Parameter(help="End every role at once instead of letting it finish its work.")] = False,
    wait: Annotated[float, Parameter(help="Seconds to wait for the end; 0 returns at once.")] = 60.0,
) -> int:
    """End a run in order: every role finishes the work in hand. `up` resumes it later."""
    from relax_rt.cli.display import say
    from relax_rt.cli.runs import find_run_dir
    from relax_rt.supervision import control

    run_dir = find_run_dir(run)
    (control.kill if kill else control.stop)(run_dir, wait_s=wait)
    say(f"{run_dir}: {'ended' if wait > 0 else 'ending'}")
    return OK
