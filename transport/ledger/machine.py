"""The ledger: applies events, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from relax_rt.transport.errors import Refused
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.ledger import account, admission, consume, training
from relax_rt.transport.ledger.callers import Kept
from relax_rt.transport.ledger.core import Core, Notice
from relax_rt.transport.ledger.events import (
    Abandon,
    Admit,
    Committed,
    Complete,
    Configure,
    Entry,
    GiveBack,
    Gone,
    Join,
    Lapse,
    Open,
    PutColumns,
    Rollback,
    Take,
    Trained,
)
from relax_rt.transport.ledger.state import State
from relax_rt.transport.queue.api import Admission, Batch, Freed

Answer = Admission | Batch | list[Freed] | None


class Outcome(msgspec.Struct, frozen=True):
    """What an event did.

    Attributes:
        answer: for the caller.
        changed: the ledger changed, so the entry must be journaled before the answer is given.
        notices: for the event log.
    """

    answer: Answer
    changed: bool
    notices: list[Notice] = []


class Ledger:
    """Deterministic: the same entries, applied in the same order, give the same state.

    An event that is refused (by an exception) or that says `changed=False` left no trace and is not journaled.
    """

    def __init__(self, snapshot: bytes = b"") -> None:
        state = msgspec.msgpack.decode(snapshot, type=State) if snapshot else State()
        self.core = Core(state)

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

    def apply(self, entry: Entry) -> Outcome:
        """Apply one event.

        Raises:
            Refused: the event is not possible; nothing changed.
            StaleEpoch: the caller is fenced; nothing changed.
        """
        core, who, event = self.core, entry.who, entry.event
        core.now, core.changed, core.notices = entry.at, False, []
        answer: Answer = None
        if who is None:
            self._own(event)
        else:
            if not isinstance(event, Join) and not self.knows(who):
                raise Refused(f"call of {who}", why="it has not joined")
            kept = core.state.callers.answer(who, entry.seq) if entry.seq else None
            if kept is not None:
                return Outcome(self._repeated(event, kept), changed=False)
            answer = self._called(who, event)
            if core.changed and entry.seq:
                self._keep(who, entry.seq, answer)
        if core.changed:
            core.state.n = entry.n
        return Outcome(answer, core.changed, core.notices)

    def _own(self, event: object) -> None:
        """The broker's own events."""
        core = self.core
        match event:
            case Configure(policy, limits):
                policy.check()
                core.changed = (policy, limits) != (core.state.policy, core.state.limits)
                core.state.policy, core.state.limits = policy, limits
                core.reindex()
            case Open(run_id):
                if core.state.run_id not in ("", run_id):
                    training.lose_payloads(core)
                core.changed = core.changed or core.state.run_id != run_id
                core.state.run_id = run_id
            case Lapse(groups, leases):
                self._lapse(groups, leases)
            case _:
                raise Refused(f"event {type(event).__name__}", why="it needs a caller")

    def _called(self, who: Incarnation, event: object) -> Answer:
        core = self.core
        match event:
            case Join():
                self._join(who)
            case Admit():
                return admission.admit(core, who, event)
            case PutColumns():
                return admission.put(core, who, event)
            case GiveBack():
                admission.give_back(core, who, event)
            case Take():
                return consume.take(core, who, event)
            case Complete():
                return consume.complete(core, who, event)
            case Abandon():
                consume.abandon(core, who, event)
            case Trained():
                training.trained(core, who, event)
            case Committed():
                training.committed(core, who, event)
            case Rollback():
                training.rollback(core, who, event)
            case Gone(gone, reason):
                self._gone(gone, reason)
            case _:
                raise Refused(f"event {type(event).__name__} of {who}", why="it is the broker's own")
        return None

    def _keep(self, who: Incarnation, seq: int, answer: Answer) -> None:
        match answer:
            case Batch(lease, samples) if not samples:
                return
            case Admission(tickets) if not tickets:
                return
            case Batch(lease):
                kept = Kept(lease=lease)
            case Admission():
                kept = Kept(admission=answer)
            case list():
                kept = Kept(freed=answer)
            case _:
                kept = Kept()
        self.core.state.callers.keep(who, seq, kept)

    def _repeated(self, event: object, kept: Kept) -> Answer:
        match event:
            case Admit():
                return kept.admission
            case PutColumns() | Complete():
                return kept.freed
            case Take():
                lease = self.core.state.leases.get(kept.lease)
                if lease is None:
                    return Batch(0, [], waiting_on=f"lease {kept.lease} lapsed before its answer arrived")
                return consume.batch_of(self.core, lease)
            case _:
                return None

    def _join(self, who: Incarnation) -> None:
        """The slot has a newer incarnation: the older ones can finish nothing more, though they may still read."""
        core = self.core
        core.state.callers.check(who)
        if core.state.callers.knows(who):
            return
        core.changed = True
        core.state.callers.join(who)
        self._end_work(lambda other: other.slot == who.slot and other.epoch < who.epoch, process_ended=False)

    def _gone(self, who: Incarnation, reason: str) -> None:
        core = self.core
        core.changed = True
        core.state.callers.fence(who.slot, who.epoch + 1)
        core.extents.forget_owner(who)
        self._end_work(lambda other: other == who, process_ended=True)
        for lease in [lease for lease in core.state.lapsed.values() if lease.who == who]:
            core.unpin(lease)

    def _end_work(self, of: Callable[[Incarnation], bool], *, process_ended: bool) -> None:
        core = self.core
        for group in [group for group in core.state.groups.values() if group.holder is not None and of(group.holder)]:
            core.end(group, "dropped(producer gone)")
        for lease in [lease for lease in core.state.leases.values() if of(lease.who)]:
            consume.lapse(core, lease, process_ended=process_ended)

    def _lapse(self, groups: list[int], leases: list[int]) -> None:
        core = self.core
        for id_ in groups:
            group = core.state.groups.get(id_)
            if group is not None and group.holder is not None:
                core.changed = True
                core.end(group, "dropped(lapsed)")
        for id_ in leases:
            lease = core.state.leases.get(id_)
            if lease is not None:
                consume.lapse(core, lease, process_ended=False)

    # --- not journaled

    def renew(self, who: Incarnation, ids: list[int], now: float) -> list[int]:
        """Renew tickets and leases of the caller; answers with the ids that are not its own (any more)."""
        state, lost = self.core.state, []
        for id_ in ids:
            group, lease = state.groups.get(id_), state.leases.get(id_)
            if (group is not None and group.holder == who) or (lease is not None and lease.who == who):
                self.core.deadlines[id_] = now + state.limits.lease_s
            else:
                lost.append(id_)
        return lost

    def restart_deadlines(self, now: float) -> None:
        """All tickets and leases run at full length from now: after the broker's restart, or after a pause."""
        state = self.core.state
        held = [group.id for group in state.groups.values() if group.holder is not None]
        self.core.deadlines = dict.fromkeys([*held, *state.leases], now + state.limits.lease_s)

    def due(self, now: float) -> Lapse | None:
        """The lapse that is due, if any deadline has passed."""
        late = [id_ for id_, deadline in self.core.deadlines.items() if deadline <= now]
        leases = [id_ for id_ in late if id_ in self.core.state.leases]
        return Lapse([id_ for id_ in late if id_ not in self.core.state.leases], leases) if late else None

    def next_lapse(self) -> float | None:
        """When the next ticket or lease lapses, unless it is renewed."""
        return min(self.core.deadlines.values(), default=None)

    def straggler_deadline(self) -> float | None:
        """Until when a batch that could be granted waits for stragglers; None if none does."""
        since = self.core.state.blocked_since
        return None if since is None else since + self.core.policy.straggler_wait_s

    def account(self) -> dict[str, int]:
        """Counts since the run began (see account.account)."""
        return account.account(self.core)

    def audit(self) -> list[str]:
        """Violated invariants; empty unless the ledger has a defect."""
        return account.audit(self.core)
