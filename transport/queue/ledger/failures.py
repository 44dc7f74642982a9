"""Failed members and their causes: regenerated, excluded, or the end of their group; items that only time out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from relax_rt.transport.memory.refs import owner_key
from relax_rt.transport.queue.ledger.core import ROOM, Core
from relax_rt.transport.queue.ledger.messages import (
    ABOUT,
    MAX_PROMPTS,
    Failure,
    Loss,
    ProgressReport,
    Retired,
    SampleKey,
)
from relax_rt.transport.queue.ledger.packed import unpack_all
from relax_rt.transport.queue.ledger.state import LossCause, ProgressState, SampleGroup, SampleState, TimedOutItem
from relax_rt.transport.rpc.identity import Incarnation


def fail_members(core: Core, task: str, failures: list[Failure]) -> None:
    """Regenerate, exclude or end members on which `task` cannot succeed, as the policy says."""
    by_group: dict[int, dict[int, Failure]] = {}
    for failure in failures:
        by_group.setdefault(failure.key.group, {})[failure.key.member] = failure
    for id_, members in by_group.items():
        group = core.state.groups.get(id_)
        if group is None or group.lease:
            continue
        core.tally("failed_groups")
        found = list(members.values())
        core.log("samples_failed", group=id_, task=task, reasons=[failure.reason for failure in found[:3]])
        verdict = record_failures(core, group, task, found)
        if verdict.retire:
            retire(core, group, task, found)
            core.end(group, "dropped(sibling)", member_states=dict.fromkeys(members, "failed"), fate="retire")
            continue
        _fail(core, group, set(members))
        if not verdict.whole and id_ not in core.state.groups:
            failed_group(core, group)


def is_frozen(core: Core, group: SampleGroup) -> bool:
    """Whether something was computed over the whole group, so that none of its members can be another."""
    task = core.policy.frozen_by
    return bool(task) and any(task in sample.done for sample in group.samples)


def _fail(core: Core, group: SampleGroup, members: set[int]) -> None:
    policy = core.policy
    member_states = dict.fromkeys(members, "failed")
    if group.prompt is None:
        # A sample that was put without a ticket cannot be regenerated. Its siblings are useful without it, unless they
        # are trained as one.
        if policy.step_task:
            core.end(group, "dropped(sibling)", member_states=member_states)
        else:
            _exclude(core, group, members)
        return
    if is_frozen(core, group) or policy.on_failed_member == "drop":
        core.end(group, "dropped(sibling)", member_states=member_states, fate="failed")
    elif policy.on_failed_member == "shrink":
        if group.size - len(members) >= max(policy.min_group, 1):
            _exclude(core, group, members)
        else:
            core.end(group, "dropped(sibling)", member_states=member_states, fate="failed")
    elif group.prompt.failures + 1 >= policy.failures_per_prompt:
        core.end(group, "dropped(sibling)", member_states=member_states, fate="retire")
    else:
        regenerate_members(core, group, members)


def fail_missing(
    core: Core, group: SampleGroup, reason: str, *, late: bool = False, item: str = "", about: str = ""
) -> None:
    """Fail the missing members of a group that its producer cannot make, as if a task had failed on them."""
    group.holder, group.making = None, []
    core.clear_deadline(group.id)
    missing = group.missing()
    for member in missing:
        core.drop_partial(group.samples[member])
    if not missing:
        core.refresh(group)
    keys = [SampleKey(group.id, member) for member in missing]
    fail_members(core, "", [Failure(key, reason, late, item, about) for key in keys])


def fail_lost_payloads(core: Core, who: Incarnation) -> None:
    """Fail the samples whose payloads were in the own memory of a process on another node that has exited."""
    owner = owner_key(who)
    home = core.state.callers.processes.get(owner)
    if home is None or not home.payloads:
        return
    unpack_all(core)
    lost = core.blocks.ids_in(owner)
    failures = [
        Failure(key, f"its payload ended with {who}")
        for group in core.state.groups.values()
        for key, sample in group.members()
        if any(part.block in lost for part in sample.parts)
    ]
    core.tally("lost_with_owner", len(failures))
    fail_members(core, "", failures)


def find_stuck(core: Core, held: Iterable[tuple[SampleKey, SampleState]]) -> list[Failure]:
    """Samples that no task can ever work on: each is done with them, or lacks a column that no other task will put."""
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


def _exclude(core: Core, group: SampleGroup, members: set[int]) -> None:
    _invalidate_group_leases(core, group)
    for member in members:
        sample = group.samples[member]
        _end_sample(core, SampleKey(group.id, member), sample, "failed")
        sample.excluded = True
        core.held -= 1
    if group.size == 0:
        core.remove_group(group)
        return
    core.touched.add(ROOM)
    core.refresh(group)
    core.finish_if_done(group)


def regenerate_members(core: Core, group: SampleGroup, members: set[int], state: str = "failed") -> None:
    """These members end in `state`; whoever gets the group next makes them anew."""
    assert group.prompt is not None
    _invalidate_group_leases(core, group)
    for member in sorted(members):
        _end_sample(core, SampleKey(group.id, member), group.samples[member], state)
        group.samples[member] = SampleState()
    core.state.issued += len(members)
    core.refresh(group)
    group.regenerations += 1
    group.prompt = group.prompt.next_attempt(failed=state == "failed")
    if group.holder is None:
        core.state.reopened[group.id] = None
        core.touched.add(ROOM)


def _invalidate_group_leases(core: Core, group: SampleGroup) -> None:
    """Void the leases of whoever computes over the whole group: its members change."""
    for sample in group.samples:
        sample.leases.pop(core.policy.frozen_by, None)
    core.recheck_stragglers()


def _end_sample(core: Core, key: SampleKey, sample: SampleState, state: str) -> None:
    core.count_end(state)
    core.losses.lost(sample.length, state)
    core.drop_parts(sample)
    sample.leases.clear()
    for ready in core.ready.values():
        ready.discard(key)


MAX_CAUSES = 32
"""Causes counted apart; the rarest makes room for a new one."""
MAX_LATE_ITEMS = 4096
"""For each task."""
MAX_RETIRED = 65_536
EXAMPLE = 400
LAST_GROUPS = 8
REPORT_EVERY_S = 5.0
"""A lasting cause is reported at least this often, and whenever its count has doubled."""
_LINE = re.compile(r"([^\s:()'\"]+\.py:\d+)")
_NUMBER = re.compile(r"\d+")


class FailureVerdict(NamedTuple):
    """Judgement of a failure.

    Attributes:
        whole: it completes a whole attempt of the group without a single success, which is counted as a failed group.
        retire: whole attempts of the group's item were late as often as the policy allows, and the same service worked
            for other items in between: the item is at fault.
    """

    whole: bool
    retire: bool


def record_failures(core: Core, group: SampleGroup, task: str, failures: Sequence[Failure]) -> FailureVerdict:
    """Count failed members of a group, and the group once each of its members failed with no success in between."""
    if not core.policy.group_size or group.prompt is None:
        return FailureVerdict(False, False)
    for failure in failures:
        group.item = failure.item or group.item
        _count(core, group, task, failure)
    if group.failed_task != task:
        group.failed_task, group.failed, group.late = task, [], True
    group.failed = sorted({*group.failed, *(failure.key.member for failure in failures)})
    group.late = group.late and all(failure.late for failure in failures)
    if len(group.failed) < group.size:
        return FailureVerdict(False, False)
    late, item = group.late, group.item
    group.failed, group.late = [], True
    failed_group(core, group)
    if not late or not item or not core.policy.item_timeouts or item in core.policy.kept_items:
        return FailureVerdict(True, False)
    # Several groups of one item may be under way when the first of them retires it.
    return FailureVerdict(True, item in core.state.progress.retired or _record_timeout(core, group, item, task))


def failed_group(core: Core, group: SampleGroup) -> None:
    """Count a group that failed: its members failed, it ended because of them, or its item is retired."""
    state, policy = core.state.progress, core.policy
    if not policy.group_size or group.prompt is None:
        return
    core.tally("groups_failed")
    if state.no_progress:
        return
    state.failed_groups += 1
    if group.prompt.index not in state.prompts and len(state.prompts) < policy.failed_prompts:
        # By index and not by item: data of fewer items than the rule asks for would never end.
        state.prompts = [*state.prompts, group.prompt.index]
    enough = policy.failed_groups and state.failed_groups >= policy.failed_groups
    if enough and len(state.prompts) >= policy.failed_prompts:
        # From here on failed groups no longer change the verdict's count; their losses are still counted by cause.
        state.no_progress = True
        report_losses(core)
        core.log("no_progress", failed_groups=state.failed_groups, prompts=len(state.prompts))
        # Wake the trainer, which waits for groups.
        core.touched.add(policy.step_task)


def count_success(core: Core, group: SampleGroup, task: str) -> None:
    """Count a member of the group that succeeded at the task."""
    if not core.policy.group_size:
        return
    if group.failed_task == task and group.failed:
        group.failed, group.late = [], True
    state = core.state.progress
    state.passed[task] = state.passed.get(task, 0) + 1
    late = state.late.get(task, {})
    if group.item in late and all(task in s.done if task else s.generated for s in group.samples if not s.excluded):
        del late[group.item]


def reset_failures(core: Core) -> None:
    """Reset the count of consecutive failed groups: a group has all that a step needs, or was trained."""
    state = core.state.progress
    state.failed_groups, state.prompts, state.no_progress = 0, [], False


def quarantine_members(core: Core, group: SampleGroup, task: str, members: Sequence[int], deaths: int) -> None:
    """These members are quarantined: their consumers ended while they worked on them."""
    if not core.policy.group_size or group.prompt is None:
        return
    reason = f"{deaths} consumers of task {task} ended or lost their lease while they worked on it"
    for member in members:
        _count(core, group, task, Failure(SampleKey(group.id, member), reason))
    failed_group(core, group)


def begin(core: Core) -> None:
    """Reset the counts at the start of a run; retired items stay.

    `passed` continues: groups that outlive the start recorded it before.
    """
    before = core.state.progress
    core.state.progress = ProgressState(passed=before.passed, retired=before.retired, revision=before.revision)


def configured(core: Core) -> None:
    """Reinstate retired items that the new policy keeps."""
    reinstate(core, [item for item in core.state.progress.retired if item in core.policy.kept_items])


def reinstate(core: Core, items: Sequence[str]) -> None:
    """Take those of the items back that are retired."""
    state = core.state.progress
    found = [item for item in dict.fromkeys(items) if item in state.retired]
    for item in found:
        del state.retired[item]
        core.log("item_reinstated", item=item)
    if found:
        state.revision += 1
        core.changed = True


def retire(core: Core, group: SampleGroup, task: str, failures: Sequence[Failure]) -> None:
    """Take the group's item out of the run until the user takes it back."""
    state, item, failure = core.state.progress, group.item, failures[0]
    if item in state.retired or len(state.retired) >= MAX_RETIRED:
        return
    times = state.late[task][item].times
    for late in state.late.values():
        late.pop(item, None)
    found = Retired(item, failure.about[:ABOUT], task, failure.reason[:EXAMPLE], times)
    state.retired[item] = found
    state.revision += 1
    report_losses(core)
    core.tally("items_retired")
    core.log("item_retired", **msgspec.structs.asdict(found))


