"""Commands before a run: init, validate, plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from relax_rt.cli.app import BAD_INPUT, DEFAULT_CONFIG, OK, Config, Json, Overrides, errors_are_bad_input
from relax_rt.cli.display import console_for_output, say, show_json
from relax_rt.cli.schema import as_json_schema, as_toml
from relax_rt.cli.starter import write_starter
from relax_rt.config.inventory import load_inventory
from relax_rt.config.job import AnswerReport, PlanLine, Planner, load_job
from relax_rt.config.loader import config_digest, load_config
from relax_rt.config.problems import BadInput, ConfigErrors
from relax_rt.config.schema import RunTable
from relax_rt.config.source import read_source

EXAMPLES = 20
"""Unreadable answers that `validate --all` prints per reward; `--json` has all that the report keeps."""


def init(folder: Annotated[Path, Parameter(help="Where to write. Created if it does not exist.")]) -> int:
    """Write the starter config."""
    written = write_starter(folder)
    say("\n".join([*(f"wrote {path}" for path in written), f"next: relax-rt validate {folder / 'roles.toml'}"]))
    return OK


def validate(
    config: Config = DEFAULT_CONFIG,
    *,
    overrides: Overrides = None,
    quick: Annotated[bool, Parameter(help="Only the quick checks, which read neither model nor data.")] = False,
    every: Annotated[
        bool,
        Parameter(
            name="--all", negative=(), help="Score every right answer of the data against itself, not only some."
        ),
    ] = False,
    schema: Annotated[bool, Parameter(help="Check nothing: print every key with its meaning and default.")] = False,
    json: Json = False,
) -> int:
    """Check a config as a whole."""
    if schema:
        # Print the config schema of the job that the config names, of the default job without one.
        run = read_source(config, ())[0].data.get("run") if config.is_file() else None
        name = run.get("job") if isinstance(run, dict) else None
        job = load_job(name if isinstance(name, str) else RunTable.model_fields["job"].default)
        show_json(as_json_schema(job)) if json else say(as_toml(job).rstrip("\n"))
        return OK
    slow = not quick
    try:
        loaded = load_config(config, overrides or (), inputs=True, preflight=slow, answers=not every, measured=slow)
    except ConfigErrors as error:
        if not json:
            raise
        show_json({"ok": False, "problems": error.problems})
        return BAD_INPUT

    reports: list[AnswerReport] = []
    if every:
        with errors_are_bad_input():
            checked = load_job(loaded.run.job).check_answers(loaded)
        if checked is None:
            raise BadInput("validate --all", why=f"job '{loaded.run.job}' has no right answers to check")
        reports = checked
    wrong = sum(report.wrong for report in reports)
    # A reward that cannot read most answers is a problem at its place in the config, as without `--all`.
    problems = [problem for report in reports if (problem := report.problem(EXAMPLES))]
    if problems:
        source, _ = read_source(config, overrides or ())
        problems = [source.locate(problem) for problem in problems]
    if json:
        more = {"answers": reports} if every else {}
        digest = config_digest(loaded)
        show_json({"ok": not wrong, "problems": problems, "digest": digest, "run_dir": loaded.run.dir, **more})
    elif wrong:
        for report in reports:
            if report.wrong and report.problem(EXAMPLES) is None:
                say("\n".join(report.lines(EXAMPLES)))
        if problems:
            raise ConfigErrors(str(config), problems)
    else:
        for report in reports:
            say(f"{report.checked} right answers get 1 from '{report.reward}' against themselves")
        roles = ", ".join(f"{kind} x{s.count}" if s.count != 1 else kind for kind, s in loaded.roles.items() if s.count)
        say(f"{config}: ok\n  run directory  {loaded.run.dir}\n  roles          {roles}")
    return BAD_INPUT if wrong else OK


def plan(
    config: Config = DEFAULT_CONFIG,
    *,
    inventory: Annotated[
        Path | None,
        Parameter(help="A nodes.toml: plan for the machines in it instead of this one. None of them is contacted."),
    ] = None,
    overrides: Overrides = None,
    json: Json = False,
) -> int:
    """Show what a run will need and do."""
    try:
        nodes = None if inventory is None else load_inventory(inventory)
        # With an inventory, loading reports every reason why the run does not fit on its machines.
        loaded = load_config(config, overrides or (), inputs=nodes is None, inventory=nodes)
    except ConfigErrors as error:
        if not json:
            raise
        show_json({"ok": False, "problems": error.problems})
        return BAD_INPUT
    job = load_job(loaded.run.job)
    if nodes is None:
        lines = job.plan(loaded)
        show_json(lines) if json else show_plan(lines)
        return OK
    if not isinstance(job, Planner):
        raise BadInput(f"job '{loaded.run.job}' does not plan for an inventory", hint="plan without --inventory")
    planned = job.plan_on(loaded, nodes)
    assert not isinstance(planned, list), "a config that was loaded for an inventory fits on it"
    show_json(planned) if json else say(planned.render())
    return OK


def show_plan(lines: Sequence[PlanLine]) -> None:
    """Print a plan, a heading for each of its sections."""
    console = console_for_output()
    for section, members in groupby(lines, key=lambda line: line.section):
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        for line in members:
            table.add_row(Text(line.name), Text(line.value, "bold"), Text(line.how, "bright_black"))
        console.print(Text(section, "bold"))
        console.print(table)
