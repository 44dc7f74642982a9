"""Groups begun beyond the bound, when the step that they were to help is complete without them (`on_surplus`).

Recycled, they go on with their tokens: what is over the staleness bound is context from then on, and finished members
that have no other tokens are made again. So a long sequence is not begun anew at each update that overtakes it.
"""

from __future__ import annotations

from relax_rt.transport.queue.ledger.core import Core
from relax_rt.transport.queue.ledger.failures import frozen, make_again
from relax_rt.transport.queue.ledger.marks import any_held
from relax_rt.transport.queue.ledger.state import Group


def recycle(core: Core, group: Group) -> bool:
    """Let a surplus group go on. False if that is not wanted, or nothing of it is unfinished and begun."""
    if core.policy.on_surplus != "recycle" or (group.holder is None and not any_held(group)):
        return False
    group.recycled = True
    core.changed = True
    core.tally("groups_recycled")
    core.may_end_hold()
    return keep_within(core, group)


def keep_within(core: Core, group: Group) -> bool:
    """Have members of a recycled group made again that are over-stale as a whole.

    A group that is complete keeps its other members, so that one that took long is not lost with short ones that were
    done before it. False if nothing else is left, or its composition is fixed.
    """
    bound = core.policy.max_staleness
    stale = {
        key.member for key, sample in group.members() if sample.spans and core.staleness(group, key.member) > bound
    }
    if stale and (len(stale) == group.size or frozen(core, group)):
        return False
    if stale:
        core.note("members_ended", group=group.id, members=sorted(stale), state="dropped(surplus)")
        make_again(core, group, stale, "dropped(surplus)")
    return True
