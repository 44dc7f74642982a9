"""The registry as a pure state machine: epochs, members, leases, policy versions. No clock of its own, no I/O."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from relax_rt.interfaces.registry import Changes, IncarnationEnd, Member, Renewed
from relax_rt.transport.base.liveness import PauseDetector
from relax_rt.transport.base.versions import ROOT, VersionRecord, VersionTree
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation

TICK_S = 0.2
"""How often `tick` is called."""
MAX_TTL_S = 3600.0
MAX_SLOTS = 65_536
MAX_GONE = 1024
MAX_TOKEN = 64
"""Ended members that are kept; a watcher that is behind the oldest dropped one gets a snapshot."""
MAX_ISSUED = 1024
"""Version numbers issued and not yet committed that are remembered."""
REPORTED_STATES = ("starting", "ready", "draining")
"""States that members report; the others are set by the registry."""
GENERATION_BITS = 32
"""Revisions of a restarted registry are above all earlier ones."""


class Entry(msgspec.Struct, frozen=True):
    """A member and its lease's length; 0: no lease yet, so none that can lapse."""

    member: Member
    ttl_s: float = 0.0


class Issued(msgspec.Struct, frozen=True):
    """A policy version number and the incarnation it was issued to."""

    version: int
    who: Incarnation


class Dropped(msgspec.Struct, frozen=True):
    """The entry of this slot is dropped."""

    slot: str


class Counters(msgspec.Struct, frozen=True):
    """The newest numbers issued."""

    epoch: int = 0
    version: int = 0


Write: TypeAlias = Entry | Issued | Dropped | Counters | VersionRecord
"""A change that must be durable before its call is answered."""


class RegistryState(msgspec.Struct):
    """The durable state, as a registry reads it when it starts.

    Attributes:
        generation: number of starts of a registry on this store, this one included.
    """

    generation: int = 1
    counters: Counters = Counters()
    entries: list[Entry] = []
    issued: list[Issued] = []
    versions: list[VersionRecord] = []


