"""The registry's state machine against a model: fencing, leases, watches and versions, through pauses and restarts."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from relax_rt.cluster.registry import core as core_module
from relax_rt.cluster.registry.core import (
    TICK_S,
    Counters,
    Dropped,
    Entry,
    Issued,
    RegistryCore,
    RegistryState,
)
from relax_rt.interfaces.registry import Changes, Member
from relax_rt.transport.base.liveness import PAUSE_S
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation

SLOTS = ("trainer/0", "rollout/0", "rollout/1")


class Disk:
    """What a store keeps, as plain dictionaries."""

    def __init__(self) -> None:
        self.generation = 0
        self.counters = Counters()
        self.entries: dict[str, Entry] = {}
        self.issued: dict[int, Issued] = {}
        self.versions: dict[int, VersionRecord] = {}

    def write(self, core: RegistryCore) -> None:
        writes, core.writes = core.writes, []
        for write in writes:
            match write:
                case Entry(member=member):
                    self.entries[member.who.slot] = write
                case Dropped(slot=slot):
                    del self.entries[slot]
                case Issued(version=version):
                    self.issued[version] = write
                case VersionRecord(version=version):
                    self.versions[version] = write
                case Counters():
                    self.counters = write

    def read(self) -> RegistryState:
        self.generation += 1
        return RegistryState(
            generation=self.generation,
            counters=self.counters,
            entries=list(self.entries.values()),
            issued=list(self.issued.values()),
            versions=[self.versions[v] for v in sorted(self.versions)],
        )


def essence(member: Member) -> tuple[Any, ...]:
    """What is durable of a member and what watchers are told of."""
    return (member.who, member.pid, member.address, member.state, member.policy_version, member.before)


def whole(core: RegistryCore) -> dict[str, Any]:
    """The whole state, to compare."""
    return copy.deepcopy({**vars(core), "_tree": core.versions()})


class Registry(RuleBasedStateMachine):
    incarnations = Bundle("incarnations")

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.now = 100.0
        self.core = RegistryCore(self.disk.read(), self.now)
        self.epochs: list[int] = []
        self.newest: dict[str, Incarnation] = {}
        self.ended: set[Incarnation] = set()
        self.lease_from: dict[Incarnation, tuple[float, float]] = {}
        """Incarnation -> (start of its lease as it must at least be honoured, length)."""
        self.numbers: list[int] = []
        self.owner: dict[int, Incarnation] = {}
        self.committed: list[VersionRecord] = []
        self.replicas: list[tuple[int, dict[str, Member]]] = [(0, {}) for _ in range(3)]

    def call(self, who: Incarnation, call: Any, *args: Any, refused: bool) -> Any:
        """Call under an identity: StaleEpoch if and only if it is fenced, Refused as told; then nothing has changed."""
        before = whole(self.core)
        fenced = self.newest[who.slot] != who
        try:
            answer = call(*args)
        except StaleEpoch:
            assert fenced
        except Refused:
            assert refused
            assert not fenced
        else:
            assert not fenced
            assert not refused
            self.disk.write(self.core)
            return answer
        assert whole(self.core) == before
        return None

    @rule(target=incarnations, slot=st.sampled_from(SLOTS))
    def start(self, slot: str) -> Incarnation:
        epoch = self.core.issue_epoch(slot)
        self.disk.write(self.core)
        assert epoch > max(self.epochs, default=0)
        self.epochs.append(epoch)
        self.newest[slot] = who = Incarnation(slot, epoch)
        return who

    @rule(who=incarnations, ttl=st.sampled_from([0.5, 2.0]), pid=st.integers(1, 5))
    def announce(self, who: Incarnation, ttl: float, pid: int) -> None:
        answer = self.call(
            who, self.core.announce, who, pid, f"unix:///{who}", ttl, self.now, refused=who in self.ended
        )
        if answer is not None:
            assert answer.committed == (self.committed[-1].version if self.committed else 0)
            self.lease_from[who] = (self.now, ttl)

    @rule(who=incarnations, state=st.sampled_from(["starting", "ready", "draining"]), n=st.integers(0, 3))
    def renew(self, who: Incarnation, state: str, n: int) -> None:
        refused = who in self.ended or who not in self.lease_from
        before = self.core.member(who.slot)
        if self.call(who, self.core.renew, who, state, n, "works", n, self.now, refused=refused) is not None:
            self.lease_from[who] = (self.now, self.lease_from[who][1])
            member = self.core.member(who.slot)
            assert member is not None and before is not None
            # One that was overtaken takes nothing back.
            assert (member.state, member.progress) == (state, max(n, before.progress))

    @rule(who=incarnations)
    def leave(self, who: Incarnation) -> None:
        self.call(who, self.core.leave, who, "finished", refused=False)
        if self.newest[who.slot] == who:
            self.ended.add(who)

    @rule(who=incarnations)
    def gone(self, who: Incarnation) -> None:
        before = self.core.member(who.slot)
        self.core.process_exited(who, "killed")
        after = self.core.member(who.slot)
        assert before is not None and after is not None
        self.disk.write(self.core)
        if self.newest[who.slot] == who:
            self.ended.add(who)
        else:
            # Of one that was replaced it is kept how it ended, and nothing else changes.
            assert essence(after)[:-1] == essence(before)[:-1]
            assert after.before is not None and who.epoch <= after.before.epoch < after.who.epoch
            assert after.before.epoch == who.epoch or after.before == before.before

    @rule(who=incarnations)
    def issue_version(self, who: Incarnation) -> None:
        number = self.call(who, self.core.issue_version, who, refused=who in self.ended)
        if number is not None:
            assert number > max(self.numbers, default=0)
            self.numbers.append(number)
            self.owner[number] = who

    @rule(who=incarnations, data=st.data())
    def commit(self, who: Incarnation, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from([*self.numbers[-3:], 999]))
        parent = data.draw(st.sampled_from([0, *self.numbers[-4:]]))
        record = VersionRecord(version, parent, len(self.committed), data.draw(st.sampled_from(["abc", ""])))
        newest = self.committed[-1] if self.committed else None
        allowed = (
            self.owner.get(version) == who == self.newest[who.slot]
            and who not in self.ended
            and record.digest != ""
            and (newest is None or version > newest.version)
            and parent in {0, *(v.version for v in self.committed)}
        )
        answer = self.call(who, self.core.commit_version, who, record, refused=not allowed)
        assert (answer == record) == allowed
        if allowed:
            self.committed.append(record)
            # Sent again, as after a reconnect: the same answer, no change.
            revision = self.core.revision
            assert self.core.commit_version(who, record) == record
            assert self.core.revision == revision
            assert self.core.writes == []

    @rule(ticks=st.integers(1, 15))
    def time_goes_by(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now += TICK_S
            self._ticked(self.core.tick(self.now))
        for slot, who in self.newest.items():
            start, ttl = self.lease_from.get(who, (0.0, 0.0))
            member = self.core.member(slot)
            assert member is not None
            if ttl and who not in self.ended and ticks > 1 and self.now >= start + ttl + TICK_S:
                assert member.state == "lapsed"

    @rule(gap=st.floats(2.1 * TICK_S, 60.0))
    def pause(self, gap: float) -> None:
        """The process did not run: whatever the clock says, no lease lapses before its renewal could be read."""
        self.now += gap
        lapsed = self.core.tick(self.now)
        if gap >= PAUSE_S:
            assert lapsed == []
            self.lease_from = {who: (self.now, ttl) for who, (_, ttl) in self.lease_from.items()}
        self._ticked(lapsed)

    def _ticked(self, lapsed: list[Member]) -> None:
        self.disk.write(self.core)
        for member in lapsed:
            start, ttl = self.lease_from[member.who]
            assert self.now >= start + ttl - 1e-9
            assert self.newest[member.who.slot] == member.who

    @rule(asleep=st.floats(0.0, 1000.0))
    def restart(self, asleep: float) -> None:
        """The registry dies; another starts on its store, on a clock of its own."""
        self.now = self.now - 50.0 + asleep
        self.core = RegistryCore(self.disk.read(), self.now)
        self.lease_from = {who: (self.now, ttl) for who, (_, ttl) in self.lease_from.items()}

    @rule(which=st.integers(0, 2))
    def watch(self, which: int) -> None:
        since, view = self.replicas[which]
        found = self.core.changes(since)
        if found is not None:
            assert since != found.revision
            view = {} if found.snapshot else dict(view)
            view |= {m.who.slot: m for m in found.members}
            self.replicas[which] = (found.revision, view)
            assert (found.committed.version if found.committed else None) == (
                self.committed[-1].version if self.committed else None
            )
        truth = {slot: self.core.member(slot) for slot in self.newest}
        assert {s: essence(m) for s, m in view.items()} == {s: essence(m) for s, m in truth.items() if m}

    @invariant()
    def holds_what_it_acknowledged(self) -> None:
        assert self.core.versions() == self.committed
        for slot, who in self.newest.items():
            member = self.core.member(slot)
            assert member is not None
            assert member.who == who
            assert (member.state == "gone") == (who in self.ended)


Registry.TestCase.settings = settings(deadline=None, max_examples=120, stateful_step_count=40)
TestRegistry = Registry.TestCase


def started(slots: int = 1, ttl_s: float = 1.0) -> tuple[RegistryCore, list[Incarnation]]:
    core = RegistryCore(RegistryState(), 0.0)
    members = [Incarnation(f"rollout/{n}", core.issue_epoch(f"rollout/{n}")) for n in range(slots)]
    for who in members:
        core.announce(who, 1, "", ttl_s, 0.0)
    return core, members


def test_progress_alone_wakes_no_watcher() -> None:
    core, (who,) = started()
    core.renew(who, "ready", 1, "a", 0, 0.0)
    revision, core.writes = core.revision, []
    core.renew(who, "ready", 2, "b", 0, 0.0)
    assert core.changes(revision) is None
    assert core.writes == []
    core.renew(who, "ready", 2, "b", 7, 0.0)
    changes = core.changes(revision)
    assert changes is not None
    assert [m.policy_version for m in changes.members] == [7]


def test_a_renewal_that_was_overtaken_takes_no_version_back() -> None:
    core, (who,) = started()
    core.renew(who, "ready", 9, "", 7, 0.0)
    core.renew(who, "ready", 4, "", 5, 0.1)
    member = core.member(who.slot)
    assert member is not None and (member.policy_version, member.progress) == (7, 9)


def test_watch_tells_only_what_changed_unless_the_revision_is_not_its_own() -> None:
    core, members = started(3)
    revision = core.revision
    core.leave(members[1], "done")
    changes = core.changes(revision)
    assert changes == Changes(core.revision, False, [core.member("rollout/1")])  # type: ignore[list-item]
    for foreign in (0, core.revision + 1, 5):
        snapshot = core.changes(foreign)
        assert snapshot is not None
        assert snapshot.snapshot
        assert len(snapshot.members) == 3


def test_forgotten_members_cost_a_watcher_who_missed_them_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "MAX_GONE", 2)
    core, members = started(4)
    before = core.revision
    for who in members[:3]:
        core.leave(who, "done")
    assert core.member("rollout/0") is None
    assert Dropped("rollout/0") in core.writes
    missed = core.changes(before)
    assert missed is not None
    assert missed.snapshot
    assert {m.who for m in missed.members} == set(members[1:])
    seen = core.changes(core.revision - 1)
    assert seen is not None
    assert not seen.snapshot
    # A fenced or forgotten incarnation never comes back by itself.
    with pytest.raises(Refused):
        core.announce(members[0], 1, "", 1.0, 0.0)


def test_an_epoch_that_is_asked_for_again_is_the_same() -> None:
    """An asking whose answer was lost may arrive after the one that was answered: it must not fence who lives."""
    core, _ = started(0)
    epoch = core.issue_epoch("rollout/0", "first")
    assert core.issued("rollout/0", "first") == epoch
    assert core.issued("rollout/0", "other") == core.issued("rollout/1", "first") == core.issued("rollout/0", "") == 0
    assert core.issue_epoch("rollout/0", "second") > epoch
    assert core.issued("rollout/0", "first") == 0, "the last asking alone is kept"
    core.issue_epoch("rollout/0")
    assert core.issued("rollout/0", "") == 0, "without a token each asking is a new one"
    with pytest.raises(Refused, match="token"):
        core.issue_epoch("rollout/0", "x" * 65)


def test_everything_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "MAX_SLOTS", 2)
    monkeypatch.setattr(core_module, "MAX_ISSUED", 3)
    core, members = started(2)
    with pytest.raises(Refused):
        core.issue_epoch("rollout/9")
    core.issue_epoch("rollout/0")
    for slot in ("", "x" * 201):
        with pytest.raises(Refused):
            core.issue_epoch(slot)
    numbers = [core.issue_version(members[1]) for _ in range(5)]
    with pytest.raises(Refused, match="skipped"):
        core.commit_version(members[1], VersionRecord(numbers[0], 0, 1, "d"))
    core.commit_version(members[1], VersionRecord(numbers[-1], 0, 1, "d"))
    for ttl_s in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(Refused):
            core.announce(members[1], 1, "", ttl_s, 0.0)


def test_a_lapsed_member_that_renews_is_back() -> None:
    core, (who,) = started()
    for tick in range(1, 8):
        core.tick(tick * TICK_S)
    assert msgspec.structs.asdict(core.member("rollout/0"))["state"] == "lapsed"  # type: ignore[arg-type]
    core.renew(who, "ready", 1, "", 0, 2.0)
    member = core.member("rollout/0")
    assert member is not None
    assert member.state == "ready"


def test_leases_lapse_even_if_every_tick_is_late() -> None:
    core, _ = started()
    late = 2.5 * TICK_S
    lapsed = [m for tick in range(1, 10) for m in core.tick(tick * late)]
    assert len(lapsed) == 1


def lapsed_after(core: RegistryCore, start: float, ticks: int) -> list[int]:
    """The ticks, TICK_S apart, at which a lease lapsed."""
    return [n for n in range(1, ticks) if core.tick(start + n * TICK_S)]


def test_a_renewal_moves_the_deadline() -> None:
    core, (who,) = started()
    assert lapsed_after(core, 0.0, 5) == []
    core.renew(who, "ready", 1, "", 0, 4 * TICK_S)
    (lapsed,) = lapsed_after(core, 4 * TICK_S, 20)
    assert lapsed * TICK_S >= 1.0


def test_renewals_queued_in_a_short_pause_are_read_before_anything_lapses() -> None:
    core, (who,) = started()
    assert lapsed_after(core, 0.0, 5) == []
    wakes = 4 * TICK_S + 0.9
    assert core.tick(wakes) == []
    core.renew(who, "ready", 1, "", 0, wakes)
    assert core.tick(wakes + TICK_S) == []


def test_the_lease_of_a_replaced_incarnation_does_not_lapse_its_successor() -> None:
    core, _ = started()
    core.issue_epoch("rollout/0")
    assert lapsed_after(core, 0.0, 20) == []


def test_after_a_restart_leases_have_their_full_length_and_then_lapse() -> None:
    disk = Disk()
    core, _ = started()
    disk.write(core)
    again = RegistryCore(disk.read(), 1000.0)
    (lapsed,) = lapsed_after(again, 1000.0, 20)
    assert lapsed * TICK_S >= 1.0
