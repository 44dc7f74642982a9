"""Commands that start and end a run: up (also as a further node), attach, down."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from relax_rt.cli.app import DEFAULT_CONFIG, OK, RUN, Config, Json, Overrides, Run, app, as_dict, duration_of
from relax_rt.cli.detach import start_detached, wait_until_ended, who_ends
from relax_rt.cli.display import say, show_json
from relax_rt.cli.runs import find_run_dir, resolved_config
from relax_rt.cli.screen import attach_screen
from relax_rt.cli.time_left import expected
from relax_rt.config.job import load_job
from relax_rt.config.loader import load_config, preflight_config
from relax_rt.config.problems import BadInput
from relax_rt.config.schema import MIB, Chosen, RunConfig
from relax_rt.supervision import control
from relax_rt.supervision.rundir import SHM_ROOT, read_run
from relax_rt.transport.rpc.errors import RelaxError

END_S = 60.0
"""For a run to be gone, beside the time that its roles may take to finish their work."""

JOINING = Group("As a further node of a run", sort_key=2)


@Parameter(name="*", group=JOINING)
@dataclass(frozen=True)
class Joining:
    """The options of --join."""

    join: Annotated[str | None, Parameter(help="HOST:PORT where the head of a run listens: join that run.")] = None
    key: Annotated[
        Path | None, Parameter(help="join.key of the head's run directory; or put its text into RELAX_JOIN_KEY.")
    ] = None
    name: Annotated[str, Parameter(help="Name of this node; the host name if left out.")] = ""
    dir: Annotated[Path | None, Parameter(help="Directory for its logs and events; RUN/nodes/NAME if left out.")] = None
    host: Annotated[
        str, Parameter(help="Address of this machine for other nodes; by default that of its route to the head.")
    ] = ""
    wait: Annotated[
        float, Parameter(converter=duration_of, help="How long to try, as 5m, each time the head does not answer.")
    ] = 120.0


ALONE = Joining()
"""Nothing was given."""


@app.command(group=RUN)
def up(
    config: Config = DEFAULT_CONFIG,
    *,
    overrides: Overrides = None,
    plain: Annotated[bool, Parameter(help="Print lines instead of the live screen.")] = False,
    detach: Annotated[
        bool, Parameter(help="Return when the run is ready or has failed; it continues without the terminal.")
    ] = False,
    json: Annotated[bool, Parameter(name="--json", help="With --detach: print JSON.")] = False,
    joining: Joining = ALONE,
) -> int:
    """Start or resume a run, and stay until it ends. Ctrl-C drains it, twice kills it.

    Exit code: 0 it has finished, or was ended by `down`; 1 it failed; 2 the config or the run directory is wrong and
    nothing was started, or a role refused its settings; 130 Ctrl-C.
    """
    from relax_rt.cluster import launch  # loads ZeroMQ, which `--help` needs not

    if joining.join is not None:
        return _join(joining)
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
    from relax_rt.cluster import launch

    if not as_json:
        say("\n".join(brief(loaded)))
    if detach:
        return _detached(config, overrides, Path(loaded.run.dir), as_json=as_json)
    # It makes the quick checks again: the file may have changed meanwhile.
    return launch.up(config, overrides, screen="relax_rt.cli.screen:plain" if plain else "relax_rt.cli.screen:live")


def _detached(config: Path, overrides: Sequence[str], run_dir: Path, *, as_json: bool) -> int:
    finished = (read_run(run_dir) or {}).get("status") == "finished"
    code, status = start_detached(config, overrides, run_dir, (lambda _: None) if as_json else say)
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
    """Show the live screen of a run that runs elsewhere. Ctrl-C leaves it running."""
    return attach_screen(find_run_dir(run), plain=plain)


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


def _join(given: Joining) -> int:
    """Take part until the run ends; returns the exit code.

    Raises:
        BadInput: the address or the key is not valid.
        RelaxError: the head was not reached, or refuses this node.
    """
    from relax_rt.cluster.join import join, join_request

    try:
        request = join_request(
            given.join or "", key=given.key, name=given.name, run_dir=given.dir, host=given.host, wait_s=given.wait
        )
    except RelaxError as error:
        raise BadInput(error.what, why=error.why, hint=error.hint) from error
    return join(request, say=say)


def brief(config: RunConfig) -> list[str]:
    """The short plan of a run; `relax-rt plan` has the long one."""
    run_dir = Path(config.run.dir)
    before = read_run(run_dir)
    resumed = f"resumes the run there, last {before.get('status', 'unknown')}" if before else "new"
    if before and (at := load_job(config.run.job).resumes_at(run_dir)) is not None:
        resumed += f", from the checkpoint of step {at}" if at else ", from the beginning: it has no checkpoint"
    roles = {kind: settings for kind, settings in config.roles.items() if settings.count}
    processes = sum(settings.count for settings in roles.values())
    threads = sum(settings.count * settings.threads for settings in roles.values())
    cores = len(os.sched_getaffinity(0))
    job_bytes = load_job(config.run.job).shm_bytes(config)
    need = config.queue.capacity_mib + job_bytes // MIB
    free = shutil.disk_usage(SHM_ROOT).free // MIB
    gpus = sum(settings.count * settings.gpus for settings in roles.values())
    return [
        f"{config.run.name}  {run_dir} ({resumed})",
        "  roles   " + ", ".join(f"{kind} x{s.count}" if s.count != 1 else kind for kind, s in roles.items()),
        f"  takes   {processes} processes, {threads} compute threads on {cores} cores"
        + (f", {gpus:g} GPUs" if gpus else "")
        + f", {need:,} MiB of shared memory ({free:,} MiB are free)",
        *choices(config.chosen),
        *([f"  time    {time_left}"] if (time_left := expected(config)) else []),
    ]


def choices(chosen: Mapping[str, Chosen]) -> list[str]:
    """Settings that were chosen for the user, a line for each value and reason: ``dtype float32 (rollout): why``."""
    roles: dict[tuple[str, str, str], list[str]] = {}
    for key, one in chosen.items():
        role, _, setting = key.removeprefix("roles.").rpartition(".")
        roles.setdefault((setting, one.value, one.why), []).append(role)
    return [f"  {setting:<7} {value} ({', '.join(who)}): {why}" for (setting, value, why), who in roles.items()]
