"""Producers: admission by whole groups, new samples, and groups that come back unfinished."""

from __future__ import annotations

from relax_rt.transport.errors import Refused
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.ledger.core import Core
from relax_rt.transport.ledger.events import Admit, GiveBack, PutColumns
from relax_rt.transport.ledger.extents import extents_of
from relax_rt.transport.ledger.state import Group, Sample
from relax_rt.transport.queue.api import Admission, Freed, Put, SampleKey, Ticket


def outstanding(core: Core) -> int:
    """Samples reserved, generating, ready or leased, plus those trained since the last update."""
    return sum(group.size for group in core.state.groups.values()) + core.state.since_update


def bound(core: Core, engine_version: int) -> float:
    """Samples that may be outstanding when this engine makes more: (max_staleness + 1 - lag) * b."""
    policy = core.policy
    return (policy.max_staleness + 1 - core.lag(engine_version)) * policy.batch_samples


def obstacle(core: Core, engine_version: int) -> str:
    """Why no group can be admitted to this engine now; empty if one can."""
    state, policy = core.state, core.policy
    if state.trainer_version is None:
        return "the trainer has not announced its weights yet"
    if engine_version not in core.tree:
        return f"engine version {engine_version} is not known to the queue yet"
    if not state.prompts.available(policy.prompts):
        return f"all {policy.prompts} prompts are given out"
    if core.extents.payload_bytes >= state.limits.capacity_bytes:
        held = sum(group.size for group in state.trained.values())
        return (
            f"payloads fill the capacity: {core.extents.payload_bytes} of {state.limits.capacity_bytes} bytes, "
            f"{held} samples wait for a checkpoint"
        )
    now, limit = outstanding(core), bound(core, engine_version)
    if now + policy.group_size > limit:
        behind = core.lag(engine_version)
        lag = f" to an engine {behind} updates behind" if behind else ""
        return f"staleness bound: {now} samples outstanding, {max(limit, 0):g} allowed{lag}"
    return ""


def admit(core: Core, who: Incarnation, event: Admit) -> Admission:
    """Tickets for up to `groups` groups, as many as the bound allows."""
    if event.groups < 1:
        raise Refused(f"admission of {event.groups} groups to {who}", why="at least one must be asked for")
    tickets: list[Ticket] = []
    while len(tickets) < event.groups:
        waiting_on = obstacle(core, event.engine_version)
        if waiting_on:
            return Admission(tickets, "" if tickets else waiting_on)
        tickets.append(_issue(core, who, event.engine_version))
    return Admission(tickets)


def _issue(core: Core, who: Incarnation, engine_version: int) -> Ticket:
    state, size = core.state, core.policy.group_size
    assert state.trainer_version is not None
    group = Group(
        id=core.new_id(),
        prompt=state.prompts.issue(),
        version=state.trainer_version,
        base=engine_version,
        samples=[Sample() for _ in range(size)],
        holder=who,
    )
    state.groups[group.id] = group
    state.issued += size
    core.hold(group.id)
    core.changed = True
    prompt = group.prompt
    return Ticket(group.id, prompt.index, prompt.attempt, size, group.version, state.limits.lease_s)


def put(core: Core, who: Incarnation, event: PutColumns) -> list[Freed]:
    """New samples of groups that the caller generates.

    What comes for a group that is no longer the caller's is not kept: its extents go straight back.
    """
    _check_puts(core, who, event.puts)
    for item in event.puts:
        extents = extents_of(item.columns)
        core.changed = True
        group = core.state.groups.get(item.key.group)
        if group is None or group.holder != who:
            core.tally("late_puts")
            for extent in extents:
                core.extents.return_to_owner(extent, core.state.callers.alive)
            continue
        group.samples[item.key.member] = Sample(
            generated=True, columns=list(item.columns), spans=item.versions, extents=extents
        )
        core.extents.add(extents)
        if all(sample.generated for sample in group.samples):
            group.holder = None
            core.deadlines.pop(group.id, None)
        core.refresh(group)
        if core.state.trainer_version is not None and core.staleness(group) > core.policy.max_staleness:
            # An engine that still served a branch the trainer has left.
            core.end(group, "refused(stale)")
    freed = core.extents.collect(who)
    core.changed = core.changed or bool(freed)
    return freed


def _check_puts(core: Core, who: Incarnation, puts: list[Put]) -> None:
    seen: set[SampleKey] = set()
    core.extents.check([extent for item in puts for extent in extents_of(item.columns)], who)
    for item in puts:
        if item.key in seen:
            raise Refused(f"put of sample {item.key} by {who}", why="it is twice in the same call")
        seen.add(item.key)
        group = core.state.groups.get(item.key.group)
        if group is None or group.holder != who:
            continue
        if not 0 <= item.key.member < group.size:
            raise Refused(f"put of sample {item.key} by {who}", why=f"its group has {group.size} members")
        if group.samples[item.key.member].generated:
            raise Refused(
                f"put of sample {item.key} by {who}", why="a producer puts a sample once, with all its columns"
            )
        for span in item.versions:
            if span.version not in core.tree:
                raise Refused(f"put of sample {item.key} by {who}", why=f"policy version {span.version} is not known")


def give_back(core: Core, who: Incarnation, event: GiveBack) -> None:
    """Unfinished groups of the caller end; their prompts are given out again."""
    for id_ in event.groups:
        group = core.state.groups.get(id_)
        if group is not None and group.holder == who:
            core.changed = True
            core.end(group, "dropped(returned)")
