"""A run's records for other tools, and what it takes of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from relax_rt.cli.app import LOOK, OK, Json, Run, app


@app.command(group=LOOK)
def top(
    run: Run = None,
    *,
    every: Annotated[float, Parameter(help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, Parameter(help="Print one frame and return.")] = False,
    json: Json = False,
) -> int:
    """Processor, memory and rate of progress of each slot, live. Ctrl-C leaves it."""
    from relax_rt.cli.runs import find_run_dir
    from relax_rt.cli.top import show_top
    from relax_rt.config.problems import BadInput

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
    from relax_rt.cli.display import say
    from relax_rt.cli.runs import find_run_dir
    from relax_rt.cli.trace import write_trace

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
    from relax_rt.cli.display import say, show_json
    from relax_rt.cli.export import export
    from relax_rt.cli.export import prometheus as as_prometheus
    from relax_rt.cli.figures import describe_empty_steps, figures_of
    from relax_rt.cli.runs import find_run_dir
    from relax_rt.cli.time_left import estimate_of
    from relax_rt.cli.why import account
    from relax_rt.config.problems import BadInput
    from relax_rt.observe.events import read_events
    from relax_rt.supervision import control

    if most_mib < 1:
        raise BadInput(f"--most-mib {most_mib}", why="at least one MiB must be taken")
    run_dir = find_run_dir(run)
    status = control.status(run_dir)
    if prometheus:
        say(as_prometheus(status, figures_of(status), estimate_of(status)).rstrip("\n"))
        return OK
    path = out or Path(f"{status.name or 'run'}.tar.gz")
    if path.exists() and not force:
        raise BadInput(f"{path} is there already", hint="give another --out, or --force to overwrite it")
    found = account(read_events(run_dir), status, empty_steps=describe_empty_steps(run_dir))
    names = export(run_dir, path, found, most_mib=most_mib)
    show_json({"out": str(path), "files": names}) if json else say(f"{path}: {', '.join(names)}")
    return OK
