"""The trainer's part: steps, filtered groups, checkpoints, roll-backs, and the loss of shared memory."""

from __future__ import annotations

from collections.abc import Collection

from relax_rt.transport.queue.ledger.admission import (
    allowed_surplus,
    groups_beyond_bound,
    limit_surplus_request,
    outstanding,
)
from relax_rt.transport.queue.ledger.consumption import lapse
from relax_rt.transport.queue.ledger.core import REFUSED, REFUSED_TOKENS, ROOM, Core
from relax_rt.transport.queue.ledger.events import (
    AssignItems,
    Commit,
    CompleteStep,
    FilterGroups,
    RequestSurplus,
    Rollback,
)
from relax_rt.transport.queue.ledger.failures import REPORT_EVERY_S, report_losses, reset_failures
from relax_rt.transport.queue.ledger.messages import ItemsAssigned, StepReply
from relax_rt.transport.queue.ledger.selection import refuse_stale
from relax_rt.transport.queue.ledger.state import Lease, SampleGroup, TrainedGroup
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation


def complete_step(core: Core, who: Incarnation, event: CompleteStep) -> StepReply:
    """The optimizer step over the groups of the leases is done; the trainer's weights are now `weights`."""
    state = core.state
    what = f"step {event.step} of {who}"
    leases = [step_lease(core, who, id_, what) for id_ in dict.fromkeys(event.leases)]
    if not leases:
        raise Refused(what, why="it names no lease", hint="lease samples before completing a step")
    if event.step <= state.step:
        raise Refused(what, why=f"step {state.step} is done already")
    if event.skipped and event.weights.version != state.trainer_version and event.weights.changed:
        raise Refused(what, why="a skipped step leaves the weights as they are", hint="publish them unchanged")
    before = state.trainer_version
    core.move_weights(event.weights)
    _lapse_other_step_leases(core, event.leases)
    for lease in leases:
        _train(core, lease, event)
        core.close(lease, pinned=lease.id in event.pinned)
    if event.weights.version != before:
        state.since_update = 0
    elif not event.skipped:
        state.since_update += sum(len(lease.keys) for lease in leases)
    state.step = event.step
    if not event.skipped:
        reset_failures(core)
        report_losses(core, REPORT_EVERY_S)
    core.changed = True
    refuse_stale(core, allowed_surplus(core))
    limit_surplus_request(core)
    before, state.refused_reported = state.refused_reported, state.tallies.get(REFUSED_TOKENS, 0)
    return StepReply(early_checkpoint(core), refused_tokens=state.refused_reported - before)


def step_lease(core: Core, who: Incarnation, id_: int, what: str) -> Lease:
    """A lease of the step task that the caller holds.

    Raises:
        Refused: it is not the caller's (any more).
    """
    lease = core.state.leases.get(id_)
    if lease is None or lease.holder != who or lease.task != core.policy.step_task:
        raise Refused(
            what,
            why=f"train lease {id_} is not the caller's: it lapsed, and its samples were offered again",
            hint="the step does not count; return to the last checkpoint and call rollback",
        )
    return lease


def _lapse_other_step_leases(core: Core, ids: Collection[int] = ()) -> None:
    """End other leases of the step task: they were granted before the present weights."""
    for lease in [lease for lease in core.state.leases.values() if lease.task == core.policy.step_task]:
        if lease.id in ids:
            continue
        groups = core.groups_of(lease)
        # The holder lives, and may still be reading the memory of its lease.
        lapse(core, lease, pinned=True, blame=False)
        for group in groups:
            if group.id in core.state.groups:
                core.lapse_columns(group)


def _train(core: Core, lease: Lease, event: CompleteStep) -> None:
    path = core.state.path.setdefault(event.step, [])
    for group in core.groups_of(lease):
        core.remove_group(group)
        path.append(TrainedGroup(group.id, group.prompt, group.size, event.skipped))
        if event.skipped:
            _skip(core, group)
            continue
        core.state.trained[group.id] = group
        group.lease = 0
        for _, sample in group.members():
            sample.deaths = 0
            # Who still works on it finishes without effect, also if the step is undone.
            sample.leases.clear()
            core.losses.used(sample.length)


