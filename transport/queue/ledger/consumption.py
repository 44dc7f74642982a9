"""Consumers: leases on ready samples, their completion, release and lapse."""

from __future__ import annotations

from collections.abc import Iterable

from relax_rt.transport.memory.refs import owner_of
from relax_rt.transport.queue.ledger import packed
from relax_rt.transport.queue.ledger.admission import (
    MAX_SAMPLES,
    check_fields,
    check_rows,
    collect_freed,
    return_extents,
)
from relax_rt.transport.queue.ledger.core import Core
from relax_rt.transport.queue.ledger.events import CompleteLease, ReleaseLease, RequestLease, UnpinLeases
from relax_rt.transport.queue.ledger.failures import (
    count_success,
    fail_members,
    find_stuck,
    quarantine_members,
    reset_failures,
)
from relax_rt.transport.queue.ledger.messages import (
    BlockPut,
    Freed,
    LeaseGrant,
    LeaseRequest,
    SampleInfo,
    SampleKey,
    SampleRun,
)
from relax_rt.transport.queue.ledger.selection import Samplers, prepare_step_request, select_keys
from relax_rt.transport.queue.ledger.state import Lease, SampleGroup, SamplePart, SampleState
from relax_rt.transport.rpc.errors import Refused, did_you_mean
from relax_rt.transport.rpc.identity import Incarnation


def lease(core: Core, who: Incarnation, event: RequestLease, samplers: Samplers) -> tuple[LeaseGrant, RequestLease]:
    """Lease ready samples for a task, or say what is waited for; also answers with the event and what was chosen.

    An event from the journal carries its keys: what was chosen then is granted again, whatever samplers do now.
    """
    task, request = event.task, event.request
    _check_request(core, who, task, request)
    slices = packed.choose(core, task, request) if event.keys is None else event.slices
    if slices:
        return batch_of(core, packed.grant(core, who, task, slices)), RequestLease(task, request, [], slices)
    settled, waiting_on = prepare_step_request(core, who, request) if task == core.policy.step_task else (request, "")
    keys = event.keys
    if keys is None:
        keys, waiting_on = _choose(core, samplers, task, settled) if settled is not None else ([], waiting_on)
    if not keys:
        return LeaseGrant(0, [], waiting_on=waiting_on), RequestLease(task, request, [])
    if event.keys is None:
        keys = _isolate_suspect(core, task, keys, request)
    # Not earlier: a replay sees only the keys that were granted, and must unpack the same runs.
    packed.unpack_keys(core, keys)
    groups = core.state.groups
    samples = [groups[key.group].samples[key.member] for key in keys]
    lease = _grant(core, who, task, keys, samples)
    return batch_of(core, lease, zip(keys, samples, strict=True)), RequestLease(task, request, keys)


def _choose(core: Core, samplers: Samplers, task: str, request: LeaseRequest) -> tuple[list[SampleKey], str]:
    try:
        return select_keys(core, samplers, task, request)
    except Refused as error:
        if not core.changed:
            raise
        # What was settled before must be journaled; the sampler says it again when it is asked again.
        return [], str(error)


def _isolate_suspect(core: Core, task: str, keys: list[SampleKey], request: LeaseRequest) -> list[SampleKey]:
    """Lease a sample alone if one more consumer death would quarantine it, so that no other sample is blamed."""
    last = core.state.limits.quarantine_after - 1
    if task == core.policy.step_task or request.groups or last < 1 or len(keys) < 2:
        return keys
    groups = core.state.groups
    for key in keys:
        # A packed sample has no deaths: a lapse unpacks it.
        if (group := groups.get(key.group)) is not None and group.samples[key.member].deaths >= last:
            return [key]
    return keys


def _check_request(core: Core, who: Incarnation, task: str, request: LeaseRequest) -> None:
    what = f"lease for task '{task}' by {who}"
    if task not in core.policy.tasks:
        tasks = sorted(core.policy.tasks)
        raise Refused(what, why=f"tasks are {', '.join(tasks)}", hint=did_you_mean(task, tasks))
    if max(request.samples, request.groups, request.tokens) < 1:
        raise Refused(what, why="neither samples nor groups nor tokens were asked for")
    if task == core.policy.step_task and (request.groups < 1 or request.tokens):
        raise Refused(what, why="training takes whole groups: say how many", hint="bound micro-batches by tokens")
    if request.at_least and (task != core.policy.step_task or request.at_least > request.groups):
        why = f"at least {request.at_least} of {request.groups} groups are asked for"
        raise Refused(what, why=why, hint="at_least is for training, and up to `groups`")
    if request.samples > MAX_SAMPLES or request.groups > MAX_SAMPLES:
        raise Refused(what, why=f"{max(request.samples, request.groups)} are asked for, {MAX_SAMPLES} may be at once")
    if request.tokens < 0:
        raise Refused(what, why=f"{request.tokens} tokens cannot be")


