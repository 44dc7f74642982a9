"""The state machine of a broadcast group: who is started, meets whom, is aborted, and is left out.

Pure: `step(event, now)` returns actions; the clock comes with the event, and a ClockTick is due by `deadline`. There is
a deadline whenever a transfer is under way or waits. Every transfer that was requested ends in one outcome.
`group.BroadcastGroup` carries the actions out.

One transfer at a time goes through phases::

    idle -> gathering -> rendezvous -> broadcasting -> idle
                ^             |             |
                +-------- aborting <--------+

A rank is left out of the transfer once it died, answered nothing within `abort_s` of a command to abort, failed for a
reason of its own, or hung in the library twice. The others form the next group without it and resume behind the last
bucket that all of them have. A dead incarnation is never asked for anything again; a later transfer starts a new one. A
process that is only slow to start costs its rank the transfer, not the start: the next transfer may find it there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from relax_rt.transport.weights.broadcast.protocol import (
    AbortReceived,
    BroadcastOutcome,
    Fate,
    LostRank,
    RankAborted,
    RankFailed,
    RankHello,
    RankJoined,
    Report,
    TransferDone,
    TransferProgress,
)


class BroadcastLimits(msgspec.Struct, frozen=True):
    """How long each step of a group may take.

    Attributes:
        hello_s: from the begin of a transfer until the processes of its ranks have said hello.
        start_s: from the start of a process to its hello, over all transfers that wait for it: a slow one is left out
            of them and not started again each time.
        starts: how often in a row a process is started that ends before its hello; then its member is given up.
        join_s: to meet all others.
        stall_s: between two buckets of the slowest rank.
        abort_s: from the command to abort a collective until it has ended.
        blameless: groups in one transfer that may fail while every rank answers and none has failed itself.
        second_chances: how often, in one transfer, a rank that answers but hangs in the library gets a new process.
        waiting: transfers that may wait for the one under way.
    """

    hello_s: float = 60.0
    start_s: float = 60.0
    starts: int = 3
    join_s: float = 30.0
    stall_s: float = 20.0
    abort_s: float = 5.0
    blameless: int = 1
    second_chances: int = 1
    waiting: int = 4


# --- events


class RequestTransfer(msgspec.Struct, frozen=True):
    """Transfer `buckets` buckets, with `digest` over all, from members[0] to the others."""

    transfer: int
    members: tuple[str, ...]
    buckets: int
    digest: str
    timeout_s: float


class PrestartRanks(msgspec.Struct, frozen=True):
    """Transfers with these members will come: start their processes."""

    members: tuple[str, ...]


class CancelTransfer(msgspec.Struct, frozen=True):
    """Nobody wants the transfer any more: end what is under way of it."""

    transfer: int


class RankReport(msgspec.Struct, frozen=True):
    """One incarnation of a member reports; a report of another incarnation than the living one is ignored."""

    member: str
    incarnation: int
    report: Report


class RankExited(msgspec.Struct, frozen=True):
    """The process of one incarnation has ended."""

    member: str
    incarnation: int
    diagnosis: str


class ClockTick(msgspec.Struct, frozen=True):
    """Time has passed: the deadline that the machine named may be over."""


class CloseGroup(msgspec.Struct, frozen=True):
    """The owner is done with the group."""


Event = RequestTransfer | PrestartRanks | CancelTransfer | RankReport | RankExited | ClockTick | CloseGroup


# --- actions


class SpawnRank(msgspec.Struct, frozen=True):
    """Start a process for the member."""

    member: str
    incarnation: int


class InitRank(msgspec.Struct, frozen=True):
    """Have the rank meet the others of this generation."""

    member: str
    incarnation: int
    generation: int
    rank: int
    world: int
    timeout_s: float


class StartBroadcast(msgspec.Struct, frozen=True):
    """Have the rank take part in the transfer from bucket `first` on; rank 0 is the root."""

    member: str
    incarnation: int
    generation: int
    transfer: int
    first: int
    stall_s: float


class AbortRank(msgspec.Struct, frozen=True):
    """Have the rank end the collective it is in."""

    member: str
    incarnation: int
    generation: int


class KillRank(msgspec.Struct, frozen=True):
    """End the rank's process."""

    member: str
    incarnation: int
    why: str


