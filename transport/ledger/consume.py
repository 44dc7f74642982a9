"""Consumers: leases on ready samples, their completion, and what becomes of lapsed ones."""

from __future__ import annotations

from relax_rt.transport.errors import Refused
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.ledger.admission import check_fields, return_extents
from relax_rt.transport.ledger.blocks import owner_of
from relax_rt.transport.ledger.choice import Samplers, choose, settle
from relax_rt.transport.ledger.core import Core
from relax_rt.transport.ledger.events import Abandon, Complete, Take
from relax_rt.transport.ledger.failures import fail_members
from relax_rt.transport.ledger.state import Group, Lease, Part, Stream
from relax_rt.transport.queue.api import Batch, Extent, Put, SampleInfo, SampleKey, Want

MAX_READERS = 4096


def take(core: Core, who: Incarnation, event: Take, samplers: Samplers) -> tuple[Batch, list[SampleKey]]:
    """Lease ready samples for a task, or say what is waited for; also answers with the keys that were chosen.

    An event from the journal carries its keys: what was chosen then is granted again, whatever samplers do now.
    """
    task, want = event.task, event.want
    _check_take(core, who, task, want)
    if want.stream:
        shared = _shared(core, who, task, want)
        if shared is not None:
            return shared, []
    waiting_on = settle(core, want) if task == core.policy.step_task else ""
    keys = event.keys
    if keys is None:
        keys, waiting_on = ([], waiting_on) if waiting_on else choose(core, samplers, task, want)
    if not keys:
        return Batch(0, [], waiting_on=waiting_on), []
    lease = _lease(core, who, task, keys, want)
    return batch_of(core, lease, who), keys


def _check_take(core: Core, who: Incarnation, task: str, want: Want) -> None:
    what = f"take for task '{task}' by {who}"
    if task not in core.policy.tasks:
        raise Refused(what, why=f"tasks are {', '.join(sorted(core.policy.tasks))}")
    if want.samples < 1 and want.groups < 1:
        raise Refused(what, why="neither samples nor groups were asked for")
    if task == core.policy.step_task and want.groups < 1:
        raise Refused(what, why="training takes whole groups: say how many")
    if not 1 <= want.readers <= MAX_READERS or want.index < 0 or want.tokens < 0:
        raise Refused(what, why=f"readers {want.readers}, index {want.index} or tokens {want.tokens} cannot be")


def _shared(core: Core, who: Incarnation, task: str, want: Want) -> Batch | None:
    """The batch of a stream's index if it was granted, or why it cannot be; None if it is the next to be granted."""
    name = f"{task}:{want.stream}"
    stream = core.state.streams.get(name, Stream())
    if want.index in stream.live:
        lease = core.state.leases[stream.live[want.index]]
        if who not in lease.holders:
            if len(lease.holders) >= lease.readers:
                raise Refused(
                    f"batch {want.index} of stream '{name}' for {who}", why=f"{lease.readers} read it already"
                )
            lease.holders.append(who)
            core.changed = True
        core.hold(lease.id, who)
        return batch_of(core, lease, who)
    if want.index < stream.next_index:
        raise Refused(
            f"batch {want.index} of stream '{name}' for {who}",
            why=f"it ended, and its samples were finished or offered again; the next is {stream.next_index}",
            hint="all ranks go on with the next index",
        )
    if want.index > stream.next_index:
        return Batch(0, [], waiting_on=f"batch {stream.next_index} of stream '{name}' was not taken yet")
    return None


def _lease(core: Core, who: Incarnation, task: str, keys: list[SampleKey], want: Want) -> Lease:
    samples = [core.state.groups[key.group].samples[key.member] for key in keys]
    pins = core.blocks.extents_of(core.read_by(samples))
    lease = Lease(core.new_id(), task, keys, pins, [who], stream=want.stream, readers=want.readers)
    core.blocks.pin(pins)
    core.state.leases[lease.id] = lease
    core.hold(lease.id, who if want.stream else None)
    if want.stream:
        stream = core.state.streams.setdefault(f"{task}:{want.stream}", Stream())
        stream.live[want.index] = lease.id
        stream.next_index = want.index + 1
    if task == core.policy.step_task:
        for group in core.groups_of(lease):
            group.lease = lease.id
            core.refresh(group)
            for _, sample in group.members():
                core.losses.consumed(sample.length, core.staleness(group))
    else:
        ready = core.ready[task]
        for key, sample in zip(keys, samples, strict=True):
            sample.leases[task] = lease.id
            ready.pop(key, None)
    core.changed = True
    return lease


