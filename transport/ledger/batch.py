"""Which groups make the next training batch, and how long it is held for stragglers."""

from __future__ import annotations

from relax_rt.transport.ledger.core import Core
from relax_rt.transport.ledger.policy import TRAIN
from relax_rt.transport.ledger.state import Group
from relax_rt.transport.queue.api import SampleKey


def refuse_stale(core: Core) -> None:
    """End every group over the staleness bound that is not on lease to the trainer; its prompt returns."""
    for group in list(core.state.groups.values()):
        if not group.lease and core.staleness(group) > core.policy.max_staleness:
            core.changed = True
            core.end(group, "refused(stale)")


def stragglers(core: Core) -> list[Group]:
    """Groups that are not ready to be trained and that the next update would push past the bound."""
    return [
        group
        for group in core.state.groups.values()
        if group.id not in core.train_ready
        and not group.lease
        and core.staleness(group) + 1 > core.policy.max_staleness
    ]


def choose(core: Core, wanted: int) -> tuple[list[SampleKey], str]:
    """The samples of exactly `wanted` groups, those first that the next update would make over-stale.

    Returns no sample and the reason while there are too few groups, or while the batch waits for stragglers.
    """
    state = core.state
    if state.trainer_version is None:
        return [], "the trainer has not announced its weights yet"
    refuse_stale(core)
    for lease in state.leases.values():
        if lease.task == TRAIN:
            return [], f"lease {lease.id} of {lease.who} is not finished; its update decides what is stale"
    if len(core.train_ready) < wanted:
        _blocked(core, None)
        return [], f"{len(core.train_ready)} of {wanted} groups are ready for training"
    late = stragglers(core)
    if late:
        since = core.now if state.blocked_since is None else state.blocked_since
        if core.now - since < core.policy.straggler_wait_s:
            _blocked(core, since)
            return [], _names(late)
        for group in late:
            core.tally("stragglers")
            core.end(group, "dropped(straggler)")
    _blocked(core, None)
    core.changed = True
    order = sorted(core.train_ready, key=lambda id_: (-core.staleness(state.groups[id_]), id_))
    return [key for id_ in order[:wanted] for key in state.groups[id_].sample_keys()], ""


def _blocked(core: Core, since: float | None) -> None:
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
