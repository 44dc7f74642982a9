"""The ledger: a state machine over journaled events.

The broker gives each event to `Ledger.apply`, journals it if it changed something, and then answers the caller.
HANDLERS says which function handles which event; a replay of the journal calls the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import msgspec

from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.queue.ledger import accounting, admission, consumption, failures, memory, processes, steps
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
from relax_rt.transport.queue.ledger.state import State
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

Answer = Reply | LeaseGrant


class Handler(NamedTuple):
    """How a caller's event is handled.

    Attributes:
        apply: changes the ledger; answers None for Acknowledged.
        reply: type of what is kept of the answer.
    """

    apply: Callable[[Core, Incarnation, Any], Reply | None]
    reply: type[Reply] = Acknowledged


def _grants(core: Core, who: Incarnation, event: ev.RequestLease) -> None:
    raise AssertionError("leases are granted by Ledger.apply, which has the samplers")


HANDLERS: dict[type[ev.Event], Handler] = {
    ev.JoinQueue: Handler(processes.join),
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
    ev.ProcessExited: Handler(lambda core, _, event: processes.process_exited(core, event)),
}
"""Events of callers: each has one handler, and one type of reply."""

OWN_HANDLERS: dict[type[ev.Event], Callable[[Core, Any], Reply | None]] = {
    ev.ConfigureQueue: processes.configure,
    ev.OpenRun: processes.open_run,
    ev.ReinstateItems: lambda core, event: failures.reinstate(core, event.items),
    ev.ReportLosses: lambda core, event: failures.report_losses(core, event.older_s),
    ev.MoveBlocks: memory.moved,
    ev.Lapse: processes.lapse_overdue,
    ev.ProcessExited: processes.process_exited,
}
"""Events of the broker itself."""


class EventOutcome(msgspec.Struct, frozen=True):
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
            own = OWN_HANDLERS.get(type(event))
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
            # Who is told to wait asks again under the same number. (A replay does not know the reason of a wait for
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
