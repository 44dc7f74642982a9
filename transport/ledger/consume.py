"""Consumers: leases on ready samples, their completion, and what becomes of lapsed ones."""

from __future__ import annotations

import heapq

from relax_rt.transport.errors import Refused
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.ledger.batch import choose
from relax_rt.transport.ledger.core import Core
from relax_rt.transport.ledger.events import Abandon, Complete, Take
from relax_rt.transport.ledger.extents import extents_of
from relax_rt.transport.ledger.policy import TRAIN
from relax_rt.transport.ledger.state import Lease
from relax_rt.transport.queue.api import Batch, Freed, Put, SampleInfo, SampleKey


def take(core: Core, who: Incarnation, event: Take) -> Batch:
    """Lease ready samples for a task, or say what is waited for."""
    if event.task not in core.policy.tasks:
        raise Refused(f"take for task '{event.task}' by {who}", why=f"tasks are {', '.join(sorted(core.policy.tasks))}")
    if event.samples < 1 and event.groups < 1:
        raise Refused(f"take for task '{event.task}' by {who}", why="neither samples nor groups were asked for")
    if event.task == TRAIN and event.groups < 1:
        raise Refused(f"take for task '{event.task}' by {who}", why="training takes whole groups: say how many")
    if event.task == TRAIN:
        keys, waiting_on = choose(core, event.groups)
    elif event.groups:
        keys, waiting_on = _whole_groups(core, event.task, event.groups)
    else:
        keys = heapq.nsmallest(event.samples, core.ready[event.task])
        waiting_on = "" if keys else f"no sample is ready for task '{event.task}'"
    if not keys:
        return Batch(0, [], waiting_on=waiting_on)
    return batch_of(core, _lease(core, who, event.task, keys))


def _whole_groups(core: Core, task: str, wanted: int) -> tuple[list[SampleKey], str]:
    """Samples of exactly `wanted` groups all of whose members are ready for the task."""
    ready = core.ready[task]
    whole = [
        id_ for id_ in sorted({key.group for key in ready}) if ready.issuperset(core.state.groups[id_].sample_keys())
    ]
    if len(whole) < wanted:
        return [], f"{len(whole)} of {wanted} groups are ready for task '{task}'"
    return [key for id_ in whole[:wanted] for key in core.state.groups[id_].sample_keys()], ""


def _lease(core: Core, who: Incarnation, task: str, keys: list[SampleKey]) -> Lease:
    samples = [core.state.groups[key.group].samples[key.member] for key in keys]
    lease = Lease(core.new_id(), task, who, keys, pins=[extent for sample in samples for extent in sample.extents])
    core.extents.pin(lease.pins)
    core.state.leases[lease.id] = lease
    core.hold(lease.id)
    for group in core.groups_of(lease):
        if task == TRAIN:
            group.lease = lease.id
    if task != TRAIN:
        for sample in samples:
            sample.leases[task] = lease.id
    for group in core.groups_of(lease):
        core.refresh(group)
    core.changed = True
    return lease


def batch_of(core: Core, lease: Lease) -> Batch:
    """What the holder of a lease is told."""
    infos: list[SampleInfo] = []
    for key in lease.keys:
        group = core.state.groups.get(key.group)
        if group is None:
            continue
        sample = group.samples[key.member]
        staleness = core.staleness(group, key.member) if lease.task == TRAIN else -1
        infos.append(
            SampleInfo(key, group.prompt.index, group.prompt.attempt, list(sample.columns), sample.spans, staleness)
        )
    return Batch(lease.id, infos, lease_s=core.state.limits.lease_s)


def complete(core: Core, who: Incarnation, event: Complete) -> list[Freed]:
    """Finish a lease: its samples get their new columns, and the groups of failed ones end.

    A lapsed lease is finished without effect on the samples: its columns are not kept and its pins are released.
    """
    lease = core.state.leases.get(event.lease)
    if lease is None or lease.who != who:
        return _complete_late(core, who, event)
    _check_complete(core, who, event, lease)
    for item in event.puts:
        _add_columns(core, item)
    core.close(lease)
    failed: dict[int, dict[int, str]] = {}
    for failure in event.failures:
        failed.setdefault(failure.key.group, {})[failure.key.member] = failure.reason
    for group in core.groups_of(lease):
        if group.id in failed and not group.lease:
            core.tally("failed_groups")
            core.note("samples_failed", group=group.id, task=event.task, reasons=list(failed[group.id].values())[:3])
            core.end(group, "dropped(sibling)", marked=dict.fromkeys(failed[group.id], "failed"), fate="failed")
            continue
        for key in lease.keys:
            if key.group == group.id and event.task != TRAIN:
                group.samples[key.member].done.append(event.task)
                group.samples[key.member].deaths = 0
        core.refresh(group)
    core.changed = True
    return core.extents.collect(who)