def report(core: Core) -> ProgressReport:
    """The account for people and for the trainer."""
    state, policy = core.state.progress, core.policy
    losses = sorted((cause.loss for cause in state.causes), key=lambda loss: -loss.members)
    return ProgressReport(
        failed_groups=state.failed_groups,
        prompts=len(state.prompts),
        most=policy.failed_groups,
        ended=state.no_progress,
        losses=losses,
        retired=list(state.retired.values()),
        revision=state.revision,
    )


def _count(core: Core, group: SampleGroup, task: str, failure: Failure) -> None:
    state = core.state.progress
    found = _LINE.findall(failure.reason)
    where = found[-1] if found else ""
    # What one line raises is one cause, whatever values stand in its message.
    gist = where or _NUMBER.sub("#", failure.reason)[:120]
    cause = next((one for one in state.causes if (one.loss.task, one.gist) == (task, gist)), None)
    if cause is None:
        if len(state.causes) >= MAX_CAUSES:
            state.causes.remove(min(state.causes, key=lambda one: one.loss.members))
        cause = LossCause(gist, Loss(task))
        state.causes.append(cause)
    assert group.prompt is not None
    loss, prompt, new = cause.loss, _prompt(group), group.id not in cause.last_groups
    if new:
        cause.last_groups = [*cause.last_groups, group.id][-LAST_GROUPS:]
    cause.last_prompts = [*(p for p in cause.last_prompts if p != prompt), prompt][-MAX_PROMPTS:]
    cause.loss = Loss(
        task=task,
        cause=failure.reason[:160],
        where=where,
        late=failure.late,
        members=loss.members + 1,
        groups=loss.groups + new,
        prompts=max(loss.prompts, len(cause.last_prompts)),
        example=failure.reason[:EXAMPLE],
        prompt=group.prompt.index,
        item=group.item,
        about=failure.about[:ABOUT],
        partial=loss.partial or any(task in sample.done if task else sample.generated for sample in group.samples),
    )
    if cause.loss.members >= 2 * cause.reported or _reported_before(core, cause, REPORT_EVERY_S):
        _report_cause(core, cause)