def batch_of(core: Core, lease: Lease, who: Incarnation) -> Batch:
    """What a holder of a lease is told."""
    place: dict[int, int] = {}
    infos: list[SampleInfo] = []
    step = lease.task == core.policy.step_task
    for key in lease.keys:
        group = core.state.groups.get(key.group)
        if group is None:
            continue
        sample = group.samples[key.member]
        if not step and sample.leases.get(lease.task) != lease.id:
            continue
        parts = [(place.setdefault(part.block, len(place)), part.row) for part in sample.parts]
        prompt = group.prompt
        infos.append(
            SampleInfo(
                key,
                prompt.index if prompt is not None else -1,
                prompt.attempt + group.remade if prompt is not None else 0,
                parts,
                sample.spans,
                sample.length,
                core.staleness(group, key.member) if step else -1,
                core.masked(sample) if step else [],
            )
        )
    blocks = [core.blocks.blocks[id_].ref for id_ in place]
    blobs = core.blocks.blob_refs(place)
    slabs = {extent.slab for extent in lease.pins}
    remote = core.state.callers.remote(who, {owner_of(slab) for slab in slabs}) if core.state.callers.homes else {}
    return Batch(lease.id, infos, blocks, blobs, remote, core.state.limits.lease_s)


def complete(core: Core, who: Incarnation, event: Complete) -> list[Extent]:
    """Finish a lease: its samples get their new columns, and failed ones go the way the policy says.

    A lapsed lease is finished without effect on the samples: its columns are not kept and its pins are released.
    """
    lease = core.state.leases.get(event.lease)
    if lease is None or who not in lease.holders:
        return _complete_late(core, who, event)
    _check_complete(core, who, event, lease)
    core.changed = True
    for item in event.puts:
        _add_columns(core, lease, item)
    if lease.stream and not _last_of(core, lease, who, event):
        return core.blocks.collect(who)
    _finish(core, who, lease, event)
    return core.blocks.collect(who)


def _last_of(core: Core, lease: Lease, who: Incarnation, event: Complete) -> bool:
    """Whether all ranks have now finished the shared lease."""
    if event.failures:
        return True
    if who not in lease.finished:
        lease.finished.append(who)
        core.unhold_for(lease.id, who)
    return len(lease.finished) >= lease.readers


def _finish(core: Core, who: Incarnation, lease: Lease, event: Complete) -> None:
    samples = core.samples_of(lease)
    groups = core.groups_of(lease)
    others = [holder for holder in lease.holders if holder != who and holder not in lease.finished]
    lease.holders = [*others, who] if event.pinned else others
    core.close(lease, pinned=bool(lease.holders))
    if lease.task != core.policy.step_task:
        failed = {failure.key for failure in event.failures}
        for key, sample in samples:
            if key not in failed:
                sample.done.append(lease.task)
                sample.deaths = 0
    if event.failures:
        fail_members(core, lease.task, event.failures)
    for group in groups:
        if group.id in core.state.groups:
            core.refresh(group)
            core.finish_if_done(group)


def _add_columns(core: Core, lease: Lease, item: Put) -> None:
    mine = {key: sample for key, sample in core.samples_of(lease)}
    rows = [row for row in item.rows if row.key in mine]
    if not rows:
        return_extents(core, [item])
        return
    block = core.blocks.add(item, len(rows), core.state.callers.alive)
    versioned = core.policy.versioned and not set(core.policy.versioned).isdisjoint(item.block.fields)
    for row in rows:
        mine[row.key].parts.append(Part(block, row.row, lease.task, item.version if versioned else -1))
        if row.length >= 0:
            mine[row.key].length = row.length


