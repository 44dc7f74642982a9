"""Bringing a run up and ending it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from relax_rt.cli.app import DEFAULT_CONFIG, OK, RUN, Config, Json, Overrides, Run, app, as_dict, duration_of
from relax_rt.cli.join import ALONE, Joining, join
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from relax_rt.config.schema import RunConfig

END_S = 60.0
"""For a run to be gone, beside the time that its roles may take to finish their work."""


@app.command(group=RUN)
def up(
    config: Config = DEFAULT_CONFIG,
    *,
    overrides: Overrides = None,
    plain: Annotated[bool, Parameter(help="Print lines instead of the live screen.")] = False,
    detach: Annotated[
        bool, Parameter(help="Return when the run is ready, or has failed; it goes on without the terminal.")
    ] = False,
    json: Annotated[bool, Parameter(name="--json", help="With --detach: print JSON.")] = False,
    joining: Joining = ALONE,
) -> int:
    """Bring a run up, or resume it, and stay with it to its end. Ctrl-C drains it, twice kills it.

    Exit code: 0 it has finished, or was ended by `down`; 1 it failed; 2 the config or the run directory is wrong and
    nothing was started, or a role refused its settings; 130 Ctrl-C.
    """
    from relax_rt.cluster import launch
    from relax_rt.config.loader import load_config, preflight_config
    from relax_rt.config.problems import BadInput

    if joining.join is not None:
        return join(joining)
    if joining != ALONE:
        raise BadInput("--key, --name, --dir, --host or --wait without --join", hint="name the head: --join HOST:PORT")
    if json and not detach:
        raise BadInput("--json without --detach", why="a run that is watched prints lines, not one result")
    loaded = load_config(config, overrides or (), inputs=True)
    try:
        launch.check_start(loaded)
        preflight_config(loaded, config, overrides or ())
        return _start(loaded, config, overrides or (), plain=plain, detach=detach, as_json=json)
    except BadInput:
        raise
    except RelaxError as error:
        raise BadInput(error.what, why=error.why, hint=error.hint) from error


def _start(
    loaded: RunConfig, config: Path, overrides: Sequence[str], *, plain: bool, detach: bool, as_json: bool
) -> int:
    from relax_rt.cli.brief import brief
    from relax_rt.cli.display import say
    from relax_rt.cluster import launch

    if not as_json:
        say("\n".join(brief(loaded)))
    if detach:
        return _detached(config, overrides, Path(loaded.run.dir), as_json=as_json)
    # It makes the quick checks again: the file may have changed meanwhile.
    return launch.up(config, overrides, screen="relax_rt.cli.screen:plain" if plain else "relax_rt.cli.screen:live")


def _detached(config: Path, overrides: Sequence[str], run_dir: Path, *, as_json: bool) -> int:
    from relax_rt.cli.detach import detach
    from relax_rt.cli.display import say, show_json
    from relax_rt.supervision.rundir import read_run

    finished = (read_run(run_dir) or {}).get("status") == "finished"
    code, status = detach(config, overrides, run_dir, (lambda _: None) if as_json else say)
    if as_json:
        show_json({"ready": status.status == "running", "exit_code": status.exit_code, **as_dict(status)})
    elif status.status == "running":
        say(f"{status.name} is running in {run_dir}\n  relax-rt attach, ps, logs -f; relax-rt down ends it")
    elif status.status == "finished" and finished:
        say(f"{status.name} was at its target already, and nothing was left to do: {status.reason}")
    return code


@app.command(group=RUN)
def attach(
    run: Run = None,
    *,
    plain: Annotated[bool, Parameter(help="Print lines instead of the live screen.")] = False,
) -> int:
    """The live screen of a run that goes on elsewhere. Ctrl-C leaves it running."""
    from relax_rt.cli.attach import attach
    from relax_rt.cli.runs import find_run_dir

    return attach(find_run_dir(run), plain=plain)


@app.command(group=RUN)
def down(
    run: Run = None,
    *,
    kill: Annotated[
        bool,
        Parameter(
            name=["--now", "--kill"],
            help="End every role at once instead of letting it finish its work, also of a run"
            " that is ending already. `up` then resumes it from its last checkpoint.",
        ),
    ] = False,
    wait: Annotated[
        float | None,
        Parameter(
            converter=duration_of,
            help="How long to wait for the end, as 60 or 5m; 0 returns at once. Unless given: as long as the run's"
            " roles may take (its drain_timeout_s), 60 s with --now.",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """End a run in order: every role finishes the work in hand. `up` resumes it later.

    Prints which slots it waits for and for how long at most. After Ctrl-C the run keeps ending. Exit code: 0 the run
    has ended, 1 it has not within --wait, 2 there is no such run.
    """
    from relax_rt.cli.detach import wait_until_ended, who_ends
    from relax_rt.cli.display import say, show_json
    from relax_rt.cli.runs import find_run_dir, resolved_config
    from relax_rt.supervision import control

    run_dir = find_run_dir(run)
    found = control.find_run(run_dir)
    if not found.alive:
        did = f"is over already: {control.status(run_dir).status}"
        show_json({"run_dir": str(run_dir.absolute()), "did": "over"}) if json else say(f"{run_dir}: {did}")
        return OK
    wait_s = END_S + (0.0 if kill else resolved_config(run_dir).supervision.drain_timeout_s) if wait is None else wait
    (control.kill if kill else control.stop)(run_dir)
    try:
        if wait_s > 0 and not wait_until_ended(run_dir, wait_s, (lambda _: None) if json else say, kill=kill):
            hint = f"it goes on ending; `relax-rt down {run_dir} --now` ends it at once"
            why = who_ends(run_dir)[1]
            raise RelaxError(f"the run in {run_dir} has not ended within {wait_s:g} s", why=why, hint=hint)
    except KeyboardInterrupt:
        sys.stderr.write(f"the run goes on ending without you; `relax-rt down {run_dir} --now` ends it at once\n")
        raise
    did = "ended" if wait_s > 0 else "ending"
    show_json({"run_dir": str(run_dir.absolute()), "did": did}) if json else say(f"{run_dir}: {did}")
    return OK
