"""Changing a run while it goes on."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from relax_rt.cli.app import OK, STEER, Run, app


@app.command(group=STEER)
def restart(slot: Annotated[str, Parameter(help="As rollout/0.")], run: Run = None) -> int:
    """Stop and start one slot; it is not counted as a failure."""
    from relax_rt.cli.display import say
    from relax_rt.cli.runs import find_run_dir
    from relax_rt.supervision import control

    control.restart(find_run_dir(run), slot)
    say(f"{slot} restarts")
    return OK