class FinishTransfer(msgspec.Struct, frozen=True):
    """Return the outcome to whoever requested the transfer."""

    outcome: BroadcastOutcome


Action = SpawnRank | InitRank | StartBroadcast | AbortRank | KillRank | FinishTransfer

Phase = Literal["idle", "gathering", "rendezvous", "broadcasting", "aborting", "closed"]
State = Literal["absent", "starting", "idle", "rendezvous", "ready", "broadcasting", "aborting", "dead"]
IN_GROUP: tuple[State, ...] = ("rendezvous", "ready", "broadcasting")


@dataclass(slots=True)
class RankMember:
    """One rank over its incarnations."""

    name: str
    incarnation: int = 0
    started_at: float = 0.0
    state: State = "absent"
    device: str = ""
    generation: int = 0
    abort_received: bool = False
    failed_starts: int = 0
    why: str = ""


@dataclass(slots=True)
class Transfer:
    """A transfer under way. `pending`: its root, then the members that do not have it yet."""

    request: RequestTransfer
    deadline: float
    pending: list[str]
    delivered: list[str] = field(default_factory=list)
    lost: dict[str, LostRank] = field(default_factory=dict)
    buckets: dict[str, int] = field(default_factory=dict)
    stuck: dict[str, int] = field(default_factory=dict)
    blameless: int = 0
    blamed: bool = False
    last_failure: str = ""

    @property
    def root(self) -> str:
        return self.request.members[0]

    @property
    def slowest(self) -> int:
        """Buckets that everybody who still takes part has."""
        return min((self.buckets.get(m, 0) for m in self.pending if m != self.root), default=0)