class RegistryCore:
    """Slots, leases and versions of a run.

    Methods that change something leave their `Write`s in `writes`, in order. Times are monotonic seconds of the
    registry's own clock.

    Args:
        stored: the durable state; leases of its members start again at full length.
        now: the time.
    """

    def __init__(self, stored: RegistryState, now: float) -> None:
        self.writes: list[Write] = []
        self.revision = stored.generation << GENERATION_BITS
        self._floor = self.revision
        self._counters = stored.counters
        self._tree = VersionTree(stored.versions)
        self._committed = stored.versions[-1] if stored.versions else None
        self._issued = {one.version: one.who for one in stored.issued}
        self._entries: dict[str, Entry] = {}
        self._last_issued: dict[str, tuple[str, int]] = {}
        self._deadlines: dict[str, float] = {}
        self._pauses = PauseDetector(now, TICK_S)
        for entry in stored.entries:
            member = msgspec.structs.replace(entry.member, revision=self.revision)
            self._entries[member.who.slot] = Entry(member, entry.ttl_s)
            if entry.ttl_s and member.state != "gone":
                self._deadlines[member.who.slot] = now + entry.ttl_s

    @property
    def committed(self) -> VersionRecord | None:
        """The newest committed version."""
        return self._committed

    def member(self, slot: str) -> Member | None:
        """The newest incarnation of a slot."""
        entry = self._entries.get(slot)
        return entry.member if entry else None

    def issued(self, slot: str, token: str) -> int:
        """The epoch issued by the slot's last call, if this was its token; else 0."""
        last, epoch = self._last_issued.get(slot, ("", 0))
        return epoch if token and token == last else 0

    def issue_epoch(self, slot: str, token: str = "") -> int:
        if len(token) > MAX_TOKEN:
            raise Refused(f"token of {len(token)} characters", why=f"at most {MAX_TOKEN}")
        if not slot or len(slot) > 200:
            raise Refused(f"slot {slot[:40]!r}", why="a slot's name has 1 to 200 characters")
        if slot not in self._entries and len(self._entries) >= MAX_SLOTS:
            raise Refused(f"slot {slot}", why=f"the registry holds {MAX_SLOTS} slots already")
        epoch = self._counters.epoch + 1
        self._last_issued[slot] = (token, epoch)
        self._count(Counters(epoch, self._counters.version))
        self._deadlines.pop(slot, None)
        old = self.member(slot)
        before = IncarnationEnd(old.who.epoch, old.detail) if old is not None and old.state == "gone" else None
        self._put(Entry(Member(Incarnation(slot, epoch), before=before)))
        for version in [v for v, who in self._issued.items() if who.slot == slot]:
            del self._issued[version]
        return epoch

    def announce(
        self, who: Incarnation, pid: int, address: str, ttl_s: float, now: float, *, node: str = "", remote: str = ""
    ) -> Renewed:
        member = self._living(who)
        if not 0 < ttl_s <= MAX_TTL_S:
            raise Refused(f"lease of {ttl_s} s for {who}", why=f"a lease is longer than 0 and at most {MAX_TTL_S:g} s")
        state = member.state if member.state in REPORTED_STATES else "starting"
        known = {"pid": pid, "address": address, "node": node, "remote": remote}
        self._put(Entry(msgspec.structs.replace(member, **known, state=state), ttl_s))
        self._deadlines[who.slot] = now + ttl_s
        return self._renewed(ttl_s)

    def enter(self, who: Incarnation, pid: int, address: str, state: str) -> None:
        """Register a member without a lease, which never lapses."""
        self._put(Entry(msgspec.structs.replace(self._living(who), pid=pid, address=address, state=state)))

    def renew(
        self, who: Incarnation, state: str, progress: int, detail: str, policy_version: int, now: float
    ) -> Renewed:
        member = self._living(who)
        ttl_s = self._entries[who.slot].ttl_s
        if not ttl_s:
            raise Refused(f"renewal of {who}", why="it has no lease", hint="announce first")
        if state not in REPORTED_STATES:
            raise Refused(f"state {state!r} of {who}", why=f"not one of {', '.join(REPORTED_STATES)}")
        # A renewal that was overtaken on another connection must not set these back.
        version, progress = max(policy_version, member.policy_version), max(progress, member.progress)
        fresh = msgspec.structs.replace(member, state=state, progress=progress, detail=detail, policy_version=version)
        if (state, version) == (member.state, member.policy_version):
            self._entries[who.slot] = Entry(fresh, ttl_s)
        else:
            self._put(Entry(fresh, ttl_s))
        self._deadlines[who.slot] = now + ttl_s
        return self._renewed(ttl_s)

    def leave(self, who: Incarnation, reason: str) -> None:
        self._end(who, reason)

    def process_exited(self, who: Incarnation, reason: str) -> None:
        member = self.member(who.slot)
        if member is None or who.epoch > member.who.epoch:
            return
        if member.who == who:
            self._end(who, reason)
        elif member.before is None or member.before.epoch < who.epoch:
            before = IncarnationEnd(who.epoch, reason)
            self._put(Entry(msgspec.structs.replace(member, before=before), self._entries[who.slot].ttl_s))

    def changes(self, since: int) -> Changes | None:
        """Everything that changed after a revision; None when nothing did. See RegistryApi.watch."""
        if since == self.revision:
            return None
        snapshot = since < self._floor or since > self.revision
        members = [e.member for e in self._entries.values() if snapshot or e.member.revision > since]
        members.sort(key=lambda m: m.revision)
        return Changes(self.revision, snapshot, members, self._committed)

    def issue_version(self, who: Incarnation) -> int:
        self._living(who)
        version = self._counters.version + 1
        self._count(Counters(self._counters.epoch, version))
        self._issued[version] = who
        self.writes.append(Issued(version, who))
        while len(self._issued) > MAX_ISSUED:
            del self._issued[min(self._issued)]
        return version

    def commit_version(self, who: Incarnation, record: VersionRecord) -> VersionRecord:
        self._living(who)
        what = f"commit of policy version {record.version}"
        newest = self._committed.version if self._committed else ROOT
        if record == self._committed:
            return record
        if record.version <= newest:
            raise Refused(what, why=f"version {newest} is committed already")
        if self._issued.get(record.version) != who:
            owner = self._issued.get(record.version)
            why = f"the number was issued to {owner}" if owner else "the number was not issued, or is skipped"
            raise Refused(what, why=why, hint=f"{who} asks for a number of its own with issue_version")
        if not record.digest:
            raise Refused(what, why="it has no digest", hint="stage the weights first")
        self._tree.add(record)
        self._committed = record
        self._issued = {v: w for v, w in self._issued.items() if v > record.version}
        self.revision += 1
        self.writes.append(record)
        return record

    def versions(self) -> list[VersionRecord]:
        return self._tree.records()

    def tick(self, now: float) -> list[Member]:
        """Lapse the leases that are over; returns their members.

        After a gap (the process was stopped, the machine slept) renewals that arrived in the meantime are processed
        first: nothing lapses at this tick, and after a long gap every lease starts again at full length.
        """
        verdict = self._pauses.check(now)
        if verdict == "restart":
            self._deadlines = {slot: now + self._entries[slot].ttl_s for slot in self._deadlines}
        if verdict != "expire":
            return []
        lapsed = []
        for slot in [s for s, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[slot]
            entry = self._entries[slot]
            self._put(Entry(msgspec.structs.replace(entry.member, state="lapsed"), entry.ttl_s))
            lapsed.append(self._entries[slot].member)
        return lapsed

    def _living(self, who: Incarnation) -> Member:
        """The caller's entry.

        Raises:
            StaleEpoch: it has been replaced.
            Refused: its epoch was not issued here, or it has ended.
        """
        member = self.member(who.slot)
        if member is None or who.epoch > member.who.epoch:
            raise Refused(f"{who}", why="this epoch was not issued by this registry")
        if who.epoch < member.who.epoch:
            raise StaleEpoch(f"{who} is fenced", why=f"{member.who} holds the slot", hint="exit")
        if member.state == "gone":
            raise Refused(f"{who} has ended", why=member.detail)
        return member

    def _end(self, who: Incarnation, reason: str) -> None:
        member = self.member(who.slot)
        if member is not None and member.who == who and member.state == "gone":
            return
        member = self._living(who)
        self._deadlines.pop(who.slot, None)
        self._put(Entry(msgspec.structs.replace(member, state="gone", detail=reason)))
        gone = [e.member for e in self._entries.values() if e.member.state == "gone"]
        if len(gone) > MAX_GONE:
            oldest = min(gone, key=lambda m: m.revision)
            del self._entries[oldest.who.slot]
            self._last_issued.pop(oldest.who.slot, None)
            self._floor = max(self._floor, oldest.revision)
            self.writes.append(Dropped(oldest.who.slot))

    def _put(self, entry: Entry) -> None:
        """Store a change that watchers see."""
        self.revision += 1
        member = msgspec.structs.replace(entry.member, revision=self.revision)
        entry = Entry(member, entry.ttl_s)
        self._entries[member.who.slot] = entry
        self.writes.append(entry)

    def _count(self, counters: Counters) -> None:
        self._counters = counters
        self.writes.append(counters)

    def _renewed(self, ttl_s: float) -> Renewed:
        return Renewed(ttl_s, self._committed.version if self._committed else ROOT)
