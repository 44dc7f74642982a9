"""The trainer's part: steps, checkpoints, roll-backs, and the loss of shared memory."""

from __future__ import annotations

from relax_rt.transport.errors import Refused
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.ledger.admission import outstanding
from relax_rt.transport.ledger.batch import refuse_stale
from relax_rt.transport.ledger.consume import lapse
from relax_rt.transport.ledger.core import Core
from relax_rt.transport.ledger.events import Committed, Rollback, Trained
from relax_rt.transport.ledger.policy import TRAIN
from relax_rt.transport.ledger.state import Group, TrainedGroup


def trained(core: Core, who: Incarnation, event: Trained) -> None:
    """The step over the lease's groups is done; the trainer's weights are now `weights`."""
    state = core.state
    lease = state.leases.get(event.lease)
    what = f"step {event.step} of {who}"
    if lease is None or lease.who != who or lease.task != TRAIN:
        raise Refused(
            what,
            why=f"train lease {event.lease} is not the caller's: it lapsed, and its samples were offered again",
            hint="the step does not count; return to the last checkpoint and call rollback",
        )
    if event.step <= state.step:
        raise Refused(what, why=f"step {state.step} is done already")
    before = state.trainer_version
    core.move_weights(event.weights)
    for group in core.groups_of(lease):
        del state.groups[group.id]
        core.forget(group)
        state.trained[group.id] = group
        state.path.setdefault(event.step, []).append(TrainedGroup(group.id, group.prompt, group.size))
        for sample in group.samples:
            sample.deaths = 0
    core.close(lease)
    for group_id in lease.groups():
        state.trained[group_id].lease = 0
    samples = len(lease.keys)
    state.since_update = state.since_update + samples if event.weights.version == before else 0
    state.step = event.step
    core.changed = True
    refuse_stale(core)


def committed(core: Core, who: Incarnation, event: Committed) -> None:
    """A checkpoint covers all steps up to `step`: their samples are finished and their memory is free."""
    if event.step > core.state.step:
        raise Refused(f"commit of step {event.step} by {who}", why=f"the last step trained is {core.state.step}")
    _commit(core, event.step)


def _commit(core: Core, step: int) -> None:
    state = core.state
    for done in sorted(s for s in state.path if state.committed < s <= step):
        for record in state.path[done]:
            group = state.trained.pop(record.group)
            for sample in group.samples:
                core.release(sample.extents)
            state.ended["freed"] = state.ended.get("freed", 0) + record.size
    if step > state.committed:
        state.committed = step
        core.changed = True


def rollback(core: Core, who: Incarnation, event: Rollback) -> None:
    """The trainer starts from the checkpoint of `step` with weights published as `weights`.

    What that checkpoint covers is committed, also if its commit was never reported. What was trained later is
    offered again if it is still admissible, else its prompts return.
    """
    if event.step < 0:
        raise Refused(f"roll-back to step {event.step} by {who}", why="steps begin at 0")
    state = core.state
    core.move_weights(event.weights)
    core.changed = True
    for lease in [lease for lease in state.leases.values() if lease.task == TRAIN]:
        lapse(core, lease, process_ended=lease.who == who, blame=False)
    _commit(core, min(event.step, state.step))
    undone = [record for step in sorted(state.path) if step > event.step for record in state.path[step]]
    state.path = {step: records for step, records in state.path.items() if step <= event.step}
    state.committed, state.step = event.step, event.step
    state.since_update, state.blocked_since = 0, None
    refuse_stale(core)
    core.note("rolled_back", step=event.step, version=event.weights.version, groups_undone=len(undone))
    _offer_again(core, undone)


def _offer_again(core: Core, undone: list[TrainedGroup]) -> None:
    state = core.state
    again: list[Group] = []
    for record in undone:
        group = state.trained.pop(record.group, None)
        if group is None:
            # Its checkpoint was given up, its payload is freed long since.
            state.ended["freed"] -= record.size
            state.ended["lost"] = state.ended.get("lost", 0) + record.size
            state.prompts.give_back(record.prompt)
        elif group.id in state.payloads_lost:
            core.end(group, "lost")
        elif core.staleness(group) > core.policy.max_staleness:
            core.end(group, "refused(stale)")
        else:
            again.append(group)
    state.payloads_lost = []
    again.sort(key=lambda group: (-core.staleness(group), group.id))
    limit = (core.policy.max_staleness + 1) * core.policy.batch_samples
    for group in again:
        # Beyond the bound they could not all be trained before the next updates make them over-stale.
        if outstanding(core) + group.size > limit:
            core.end(group, "dropped(surplus)")
            continue
        state.groups[group.id] = group
        core.refresh(group)
        core.tally("samples_offered_again", group.size)


def lose_payloads(core: Core) -> None:
    """Shared memory is gone, and with it every process of before: all that is not committed is lost.

    Groups trained but not known to be committed keep their place on the path until the trainer's roll-back says
    which checkpoint it found: one may have been renamed into place without its commit being reported.
    """
    state = core.state
    core.extents.clear()
    state.leases, state.lapsed = {}, {}
    state.callers.answers = {}
    for group in [*state.groups.values(), *state.trained.values()]:
        group.lease = 0
        for sample in group.samples:
            sample.extents, sample.leases = [], {}
    core.note("payloads_lost", samples=sum(group.size for group in state.groups.values()))
    for group in list(state.groups.values()):
        core.end(group, "lost")
    state.payloads_lost = sorted(state.trained)
    state.trainer_version, state.blocked_since, state.since_update = None, None, 0
    core.deadlines.clear()
    core.changed = True
