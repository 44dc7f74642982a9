"""Decides about a group of ranks: who is started, who meets whom, when a collective is given up and who is left out.

Pure: `step(event, now)` gives actions; the clock comes with the event, `deadline` says when a Tick is due at the
latest. There is one whenever a transfer is under way or waits. Every transfer that was asked for ends in one outcome.

One transfer at a time goes through phases::

    idle -> gathering -> rendezvous -> broadcasting -> idle
                ^             |             |
                +-------- aborting <--------+

A rank is out of the transfer once it died, answered nothing within `abort_s` of a request to abort, failed for a reason
of its own, or hung in the library twice. The others form the next group without it and go on behind the last bucket
that all of them have. A dead incarnation is never asked for anything again; a later transfer starts a new one. One that
is only slow to start costs its rank the transfer, not the start: the next one may find it there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from relax_rt.transport.weights.collective.events import (
    Abort,
    Aborted,
    Action,
    Asked,
    Broadcast,
    Cancelled,
    Closed,
    Died,
    Done,
    Event,
    Failed,
    Fate,
    Heard,
    Hello,
    Init,
    Joined,
    Kill,
    Limits,
    Lost,
    Outcome,
    Progressed,
    Report,
    Spawn,
    Tick,
    Wanted,
)

Phase = Literal["idle", "gathering", "rendezvous", "broadcasting", "aborting", "closed"]
State = Literal["absent", "starting", "idle", "rendezvous", "ready", "broadcasting", "aborting", "dead"]
IN_GROUP: tuple[State, ...] = ("rendezvous", "ready", "broadcasting")


@dataclass(slots=True)
class Member:
    """One rank's process, over its incarnations."""

    name: str
    incarnation: int = 0
    born: float = 0.0
    state: State = "absent"
    device: str = ""
    generation: int = 0
    heard: bool = False
    unborn: int = 0
    why: str = ""


@dataclass(slots=True)
class Transfer:
    """A transfer under way. `pending`: its root, then who has not got it yet."""

    asked: Asked
    deadline: float
    pending: list[str]
    delivered: list[str] = field(default_factory=list)
    lost: dict[str, Lost] = field(default_factory=dict)
    buckets: dict[str, int] = field(default_factory=dict)
    stuck: dict[str, int] = field(default_factory=dict)
    blameless: int = 0
    blamed: bool = False
    last_failure: str = ""

    @property
    def root(self) -> str:
        """Who sends."""
        return self.asked.members[0]

    @property
    def slowest(self) -> int:
        """Buckets that everybody who still takes part has."""
        return min((self.buckets.get(m, 0) for m in self.pending if m != self.root), default=0)