def _check_complete(core: Core, who: Incarnation, event: Complete, lease: Lease) -> None:
    what = f"completion of lease {event.lease} by {who}"
    if event.task != lease.task:
        raise Refused(what, why=f"it was taken for task '{lease.task}', not '{event.task}'")
    shared = lease.stream != ""
    if event.task == core.policy.step_task and (event.puts or not (event.failures or shared)):
        raise Refused(what, why="training is finished with `trained`; complete only reports samples that failed")
    if not event.puts and not event.failures:
        return
    keys = set(lease.keys)
    put_keys = [row.key for item in event.puts for row in item.rows]
    for key in put_keys + [failure.key for failure in event.failures]:
        if key not in keys:
            raise Refused(what, why=f"sample {key} is not part of it")
    core.blocks.check(event.puts, who)
    check_fields(core, who, event.puts)
    _check_columns(core, what, event, lease)


def _check_columns(core: Core, what: str, event: Complete, lease: Lease) -> None:
    """No column comes twice, none was computed with weights that are not known."""
    seen: dict[SampleKey, set[str]] = {}
    blocks = core.blocks.blocks
    for key, sample in core.samples_of(lease):
        seen[key] = {name for part in sample.parts for name in blocks[part.block].ref.fields}
    for item in event.puts:
        if item.version >= 0 and item.version not in core.tree:
            raise Refused(what, why=f"policy version {item.version} is not known")
        for row in item.rows:
            there = seen.setdefault(row.key, set())
            double = there.intersection(item.block.fields)
            if double:
                raise Refused(what, why=f"sample {row.key} has column {', '.join(sorted(double))} already")
            there.update(item.block.fields)


def _complete_late(core: Core, who: Incarnation, event: Complete) -> list[Extent]:
    core.blocks.check(event.puts, who)
    core.tally("late_completions")
    return_extents(core, event.puts)
    if not event.pinned:
        unpin(core, who, [event.lease])
    core.changed = True
    return core.blocks.collect(who)


def unpin(core: Core, who: Incarnation, leases: list[int]) -> None:
    """The caller reads the memory of these ended leases no more."""
    for id_ in leases:
        lapsed = core.state.lapsed.get(id_)
        if lapsed is not None and who in lapsed.holders:
            core.unread(lapsed, who)
            core.changed = True


def abandon(core: Core, who: Incarnation, event: Abandon) -> None:
    """The caller gives a lease back undone: its samples are offered again, no death is counted."""
    lease = core.state.leases.get(event.lease)
    if lease is None or who not in lease.holders:
        unpin(core, who, [event.lease])
        return
    core.changed = True
    samples, groups = core.samples_of(lease), core.groups_of(lease)
    lease.holders.remove(who)
    core.close(lease, pinned=bool(lease.holders))
    _offer_again(core, groups, [key for key, _ in samples])


def _offer_again(core: Core, groups: list[Group], keys: list[SampleKey]) -> None:
    for group in groups:
        if group.id in core.state.groups:
            core.refresh(group)
    core.first(reversed(keys))


def lapse(core: Core, lease: Lease, *, ended: set[Incarnation], blame: bool = True) -> None:
    """A holder is dead or late: the samples are offered again, or quarantined if they killed too many.

    Holders that are not among the `ended` processes may still be reading, so that the extents stay pinned.
    """
    core.changed = True
    samples, groups = core.samples_of(lease), core.groups_of(lease)
    step = lease.task == core.policy.step_task
    if step:
        samples = [member for group in groups for member in group.members()]
    lease.holders = [who for who in lease.holders if who not in ended and who not in lease.finished]
    core.note("lease_lapsed", lease=lease.id, task=lease.task, samples=len(lease.keys), readers=lease.readers)
    core.close(lease, pinned=bool(lease.holders))
    for _, sample in samples:
        sample.deaths += blame
    limit = core.state.limits.quarantine_after
    for group in groups:
        bad = {n: "quarantined" for n, sample in enumerate(group.samples) if sample.deaths >= limit}
        # A group on lease to the trainer is frozen; its end is the trainer's.
        if bad and not group.lease:
            core.end(group, "dropped(sibling)", marked=bad, fate="retire")
    _offer_again(core, groups, [key for key, _ in samples])
