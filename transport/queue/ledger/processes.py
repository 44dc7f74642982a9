"""Processes that come and go: configuration, joins, fencing, exits, and deadlines that passed."""

from __future__ import annotations

from collections.abc import Callable

from relax_rt.transport.memory.refs import owner_key, owner_of, unfit_slot
from relax_rt.transport.queue.ledger import admission, consumption, failures, memory, packed
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.core import Core
from relax_rt.transport.queue.ledger.policy import LedgerPolicy
from relax_rt.transport.queue.ledger.state import ClientProcess
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation


def open_run(core: Core, event: ev.OpenRun) -> None:
    """The broker serves a run; another run id than before means that shared memory began anew."""
    callers = core.state.callers
    if core.state.run_id not in ("", event.run_id):
        if core.state.limits.durable:
            memory.keep_payloads(core)
        else:
            memory.lose_payloads(core)
        failures.begin(core)
    after = (event.run_id, event.node, event.payloads)
    before = (core.state.run_id, callers.node, callers.payloads)
    core.changed = core.changed or before != after or core.state.blocked_since is not None
    core.state.run_id, callers.node, callers.payloads = after
    # Like the leases, the wait for stragglers begins anew: nobody could be heard meanwhile.
    core.state.blocked_since = None


def join(core: Core, who: Incarnation, event: ev.JoinQueue) -> None:
    """The slot has a newer incarnation: the older ones can finish nothing more, though they may still read."""
    callers = core.state.callers
    callers.check(who)
    if unfit := unfit_slot(who):
        raise Refused(f"joining as {who.slot[:200]!r}", why=unfit, hint="use one as reader/0")
    if callers.knows(who):
        return
    core.changed = True
    callers.join(who)
    if event.issued:
        core.state.next_epoch = max(core.state.next_epoch, who.epoch + 1)
        # A fenced process that still reads is to be watched: its end releases what it reads.
        reading = {owner_key(reader) for reader in core.readers()}
        callers.forget_processes(reading.union(owner_of(slab) for slab in core.blocks.live))
        callers.processes[owner_key(who)] = ClientProcess(who, event.node, event.payloads, event.pid, event.started)
    _end_work(core, lambda other: other.slot == who.slot and other.epoch < who.epoch, process_ended=False)


def process_exited(core: Core, event: ev.ProcessExited) -> None:
    """Fence the process, end its work, and release all that it read or owned."""
    who = event.who
    core.changed = True
    core.state.callers.fence(who.slot, who.epoch + 1)
    core.blocks.forget_owner(who)
    failures.lose_memory(core, who)
    _end_work(core, lambda other: other == who, process_ended=True)
    for lease in [lease for lease in core.state.pinned.values() if lease.holder == who]:
        core.release_pins(lease)


def _end_work(core: Core, of: Callable[[Incarnation], bool], *, process_ended: bool) -> None:
    for group in [group for group in core.state.groups.values() if group.holder is not None and of(group.holder)]:
        admission.reopen(core, group, "dropped(producer gone)", losses=1)
    # The newest first, so that the samples of the oldest are offered first again.
    for lease in reversed(list(core.state.leases.values())):
        if of(lease.holder):
            consumption.lapse(core, lease, pinned=not process_ended)


def lapse_overdue(core: Core, event: ev.Lapse) -> None:
    """End tickets and leases whose deadlines passed."""
    for id_ in event.groups:
        group = core.state.groups.get(id_)
        if group is not None and group.holder is not None:
            core.changed = True
            admission.reopen(core, group, "dropped(lapsed)", losses=1)
    for id_ in reversed(event.leases):
        lease = core.state.leases.get(id_)
        if lease is not None:
            consumption.lapse(core, lease, pinned=True)


def configure(core: Core, event: ev.ConfigureQueue) -> None:
    """Change policy and limits. Work for removed tasks ends; new tasks see the samples that are there.

    Raises:
        Refused: samples that were made under the old policy cannot go on under this one.
    """
    policy, limits = event.policy, event.limits
    state, before = core.state, core.state.policy
    if (policy, limits) == (before, state.limits):
        return
    policy.check()
    limits.check()
    if before is not None:
        _check_change(core, before, policy)
    core.changed = True
    if before is not None:
        for lease in list(state.leases.values()):
            if lease.task not in policy.tasks:
                consumption.lapse(core, lease, pinned=True, blame=False)
    if policy != before:
        packed.unpack_all(core)
    state.policy, state.limits = policy, limits
    failures.configured(core)
    for group in [*state.groups.values(), *state.trained.values()]:
        for sample in group.samples:
            sample.done = [task for task in sample.done if task in policy.tasks]
    core.reindex()
    for group in list(state.groups.values()):
        core.finish_if_done(group)


def _check_change(core: Core, before: LedgerPolicy, after: LedgerPolicy) -> None:
    held = len(core.state.groups) + len(core.state.trained)
    if not held:
        return
    for what, old, new in (
        ("step_task", before.step_task, after.step_task),
        ("prompts (group_size)", bool(before.group_size), bool(after.group_size)),
    ):
        if old != new:
            raise Refused(
                f"queue policy: another {what}",
                why=f"{held} groups of samples were made under the old one, {old!r}",
                hint="use another folder for the other kind of queue",
            )
