"""Looking at a run, alive or ended."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from relax_rt.cli.app import LOOK, OK, Json, Run, app, as_dict


@app.command(group=LOOK)
def ps(run: Run = None, *, json: Json = False) -> int:
    """The slots of a run: what each does, and since when; how far the run is, and how long it still takes."""
    from relax_rt.cli.brief import choices
    from relax_rt.cli.display import say, show_json, show_status
    from relax_rt.cli.ended import ended
    from relax_rt.cli.figures import Figures, describe_empty_steps, empty_steps, figures_of
    from relax_rt.cli.retirement import progress_report
    from relax_rt.cli.runs import find_run_dir
    from relax_rt.cli.time_left import estimate_of
    from relax_rt.config.schema import Chosen
    from relax_rt.supervision import control
    from relax_rt.supervision.rundir import read_run

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
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], help="Go on as lines are written.")] = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], help="Lines from the end of each log.")] = 40,
    json: Json = False,
) -> int:
    """What the roles wrote, rotated files included."""
    from relax_rt.cli.logs import logged, show_logs
    from relax_rt.cli.runs import split_run

    first, *others = patterns or [""]
    run_dir, first = split_run(first, run, logged)
    show_logs(run_dir, [*([first] if first else []), *others], lines=lines, follow=follow, as_json=json)
    return OK


@app.command(group=LOOK)
def why(
    slot: Annotated[str | None, Parameter(help="Tell of this slot or role only; or the run, as below.")] = None,
    run: Run = None,
    *,
    json: Json = False,
) -> int:
    """Why a run, or a role, is as it is: who waits for what, and of each failure the cause, what was done, and whom it
    touched."""
    from relax_rt.cli.display import show_json, show_why
    from relax_rt.cli.figures import describe_empty_steps
    from relax_rt.cli.runs import split_run
    from relax_rt.cli.why import account, known_names
    from relax_rt.config.problems import BadInput, did_you_mean
    from relax_rt.observe.events import read_events
    from relax_rt.supervision import control

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
    from relax_rt.cli.display import console_for_output, say, show_json
    from relax_rt.cli.losses import show_retired
    from relax_rt.cli.retirement import progress_report
    from relax_rt.cli.runs import find_run_dir

    found = progress_report(find_run_dir(run)).retired
    if json:
        show_json(found)
    elif found:
        show_retired(console_for_output(), found)
    else:
        say("no item is retired")
    return OK
