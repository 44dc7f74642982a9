"""The ledger: a state machine over journaled events.

The broker gives each event to `Ledger.apply`, journals it if it changed something, and then answers the caller.
HANDLERS says which function handles which event; a replay of the journal calls the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import msgspec

from relax_rt.transport.memory.refs import Extent, owner_key, owner_of, unfit_slot
from relax_rt.transport.queue.ledger import accounting, admission, consumption, failures, memory, packed, steps
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.core import ROOM, Core, Notice
from relax_rt.transport.queue.ledger.messages import (
    Acknowledged,
    Admission,
    Freed,
    Granted,
    GroupsPut,
    ItemsAssigned,
    LeaseGrant,
    Reply,
    SavedPartials,
    StepReply,
)
from relax_rt.transport.queue.ledger.policy import LedgerPolicy
from relax_rt.transport.queue.ledger.selection import BatchSampler, Samplers
from relax_rt.transport.queue.ledger.state import ClientProcess, State
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

Answer = Reply | LeaseGrant


# --- processes that come and go, and deadlines that passed


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
    # Like the leases, the wait for stragglers starts again: no call arrived meanwhile.
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
    failures.fail_lost_payloads(core, who)
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
    state = core.state
    held = len(state.groups) + len(state.trained) + sum(run.open for run in state.runs.values())
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


# --- which function handles which event


class Handler(NamedTuple):
    """Handler of a caller's event.

    Attributes:
        apply: changes the ledger; answers None for Acknowledged.
        reply: type of what is kept of the answer.
    """

    apply: Callable[[Core, Incarnation, Any], Reply | None]
    reply: type[Reply] = Acknowledged


def _grants(core: Core, who: Incarnation, event: ev.RequestLease) -> None:
    raise AssertionError("leases are granted by Ledger.apply, which has the samplers")


HANDLERS: dict[type[ev.Event], Handler] = {
    ev.JoinQueue: Handler(join),
    ev.RequestTickets: Handler(admission.admit, Admission),
    ev.PutGroups: Handler(admission.put_groups, GroupsPut),
    ev.PutSamples: Handler(admission.put_samples, Freed),
    ev.SavePartials: Handler(admission.save_partials, SavedPartials),
    ev.ReleaseGroups: Handler(admission.release_groups),
    ev.SkipGroups: Handler(admission.skip_groups),
    ev.RequestLease: Handler(_grants, Granted),
    ev.CompleteLease: Handler(consumption.complete, Freed),
    ev.ReleaseLease: Handler(consumption.release),
    ev.UnpinLeases: Handler(consumption.unpin, Freed),
    ev.CompleteStep: Handler(steps.complete_step, StepReply),
    ev.FilterGroups: Handler(steps.filter_groups),
    ev.RequestSurplus: Handler(steps.request_surplus),
    ev.AssignItems: Handler(steps.assign_items, ItemsAssigned),
    ev.Commit: Handler(steps.commit),
    ev.Rollback: Handler(steps.rollback),
    ev.ProcessExited: Handler(lambda core, _, event: process_exited(core, event)),
}
"""Events of callers: each has one handler, and one type of reply."""

BROKER_HANDLERS: dict[type[ev.Event], Callable[[Core, Any], Reply | None]] = {
    ev.ConfigureQueue: configure,
    ev.OpenRun: open_run,
    ev.ReinstateItems: lambda core, event: failures.reinstate(core, event.items),
    ev.ReportFailures: lambda core, event: failures.report_losses(core, event.older_s),
    ev.MoveBlocks: memory.moved,
    ev.Lapse: lapse_overdue,
    ev.ProcessExited: process_exited,
}
"""Events of the broker itself."""


class EventOutcome(msgspec.Struct, frozen=True):
    """Result of an event.

    Attributes:
        answer: for the caller.
        changed: the ledger changed, so the event must be journaled before the answer is given.
        notices: for the event log.
        event: what to journal: the event with what was decided on the way.
        touched: waiters to wake: names of tasks, or ROOM.
    """

    answer: Answer
    changed: bool
    notices: list[Notice] = []
    event: ev.Event | None = None
    touched: frozenset[str] = frozenset()


LoadSampler = Callable[[str, Mapping[str, Any]], BatchSampler]
"""Makes the sampler of a short name or import path, with its options."""


def load_samplers(policy: LedgerPolicy, load: LoadSampler) -> Samplers:
    """Load the samplers of those tasks that do not choose first in, first out.

    Raises:
        Refused: one cannot be loaded.
    """
    specs = policy.samplers.items()
    return {task: load(spec.path, spec.options) for task, spec in specs if spec.path != "fifo"}


def _no_sampler(path: str, _: Mapping[str, Any]) -> BatchSampler:
    raise Refused(f"sampler '{path}'", why="this ledger was made without `load_sampler`")


class Ledger:
    """Deterministic: the same entries, applied in the same order, give the same state.

    An event that is refused (by an exception) or that says `changed=False` left no trace and is not journaled.

    Args:
        snapshot: state to go on from; empty: a new ledger.
        load_sampler: imports samplers, which the ledger itself does not: it does no I/O.
    """

    def __init__(self, snapshot: bytes = b"", load_sampler: LoadSampler = _no_sampler) -> None:
        self._load_sampler = load_sampler
        state = msgspec.msgpack.decode(snapshot, type=State) if snapshot else State()
        self.core = Core(state)
        self._samplers: Samplers | None = None

    @property
    def samplers(self) -> Samplers:
        """Samplers of the current policy, loaded on first use; a replay grants the journaled choice without them.

        Raises:
            Refused: one cannot be loaded.
        """
        if self._samplers is None:
            policy = self.core.state.policy
            self._samplers = load_samplers(policy, self._load_sampler) if policy is not None else {}
        return self._samplers

    @property
    def n(self) -> int:
        """Sequence number of the last entry that changed the ledger."""
        return self.core.state.n

    @property
    def state(self) -> State:
        """The state, to be read only."""
        return self.core.state

    def snapshot(self) -> bytes:
        """Encode the whole state; a ledger made from it continues as this one would."""
        return msgspec.msgpack.encode(self.core.state)

    def knows(self, who: Incarnation) -> bool:
        """Whether this incarnation has joined.

        Raises:
            StaleEpoch: it is fenced.
        """
        self.core.state.callers.check(who)
        return self.core.state.callers.knows(who)

    def concerned(self, who: Incarnation) -> bool:
        """Whether the end of this incarnation makes a difference: it is heard, or fenced and may still be reading."""
        return self.core.state.callers.knows(who) or who in self.core.readers()

    def apply(self, entry: ev.JournalEntry) -> EventOutcome:
        """Apply one event.

        A call that comes again (its caller did not get the reply) is found by its number, and answered as before.

        Raises:
            Refused: the event is not possible; nothing changed.
            StaleEpoch: the caller is fenced; nothing changed.
        """
        core, who, event = self.core, entry.who, entry.event
        core.now, core.changed, core.notices, core.touched = entry.at, False, [], set()
        full = core.used_bytes >= core.state.limits.capacity_bytes
        if who is None:
            own = BROKER_HANDLERS.get(type(event))
            if own is None:
                raise Refused(f"event {type(event).__name__}", why="it needs a caller")
            answer: Answer = own(core, event) or Acknowledged()
            if isinstance(event, ev.ConfigureQueue):
                self._samplers = None
        else:
            handler = HANDLERS.get(type(event))
            if handler is None:
                raise Refused(f"event {type(event).__name__} of {who}", why="it is the broker's own")
            if not isinstance(event, ev.JoinQueue) and not self.knows(who):
                raise Refused(f"call of {who}", why="it has not joined")
            kept = core.state.callers.reply(who, entry.seq) if entry.seq else None
            if kept is not None:
                if type(kept) is not handler.reply:
                    why, hint = "another call had this number", "number changing calls anew"
                    raise Refused(f"call {entry.seq} of {who}", why=why, hint=hint)
                return EventOutcome(
                    self._granted_again(kept) if isinstance(kept, Granted) else kept, False, event=event
                )
            reply: Reply = Acknowledged()
            answer = reply
            if isinstance(event, ev.RequestLease):
                samplers = self.samplers if event.keys is None else {}
                answer, event = consumption.lease(core, who, event, samplers)
                reply = Granted(answer.lease)
            elif (said := handler.apply(core, who, event)) is not None:
                answer = reply = said
            # A caller that must wait asks again under the same number. (A replay does not know the reason of a wait for
            # samples: it chooses nothing.)
            waits = not answer.lease if isinstance(answer, LeaseGrant) else getattr(answer, "waiting_on", "")
            if core.changed and entry.seq and not waits:
                core.state.callers.keep(who, entry.seq, reply)
        if core.changed:
            core.state.n = entry.n
        if full and core.used_bytes < core.state.limits.capacity_bytes:
            core.touched.add(ROOM)
        return EventOutcome(answer, core.changed, core.notices, event, frozenset(core.touched))

    def _granted_again(self, kept: Granted) -> LeaseGrant:
        lease = self.core.state.leases.get(kept.lease)
        # Of one that lapsed before its answer arrived, the memory is pinned until the caller releases it.
        return consumption.batch_of(self.core, lease) if lease is not None else LeaseGrant(kept.lease, [])

    # --- not journaled

    def renew(self, who: Incarnation, ids: list[int], now: float) -> list[int]:
        """Renew tickets and leases of the caller; answers with the ids that are not its own (any more)."""
        core, lost = self.core, []
        for id_ in ids:
            group, lease = core.state.groups.get(id_), core.state.leases.get(id_)
            if (group is not None and group.holder == who) or (lease is not None and lease.holder == who):
                core.renew(id_, now)
            else:
                lost.append(id_)
        return lost

    def restart_deadlines(self, now: float) -> None:
        """All tickets and leases run at full length from now: after the broker's restart, or after a pause."""
        core = self.core
        core.deadlines.clear()
        for group in core.state.groups.values():
            if group.holder is not None:
                core.renew(group.id, now)
        for lease in core.state.leases.values():
            core.renew(lease.id, now)

    def due(self, now: float) -> ev.Lapse | None:
        """The lapse that is due, if any deadline has passed."""
        late = [id_ for id_, deadline in self.core.deadlines.items() if deadline <= now]
        leases = [id_ for id_ in late if id_ in self.core.state.leases]
        return ev.Lapse([id_ for id_ in late if id_ not in self.core.state.leases], leases) if late else None

    def straggler_deadline(self) -> float | None:
        """Deadline of a batch that waits for stragglers; None if none does."""
        since = self.core.state.blocked_since
        return None if since is None else since + self.core.policy.straggler_wait_s

    def to_spill(self, skip: Container[int] = (), short: Mapping[str, int] | None = None) -> list[tuple[int, Extent]]:
        """Blocks to copy to disk now (see memory.wanted)."""
        return memory.wanted(self.core, skip, short or {})

    def account(self) -> dict[str, int]:
        """Counts since the run began (see accounting.account)."""
        return accounting.account(self.core)

    def audit(self) -> list[str]:
        """Violated invariants; empty unless the ledger has a defect."""
        return accounting.audit(self.core)