class BroadcastMachine:
    """Decide about one group of ranks.

    Args:
        shared_devices: two ranks may have one device (a library that allows it).
    """

    def __init__(self, limits: BroadcastLimits, *, shared_devices: bool = False) -> None:
        self.limits = limits
        self.phase: Phase = "idle"
        self.generation = 0
        self.members: dict[str, RankMember] = {}
        self._shared_devices = shared_devices
        self._now: Transfer | None = None
        self._waiting: deque[tuple[RequestTransfer, float]] = deque()
        self._group: tuple[str, ...] = ()
        self._phase_deadline: float | None = None
        self._actions: list[Action] = []

    @property
    def present(self) -> frozenset[str]:
        """The members whose process has said hello and lives."""
        away: tuple[State, ...] = ("absent", "starting", "dead")
        return frozenset(name for name, member in self.members.items() if member.state not in away)

    @property
    def given_up(self) -> dict[str, str]:
        """The members whose processes are not started any more, because each ended before its hello, and why."""
        return {name: member.why for name, member in self.members.items() if self._given_up(member)}

    @property
    def deadline(self) -> float | None:
        """When a Tick is due at the latest; None: nothing is under way."""
        times = [t for _, t in self._waiting]
        if self._now is not None:
            times.append(self._now.deadline)
            assert self._phase_deadline is not None
            times.append(self._phase_deadline)
        return min(times, default=None)

    def step(self, event: Event, now: float) -> list[Action]:
        """Take an event; return what is to be done."""
        self._actions = []
        if self.phase == "closed":
            if isinstance(event, RequestTransfer):
                self._refuse(event, "failed", "the group is closed")
            return self._actions
        match event:
            case RequestTransfer():
                # Each member once; the first is the root, whatever follows.
                request = msgspec.structs.replace(event, members=tuple(dict.fromkeys(event.members)))
                if self._now is None:
                    self._begin(request, now + request.timeout_s, now)
                elif len(self._waiting) < self.limits.waiting:
                    self._waiting.append((request, now + request.timeout_s))
                else:
                    self._refuse(request, "late", f"{len(self._waiting)} transfers wait already")
            case PrestartRanks(members):
                self._start(members, now)
                self._form_if_ready(now)
            case CancelTransfer(transfer):
                self._cancel(transfer, now)
            case CloseGroup():
                self._close()
            case RankReport(name, incarnation) | RankExited(name, incarnation):
                member = self.members.get(name)
                known = member is not None and member.incarnation == incarnation
                if member is not None and known and member.state not in ("absent", "dead"):
                    if isinstance(event, RankExited):
                        why = event.diagnosis or "its process ended"
                        self._count_failed_start(member, why)
                        member.state = "dead"
                        self._lose(name, "died", why)
                        self._broken(member, now)
                    else:
                        self._reported(member, event.report, now)
            case ClockTick():
                pass
        self._expire(now)
        return self._actions

    def _reported(self, member: RankMember, report: Report, now: float) -> None:
        if isinstance(report, RankHello):
            if member.state == "starting":
                member.state, member.device = "idle", report.device
                member.failed_starts, member.why = 0, ""
                self._form_if_ready(now)
            return
        if report.generation != member.generation:
            return  # of a group that is no more
        transfer = self._now
        match report:
            case RankJoined() if member.state == "rendezvous":
                member.state = "ready"
                assert transfer is not None
                if self._all(transfer.pending, "ready"):
                    self._broadcast(now)
            case TransferProgress(buckets=buckets):
                if transfer is not None and member.state == "broadcasting" and member.name in transfer.pending:
                    slowest = transfer.slowest
                    known = transfer.buckets.get(member.name, 0)
                    transfer.buckets[member.name] = min(max(buckets, known), transfer.request.buckets)
                    if transfer.slowest > slowest:
                        self._phase_deadline = now + self.limits.stall_s
            case TransferDone():
                self._done(member, report, now)
            case RankFailed(own=own, error=error):
                if transfer is not None:
                    transfer.last_failure = f"{member.name}: {error}"
                if own:
                    self._lose(member.name, "failed", error)
                    self._kill(member, error)
                elif member.state in IN_GROUP:
                    member.state = "idle"
                else:
                    return  # on its way out already: what counts is that it has ended
                self._broken(member, now)
            case AbortReceived():
                member.abort_received = member.abort_received or member.state == "aborting"
            case RankAborted() if member.state == "aborting":
                member.state = "idle"
                self._form_if_aborted(now)

    # A transfer begins

    def _begin(self, request: RequestTransfer, deadline: float, now: float) -> None:
        self._now = Transfer(request, deadline, list(request.members))
        for name in request.members:
            self.members.setdefault(name, RankMember(name))
        if self._end_if_over(self._now, now):
            return
        if request.members == self._group and self._all(request.members, "ready"):
            self._broadcast(now)
        else:
            self._gather(now)

    def _gather(self, now: float) -> None:
        """Start a process for everybody who takes part."""
        self.phase, self._phase_deadline = "gathering", now + self.limits.hello_s
        self._group = ()
        assert self._now is not None
        self._start(tuple(self._now.pending), now)
        self._form_if_ready(now)

    def _start(self, names: tuple[str, ...], now: float) -> None:
        """Start the processes that do not run."""
        for name in names:
            member = self.members.setdefault(name, RankMember(name))
            if self._start_overdue(member, now):
                self._kill(member, "it never said hello")
            if member.state in ("absent", "dead") and not self._given_up(member):
                member.incarnation += 1
                member.started_at = now
                member.state, member.device, member.generation = "starting", "", 0
                self._actions.append(SpawnRank(name, member.incarnation))

    def _given_up(self, member: RankMember) -> bool:
        return member.failed_starts >= self.limits.starts

    def _count_failed_start(self, member: RankMember, why: str) -> None:
        """Count the end of a process that has not said hello yet: `starts` of them in a row give the member up."""
        if member.state == "starting":
            member.failed_starts, member.why = member.failed_starts + 1, why

    def _start_overdue(self, member: RankMember, now: float) -> bool:
        return member.state == "starting" and member.started_at + self.limits.start_s <= now

    def _form_if_ready(self, now: float) -> None:
        """Have the ranks meet once everybody is there or has been given up."""
        transfer = self._now
        if self.phase != "gathering" or transfer is None:
            return
        for name in [n for n in transfer.pending if self._given_up(self.members[n])]:
            self._lose(name, "absent", f"its process is not started any more: {self.members[name].why}")
        if any(self.members[name].state == "starting" for name in transfer.pending):
            return
        if not self._shared_devices:
            owners: dict[str, str] = {}
            for name in list(transfer.pending):
                device = self.members[name].device
                if device and owners.setdefault(device, name) != name:
                    self._lose(name, "duplicate_device", f"{owners[device]} works on its device {device} as well")
        if self._end_if_over(transfer, now):
            return
        self.generation += 1
        self.phase, self._phase_deadline = "rendezvous", now + self.limits.join_s
        transfer.blamed = False
        for rank, name in enumerate(transfer.pending):
            member = self.members[name]
            member.state, member.generation = "rendezvous", self.generation
            world = len(transfer.pending)
            self._actions.append(InitRank(name, member.incarnation, self.generation, rank, world, self.limits.join_s))

    def _broadcast(self, now: float) -> None:
        transfer = self._now
        assert transfer is not None
        self._group = tuple(transfer.pending)
        self.phase, self._phase_deadline = "broadcasting", now + self.limits.stall_s
        first = transfer.slowest
        for name in transfer.pending:
            member = self.members[name]
            member.state = "broadcasting"
            self._actions.append(
                StartBroadcast(
                    name, member.incarnation, member.generation, transfer.request.transfer, first, self.limits.stall_s
                )
            )

    def _done(self, member: RankMember, done: TransferDone, now: float) -> None:
        transfer = self._now
        if transfer is None or member.state != "broadcasting" or done.transfer != transfer.request.transfer:
            return
        member.state = "ready"
        if done.digest != transfer.request.digest:
            self._lose(
                member.name, "corrupt", f"its memory has digest {done.digest}, sent was {transfer.request.digest}"
            )
        elif member.name != transfer.root:
            transfer.pending.remove(member.name)
            transfer.delivered.append(member.name)
        # The group stays whole until its last rank is through, so that the next transfer finds it as it is.
        if not any(self.members[name].state == "broadcasting" for name in self._group):
            self._end_if_over(transfer, now)

    # Something goes wrong

    def _broken(self, member: RankMember, now: float) -> None:
        """React to a rank that is lost to the group which the others still count on."""
        self._group = ()
        if self._now is None:
            return
        if self.phase == "gathering":
            self._form_if_ready(now)
        elif self.phase == "aborting":
            self._form_if_aborted(now)
        elif member.generation == self.generation:
            self._abort(now)

    def _abort(self, now: float) -> None:
        """End the collective on all ranks; who does not answer is left out."""
        self.phase, self._phase_deadline = "aborting", now + self.limits.abort_s
        for member in self.members.values():
            if member.state in IN_GROUP and member.generation == self.generation:
                member.state, member.abort_received = "aborting", False
                self._actions.append(AbortRank(member.name, member.incarnation, member.generation))
        self._form_if_aborted(now)

    def _form_if_aborted(self, now: float) -> None:
        transfer = self._now
        if self.phase != "aborting" or transfer is None or any(m.state == "aborting" for m in self.members.values()):
            return
        if not transfer.blamed:
            transfer.blameless += 1
            if transfer.blameless > self.limits.blameless:
                why = f"{transfer.blameless} groups failed in which every rank answers"
                self._finish(now, f"{why}; last {transfer.last_failure or 'none of them got further'}")
                return
        if not self._end_if_over(transfer, now):
            self._gather(now)

    def _expire(self, now: float) -> None:
        """React to deadlines that have passed."""
        for waiting in [w for w in self._waiting if now >= w[1]]:
            self._waiting.remove(waiting)
            self._refuse(waiting[0], "late", f"waited {waiting[0].timeout_s:g} s for the transfers before it")
        transfer = self._now
        if transfer is not None and now >= transfer.deadline:
            self._finish(now, f"not over within {transfer.request.timeout_s:g} s")
        elif transfer is not None and self._phase_deadline is not None and now >= self._phase_deadline:
            self._phase_overdue(transfer, now)

    def _phase_overdue(self, transfer: Transfer, now: float) -> None:
        limits = self.limits
        if self.phase == "gathering":
            for name in list(transfer.pending):
                if (member := self.members[name]).state == "starting":
                    if self._start_overdue(member, now):
                        self._kill(member, "it never said hello")
                    self._lose(name, "absent", f"its process said nothing within {limits.hello_s:g} s")
            self._form_if_ready(now)
        elif self.phase == "aborting":
            for member in [member for member in self.members.values() if member.state == "aborting"]:
                if not member.abort_received:
                    self._kill(member, "it answers nothing")
                    self._lose(member.name, "silent", f"answered nothing within {limits.abort_s:g} s")
                    continue
                # It lives, but its library does not come back: a new process costs less than the wait.
                self._kill(member, "its collective cannot be ended")
                transfer.blamed = True
                transfer.stuck[member.name] = transfer.stuck.get(member.name, 0) + 1
                if transfer.stuck[member.name] > limits.second_chances:
                    why = f"its collective could not be ended within {limits.abort_s:g} s, again"
                    self._lose(member.name, "stuck", why)
            self._form_if_aborted(now)
        else:
            meeting = self.phase == "rendezvous"
            state: State = "rendezvous" if meeting else "broadcasting"
            late = ", ".join(name for name in transfer.pending if self.members[name].state == state)
            transfer.last_failure = (
                f"{late} did not meet the others within {limits.join_s:g} s"
                if meeting
                else f"{late} had no further bucket within {limits.stall_s:g} s"
            )
            self._abort(now)

    # A transfer ends

    def _end_if_over(self, transfer: Transfer, now: float) -> bool:
        """End the transfer if nobody is left to get it, or to send it."""
        if transfer.root in transfer.lost:
            lost = transfer.lost[transfer.root]
            self._finish(now, f"its root {lost.member} is lost ({lost.fate}): {lost.why}")
        elif len(transfer.pending) == 1:
            self._finish(now)
        else:
            return False
        return True

    def _finish(self, now: float, error: str = "") -> None:
        transfer = self._now
        assert transfer is not None
        for name in transfer.pending:
            if name != transfer.root and name not in transfer.lost:
                transfer.lost[name] = LostRank(name, "late", error)
        for member in self.members.values():
            # A rank in the middle of something cannot be distinguished from one that hangs.
            if member.state in ("rendezvous", "broadcasting", "aborting") or self._start_overdue(member, now):
                self._kill(member, error or "its group is over")
        lost = tuple(entry for name, entry in transfer.lost.items() if name != transfer.root)
        self._actions.append(
            FinishTransfer(BroadcastOutcome(transfer.request.transfer, tuple(transfer.delivered), lost, error))
        )
        self._now, self._phase_deadline, self.phase = None, None, "idle"
        if self._waiting:
            request, deadline = self._waiting.popleft()
            self._begin(request, deadline, now)

    def _cancel(self, transfer: int, now: float) -> None:
        why = "it was cancelled"
        if self._now is not None and self._now.request.transfer == transfer:
            self._finish(now, why)
            return
        for waiting in [w for w in self._waiting if w[0].transfer == transfer]:
            self._waiting.remove(waiting)
            self._refuse(waiting[0], "failed", why)

    def _close(self) -> None:
        transfer, why = self._now, "the group was closed"
        if transfer is not None:
            left = [n for n in transfer.pending if n != transfer.root]
            lost = {n: entry for n, entry in transfer.lost.items() if n != transfer.root}
            lost.update({n: LostRank(n, "failed", why) for n in left})
            self._actions.append(
                FinishTransfer(
                    BroadcastOutcome(transfer.request.transfer, tuple(transfer.delivered), tuple(lost.values()), why)
                )
            )
        for request, _ in self._waiting:
            self._refuse(request, "failed", why)
        self._waiting.clear()
        self._now, self._phase_deadline, self.phase = None, None, "closed"
        for member in self.members.values():
            if member.state not in ("absent", "dead"):
                self._kill(member, why)

    def _refuse(self, request: RequestTransfer, fate: Fate, error: str) -> None:
        """End a transfer that was never begun."""
        lost = tuple(LostRank(name, fate, error) for name in request.members[1:])
        self._actions.append(FinishTransfer(BroadcastOutcome(request.transfer, (), lost, error)))

    def _lose(self, name: str, fate: Fate, why: str) -> None:
        """Leave the member out of this transfer, unless it has it already."""
        transfer = self._now
        if transfer is None or name not in transfer.request.members:
            return
        transfer.blamed = True
        if name in transfer.pending:
            transfer.pending.remove(name)
            transfer.lost[name] = LostRank(name, fate, why)

    def _kill(self, member: RankMember, why: str) -> None:
        self._count_failed_start(member, why)
        member.state = "dead"
        self._actions.append(KillRank(member.name, member.incarnation, why))

    def _all(self, names: tuple[str, ...] | list[str], state: State) -> bool:
        return all(self.members[name].state == state for name in names)