class GroupMachine:
    """See the module.

    Args:
        shared_devices: two ranks may have one device (a library that allows it).
    """

    def __init__(self, limits: Limits, *, shared_devices: bool = False) -> None:
        self.limits = limits
        self.phase: Phase = "idle"
        self.generation = 0
        self.members: dict[str, Member] = {}
        self._shared_devices = shared_devices
        self._now: Transfer | None = None
        self._waiting: deque[tuple[Asked, float]] = deque()
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
        """The members whose processes are started no more, as each of the last ended before its first word, and why."""
        return {name: member.why for name, member in self.members.items() if self._hopeless(member)}

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
        """Take an event."""
        self._actions = []
        if self.phase != "closed":
            self._take(event, now)
            self._expire(now)
        elif isinstance(event, Asked):
            self._report(event.transfer, (), event.members[1:], "failed", "the group is closed")
        return self._actions

    def _take(self, event: Event, now: float) -> None:
        if isinstance(event, Asked):
            self._ask(event, now)
        elif isinstance(event, Wanted):
            self._want(event.members, now)
            self._maybe_form(now)
        elif isinstance(event, Cancelled):
            self._cancel(event.transfer, now)
        elif isinstance(event, Closed):
            self._close()
        elif not isinstance(event, Tick):
            member = self.members.get(event.member)
            if member is None or member.incarnation != event.incarnation or member.state in ("absent", "dead"):
                return
            self._of_member(member, event, now)

    def _of_member(self, member: Member, event: Event, now: float) -> None:
        if isinstance(event, Died):
            self._died(member, event.diagnosis, now)
        elif isinstance(event, Hello):
            if member.state == "starting":
                member.state, member.device = "idle", event.device
                member.unborn, member.why = 0, ""
                self._maybe_form(now)
        elif not isinstance(event, Joined | Progressed | Done | Failed | Heard | Aborted):
            return
        elif event.generation != member.generation:
            return  # of a group that is no more
        elif isinstance(event, Joined):
            self._joined(member, now)
        elif isinstance(event, Progressed):
            self._progressed(member, event.buckets, now)
        elif isinstance(event, Done):
            self._done(member, event, now)
        elif isinstance(event, Failed):
            self._failed(member, event, now)
        elif isinstance(event, Heard):
            member.heard = member.heard or member.state == "aborting"
        elif member.state == "aborting":
            member.state = "idle"
            self._maybe_aborted(now)

    # A transfer begins

    def _ask(self, asked: Asked, now: float) -> None:
        # Each member once; the first is the root, whatever follows.
        asked = Asked(asked.transfer, tuple(dict.fromkeys(asked.members)), asked.buckets, asked.digest, asked.timeout_s)
        if self._now is None:
            self._begin(asked, now + asked.timeout_s, now)
        elif len(self._waiting) < self.limits.waiting:
            self._waiting.append((asked, now + asked.timeout_s))
        else:
            why = f"{len(self._waiting)} transfers wait already"
            self._report(asked.transfer, (), asked.members[1:], "late", why)

    def _begin(self, asked: Asked, deadline: float, now: float) -> None:
        self._now = Transfer(asked, deadline, list(asked.members))
        for name in asked.members:
            self.members.setdefault(name, Member(name))
        if self._over(self._now, now):
            return
        if asked.members == self._group and self._all(asked.members, "ready"):
            self._broadcast(now)
        else:
            self._gather(now)

    def _gather(self, now: float) -> None:
        """Everybody who takes part gets a process."""
        self.phase, self._phase_deadline = "gathering", now + self.limits.hello_s
        self._group = ()
        assert self._now is not None
        self._want(tuple(self._now.pending), now)
        self._maybe_form(now)

    def _want(self, names: tuple[str, ...], now: float) -> None:
        """Start the processes that are not there."""
        for name in names:
            member = self.members.setdefault(name, Member(name))
            if self._never_came(member, now):
                self._kill(member, "it never said hello")
            if member.state in ("absent", "dead") and not self._hopeless(member):
                member.incarnation += 1
                member.born = now
                member.state, member.device, member.generation = "starting", "", 0
                self._actions.append(Spawn(name, member.incarnation))

    def _hopeless(self, member: Member) -> bool:
        return member.unborn >= self.limits.starts

    def _unborn(self, member: Member, why: str) -> None:
        """Its process ends; if it has not said its first word yet, that is one of the starts that are tried in vain."""
        if member.state == "starting":
            member.unborn, member.why = member.unborn + 1, why

    def _never_came(self, member: Member, now: float) -> bool:
        return member.state == "starting" and member.born + self.limits.start_s <= now

    def _maybe_form(self, now: float) -> None:
        """Once everybody is there, or has been given up, they are to meet."""
        transfer = self._now
        if self.phase != "gathering" or transfer is None:
            return
        for name in [n for n in transfer.pending if self._hopeless(self.members[n])]:
            self._lose(name, "absent", f"its process is not started any more: {self.members[name].why}")
        if any(self.members[name].state == "starting" for name in transfer.pending):
            return
        self._refuse_duplicates(transfer)
        if self._over(transfer, now):
            return
        self.generation += 1
        self.phase, self._phase_deadline = "rendezvous", now + self.limits.join_s
        transfer.blamed = False
        for rank, name in enumerate(transfer.pending):
            member = self.members[name]
            member.state, member.generation = "rendezvous", self.generation
            world = len(transfer.pending)
            self._actions.append(Init(name, member.incarnation, self.generation, rank, world, self.limits.join_s))

    def _refuse_duplicates(self, transfer: Transfer) -> None:
        if self._shared_devices:
            return
        owners: dict[str, str] = {}
        for name in list(transfer.pending):
            device = self.members[name].device
            if device and owners.setdefault(device, name) != name:
                self._lose(name, "duplicate_device", f"{owners[device]} works on its device {device} as well")

    def _joined(self, member: Member, now: float) -> None:
        if member.state != "rendezvous":
            return
        member.state = "ready"
        assert self._now is not None
        if self._all(self._now.pending, "ready"):
            self._broadcast(now)

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
                Broadcast(
                    name, member.incarnation, member.generation, transfer.asked.transfer, first, self.limits.stall_s
                )
            )

    def _progressed(self, member: Member, buckets: int, now: float) -> None:
        transfer = self._now
        if transfer is None or member.state != "broadcasting" or member.name not in transfer.pending:
            return
        before = transfer.slowest
        transfer.buckets[member.name] = min(max(buckets, transfer.buckets.get(member.name, 0)), transfer.asked.buckets)
        if transfer.slowest > before:
            self._phase_deadline = now + self.limits.stall_s

    def _done(self, member: Member, done: Done, now: float) -> None:
        transfer = self._now
        if transfer is None or member.state != "broadcasting" or done.transfer != transfer.asked.transfer:
            return
        member.state = "ready"
        if done.digest != transfer.asked.digest:
            self._lose(member.name, "corrupt", f"its memory has digest {done.digest}, sent was {transfer.asked.digest}")
        elif member.name != transfer.root:
            transfer.pending.remove(member.name)
            transfer.delivered.append(member.name)
        # The group stays whole until its last rank is through, so that the next transfer finds it as it is.
        if not any(self.members[name].state == "broadcasting" for name in self._group):
            self._over(transfer, now)

    # Something goes wrong

    def _died(self, member: Member, diagnosis: str, now: float) -> None:
        self._unborn(member, diagnosis or "its process ended")
        member.state = "dead"
        self._lose(member.name, "died", diagnosis or "its process ended")
        self._broken(member, now)

    def _failed(self, member: Member, failed: Failed, now: float) -> None:
        if self._now is not None:
            self._now.last_failure = f"{member.name}: {failed.error}"
        if failed.own:
            self._lose(member.name, "failed", failed.error)
            self._kill(member, failed.error)
        elif member.state in IN_GROUP:
            member.state = "idle"
        else:
            return  # on its way out already: what counts is that it has ended
        self._broken(member, now)

    def _broken(self, member: Member, now: float) -> None:
        """A rank is no more what the others take it for."""
        self._group = ()
        if self._now is None:
            return
        if self.phase == "gathering":
            self._maybe_form(now)
        elif self.phase == "aborting":
            self._maybe_aborted(now)
        elif member.generation == self.generation:
            self._abort(now)

    def _abort(self, now: float) -> None:
        """End the collective everywhere; who does not answer is the one to leave out."""
        self.phase, self._phase_deadline = "aborting", now + self.limits.abort_s
        for member in self.members.values():
            if member.state in IN_GROUP and member.generation == self.generation:
                member.state, member.heard = "aborting", False
                self._actions.append(Abort(member.name, member.incarnation, member.generation))
        self._maybe_aborted(now)

    def _maybe_aborted(self, now: float) -> None:
        transfer = self._now
        if self.phase != "aborting" or transfer is None or any(m.state == "aborting" for m in self.members.values()):
            return
        if not transfer.blamed:
            transfer.blameless += 1
            if transfer.blameless > self.limits.blameless:
                why = f"{transfer.blameless} groups failed in which every rank answers"
                self._finish(now, f"{why}; last {transfer.last_failure or 'none of them got further'}")
                return
        if not self._over(transfer, now):
            self._gather(now)

    def _abort_overdue(self, now: float) -> None:
        transfer = self._now
        assert transfer is not None
        for member in self.members.values():
            if member.state != "aborting":
                continue
            heard, limit = member.heard, f"within {self.limits.abort_s:g} s"
            if not heard:
                self._kill(member, "it answers nothing")
                self._lose(member.name, "silent", f"answered nothing {limit}")
                continue
            # It lives, but its library does not come back: a new process costs less than the wait.
            self._kill(member, "its collective cannot be ended")
            transfer.blamed = True
            transfer.stuck[member.name] = transfer.stuck.get(member.name, 0) + 1
            if transfer.stuck[member.name] > self.limits.second_chances:
                self._lose(member.name, "stuck", f"its collective could not be ended {limit}, again")
        self._maybe_aborted(now)

    def _expire(self, now: float) -> None:
        """What deadlines that are over mean."""
        for waiting in [w for w in self._waiting if now >= w[1]]:
            self._waiting.remove(waiting)
            why = f"waited {waiting[0].timeout_s:g} s for the transfers before it"
            self._report(waiting[0].transfer, (), waiting[0].members[1:], "late", why)
        transfer = self._now
        if transfer is not None and now >= transfer.deadline:
            self._finish(now, f"not over within {transfer.asked.timeout_s:g} s")
        elif transfer is not None and self._phase_deadline is not None and now >= self._phase_deadline:
            self._overdue(transfer, now)

    def _overdue(self, transfer: Transfer, now: float) -> None:
        if self.phase == "gathering":
            for name in list(transfer.pending):
                if (member := self.members[name]).state == "starting":
                    if self._never_came(member, now):
                        self._kill(member, "it never said hello")
                    self._lose(name, "absent", f"its process said nothing within {self.limits.hello_s:g} s")
            self._maybe_form(now)
        elif self.phase == "aborting":
            self._abort_overdue(now)
        else:
            transfer.last_failure = self._who_is_late(transfer)
            self._abort(now)

    def _who_is_late(self, transfer: Transfer) -> str:
        if self.phase == "rendezvous":
            late = [n for n in transfer.pending if self.members[n].state == "rendezvous"]
            return f"{', '.join(late)} did not meet the others within {self.limits.join_s:g} s"
        late = [n for n in transfer.pending if self.members[n].state == "broadcasting"]
        return f"{', '.join(late)} had no further bucket within {self.limits.stall_s:g} s"

    # A transfer ends

    def _over(self, transfer: Transfer, now: float) -> bool:
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
                transfer.lost[name] = Lost(name, "late", error)
        for member in self.members.values():
            # Whoever is still in the middle of something cannot be told from one that hangs.
            if member.state in ("rendezvous", "broadcasting", "aborting") or self._never_came(member, now):
                self._kill(member, error or "its group is over")
        lost = tuple(entry for name, entry in transfer.lost.items() if name != transfer.root)
        self._actions.append(Report(Outcome(transfer.asked.transfer, tuple(transfer.delivered), lost, error)))
        self._now, self._phase_deadline, self.phase = None, None, "idle"
        if self._waiting:
            asked, deadline = self._waiting.popleft()
            self._begin(asked, deadline, now)

    def _cancel(self, transfer: int, now: float) -> None:
        why = "it was cancelled"
        if self._now is not None and self._now.asked.transfer == transfer:
            self._finish(now, why)
            return
        for waiting in [w for w in self._waiting if w[0].transfer == transfer]:
            self._waiting.remove(waiting)
            self._report(transfer, (), waiting[0].members[1:], "failed", why)

    def _close(self) -> None:
        transfer, why = self._now, "the group was closed"
        if transfer is not None:
            left = [n for n in transfer.pending if n != transfer.root]
            lost = {n: entry for n, entry in transfer.lost.items() if n != transfer.root}
            lost.update({n: Lost(n, "failed", why) for n in left})
            self._actions.append(
                Report(Outcome(transfer.asked.transfer, tuple(transfer.delivered), tuple(lost.values()), why))
            )
        for asked, _ in self._waiting:
            self._report(asked.transfer, (), asked.members[1:], "failed", why)
        self._waiting.clear()
        self._now, self._phase_deadline, self.phase = None, None, "closed"
        for member in self.members.values():
            if member.state not in ("absent", "dead"):
                self._kill(member, why)

    def _report(self, transfer: int, delivered: tuple[str, ...], lost: tuple[str, ...], fate: Fate, error: str) -> None:
        entries = tuple(Lost(name, fate, error) for name in lost)
        self._actions.append(Report(Outcome(transfer, delivered, entries, error)))

    def _lose(self, name: str, fate: Fate, why: str) -> None:
        """The member gets this transfer no more, if it has not got it yet."""
        transfer = self._now
        if transfer is None or name not in transfer.asked.members:
            return
        transfer.blamed = True
        if name in transfer.pending:
            transfer.pending.remove(name)
            transfer.lost[name] = Lost(name, fate, why)

    def _kill(self, member: Member, why: str) -> None:
        self._unborn(member, why)
        member.state = "dead"
        self._actions.append(Kill(member.name, member.incarnation, why))

    def _all(self, names: tuple[str, ...] | list[str], state: State) -> bool:
        return all(self.members[name].state == state for name in names)