def _prompt(group: SampleGroup) -> str:
    """Identity of the group's prompt: its item, which recurs in each epoch, or its index until the item is known."""
    assert group.prompt is not None
    return group.item or f"#{group.prompt.index}"


def report_losses(core: Core, older_s: float = 0.0) -> None:
    """Report the causes whose newest losses were not reported, and whose last report is at least this old."""
    for cause in core.state.progress.causes:
        if cause.reported < cause.loss.members and _reported_before(core, cause, older_s):
            _report_cause(core, cause)
            core.changed = True


def _reported_before(core: Core, cause: LossCause, older_s: float) -> bool:
    """Whether the cause's last report is at least this old, or was made by a clock that a reboot set back."""
    return core.now - cause.reported_at >= older_s or core.now < cause.reported_at


def _report_cause(core: Core, cause: LossCause) -> None:
    """Report a cause with its counts so far."""
    cause.reported, cause.reported_at = cause.loss.members, core.now
    fields = msgspec.structs.asdict(cause.loss)
    row, most = core.state.progress.failed_groups, core.policy.failed_groups
    core.log("members_lost", gist=cause.gist, **fields, failed_groups=row, most=most)


def _record_timeout(core: Core, group: SampleGroup, item: str, task: str) -> bool:
    """A whole attempt of the item was late once more. Whether it is the item, and not the service, that is at fault.

    The service is at fault if another item was late as well since anything last got through the task: then the item's
    attempts count from zero. The item is at fault if others got through since its first group was admitted. That
    count is not taken at its last attempt, because others may be held up by this very group (on_straggler = "wait").
    """
    state, late = core.state.progress, core.state.progress.late.setdefault(task, {})
    passed = state.passed.get(task, 0)
    found = late.pop(item, TimedOutItem(0, group.passed.get(task, 0), passed))
    if any(other.passed == passed for other in late.values()):
        found = TimedOutItem(0, passed, passed)
    else:
        found = TimedOutItem(found.times + 1, found.since, passed)
    late[item] = found
    while len(late) > MAX_LATE_ITEMS:
        del late[next(iter(late))]
    return found.times >= core.policy.item_timeouts and passed > found.since