def _add_columns(core: Core, item: Put) -> None:
    extents = extents_of(item.columns)
    group = core.state.groups.get(item.key.group)
    if group is None:
        for extent in extents:
            core.extents.return_to_owner(extent, core.state.callers.alive)
        return
    sample = group.samples[item.key.member]
    sample.columns.extend(item.columns)
    sample.extents.extend(extents)
    core.extents.add(extents)


def _check_complete(core: Core, who: Incarnation, event: Complete, lease: Lease) -> None:
    what = f"completion of lease {event.lease} by {who}"
    if event.task != lease.task:
        raise Refused(what, why=f"it was taken for task '{lease.task}', not '{event.task}'")
    if event.task == TRAIN and (event.puts or not event.failures):
        raise Refused(what, why="training is finished with `trained`; complete only reports samples that failed")
    keys = set(lease.keys)
    put_keys = [item.key for item in event.puts]
    if len(set(put_keys)) != len(put_keys):
        raise Refused(what, why="a sample is twice in the same call")
    for key in put_keys + [failure.key for failure in event.failures]:
        if key not in keys:
            raise Refused(what, why=f"sample {key} is not part of it")
    core.extents.check([extent for item in event.puts for extent in extents_of(item.columns)], who)
    for item in event.puts:
        group = core.state.groups.get(item.key.group)
        there = {column.name for column in group.samples[item.key.member].columns} if group is not None else set()
        double = there.intersection(column.name for column in item.columns)
        if double:
            raise Refused(what, why=f"sample {item.key} has column {', '.join(sorted(double))} already")


def _complete_late(core: Core, who: Incarnation, event: Complete) -> list[Freed]:
    core.extents.check([extent for item in event.puts for extent in extents_of(item.columns)], who)
    core.tally("late_completions")
    for item in event.puts:
        for extent in extents_of(item.columns):
            core.extents.return_to_owner(extent, core.state.callers.alive)
    _unpin(core, who, event.lease)
    core.changed = True
    return core.extents.collect(who)


def _unpin(core: Core, who: Incarnation, lease_id: int) -> None:
    lapsed = core.state.lapsed.get(lease_id)
    if lapsed is not None and lapsed.who == who:
        core.unpin(lapsed)
        core.changed = True


def abandon(core: Core, who: Incarnation, event: Abandon) -> None:
    """The caller gives a lease back undone: its samples are offered again, no death is counted."""
    lease = core.state.leases.get(event.lease)
    if lease is None or lease.who != who:
        _unpin(core, who, event.lease)
        return
    core.changed = True
    core.close(lease)
    for group in core.groups_of(lease):
        core.refresh(group)


def lapse(core: Core, lease: Lease, *, process_ended: bool, blame: bool = True) -> None:
    """The lease's holder is dead or late: its samples are offered again, or quarantined if they killed too many.

    Without process_ended the holder may still be reading, so that the extents stay pinned.
    """
    core.changed = True
    core.close(lease, pinned=not process_ended)
    core.note("lease_lapsed", lease=lease.id, task=lease.task, holder=str(lease.who), samples=len(lease.keys))
    members: dict[int, list[int]] = {}
    for key in lease.keys:
        members.setdefault(key.group, []).append(key.member)
    for group in core.groups_of(lease):
        for member in members[group.id]:
            group.samples[member].deaths += blame
        limit = core.state.limits.quarantine_after
        bad = {member: "quarantined" for member, sample in enumerate(group.samples) if sample.deaths >= limit}
        # A group on lease to the trainer is frozen; its end is the trainer's.
        if bad and not group.lease:
            core.end(group, "dropped(sibling)", marked=bad, fate="retire")
        else:
            core.refresh(group)
