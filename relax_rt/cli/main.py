"""`relax-rt`: bring a run up, look at it, end it. Heavy imports happen inside the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from relax_rt import __version__
from relax_rt.transport.errors import RelaxError

if TYPE_CHECKING:
    from relax_rt.config.schema import RunConfig

DEFAULT_CONFIG = Path("roles.toml")
OK, FAILED, BAD_INPUT = 0, 1, 2

app = App(
    name="relax-rt",
    help="Asynchronous RL post-training on bare-metal nodes, as restartable processes.",
    version=__version__,
    help_format="plaintext",
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)

Config = Annotated[Path, Parameter(help="The run's roles.toml.")]
Overrides = Annotated[
    list[str] | None,
    Parameter(name="--set", help="Override a key, as algorithm.steps=20; may be repeated.", negative_iterable=()),
]
Run = Annotated[
    Path | None,
    Parameter(help="Run directory, or a name under ./runs; the living or newest run under ./runs if left out."),
]
Json = Annotated[bool, Parameter(name="--json", help="Print JSON.")]


@app.command
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


@app.command
def validate(
    config: Config = DEFAULT_CONFIG,
    *,
    overrides: Overrides = None,
    quick: Annotated[bool, Parameter(help="Leave out the model, the data and the dry run of the reward.")] = False,
    json: Json = False,
) -> int:
    """Check a config as a whole: every problem at once, each with its place."""
    from relax_rt.cli.display import say, show_json
    from relax_rt.config.loader import config_digest, load_config
    from relax_rt.config.problems import ConfigErrors

    try:
        loaded = load_config(config, overrides or (), preflight=not quick)
    except ConfigErrors as error:
        if not json:
            raise
        show_json({"ok": False, "problems": error.problems})
        return BAD_INPUT
    if json:
        show_json({"ok": True, "problems": [], "digest": config_digest(loaded), "run_dir": loaded.run.dir})
    else:
        roles = ", ".join(f"{kind} x{s.count}" if s.count != 1 else kind for kind, s in loaded.roles.items() if s.count)
        say(f"{config}: ok\n  run directory  {loaded.run.dir}\n  roles          {roles}")
    return OK


@app.command
def plan(config: Config = DEFAULT_CONFIG, *, overrides: Overrides = None, json: Json = False) -> int:
    """What a run will need and do, before it starts."""
    from relax_rt.cli.display import show_json, show_plan
    from relax_rt.config.job import load_job
    from relax_rt.config.loader import load_config

    loaded = load_config(config, overrides or ())
    lines = load_job(loaded.run.job).plan(loaded)
    show_json(lines) if json else show_plan(lines)
    return OK


@app.command
def init(folder: Annotated[Path, Parameter(help="Where to write; made if it is not there.")]) -> int:
    """Write a commented roles.toml and a reward function to start from. Nothing is overwritten."""
    from relax_rt.cli.display import say
    from relax_rt.cli.starter import write_starter

    written = write_starter(folder)
    say("\n".join([*(f"wrote {path}" for path in written), f"next: relax-rt validate {folder / 'roles.toml'}"]))
    return OK


@app.command
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


@app.command
def ps(run: Run = None, *, json: Json = False) -> int:
    """The slots of a run: what each does, and since when."""
    from relax_rt.cli.display import show_json, show_status
    from relax_rt.cli.runs import find_run_dir, versions_of
    from relax_rt.supervision import control

    run_dir = find_run_dir(run)
    status = control.status(run_dir)
    versions = versions_of(status)
    show_json({**as_dict(status), "versions": versions}) if json else show_status(status, versions)
    return OK


@app.command
def restart(slot: Annotated[str, Parameter(help="As rollout/0.")], run: Run = None) -> int:
    """Stop and start one slot; it is not counted as a failure."""
    from relax_rt.cli.display import say
    from relax_rt.cli.runs import find_run_dir
    from relax_rt.supervision import control

    control.restart(find_run_dir(run), slot)
    say(f"{slot} restarts")
    return OK


@app.command
def logs(
    slot: Annotated[str | None, Parameter(help="A slot, or a kind of role; all if left out.")] = None,
    run: Run = None,
    *,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], help="Go on as lines are written.")] = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], help="Lines from the end of each log.")] = 40,
    json: Json = False,
) -> int:
    """What the roles wrote."""
    from relax_rt.cli.logs import show_logs
    from relax_rt.cli.runs import find_run_dir

    show_logs(find_run_dir(run), slot or "", lines=lines, follow=follow, as_json=json)
    return OK


@app.command
def why(
    slot: Annotated[str | None, Parameter(help="Tell of this slot only.")] = None,
    run: Run = None,
    *,
    json: Json = False,
) -> int:
    """Why a run, or a slot, is as it is: the first failure, what was restarted, who waits for what."""
    from relax_rt.cli.display import show_json, show_why
    from relax_rt.cli.runs import find_run_dir
    from relax_rt.cli.why import account
    from relax_rt.config.problems import BadInput, did_you_mean
    from relax_rt.events import read_events
    from relax_rt.supervision import control

    run_dir = find_run_dir(run)
    status = control.status(run_dir)
    known = sorted({s.slot for s in status.slots} | {s.kind for s in status.slots})
    if slot and known and slot not in known:
        raise BadInput(f"there is no slot {slot!r}", hint=did_you_mean(slot, known) or f"slots: {', '.join(known)}")
    found = account(read_events(run_dir), status, slot or "")
    show_json(found) if json else show_why(found)
    return OK


@app.command
def sample(
    config: Annotated[Path | None, Parameter(help="A roles.toml; ./roles.toml if it is there.")] = None,
    *,
    items: Annotated[int, Parameter(name=["-n", "--items"], help="Prompts to sample, one completion of each.")] = 4,
    run: Annotated[Path | None, Parameter(help="Sample from this run's newest checkpoint, with its config.")] = None,
    prompts: Annotated[
        list[str] | None,
        Parameter(name="--prompt", help="Ask this instead of the data; may be repeated.", negative_iterable=()),
    ] = None,
    held_out: Annotated[bool, Parameter(help="Held-out prompts; else training prompts in the run's order.")] = False,
    overrides: Overrides = None,
    json: Json = False,
) -> int:
    """Rendered prompt, tokens, loss mask, completion and reward of a few samples, without training."""
    from relax_rt.cli.display import show_json, show_samples
    from relax_rt.config.job import load_job
    from relax_rt.config.problems import BadInput

    if items < 1:
        raise BadInput(f"-n {items}", why="at least one prompt must be sampled")
    if prompts and held_out:
        raise BadInput("both --prompt and --held-out", why="a prompt of one's own is of no split", hint="give one")
    try:
        loaded, run_dir = _sampled_from(config, run, overrides or ())
        job = load_job(loaded.run.job)
        found = job.sample(loaded, run_dir, items, held_out=held_out, prompts=prompts or ())
    except BadInput:
        raise
    except RelaxError as error:
        raise BadInput(error.what, why=error.why, hint=error.hint) from error
    show_json(found) if json else show_samples(found)
    return OK


def _sampled_from(config: Path | None, run: Path | None, overrides: Sequence[str]) -> tuple[RunConfig, Path | None]:
    """The config to sample with, and the run whose checkpoint is taken, if one is."""
    from relax_rt.cli.runs import find_run_dir, resolved_config
    from relax_rt.config.loader import load_config
    from relax_rt.config.problems import BadInput

    if run is not None and config is not None:
        raise BadInput(f"both {config} and --run {run}", why="a run has its own config", hint="give one of them")
    if config is None and run is None and DEFAULT_CONFIG.is_file():
        config = DEFAULT_CONFIG
    if config is not None:
        return load_config(config, overrides), None
    if overrides:
        hint = "name the roles.toml to override its keys"
        raise BadInput("--set with a run", why="a run is sampled with the config it was started with", hint=hint)
    run_dir = find_run_dir(run)
    return resolved_config(run_dir), run_dir


def as_dict(value: Any) -> dict[str, Any]:
    """A struct as plain data."""
    import msgspec

    return dict(msgspec.to_builtins(value))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 done, 1 the run failed or does not answer, 2 the input is wrong; `up` also 130 and the like, for signals.
    """
    try:
        found = app(argv, exit_on_error=False)
    except CycloptsError:
        return BAD_INPUT
    except RelaxError as error:
        return _explain(error)
    except BrokenPipeError:
        # The reader has seen enough (`| head`); what is still buffered has nowhere to go.
        sys.stdout = None
        return OK
    except KeyboardInterrupt:
        return 130
    return found if isinstance(found, int) else OK


def _explain(error: RelaxError) -> int:
    from relax_rt.config.problems import BadInput, ConfigErrors
    from relax_rt.supervision.control import NoRun

    if isinstance(error, ConfigErrors):
        print(error.render(), file=sys.stderr)
        return BAD_INPUT
    print(f"relax-rt: {error.what}" + (f": {error.why}" if error.why else ""), file=sys.stderr)
    if error.hint:
        print(f"  {error.hint}", file=sys.stderr)
    return BAD_INPUT if isinstance(error, NoRun | BadInput) else FAILED


if __name__ == "__main__":
    sys.exit(main())
