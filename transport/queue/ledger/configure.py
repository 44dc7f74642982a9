"""A new policy for a ledger that may hold samples: tasks come and go between two starts of a run."""

from __future__ import annotations

from relax_rt.transport.queue.ledger import progress
from relax_rt.transport.queue.ledger.consume import lapse
from relax_rt.transport.queue.ledger.core import Core
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.errors import Refused


def configure(core: Core, policy: LedgerPolicy, limits: QueueLimits) -> None:
    """The policy and limits from here on. Work for tasks that are no more ends; new tasks see what is there.

    Raises:
        Refused: samples that were made under the old policy cannot go on under this one.
    """
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
                lapse(core, lease, ended=set(), blame=False)
    state.policy, state.limits = policy, limits
    progress.configured(core)
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
