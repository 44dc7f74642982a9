"""Commands that change a living run: restart, scale, drain, reinstate. They name a slot, a role or a node."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from relax_rt.cli.app import OK, STEER, Json, Run, app, duration_of
from relax_rt.cli.display import say, show_json
from relax_rt.cli.lost_samples import reinstate_items
from relax_rt.cli.runs import find_run_dir
from relax_rt.config.problems import BadInput, did_you_mean
from relax_rt.interfaces.agent import RunStatus, SlotStatus
from relax_rt.observe.text import clip
from relax_rt.supervision import control
from relax_rt.transport.rpc.errors import Refused, RelaxError

POLL_S = 0.1
DOWN = ("ended", "pending")

Done = tuple[str, list[str]]
"""What was done, in words, and the slots concerned."""


Seconds = Annotated[
    float,
    Parameter(
        name="--wait",
        converter=duration_of,
        help="How long to wait until it is done, as 60 or 5m; 0: do not wait.",
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
    """Restart slots; this does not count as a failure. A drained node takes slots again."""
    _print_done(restart_slots(find_run_dir(run), what), as_json=json)
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
    """Change the number of slots of a role, within what the config allows. The file is not changed: a resumed run has
    its number again."""
    _print_done(scale_role(find_run_dir(run), role, count, wait), as_json=json)
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
    _print_done(drain_what(find_run_dir(run), what, wait), as_json=json)
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
    found = reinstate_items(find_run_dir(run), items)
    _print_done((f"tried again: {', '.join(found)}", []), as_json=json)
    return OK


def _print_done(found: tuple[str, list[str]], *, as_json: bool) -> None:
    text, slots = found
    show_json({"did": text, "slots": slots}) if as_json else say(text)


def restart_slots(run_dir: Path, what: str) -> Done:
    """Restart a slot, or all slots of a role; of a gang one stands for all. Or open a drained node again.

    Raises:
        BadInput: there is no such slot, role or node, or the run refuses.
        NoRun: see control.restart.
    """
    status = control.status(run_dir)
    slots = slots_meant(status, what)
    # An ended run has no slots: the call itself says so best.
    _ask(lambda: control.restart(run_dir, what))
    if not any(what in (slot.slot, slot.kind) for slot in slots):
        return f"node {what} takes slots again", []
    names = [slot.slot for slot in slots]
    return f"{_listed(names)} restart{'s' if len(names) == 1 else ''}", names


def scale_role(run_dir: Path, role: str, count: int, wait_s: float) -> Done:
    """Scale a role; with wait_s, stay until it has that many slots ready and no other is up.

    Raises:
        BadInput: there is no such role, or the number cannot be.
        NoRun: see control.scale.
        RelaxError: it has not come to pass within wait_s.
    """
    if count < 0:
        raise BadInput(f"{role} cannot have {count} slots", hint="0 drains all of them")
    before = control.status(run_dir)
    roles = sorted({*before.roles, *(slot.kind for slot in before.slots)})
    if roles and role not in roles:
        raise BadInput(f"there is no role {role!r}", hint=did_you_mean(role, roles) or f"roles: {', '.join(roles)}")
    had = len([slot for slot in before.slots if slot.kind == role and slot.state not in DOWN])
    _ask(lambda: control.scale(run_dir, role, count))

    def late(status: RunStatus) -> str:
        mine = [slot for slot in status.slots if slot.kind == role]
        up = [slot for slot in mine if slot.state not in DOWN]
        ready = [slot for slot in up if slot.state == "ready"]
        if len(ready) == len(up) == count:
            return ""
        return _states(up) or f"none of {count} started"

    status = _wait(run_dir, late, wait_s, f"{role} does not have {count} slots ready")
    names = [slot.slot for slot in status.slots if slot.kind == role and slot.state not in DOWN]
    return f"{role}: {had} -> {count} slots", names


def drain_what(run_dir: Path, what: str, wait_s: float) -> Done:
    """Drain a slot, a role or a node; with wait_s, stay until they are down.

    Raises:
        BadInput: there is no such thing, or the run cannot do without it.
        NoRun: see control.drain.
        RelaxError: it has not come to pass within wait_s.
    """
    slots = slots_meant(control.status(run_dir), what)
    _ask(lambda: control.drain(run_dir, what))
    names = [slot.slot for slot in slots]

    def late(status: RunStatus) -> str:
        return _states([slot for slot in status.slots if slot.slot in names and slot.state not in DOWN])

    _wait(run_dir, late, wait_s, f"{what} is not drained")
    return f"{_listed(names)} drained", names


def slots_meant(status: RunStatus, what: str) -> list[SlotStatus]:
    """The slots of that name, role or node; empty if the run has ended.

    Raises:
        BadInput: there is no such thing, or it is a role without slots.
    """
    if status.ended:
        return []
    named = [slot for slot in status.slots if what in (slot.slot, slot.kind)]
    if named:
        return named
    if what in status.roles:
        raise BadInput(f"{what} has no slots", hint=f"`relax-rt scale {what} N` gives it some")
    if any(node.node == what for node in status.nodes if node.node):
        return [slot for slot in status.slots if slot.node == what]
    known = [*(slot.slot for slot in status.slots), *sorted({*status.roles, *(slot.kind for slot in status.slots)})]
    known += [node.node for node in status.nodes if node.node]
    hint = did_you_mean(what, known) or f"there is {', '.join(known)}"
    raise BadInput(f"there is no slot, role or node {what!r}", hint=hint)


def _ask(call: Callable[[], None]) -> None:
    """What a run refuses is bad input: nothing of it has changed."""
    try:
        call()
    except Refused as refused:
        raise BadInput(refused.what, why=refused.why, hint=refused.hint) from refused


def _wait(run_dir: Path, late: Callable[[RunStatus], str], wait_s: float, what: str) -> RunStatus:
    end = time.monotonic() + wait_s
    while True:
        status = control.status(run_dir)
        if status.ended:
            raise RelaxError(f"{what}: the run has ended", why=status.reason)
        left = late(status) if wait_s > 0 else ""
        if not left:
            return status
        if time.monotonic() > end:
            raise RelaxError(f"{what} after {wait_s:g} s", why=clip(left, 200), hint="`relax-rt why` shows why")
        time.sleep(POLL_S)


def _states(slots: Sequence[SlotStatus]) -> str:
    return ", ".join(f"{slot.slot} {slot.state}" for slot in slots)


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