def _grant(core: Core, who: Incarnation, task: str, keys: list[SampleKey], samples: list[SampleState]) -> Lease:
    blocks = core.blocks_of(samples)
    pins = core.blocks.extents_of(blocks)
    lease = Lease(core.new_id(), task, keys, blocks, pins, who)
    core.blocks.pin(pins)
    core.state.leases[lease.id] = lease
    core.start_deadline(lease.id)
    if task == core.policy.step_task:
        for group in core.groups_of(lease):
            group.lease = lease.id
            core.refresh(group)
            for _, sample in group.members():
                core.losses.consumed(sample.length, core.staleness(group))
    else:
        ready, id_ = core.ready[task], lease.id
        for sample in samples:
            sample.leases[task] = id_
        for key in keys:
            ready.discard(key)
    core.changed = True
    return lease


def batch_of(core: Core, lease: Lease, held: Iterable[tuple[SampleKey, SampleState]] | None = None) -> LeaseGrant:
    """The grant of a lease, as its holder gets it.

    Columns that came after the lease was granted are not in it: their memory is not pinned for its holder.
    held: its samples, if they are at hand.
    """
    # Blocks put after the grant are left out: only those of the grant are pinned, so that a batch that is asked for
    # again (its first answer was lost) shows exactly the memory that its holder may read.
    granted = set(lease.blocks)
    place: dict[int, int] = {}
    infos: list[SampleInfo] = []
    runs: list[SampleRun] = []
    if lease.slices:
        runs = packed.runs_of(core, lease, place)
    elif core.policy.step_task:
        infos = _infos(core, lease, granted, place)
    else:
        runs = runs_of(core.samples_of(lease) if held is None else held, granted, place)
    blocks = [core.blocks.blocks[id_].ref for id_ in place]
    blobs = core.blocks.blob_refs(place)
    return LeaseGrant(lease.id, infos, runs, blocks, blobs, _remote(core, lease), core.state.limits.lease_s)


def _remote(core: Core, lease: Lease) -> dict[str, str]:
    callers = core.state.callers
    return callers.remote(lease.holder, {owner_of(extent.slab) for extent in lease.pins}) if callers.processes else {}


def _infos(core: Core, lease: Lease, granted: set[int], place: dict[int, int]) -> list[SampleInfo]:
    infos: list[SampleInfo] = []
    step = lease.task == core.policy.step_task
    for key in lease.keys:
        group = core.state.groups.get(key.group)
        if group is None:
            continue
        sample = group.samples[key.member]
        if not step and sample.leases.get(lease.task) != lease.id:
            continue
        parts = [(place.setdefault(p.block, len(place)), p.row) for p in sample.parts if p.block in granted]
        prompt = group.prompt
        infos.append(
            SampleInfo(
                key,
                prompt.index if prompt is not None else -1,
                prompt.attempt if prompt is not None else 0,
                parts,
                sample.spans,
                sample.length,
                core.staleness(group, key.member) if step else -1,
                core.masked(group, sample) if step else [],
            )
        )
    return infos


def complete(core: Core, who: Incarnation, event: CompleteLease) -> Freed:
    """Finish a lease: its samples get their new columns, and failed ones go the way the policy says.

    A lapsed lease is finished without effect on the samples: its columns are not kept and its pins are released.
    """
    lease = core.state.leases.get(event.lease)
    if lease is None or lease.holder != who:
        check_rows(core, who, event.puts)
        core.tally("late_completions")
        return_extents(core, event.puts)
        if not event.pinned:
            _unpin(core, who, [event.lease])
        core.changed = True
        return Freed(core.blocks.collect(who))
    _check_complete(core, who, event, lease)
    core.changed = True
    if lease.slices:
        if not event.puts and not event.failures and packed.complete(core, lease, pinned=event.pinned):
            return Freed(core.blocks.collect(who))
        packed.unpack_lease(core, lease)
    if event.puts or event.failures or lease.task == core.policy.step_task:
        _finish(core, lease, event)
    else:
        # The usual end of a lease: its task is done with the samples, and nothing new is ready for another task.
        task, tasks = lease.task, len(core.policy.tasks)
        held = core.samples_of(lease)
        core.close(lease, pinned=event.pinned)
        ends = not core.policy.step_task
        for key, sample in held:
            sample.done.append(task)
            sample.deaths = 0
            if ends and len(sample.done) >= tasks:
                core.finish_if_done(core.state.groups[key.group])
        fail_members(core, task, find_stuck(core, held))
    return Freed(core.blocks.collect(who))


