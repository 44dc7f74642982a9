"""Commands that show a run, alive or ended: ps, logs, why, retired, top, trace, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from relax_rt.cli.app import LOOK, OK, Json, Run, app, as_dict
from relax_rt.cli.display import console_for_output, say, show_json, show_status, show_why
from relax_rt.cli.ended import ended
from relax_rt.cli.export import prometheus_text, write_archive, write_trace
from relax_rt.cli.figures import Figures, describe_empty_steps, empty_steps, figures_of
from relax_rt.cli.logs import logged, show_logs
from relax_rt.cli.lost_samples import progress_report, show_retired
from relax_rt.cli.run import choices
from relax_rt.cli.runs import find_run_dir, split_run
from relax_rt.cli.time_left import estimate_of
from relax_rt.cli.top import show_top
from relax_rt.cli.why import account, known_names
from relax_rt.config.problems import BadInput, did_you_mean
from relax_rt.config.schema import Chosen
from relax_rt.observe.events import read_events
from relax_rt.supervision import control
from relax_rt.supervision.rundir import read_run


@app.command(group=LOOK)
def ps(run: Run = None, *, json: Json = False) -> int:
    """Show the slots of a run and what each does; the run's progress and the time left."""
    run_dir = find_run_dir(run)
    status = control.status(run_dir)
    chosen = (read_run(run_dir) or {}).get("chosen") or {}
    figures = figures_of(status)
    estimate = estimate_of(status) if status.status in ("starting", "running") else None
    end = ended(run_dir) if status.ended else None
    if json:
        plain = as_dict(status)
        for slot in plain["slots"]:
            known = as_dict(figures.get(slot["slot"], Figures()))
            slot.update({"policy_version": known.pop("version"), **known})
        plain["time"] = None
        if estimate is not None:
            plain["time"] = {**as_dict(estimate), "total_s": estimate.total_s(status.uptime_s)}
        plain["ended"] = as_dict(end) if end else None
        show_json({**plain, "empty_steps": empty_steps(run_dir), "chosen": chosen})
    else:
        show_status(status, figures, estimate, progress_report(run_dir), describe_empty_steps(run_dir), end)
        for line in choices({key: Chosen(**one) for key, one in chosen.items()}):
            say(line)
    return OK


@app.command(group=LOOK)
def logs(
    patterns: Annotated[
        list[str] | None,
        Parameter(
            help="Slots or roles, or patterns of them as 'roll*'; all logs if left out. A run before them, as --run.",
            negative_iterable=(),
        ),
    ] = None,
    *,
    run: Run = None,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], help="Keep printing new lines.")] = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], help="Lines from the end of each log.")] = 40,
    json: Json = False,
) -> int:
    """Print the logs of the roles, rotated files included."""
    first, *others = patterns or [""]
    run_dir, first = split_run(first, run, logged)
    show_logs(run_dir, [*([first] if first else []), *others], lines=lines, follow=follow, as_json=json)
    return OK


@app.command(group=LOOK)
def why(
    slot: Annotated[str | None, Parameter(help="Only this slot or role; or the run, as below.")] = None,
    run: Run = None,
    *,
    json: Json = False,
) -> int:
    """Explain the state of a run or a role: what each slot waits for; cause, handling and effects of each failure."""
    run_dir, asked = split_run(slot or "", run, lambda path: known_names(control.status(path)))
    status = control.status(run_dir)
    known = known_names(status)
    if asked and known and asked not in known:
        hint = did_you_mean(asked, known) or f"slots and roles: {', '.join(known)}"
        raise BadInput(f"there is no slot, role or run {asked!r}", hint=hint)
    found = account(read_events(run_dir), status, asked, empty_steps=describe_empty_steps(run_dir))
    show_json(found) if json else show_why(found, asked)
    return OK


@app.command(group=LOOK)
def retired(run: Run = None, *, json: Json = False) -> int:
    """List the data items that a run retired because whole groups of them timed out. `reinstate` takes them back."""
    found = progress_report(find_run_dir(run)).retired
    if json:
        show_json(found)
    elif found:
        show_retired(console_for_output(), found)
    else:
        say("no item is retired")
    return OK


@app.command(group=LOOK)
def top(
    run: Run = None,
    *,
    every: Annotated[float, Parameter(help="Seconds between two samples.")] = 1.0,
    once: Annotated[bool, Parameter(help="Print one frame and return.")] = False,
    json: Json = False,
) -> int:
    """Show processor, memory and rate of progress of each slot, live. Ctrl-C leaves it."""
    if not 0.05 <= every <= 3600:
        raise BadInput(f"--every {every:g}", why="it must lie between 0.05 and 3600 seconds")
    show_top(find_run_dir(run), every_s=every, once=once, as_json=json)
    return OK


@app.command(group=LOOK)
def trace(
    run: Run = None,
    *,
    out: Annotated[Path | None, Parameter(help="Where to write; trace.json in the run directory if left out.")] = None,
) -> int:
    """Write the event log as a trace that ui.perfetto.dev opens: a track a slot, with starts, steps, deaths, faults."""
    run_dir = find_run_dir(run)
    path = out or run_dir / "trace.json"
    count = write_trace(run_dir, path)
    say(f"{path}: {count:,} records; open it in https://ui.perfetto.dev")
    return OK


@app.command(group=LOOK)
def export(
    run: Run = None,
    *,
    out: Annotated[
        Path | None, Parameter(help="Where to write (.tar.gz); <name>.tar.gz in this folder if left out.")
    ] = None,
    most_mib: Annotated[int, Parameter(help="Newest MiB of the events, and of the metrics, that are taken.")] = 256,
    force: Annotated[bool, Parameter(help="Overwrite what is there.")] = False,
    prometheus: Annotated[bool, Parameter(help="Print the present state in Prometheus' text format instead.")] = False,
    json: Json = False,
) -> int:
    """Write events, metrics, failures, config and ends of logs as one archive of JSON lines and CSV tables."""
    if most_mib < 1:
        raise BadInput(f"--most-mib {most_mib}", why="at least one MiB must be taken")
    run_dir = find_run_dir(run)
    status = control.status(run_dir)
    if prometheus:
        say(prometheus_text(status, figures_of(status), estimate_of(status)).rstrip("\n"))
        return OK
    path = out or Path(f"{status.name or 'run'}.tar.gz")
    if path.exists() and not force:
        raise BadInput(f"{path} is there already", hint="give another --out, or --force to overwrite it")
    found = account(read_events(run_dir), status, empty_steps=describe_empty_steps(run_dir))
    names = write_archive(run_dir, path, found, most_mib=most_mib)
    show_json({"out": str(path), "files": names}) if json else say(f"{path}: {', '.join(names)}")
    return OK