def _skip(core: Core, group: SampleGroup) -> None:
    """The step was thrown away: its samples end as skipped, and their memory is free at once."""
    core.count_end("skipped", group.size)
    for _, sample in group.members():
        core.losses.lost(sample.length, "skipped")
        core.drop_parts(sample)


def early_checkpoint(core: Core) -> str:
    """Why the trainer should commit now: what it has trained on fills the memory that producers need."""
    limits = core.state.limits
    used, mark = core.blocks.payload_bytes, limits.high_water * limits.capacity_bytes
    held = sum(group.size for group in core.state.trained.values())
    if used < mark or not held:
        return ""
    return f"{used} of {limits.capacity_bytes} payload bytes are in use, {held} samples wait for a checkpoint"


def commit(core: Core, who: Incarnation, event: Commit) -> None:
    """A checkpoint covers all steps up to `step`: their samples are finished and their memory is free."""
    if event.step > core.state.step:
        raise Refused(f"commit of step {event.step} by {who}", why=f"the last step trained is {core.state.step}")
    _commit(core, event.step)
    # Keep only counts of steps too old to be returned to.
    state = core.state
    floor = state.committed - state.limits.keep_steps
    for step in [step for step in state.path if step <= floor]:
        records = state.path.pop(step)
        for what, n in (("groups", len(records)), ("samples", sum(record.size for record in records))):
            state.folded[what] = state.folded.get(what, 0) + n
        state.folded_steps = max(state.folded_steps, step)
        core.changed = True


def _commit(core: Core, step: int) -> None:
    state = core.state
    for done in sorted(s for s in state.path if state.committed < s <= step):
        for record in state.path[done]:
            group = state.trained.pop(record.group, None)
            if group is None:
                continue
            for sample in group.samples:
                core.drop_parts(sample)
            core.count_end("freed", record.size)
    if step > state.committed:
        state.committed = step
        core.changed = True
        core.touched.add(ROOM)


def rollback(core: Core, who: Incarnation, event: Rollback) -> None:
    """The trainer starts from the checkpoint of `step` with weights published as `weights`.

    What that checkpoint covers is committed, also if its commit was never reported. What was trained later is
    offered again if it is still admissible, else its prompts return.
    """
    what = f"roll-back to step {event.step} by {who}"
    if event.step < 0:
        raise Refused(what, why="steps begin at 0")
    state = core.state
    if event.step > state.step:
        raise Refused(
            what,
            why=f"the last step that the queue knows of is {state.step}: what came then would be trained on twice",
            hint="its journal has lost it; return to a checkpoint of before, or begin a new run from these weights",
        )
    if event.step < state.folded_steps:
        raise Refused(
            what,
            why=f"the queue keeps no record of single steps up to {state.folded_steps}",
            hint="start a new run directory from that checkpoint, or raise [queue] keep_steps beforehand",
        )
    core.move_weights(event.weights)
    core.changed = True
    _lapse_other_step_leases(core)
    _commit(core, event.step)
    undone = [record for step in sorted(state.path) if step > event.step for record in state.path[step]]
    state.path = {step: records for step, records in state.path.items() if step <= event.step}
    state.committed, state.step = event.step, event.step
    state.since_update, state.blocked_since = 0, None
    refuse_stale(core)
    core.log("rolled_back", step=event.step, version=event.weights.version, groups_undone=len(undone))
    _offer_again(core, undone)
    limit_surplus_request(core)
    core.touched.add(ROOM)


def _offer_again(core: Core, undone: list[TrainedGroup]) -> None:
    state = core.state
    again: list[SampleGroup] = []
    for record in undone:
        group = state.trained.pop(record.group, None)
        if group is None:
            # Its step was skipped, or its checkpoint was given up after its payload was freed: only its prompt
            # returns.
            core.count_end("skipped" if record.skipped else "freed", -record.size)
            core.count_end("lost", record.size)
            if record.prompt is not None:
                core.state.prompts.give_back(record.prompt)
        elif group.id in state.payloads_lost:
            core.end(group, "lost")
        elif core.staleness(group) > core.policy.max_staleness:
            core.end(group, REFUSED)
        else:
            again.append(group)
    state.payloads_lost = []
    again.sort(key=lambda group: (-core.staleness(group), group.id))
    limit = (core.policy.max_staleness + 1) * core.policy.batch_samples if core.policy.group_size else float("inf")
    for group in again:
        # Beyond the bound they could not all be trained before the next updates make them over-stale.
        if outstanding(core) + group.size > limit:
            core.end(group, "dropped(surplus)")
            continue
        core.add_group(group)
        core.lapse_columns(group)
        core.refresh(group)
        core.tally("samples_offered_again", group.size)