def _new_columns(core: Core, lease: Lease, puts: list[BlockPut]) -> list[tuple[SampleKey, SamplePart, int]]:
    """The blocks of the puts are in use from now on, by those samples that the lease still holds."""
    held = {key for key, _ in core.samples_of(lease)}
    versioned, found = set(core.policy.versioned), []
    for item in puts:
        rows = [row for row in item.rows if row.key in held]
        if not rows:
            return_extents(core, [item])
            continue
        block = core.blocks.add(item, len(rows), core.state.callers.alive)
        version = item.version if not versioned.isdisjoint(item.block.fields) else -1
        found += [(row.key, SamplePart(block, row.row, lease.task, version), row.length) for row in rows]
    return found


def _finish(core: Core, lease: Lease, event: CompleteLease) -> None:
    """Failures come first: they decide whose new columns are of use."""
    task, pending = lease.task, _new_columns(core, lease, event.puts)
    held, groups = dict(core.samples_of(lease)), core.groups_of(lease)
    still = {key for group in groups for key in group.sample_keys()} if task == core.policy.step_task else held.keys()
    failures = [failure for failure in event.failures if failure.key in still]
    core.close(lease, pinned=event.pinned)
    not_done = {failure.key for failure in failures}
    # Computed with weights that are not the trainer's any more: the task does all of the sample again.
    not_done |= {key for key, part, _ in pending if core.outdated(part)}
    if failures:
        fail_members(core, task, failures)
        # Where a member is gone, what was computed over the whole group is of no use.
        spoiled = {failure.key.group for failure in failures} if task == core.policy.frozen_by else set()
        not_done |= {key for key in held if key.group in spoiled or key.group not in core.state.groups}
    for key, part, length in pending:
        if key in not_done or key not in held:
            core.blocks.drop_row(part.block, core.state.callers.alive)
            continue
        held[key].parts.append(part)
        if length >= 0:
            held[key].length = length
    for key, sample in held.items():
        if key not in not_done:
            sample.done.append(task)
            sample.deaths = 0
            count_success(core, core.state.groups[key.group], task)
    fail_members(core, task, find_stuck(core, [(key, sample) for key, sample in held.items() if key not in not_done]))
    for group in groups:
        if group.id in core.state.groups:
            core.refresh(group)
            if group.id in core.step_ready:
                reset_failures(core)
            core.finish_if_done(group)


def _check_complete(core: Core, who: Incarnation, event: CompleteLease, lease: Lease) -> None:
    what = f"completion of lease {event.lease} by {who}"
    if lease.task == core.policy.step_task and (event.puts or not event.failures):
        raise Refused(what, why="training is finished with `complete_step`; complete only reports samples that failed")
    if not event.puts and not event.failures:
        return
    keys = set(packed.keys_of(lease))
    put_keys = [row.key for item in event.puts for row in item.rows]
    for key in put_keys + [failure.key for failure in event.failures]:
        if key not in keys:
            raise Refused(what, why=f"sample {key} is not part of it")
    check_rows(core, who, event.puts)
    check_fields(core, who, event.puts)
    _check_columns(core, what, event, lease)


def _check_columns(core: Core, what: str, event: CompleteLease, lease: Lease) -> None:
    """Raises Refused if a column comes twice, or was computed with weights that are not known."""
    seen: dict[SampleKey, set[str]] = {}
    blocks, versioned = core.blocks.blocks, set(core.policy.versioned)
    for one in lease.slices:
        fields = set(blocks[core.state.runs[one.run].block].ref.fields)
        seen.update((SampleKey(one.run + n, 0), set(fields)) for n in range(one.start, one.end))
    for key, sample in core.samples_of(lease):
        seen[key] = {name for part in sample.parts for name in blocks[part.block].ref.fields}
    for item in event.puts:
        if item.version >= 0 and item.version not in core.tree:
            raise Refused(what, why=f"policy version {item.version} is not known")
        if item.version < 0 and not versioned.isdisjoint(item.block.fields):
            name = min(versioned.intersection(item.block.fields))
            raise Refused(what, why=f"column '{name}' depends on the weights, and comes without their version")
        for row in item.rows:
            there = seen.setdefault(row.key, set())
            double = there.intersection(item.block.fields)
            if double:
                raise Refused(what, why=f"sample {row.key} has column {', '.join(sorted(double))} already")
            there.update(item.block.fields)


