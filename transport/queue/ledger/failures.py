"""Members on which a task cannot succeed: made again, left out, or the end of their group."""

from __future__ import annotations

from collections.abc import Iterable

from relax_rt.transport.memory.slab_names import owner_key
from relax_rt.transport.queue.ledger import progress
from relax_rt.transport.queue.ledger.core import ROOM, Core
from relax_rt.transport.queue.ledger.messages import Failure, SampleKey
from relax_rt.transport.queue.ledger.state import Group, Sample
from relax_rt.transport.rpc.identity import Incarnation


def fail_members(core: Core, task: str, failures: list[Failure]) -> None:
    """What the policy says of members on which `task` cannot succeed."""
    by_group: dict[int, dict[int, Failure]] = {}
    for failure in failures:
        by_group.setdefault(failure.key.group, {})[failure.key.member] = failure
    for id_, members in by_group.items():
        group = core.state.groups.get(id_)
        if group is None or group.lease:
            continue
        core.tally("failed_groups")
        found = list(members.values())
        core.note("samples_failed", group=id_, task=task, reasons=[failure.reason for failure in found[:3]])
        judged = progress.failed(core, group, task, found)
        if judged.retire:
            progress.retire(core, group, task, found)
            core.end(group, "dropped(sibling)", marked=dict.fromkeys(members, "failed"), fate="retire")
            continue
        _fail(core, group, set(members))
        if not judged.whole and id_ not in core.state.groups:
            progress.failed_group(core, group)


def frozen(core: Core, group: Group) -> bool:
    """Whether something was computed over the whole group, so that none of its members can be another."""
    task = core.policy.frozen_by
    return bool(task) and any(task in sample.done for sample in group.samples)


def _fail(core: Core, group: Group, members: set[int]) -> None:
    policy = core.policy
    marked = dict.fromkeys(members, "failed")
    if group.prompt is None:
        # Nobody makes an offered sample again. Its siblings are useful without it, unless they are trained as one.
        if policy.step_task:
            core.end(group, "dropped(sibling)", marked=marked)
        else:
            _leave_out(core, group, members)
        return
    if frozen(core, group) or policy.on_failed_member == "drop":
        core.end(group, "dropped(sibling)", marked=marked, fate="failed")
    elif policy.on_failed_member == "shrink":
        if group.size - len(members) >= max(policy.min_group, 1):
            _leave_out(core, group, members)
        else:
            core.end(group, "dropped(sibling)", marked=marked, fate="failed")
    elif group.prompt.failures + 1 >= policy.failures_per_prompt:
        core.end(group, "dropped(sibling)", marked=marked, fate="retire")
    else:
        make_again(core, group, members)


def fail_missing(core: Core, group: Group, reason: str, *, late: bool = False, item: str = "", about: str = "") -> None:
    """Its producer cannot make what is missing of the group: the same as if a task had failed on it."""
    group.holder, group.making = None, []
    core.unhold(group.id)
    missing = group.missing()
    for member in missing:
        core.drop_mark(group.samples[member])
    if not missing:
        core.refresh(group)
    keys = [SampleKey(group.id, member) for member in missing]
    fail_members(core, "", [Failure(key, reason, late, item, about) for key in keys])


def lose_memory(core: Core, who: Incarnation) -> None:
    """The memory that a process on another node had of its own ended with it: so did the samples that need it."""
    owner = owner_key(who)
    home = core.state.callers.homes.get(owner)
    if home is None or not home.payloads:
        return
    lost = core.blocks.ids_in(owner)
    failures = [
        Failure(key, f"its payload ended with {who}")
        for group in core.state.groups.values()
        for key, sample in group.members()
        if any(part.block in lost for part in sample.parts)
    ]
    core.tally("lost_with_owner", len(failures))
    fail_members(core, "", failures)


def stuck(core: Core, held: Iterable[tuple[SampleKey, Sample]]) -> list[Failure]:
    """Those that nobody works on, or ever will: each task is done with them, or lacks a column that none will put."""
    step_task, everything = core.policy.step_task, len(core.policy.tasks)
    found: list[Failure] = []
    for key, sample in held:
        if sample.leases or len(sample.done) == everything:
            continue
        tasks = core.tasks_for(sample)
        if step_task in tasks or any(task not in sample.done for task in tasks):
            continue
        there = {name for part in sample.parts for name in core.blocks.blocks[part.block].ref.fields}
        left = [name for task in core.policy.tasks if task not in sample.done for name in core.policy.tasks[task]]
        missing = ", ".join(dict.fromkeys(name for name in left if name not in there))
        found.append(Failure(key, f"it lacks {missing}, and no task that could put it is left"))
    return found


def _leave_out(core: Core, group: Group, members: set[int]) -> None:
    _recompute(core, group)
    for member in members:
        sample = group.samples[member]
        _end_sample(core, SampleKey(group.id, member), sample, "failed")
        sample.left_out = True
        core.held -= 1
    if group.size == 0:
        core.leave(group)
        return
    core.touched.add(ROOM)
    core.refresh(group)
    core.finish_if_done(group)


def make_again(core: Core, group: Group, members: set[int], state: str = "failed") -> None:
    """These members end in `state`; whoever gets the group next makes them anew."""
    assert group.prompt is not None
    _recompute(core, group)
    for member in sorted(members):
        _end_sample(core, SampleKey(group.id, member), group.samples[member], state)
        group.samples[member] = Sample()
    core.state.issued += len(members)
    core.refresh(group)
    group.remade += 1
    group.prompt = group.prompt.again(failed=state == "failed")
    if group.holder is None:
        core.state.reopened[group.id] = None
        core.touched.add(ROOM)


def _recompute(core: Core, group: Group) -> None:
    """Who computes over the whole group now does so over the wrong members: it finishes without effect."""
    for sample in group.samples:
        sample.leases.pop(core.policy.frozen_by, None)
    core.may_end_hold()


def _end_sample(core: Core, key: SampleKey, sample: Sample, state: str) -> None:
    core.ended(state)
    core.losses.lost(sample.length, state)
    core.drop_parts(sample)
    sample.leases.clear()
    for ready in core.ready.values():
        ready.pop(key, None)
