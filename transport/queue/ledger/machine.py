"""The ledger: applies events, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import msgspec

from relax_rt.transport.memory.refs import Extent, owner_key, owner_of, unfit_slot
from relax_rt.transport.queue.ledger import accounting, admission, consumption, failures, memory, steps
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.consumption import lapse
from relax_rt.transport.queue.ledger.core import ROOM, Core, Notice
from relax_rt.transport.queue.ledger.messages import (
    Admission,
    GroupsPut,
    ItemsAssigned,
    LeaseGrant,
    SavedPartials,
    StepReply,
)
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.queue.ledger.selection import Sampler, Samplers
from relax_rt.transport.queue.ledger.state import ClientProcess, Kept, State
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

Answer = Admission | GroupsPut | LeaseGrant | StepReply | SavedPartials | ItemsAssigned | list[Extent] | None


class Outcome(msgspec.Struct, frozen=True):
    """What an event did.

    Attributes:
        answer: for the caller.
        changed: the ledger changed, so the event must be journaled before the answer is given.
        notices: for the event log.
        event: what to journal: the event with what was decided on the way.
        touched: what those may wait for who wait now (names of tasks, ROOM).
    """

    answer: Answer
    changed: bool
    notices: list[Notice] = []
    event: ev.Event | None = None
    touched: frozenset[str] = frozenset()


LoadSampler = Callable[[str, Mapping[str, Any]], Sampler]
"""Makes the sampler of a short name or import path, with its options."""


def load_samplers(policy: LedgerPolicy, load: LoadSampler) -> Samplers:
    """Load the samplers of those tasks that do not choose first in, first out.

    Raises:
        Refused: one cannot be loaded.
    """
    specs = policy.samplers.items()
    return {task: load(spec.path, spec.options) for task, spec in specs if spec.path != "fifo"}


def _no_sampler(path: str, _: Mapping[str, Any]) -> Sampler:
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
        """Those of the policy in force, loaded when they are first asked: a replay grants what was chosen then.

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
        """The whole state; a ledger made from it goes on as this one would."""
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

    def apply(self, entry: ev.Entry) -> Outcome:
        """Apply one event.

        Raises:
            Refused: the event is not possible; nothing changed.
            StaleEpoch: the caller is fenced; nothing changed.
        """
        core, who, event = self.core, entry.who, entry.event
        core.now, core.changed, core.notices, core.touched = entry.at, False, [], set()
        full = core.used_bytes >= core.state.limits.capacity_bytes
        answer: Answer = None
        if who is None:
            answer = self._own(event)
        else:
            if not isinstance(event, ev.Join) and not self.knows(who):
                raise Refused(f"call of {who}", why="it has not joined")
            kept = core.state.callers.answer(who, entry.seq) if entry.seq else None
            if kept is not None:
                answer = self._repeated(who, event, kept)
                if core.changed:
                    core.state.n = entry.n
                return Outcome(answer, core.changed, event=event)
            if isinstance(event, ev.RequestLease):
                answer, keys = consumption.take(core, who, event, self.samplers if event.keys is None else {})
                event = ev.RequestLease(event.task, event.want, keys)
            else:
                answer = self._called(who, event)
            if core.changed and entry.seq:
                self._keep(who, entry.seq, answer)
        if core.changed:
            core.state.n = entry.n
        if full and core.used_bytes < core.state.limits.capacity_bytes:
            core.touched.add(ROOM)
        return Outcome(answer, core.changed, core.notices, event, frozenset(core.touched))

    def _own(self, event: object) -> Answer:
        """The broker's own events."""
        core = self.core
        match event:
            case ev.Configure(policy, limits):
                configure(core, policy, limits)
                self._samplers = None
            case ev.OpenRun():
                self._open(event)
            case ev.ReinstateItems(items):
                failures.reinstate(core, items)
            case ev.ReportLosses(older_s):
                failures.report_losses(core, older_s)
            case ev.MoveBlocks():
                return memory.spilled(core, event)
            case ev.Lapse(groups, leases):
                self._lapse(groups, leases)
            case ev.ProcessExited(gone, _):
                self._gone(gone)
            case _:
                raise Refused(f"event {type(event).__name__}", why="it needs a caller")
        return None

    def _open(self, event: ev.OpenRun) -> None:
        core, callers = self.core, self.core.state.callers
        if core.state.run_id not in ("", event.run_id):
            if core.state.limits.durable:
                steps.keep_payloads(core)
            else:
                steps.lose_payloads(core)
            failures.begin(core)
        after = (event.run_id, event.node, event.payloads)
        before = (core.state.run_id, callers.node, callers.payloads)
        core.changed = core.changed or before != after or core.state.blocked_since is not None
        core.state.run_id, callers.node, callers.payloads = after
        # Like the leases, the wait for stragglers begins anew: nobody could be heard meanwhile.
        core.state.blocked_since = None

    def _called(self, who: Incarnation, event: object) -> Answer:
        core = self.core
        match event:
            case ev.PutSamples():
                return admission.put(core, who, event)
            case ev.PutGroups():
                return admission.offer(core, who, event)
            case ev.Admit():
                return admission.admit(core, who, event)
            case ev.SavePartials():
                return admission.mark(core, who, event)
            case ev.CompleteLease():
                return consumption.complete(core, who, event)
            case ev.CompleteStep():
                return steps.trained(core, who, event)
            case ev.AssignItems():
                return steps.choose(core, who, event)
            case ev.Unpin(leases):
                consumption.unpin(core, who, leases)
                return self._collect(who)
            case ev.Join():
                self._join(who, event)
            case ev.ReleaseGroups():
                admission.give_back(core, who, event)
            case ev.SkipGroups():
                admission.skip(core, who, event)
            case ev.ReleaseLease():
                consumption.abandon(core, who, event)
            case ev.FilterGroups():
                steps.filtered(core, who, event)
            case ev.RequestSurplus():
                steps.ask(core, who, event)
            case ev.Commit():
                steps.committed(core, who, event)
            case ev.Rollback():
                steps.rollback(core, who, event)
            case ev.ProcessExited(gone, _):
                self._gone(gone)
            case _:
                raise Refused(f"event {type(event).__name__} of {who}", why="it is the broker's own")
        return None

    def _collect(self, who: Incarnation) -> list[Extent]:
        freed = self.core.blocks.collect(who)
        self.core.changed = self.core.changed or bool(freed)
        return freed

    def _keep(self, who: Incarnation, seq: int, answer: Answer) -> None:
        match answer:
            case LeaseGrant(0):
                return
            case Admission(tickets) if not tickets:
                return
            case LeaseGrant(lease):
                kept = Kept(lease=lease)
            case Admission():
                kept = Kept(admission=answer)
            case GroupsPut():
                kept = Kept(offered=answer)
            case StepReply():
                kept = Kept(advice=answer)
            case SavedPartials():
                kept = Kept(marked=answer)
            case ItemsAssigned():
                kept = Kept(chosen=answer)
            case list():
                kept = Kept(freed=answer)
            case _:
                kept = Kept()
        self.core.state.callers.keep(who, seq, kept)

    def _repeated(self, who: Incarnation, event: object, kept: Kept) -> Answer:
        match event:
            case ev.Admit():
                return kept.admission
            case ev.PutGroups():
                return kept.offered
            case ev.CompleteStep():
                return kept.advice
            case ev.SavePartials():
                return kept.marked
            case ev.AssignItems():
                return kept.chosen
            case ev.PutSamples() | ev.CompleteLease() | ev.Unpin():
                return kept.freed
            case ev.RequestLease():
                lease = self.core.state.leases.get(kept.lease)
                if lease is None:
                    # It lapsed before its answer arrived, and its memory is pinned until the caller gives it back.
                    return LeaseGrant(kept.lease, [])
                return consumption.batch_of(self.core, lease)
            case _:
                return None

    def _join(self, who: Incarnation, event: ev.Join) -> None:
        """The slot has a newer incarnation: the older ones can finish nothing more, though they may still read."""
        core, callers = self.core, self.core.state.callers
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
            callers.forget_homes(reading.union(owner_of(slab) for slab in core.blocks.live))
            callers.homes[owner_key(who)] = ClientProcess(who, event.node, event.payloads, event.pid, event.started)
        self._end_work(lambda other: other.slot == who.slot and other.epoch < who.epoch, process_ended=False)

    def _gone(self, who: Incarnation) -> None:
        core = self.core
        core.changed = True
        core.state.callers.fence(who.slot, who.epoch + 1)
        core.blocks.forget_owner(who)
        failures.lose_memory(core, who)
        self._end_work(lambda other: other == who, process_ended=True)
        for lease in [lease for lease in core.state.pinned.values() if lease.holder == who]:
            core.release_pins(lease)

    def _end_work(self, of: Callable[[Incarnation], bool], *, process_ended: bool) -> None:
        core = self.core
        for group in [group for group in core.state.groups.values() if group.holder is not None and of(group.holder)]:
            admission.reopen(core, group, "dropped(producer gone)", losses=1)
        # The newest first, so that the samples of the oldest are offered first again.
        for lease in reversed(list(core.state.leases.values())):
            if of(lease.holder):
                consumption.lapse(core, lease, pinned=not process_ended)

    def _lapse(self, groups: list[int], leases: list[int]) -> None:
        core = self.core
        for id_ in groups:
            group = core.state.groups.get(id_)
            if group is not None and group.holder is not None:
                core.changed = True
                admission.reopen(core, group, "dropped(lapsed)", losses=1)
        for id_ in reversed(leases):
            lease = core.state.leases.get(id_)
            if lease is not None:
                consumption.lapse(core, lease, pinned=True)

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
        """Until when a batch that could be granted waits for stragglers; None if none does."""
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
                lapse(core, lease, pinned=True, blame=False)
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
