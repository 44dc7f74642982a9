"""Looking at a run, alive or ended."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from relax_rt.cli.app import LOOK, OK, Json, Run, app, as_dict


@app.command(group=LOOK)
def ps(run: Run = None, *, json: Json = False) -> int:
    """The slots of a run: what each does, and since when."""
    from relax_rt.cli.display import show_json, show_status
    from relax_rt.cli.figures import Figures, figures_of
    from relax_rt.cli.runs import find_run_dir
    from relax_rt.supervision import control

    status = control.status(find_run_dir(run))
    figures = figures_of(status)
    if json:
        plain = as_dict(status)
        for slot in plain["slots"]:
            known = as_dict(figures.get(slot["slot"], Figures()))
            slot.update({"policy_version": known.pop("version"), **known})
        show_json(plain)
    else:
        show_status(status, figures)
    return OK


@app.command(group=LOOK)
def logs(
    patterns: Annotated[
        list[str] | None,
        Parameter(help="Slots or roles, or patterns of them as 'roll*'; all logs if left out.", negative_iterable=()),
    ] = None,
    *,
    run: Run = None,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], help="Go on as lines are written.")] = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], help="Lines from the end of each log.")] = 40,
    json: Json = False,
) -> int:
    """What the roles wrote, rotated files included."""
    from relax_rt.cli.logs import show_logs
    from relax_rt.cli.runs import find_run_dir

    show_logs(find_run_dir(run), patterns or (), lines=lines, follow=follow, as_json=json)
    return OK


@app.command(group=LOOK)
def why(
    slot: Annotated[str | None, Parameter(help="Tell of this slot or role only.")] = None,
    run: Run = None,
    *,
    json: Json = False,
) -> int:
    """Why a run, or a role, is as it is: who waits for what, and of each failure the cause, what was done, and whom it
    touched."""
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
    show_json(found) if json else show_why(found, slot or "")
    return OK
