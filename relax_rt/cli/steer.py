"""Changing a run while it goes on."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from relax_rt.cli.app import OK, STEER, Json, Run, app, duration_of

Seconds = Annotated[
    float,
    Parameter(
        name="--wait",
        converter=duration_of,
        help="How long to wait until it has come to pass, as 60 or 5m; 0: do not wait.",
    ),
]


@app.command(group=STEER)
def restart(
    what: Annotated[
        str, Parameter(help="A slot, as rollout/0; a role, as rollout: all of its slots; or a drained node.")
    ],
    run: Run = None,
    *,
    json: Json = False,
) -> int:
    """Stop and start slots; it is not counted as a failure. A drained node takes slots again."""
    from relax_rt.cli.runs import find_run_dir
    from relax_rt.cli.steering import restart

    _tell(restart(find_run_dir(run), what), as_json=json)
    return OK


@app.command(group=STEER)
def scale(
    role: Annotated[str, Parameter(help="As rollout.")],
    count: Annotated[int, Parameter(help="How many slots it is to have; the highest are drained first.")],
    run: Run = None,
    *,
    wait: Seconds = 60.0,
    json: Json = False,
) -> int:
    """Give a role another number of slots, as the config might have it. The file is left as it is: a resumed run has
    its number again."""
    from relax_rt.cli.runs import find_run_dir
    from relax_rt.cli.steering import scale

    _tell(scale(find_run_dir(run), role, count, wait), as_json=json)
    return OK


@app.command(group=STEER)
def drain(
    what: Annotated[str, Parameter(help="A slot, a role or a node.")],
    run: Run = None,
    *,
    wait: Seconds = 60.0,
    json: Json = False,
) -> int:
    """Stop slots in order; they stay down until they are restarted or their role is scaled. A node is emptied, and
    takes no slots until it is restarted."""
    from relax_rt.cli.runs import find_run_dir
    from relax_rt.cli.steering import drain

    _tell(drain(find_run_dir(run), what, wait), as_json=json)
    return OK


@app.command(group=STEER)
def reinstate(
    items: Annotated[
        list[str], Parameter(help="Ids of retired items, as `relax-rt retired` lists them, or their beginnings.")
    ],
    *,
    run: Run = None,
    json: Json = False,
) -> int:
    """Sample retired items again in a live run. progress.kept_items names items that are never retired."""
    from relax_rt.cli.retirement import reinstate
    from relax_rt.cli.runs import find_run_dir

    found = reinstate(find_run_dir(run), items)
    _tell((f"tried again: {', '.join(found)}", []), as_json=json)
    return OK


def _tell(found: tuple[str, list[str]], *, as_json: bool) -> None:
    from relax_rt.cli.display import say, show_json

    text, slots = found
    show_json({"did": text, "slots": slots}) if as_json else say(text)
