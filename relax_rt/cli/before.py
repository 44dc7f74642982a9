"""Commands before a run: init, validate, sample, plan, doctor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from relax_rt.cli.app import BAD_INPUT, BEFORE, DEFAULT_CONFIG, FAILED, OK, Config, Json, Overrides, app
from relax_rt.cli.display import say, show_findings, show_json, show_plan, show_samples
from relax_rt.cli.doctor.fit import check_fit
from relax_rt.cli.doctor.machine import check_limits, check_machine
from relax_rt.cli.doctor.software import check_gpus, check_sandboxes, check_software
from relax_rt.cli.runs import find_run_dir, resolved_config
from relax_rt.cli.schema import as_json_schema, as_toml
from relax_rt.cli.starter import write_starter
from relax_rt.config.inventory import load_inventory
from relax_rt.config.job import GoldReport, Planner, load_job
from relax_rt.config.loader import config_digest, load_config
from relax_rt.config.problems import BadInput, ConfigErrors, Problem
from relax_rt.config.schema import RunConfig, RunTable
from relax_rt.config.source import read_source
from relax_rt.transport.rpc.errors import RelaxError

EXAMPLES = 20
"""Most right answers of a report of `validate --all` that are printed; `--json` has all that are kept."""


@app.command(group=BEFORE)
def init(folder: Annotated[Path, Parameter(help="Where to write; made if it is not there.")]) -> int:
    """Write a commented roles.toml and a reward function to start from. Nothing is overwritten."""
    written = write_starter(folder)
    say("\n".join([*(f"wrote {path}" for path in written), f"next: relax-rt validate {folder / 'roles.toml'}"]))
    return OK


@app.command(group=BEFORE)
def validate(
    config: Config = DEFAULT_CONFIG,
    *,
    overrides: Overrides = None,
    quick: Annotated[bool, Parameter(help="Only the quick checks, which do not read model or data.")] = False,
    every: Annotated[
        bool,
        Parameter(
            name="--all", negative=(), help="Score every right answer of the data against itself, not only some."
        ),
    ] = False,
    schema: Annotated[bool, Parameter(help="Check nothing: print every key with its meaning and default.")] = False,
    json: Json = False,
) -> int:
    """Check a config as a whole and report every problem with its line.

    The model, the data and the reward are read only if the quick checks find nothing. Exit code: 0 the config is valid,
    2 it is not.
    """
    if schema:
        return _show_schema(config, as_json=json)
    try:
        slow = not quick
        loaded = load_config(config, overrides or (), inputs=True, preflight=slow, golds=not every, measured=slow)
    except ConfigErrors as error:
        if not json:
            raise

        show_json({"ok": False, "problems": error.problems})
        return BAD_INPUT

    golds = _golds(loaded) if every else []
    wrong = sum(report.wrong for report in golds)
    problems = _problems(golds, config, overrides or ())
    if json:
        found = {"digest": config_digest(loaded), "run_dir": loaded.run.dir, **({"golds": golds} if every else {})}
        show_json({"ok": not wrong, "problems": problems, **found})
    elif wrong:
        for report in golds:
            if report.wrong and report.problem(EXAMPLES) is None:
                say("\n".join(report.lines(EXAMPLES)))
        if problems:
            raise ConfigErrors(str(config), problems)
    else:
        for report in golds:
            say(f"{report.checked} right answers get 1 from '{report.reward}' against themselves")
        roles = ", ".join(f"{kind} x{s.count}" if s.count != 1 else kind for kind, s in loaded.roles.items() if s.count)
        say(f"{config}: ok\n  run directory  {loaded.run.dir}\n  roles          {roles}")
    return BAD_INPUT if wrong else OK


def _golds(config: RunConfig) -> list[GoldReport]:
    """Score every right answer of the data against itself."""
    try:
        reports = load_job(config.run.job).check_golds(config)
    except BadInput:
        raise
    except RelaxError as error:
        raise BadInput(error.what, why=error.why, hint=error.hint) from error
    if reports is None:
        raise BadInput("validate --all", why=f"job '{config.run.job}' has no right answers to check")
    return reports


def _problems(golds: Sequence[GoldReport], config: Path, overrides: Sequence[str]) -> list[Problem]:
    """The problems of rewards that cannot read most answers, at their place in the config, as without `--all`."""
    found = [problem for report in golds if (problem := report.problem(EXAMPLES))]
    if not found:
        return []
    source, _ = read_source(config, overrides)
    return [source.locate(problem) for problem in found]


def _show_schema(config: Path, *, as_json: bool) -> int:
    """Print the config schema of the job that the config names, of the default job without one."""
    run = read_source(config, ())[0].data.get("run") if config.is_file() else None
    name = run.get("job") if isinstance(run, dict) else None
    job = load_job(name if isinstance(name, str) else RunTable.model_fields["job"].default)
    show_json(as_json_schema(job)) if as_json else say(as_toml(job).rstrip("\n"))
    return OK


@app.command(group=BEFORE)
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
    """Show rendered prompt, tokens, loss mask, completion and reward of a few samples, without training."""
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
    """The config to sample with, and the run whose checkpoint is used, if any."""
    if run is not None and config is not None:
        raise BadInput(f"both {config} and --run {run}", why="a run has its own config", hint="give one of them")
    if config is None and run is None and DEFAULT_CONFIG.is_file():
        config = DEFAULT_CONFIG
    if config is not None:
        return load_config(config, overrides, inputs=True), None
    if overrides:
        hint = "name the roles.toml to override its keys"
        raise BadInput("--set with a run", why="a run is sampled with the config it was started with", hint=hint)
    run_dir = find_run_dir(run)
    return resolved_config(run_dir), run_dir


@app.command(group=BEFORE)
def plan(
    config: Config = DEFAULT_CONFIG,
    *,
    inventory: Annotated[
        Path | None, Parameter(help="A nodes.toml: plan for these machines instead of this one; none need be here.")
    ] = None,
    overrides: Overrides = None,
    json: Json = False,
) -> int:
    """Show what a run will need and do, before it starts: on this machine, or on the machines of an inventory."""
    try:
        if inventory is not None:
            return _on_inventory(config, overrides or (), inventory, as_json=json)
        loaded = load_config(config, overrides or (), inputs=True)
    except ConfigErrors as error:
        if not json:
            raise
        show_json({"ok": False, "problems": error.problems})
        return BAD_INPUT
    lines = load_job(loaded.run.job).plan(loaded)
    show_json(lines) if json else show_plan(lines)
    return OK


def _on_inventory(config: Path, overrides: Sequence[str], path: Path, *, as_json: bool) -> int:
    """Print the plan for an inventory's machines; loading the config reports every reason why the run does not fit on
    them."""
    nodes = load_inventory(path)
    loaded = load_config(config, overrides, inventory=nodes)
    job = load_job(loaded.run.job)
    if not isinstance(job, Planner):
        raise BadInput(f"job '{loaded.run.job}' does not plan for an inventory", hint="plan without --inventory")
    found = job.plan_on(loaded, nodes)
    assert not isinstance(found, list), "a config that was loaded for an inventory fits on it"
    show_json(found) if as_json else say(found.render())
    return OK


@app.command(group=BEFORE)
def doctor(
    config: Annotated[
        Path | None, Parameter(help="A roles.toml: also check that its run fits; ./roles.toml if it is there.")
    ] = None,
    *,
    overrides: Overrides = None,
    json: Json = False,
) -> int:
    """Check this machine, and whether a run fits on it: ok, warn or fail, with advice. 1 if any check failed."""
    if config is None and DEFAULT_CONFIG.is_file():
        config = DEFAULT_CONFIG
    loaded = load_config(config, overrides or (), inputs=True) if config is not None else None
    of_gpus, gpus = check_gpus()
    findings = [*check_machine(), *check_limits(), *of_gpus, *check_software(gpus)]
    findings += check_sandboxes(loaded)
    if loaded is not None:
        findings += check_fit(loaded, gpus)
    show_json(findings) if json else show_findings(findings)
    return FAILED if any(finding.level == "fail" for finding in findings) else OK
