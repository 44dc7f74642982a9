"""Which groups make the next training batch, and how long it is held for stragglers."""

from __future__ import annotations

from relax_rt.transport.queue.ledger.admission import bound, outstanding, surplus
from relax_rt.transport.queue.ledger.core import REFUSED, Core
from relax_rt.transport.queue.ledger.recycle import keep_within, recycle
from relax_rt.transport.queue.ledger.state import Group


def refuse_stale(core: Core, beyond: int = 0) -> None:
    """End every group over the staleness bound that is not on lease to the trainer; its prompt returns.

    beyond: samples that may have been there beyond the bound: the newest so many end as that, or are recycled, less
        what was recycled before and still goes on.
    """
    if core.state.trainer_version is None or core.policy.max_staleness == float("inf"):
        return
    stale = [
        group
        for group in reversed(list(core.state.groups.values()))
        if not group.lease and core.staleness(group) > core.policy.max_staleness
    ]
    core.changed = core.changed or bool(stale)
    for group in stale:
        if group.recycled and not keep_within(core, group):
            core.end(group, "dropped(surplus)" if beyond else REFUSED)
    left = beyond - _going_on(core) if beyond else 0
    for group in stale:
        if group.recycled:
            continue
        if left <= 0 or not recycle(core, group):
            core.end(group, "dropped(surplus)" if left > 0 else REFUSED)
        left -= group.size


def _going_on(core: Core) -> int:
    """Samples of recycled groups that are not ready for training: they take the room of new surplus."""
    return sum(
        group.size
        for group in core.state.groups.values()
        if group.recycled and not group.lease and group.id not in core.step_ready
    )


def urgent(core: Core, group: Group) -> bool:
    """Whether the next update would push the group past the bound."""
    return core.staleness(group) + 1 > core.policy.max_staleness


def stragglers(core: Core) -> list[Group]:
    """Groups that are not ready to be trained and that the next update would push past the bound."""
    if core.policy.on_straggler == "mask" or core.policy.max_staleness == float("inf"):
        return []
    return [
        group
        for group in core.state.groups.values()
        if group.id not in core.step_ready and not group.lease and not group.recycled and urgent(core, group)
    ]


def hold_for_stragglers(core: Core, *, ends_step: bool = True) -> str:
    """Why the batch that could be granted must wait; empty when it need not. Late stragglers are revoked.

    ends_step: the update comes next, so that surplus is of no use any more. A trainer that takes parts may still leave
        some of them out, and then needs it; the update itself ends what is left of it.
    """
    late = stragglers(core)
    beyond = _beyond_bound(core, late)
    for group in beyond if ends_step else ():
        if not recycle(core, group):
            core.end(group, "dropped(surplus)")
        core.changed = True
    ended = {group.id for group in beyond}
    late = [group for group in late if group.id not in ended]
    if late:
        since = core.now if core.state.blocked_since is None else core.state.blocked_since
        patience_s = core.policy.straggler_wait_s if core.policy.on_straggler == "wait" else 0.0
        if core.now - since < patience_s:
            blocked(core, since)
            return _names(late)
        for group in late:
            core.tally("stragglers")
            # Nobody waits for the same prompt for ever. What took no time is tried again as often as it takes.
            in_vain = patience_s > 0 and bool(group.missing())
            core.end(group, "dropped(straggler)", fate="failed" if in_vain else "return")
        core.changed = True
    blocked(core, None)
    return ""


def places(core: Core, groups: int) -> int:
    """How many of the groups that a step lacks may be taken before its stragglers are there, which need the others.

    Else what is made fast would take the places of what takes long, and the update refuse that.
    """
    if core.policy.on_straggler != "wait":
        return groups
    late = stragglers(core)
    waited_for = len(late) - len(_beyond_bound(core, late))
    ready = sum(urgent(core, core.state.groups[id_]) for id_ in core.step_ready)
    return max(ready, groups - waited_for, 0)


def _beyond_bound(core: Core, late: list[Group]) -> list[Group]:
    """The newest stragglers, as many as are surplus, less what goes on already: the batch does not wait for them."""
    over = outstanding(core) - bound(core, core.state.trainer_version or 0) - _going_on(core)
    found: list[Group] = []
    for group in reversed(late):
        if not surplus(core) or over <= 0:
            break
        over -= group.size
        found.append(group)
    return found


def blocked(core: Core, since: float | None) -> None:
    """Since when the batch waits for stragglers only."""
    if core.state.blocked_since != since:
        core.state.blocked_since = since
        core.changed = True


def _names(late: list[Group]) -> str:
    """What the batch waits for, in words."""
    group = late[0]
    there = sum(sample.generated for sample in group.samples)
    at = f"{group.holder} has made {there} of {group.size}" if group.holder else "its columns are not complete"
    more = f" and {len(late) - 1} more" if len(late) > 1 else ""
    return f"the update would make group {group.id}{more} over-stale: {at}"
