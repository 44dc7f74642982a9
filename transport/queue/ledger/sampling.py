"""Dynamic sampling and prompt samplers: groups left out of a step, others asked for, and which item a prompt is."""

from __future__ import annotations

from relax_rt.transport.queue.ledger.admission import beyond
from relax_rt.transport.queue.ledger.core import ROOM, Core
from relax_rt.transport.queue.ledger.events import Ask, Choose, Filtered
from relax_rt.transport.queue.ledger.messages import Chosen
from relax_rt.transport.queue.ledger.state import Lease
from relax_rt.transport.queue.ledger.training import end_for, step_lease
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

MAX_ASKED = 65_536
"""Groups that may be asked for beyond the bound."""
MAX_AHEAD = 65_536
"""Prompts ahead of the order's cursor whose items may be chosen."""
RULES = 32
"""Rules whose groups the account counts apart; the others' are counted together."""


def filtered(core: Core, who: Incarnation, event: Filtered) -> None:
    """Groups of a train lease end as dropped(filter), whatever becomes of the step; the lease keeps the others."""
    what = f"filtering groups of lease {event.lease} by {who}"
    lease = step_lease(core, who, event.lease, what)
    gone = dict.fromkeys(event.groups)
    strange = [id_ for id_ in gone if id_ not in lease.groups()]
    if lease.stream:
        raise Refused(what, why="its ranks read it together", hint="take the batch by one caller alone")
    if strange or not gone:
        raise Refused(what, why=f"groups {strange or 'none'} are not part of it")
    core.changed = True
    lease.keys = [key for key in lease.keys if key.group not in gone]
    for group in [core.state.groups[id_] for id_ in gone]:
        core.tally(_rule(core, event.reason), group.size)
        core.end(group, "dropped(filter)", fate="filter", reason=event.reason)
    if not lease.keys:
        end_for(core, lease, who, pinned=event.pinned)
    elif not event.pinned:
        _let_go(core, lease)


def _rule(core: Core, reason: str) -> str:
    """The name of the count of samples left out by the rule that a reason begins with, as `rule: why`."""
    name = f"filtered({reason.partition(':')[0].strip()[:40]})"
    known = [tally for tally in core.state.tallies if tally.startswith("filtered(")]
    return name if name in known or len(known) < RULES else "filtered(others)"


def _let_go(core: Core, lease: Lease) -> None:
    """Its holder reads only what the rest of it needs."""
    needed = set(core.read_by(sample for group in core.groups_of(lease) for _, sample in group.members()))
    lease.blocks = [id_ for id_ in lease.blocks if id_ in needed]
    pins = core.blocks.extents_of(lease.blocks)
    gone = set(lease.pins).difference(pins)
    core.unpin(extent for extent in lease.pins if extent in gone)
    lease.pins = pins


def ask(core: Core, who: Incarnation, event: Ask) -> None:
    """So many groups may be under way beyond the bound until the next step; a later word counts instead."""
    what = f"asking for {event.groups} groups by {who}"
    if not core.policy.group_size:
        raise Refused(what, why="this queue has no prompts")
    if not 0 <= event.groups <= MAX_ASKED:
        raise Refused(what, why=f"from 0 to {MAX_ASKED} can be asked for")
    # What is under way already stays allowed.
    core.state.asked = max(event.groups, min(core.state.asked, beyond(core)))
    core.changed = True
    core.touched.add(ROOM)


def choose(core: Core, who: Incarnation, event: Choose) -> Chosen:
    """Which data item prompts are of that were not yet given out; answers with the first of these."""
    what = f"choosing prompts by {who}"
    if not core.policy.group_size:
        raise Refused(what, why="this queue has no prompts")
    pool, end = core.state.prompts, core.policy.prompts
    far = max(event.items, default=0)
    if far >= pool.cursor + MAX_AHEAD:
        raise Refused(what, why=f"place {far} is {far - pool.cursor} ahead", hint=f"choose at most {MAX_AHEAD} ahead")
    core.changed = pool.choose({index: item for index, item in event.items.items() if end is None or index < end})
    return Chosen(pool.cursor)