def unpin(core: Core, who: Incarnation, event: UnpinLeases) -> Freed:
    """The caller does not read the memory of these ended leases any more."""
    _unpin(core, who, event.leases)
    return collect_freed(core, who)


def _unpin(core: Core, who: Incarnation, leases: list[int]) -> None:
    """Release the caller's pins on the memory of these ended leases."""
    for id_ in leases:
        lease = core.state.pinned.get(id_)
        if lease is not None and lease.holder == who:
            core.release_pins(lease)
            core.changed = True


def release(core: Core, who: Incarnation, event: ReleaseLease) -> None:
    """Release a lease undone: its samples are offered again, and no death is counted."""
    lease = core.state.leases.get(event.lease)
    if lease is None or lease.holder != who:
        if not event.pinned:
            _unpin(core, who, [event.lease])
        return
    core.changed = True
    packed.unpack_lease(core, lease)
    samples, groups = core.samples_of(lease), core.groups_of(lease)
    core.close(lease, pinned=event.pinned)
    _offer_again(core, lease.task, groups, [key for key, _ in samples])


def _offer_again(core: Core, task: str, groups: list[SampleGroup], keys: list[SampleKey]) -> None:
    for group in groups:
        if group.id in core.state.groups:
            core.refresh(group)
    core.requeue_first(task, keys)


def lapse(core: Core, lease: Lease, *, pinned: bool, blame: bool = True) -> None:
    """The holder is dead or late: the samples are offered again, or quarantined if they killed too many.

    pinned: the holder's process lives, and may still be reading.
    """
    core.changed = True
    packed.unpack_lease(core, lease)
    samples, groups = core.samples_of(lease), core.groups_of(lease)
    if lease.task == core.policy.step_task:
        samples = [member for group in groups for member in group.members()]
    core.log("lease_lapsed", lease=lease.id, task=lease.task, samples=len(lease.keys))
    core.close(lease, pinned=pinned)
    for _, sample in samples:
        sample.deaths += blame
    limit = core.state.limits.quarantine_after
    for group in groups:
        bad = {key.member: "quarantined" for key, sample in group.members() if sample.deaths >= limit}
        # A group on lease to the trainer is frozen; its end is the trainer's.
        if bad and not group.lease:
            quarantine_members(core, group, lease.task, list(bad), limit)
            core.end(group, "dropped(sibling)", member_states=bad, fate="retire")
    _offer_again(core, lease.task, groups, [key for key, _ in samples])


def runs_of(held: Iterable[tuple[SampleKey, SampleState]], granted: set[int], place: dict[int, int]) -> list[SampleRun]:
    """Samples on lease of a queue without steps, where prompts and versions do not count.

    granted: blocks of the lease; place: where each is in the batch's list, extended here.
    """
    runs: list[SampleRun] = []
    start, count, by_group = SampleKey(0, 0), 0, False
    group = member = -1
    parts: list[SamplePart] = []
    lengths: list[int] = []
    for key, sample in held:
        if count and _next_rows(sample.parts, parts, count):
            next_group = key.group == group + count and key.member == member
            if (next_group and (by_group or count == 1)) or (
                not by_group and key.group == group and key.member == member + count
            ):
                by_group, count = next_group, count + 1
                lengths.append(sample.length)
                continue
        if count:
            runs.append(_run(start, count, by_group, parts, lengths, granted, place))
        start, count, by_group, parts, lengths = key, 1, False, sample.parts, [sample.length]
        group, member = key.group, key.member
    if count:
        runs.append(_run(start, count, by_group, parts, lengths, granted, place))
    return runs


def _run(
    key: SampleKey,
    count: int,
    by_group: bool,
    parts: list[SamplePart],
    lengths: list[int],
    granted: set[int],
    place: dict[int, int],
) -> SampleRun:
    first = [(place.setdefault(part.block, len(place)), part.row) for part in parts if part.block in granted]
    return SampleRun(key, count, by_group, first, lengths if max(lengths) >= 0 else [])


def _next_rows(parts: list[SamplePart], first: list[SamplePart], by: int) -> bool:
    """Whether these are the rows of the same blocks, `by` further on."""
    if len(parts) != len(first):
        return False
    if len(parts) == 1:
        return parts[0].row == first[0].row + by and parts[0].block == first[0].block
    for n, part in enumerate(parts):
        other = first[n]
        if part.block != other.block or part.row != other.row + by:
            return False
    return True