MAX_SURPLUS_GROUPS = 65_536
"""Groups that may be asked for beyond the bound."""
MAX_PROMPTS_AHEAD = 65_536
"""Prompts ahead of the order's cursor whose items may be chosen."""
MAX_FILTER_RULES = 32
"""Rules whose groups the account counts apart; the others' are counted together."""


def filter_groups(core: Core, who: Incarnation, event: FilterGroups) -> None:
    """Groups of a train lease end as dropped(filter), whatever becomes of the step; the lease keeps the others."""
    what = f"filtering groups of lease {event.lease} by {who}"
    lease = step_lease(core, who, event.lease, what)
    gone = dict.fromkeys(event.groups)
    strange = [id_ for id_ in gone if id_ not in lease.groups()]
    if strange or not gone:
        raise Refused(what, why=f"groups {strange or 'none'} are not part of it")
    core.changed = True
    lease.keys = [key for key in lease.keys if key.group not in gone]
    for group in [core.state.groups[id_] for id_ in gone]:
        core.tally(_rule(core, event.reason), group.size)
        core.end(group, "dropped(filter)", fate="filter", reason=event.reason)
    if not lease.keys:
        core.close(lease, pinned=event.pinned)
    elif not event.pinned:
        _unpin_filtered(core, lease)


def _rule(core: Core, reason: str) -> str:
    """The name of the count of samples left out by the rule that a reason begins with, as `rule: why`."""
    name = f"filtered({reason.partition(':')[0].strip()[:40]})"
    known = [tally for tally in core.state.tallies if tally.startswith("filtered(")]
    return name if name in known or len(known) < MAX_FILTER_RULES else "filtered(others)"


def _unpin_filtered(core: Core, lease: Lease) -> None:
    """Unpin what only the filtered groups needed."""
    needed = set(core.blocks_of(sample for group in core.groups_of(lease) for _, sample in group.members()))
    lease.blocks = [id_ for id_ in lease.blocks if id_ in needed]
    pins = core.blocks.extents_of(lease.blocks)
    gone = set(lease.pins).difference(pins)
    core.unpin(extent for extent in lease.pins if extent in gone)
    lease.pins = pins


def request_surplus(core: Core, who: Incarnation, event: RequestSurplus) -> None:
    """Allow so many groups beyond the bound until the next step; a later request replaces this one."""
    what = f"asking for {event.groups} groups by {who}"
    if not core.policy.group_size:
        raise Refused(what, why="this queue has no prompts")
    if not 0 <= event.groups <= MAX_SURPLUS_GROUPS:
        raise Refused(what, why=f"from 0 to {MAX_SURPLUS_GROUPS} can be asked for")
    # What is under way already stays allowed.
    core.state.surplus_requested = max(event.groups, min(core.state.surplus_requested, groups_beyond_bound(core)))
    core.changed = True
    core.touched.add(ROOM)


def assign_items(core: Core, who: Incarnation, event: AssignItems) -> ItemsAssigned:
    """Choose the data items of prompts that are not yet issued; return the first index that is not."""
    what = f"choosing prompts by {who}"
    if not core.policy.group_size:
        raise Refused(what, why="this queue has no prompts")
    pool, end = core.state.prompts, core.policy.prompts
    far = max(event.items, default=0)
    if far >= pool.cursor + MAX_PROMPTS_AHEAD:
        raise Refused(
            what, why=f"place {far} is {far - pool.cursor} ahead", hint=f"choose at most {MAX_PROMPTS_AHEAD} ahead"
        )
    core.changed = pool.choose({index: item for index, item in event.items.items() if end is None or index < end})
    return ItemsAssigned(pool.cursor)
