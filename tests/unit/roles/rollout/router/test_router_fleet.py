"""Health and versions of engines, against a naive evaluation of their history."""

from __future__ import annotations

import pickle
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relax_rt.roles.rollout.router.fleet import KNOWN, EngineEntry, EngineReport, Fleet, HealthLimits
from relax_rt.transport.base.versions import VersionRecord

SLOT = "rollout/0"
PATIENCE = HealthLimits(stuck_s=5.0, paused_s=20.0, dead_s=8.0)


def walked(records: dict[int, VersionRecord], a: int, b: int) -> int:
    """Distance of two versions, by their paths to the root."""

    def path(version: int) -> dict[int, int]:
        found, n = {version: 0}, 0
        while version:
            n, version = n + records[version].changed, records[version].parent
            found[version] = n
        return found

    one, other = path(a), path(b)
    return min(one[v] + other[v] for v in one if v in other)


@st.composite
def trees(draw: st.DrawFn) -> list[VersionRecord]:
    """Committed versions with roll-backs and numbers that were skipped."""
    found: list[VersionRecord] = []
    for step in range(draw(st.integers(1, 12))):
        number = (found[-1].version if found else 0) + draw(st.integers(1, 2))
        back = bool(found) and draw(st.booleans())
        parent = draw(st.sampled_from(found)).version if back else found[-1].version if found else 0
        found.append(VersionRecord(number, parent, step, changed=not back))
    return found


@given(trees(), st.randoms())
def test_lag_is_the_distance_in_the_version_tree(records: list[VersionRecord], dice: random.Random) -> None:
    fleet, by_number = Fleet(), {r.version: r for r in records}
    # The newest alone, as when the registry does not tell the others in time; then all, in any order.
    fleet.on_committed(records[-1:])
    assert fleet.allowed(0) == (records[-1].version,)
    assert all(fleet.lag(r.version) == float("inf") for r in records[:-1])
    mixed = list(records)
    dice.shuffle(mixed)
    fleet.on_committed(mixed)
    newest = records[-1].version
    for record in records:
        assert fleet.lag(record.version) == walked(by_number, record.version, newest)
    for lag in range(4):
        assert set(fleet.allowed(lag)) == {v for v in by_number if walked(by_number, v, newest) <= lag}
        assert fleet.allowed(lag)[-1] == newest
    assert fleet.lag(newest + 1) == 0, "it knows of a newer commit than we"
    assert fleet.lag(0) == float("inf"), "without weights"


@pytest.mark.parametrize("all_each_time", [False, True])
def test_only_the_newest_versions_are_kept(all_each_time: bool) -> None:
    """And their distances are what they are, roll-backs among them, though the registry tells all there ever were."""
    fleet, dice, sizes = Fleet(), random.Random(5), list[int]()
    records: list[VersionRecord] = []
    for number in range(1, 6 * KNOWN + 1):
        back = number > 40 and dice.random() < 0.05
        parent = number - dice.randint(2, 30) if back else number - 1
        records.append(VersionRecord(number, parent, number, changed=not back))
        if not all_each_time:
            fleet.on_committed(records[-1:])
        elif number % 100 == 0:
            fleet.on_committed(records)
        if number in (2 * KNOWN, 6 * KNOWN):
            sizes.append(len(pickle.dumps(fleet)))
    fleet.on_committed(records)
    assert sizes[1] < 1.1 * sizes[0]
    by_number = {r.version: r for r in records}
    for record in records[-KNOWN // 2 :]:
        assert fleet.lag(record.version) == walked(by_number, record.version, records[-1].version)
    assert fleet.lag(3) == float("inf") and fleet.committed == records[-1]


class FleetMachine(RuleBasedStateMachine):
    """One slot through its incarnations; the model remembers what was last said of the newest one."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(PATIENCE)
        self.now, self.epoch, self.told = 0.0, 0, ""
        self.version = self.committed = self.generated = self.assigned = 0
        self.lost_last = self.moved_last = False

    @rule(seconds=st.floats(0.1, 6.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.tick(self.now)
        self.moved_last = False

    @rule()
    def a_version_is_committed(self) -> None:
        self.committed += 1
        self.fleet.on_committed([VersionRecord(self.committed, self.committed - 1, self.committed)])

    @rule(state=st.sampled_from(["ready", "ready", "draining", "lapsed", "gone"]), current=st.booleans())
    @precondition(lambda self: self.epoch > 0)
    def the_registry_tells(self, state: str, current: bool) -> None:
        if self.told == "gone":
            state = "gone"
        self.version = self.committed if current else self.version
        self.told = state
        self.fleet.on_members(self.now, [EngineEntry(SLOT, self.epoch, state, self.version, 0)])

    @rule()
    @precondition(lambda self: self.told in ("", "gone"))
    def it_starts_anew(self) -> None:
        self.epoch += 1
        self.told, self.version, self.generated, self.assigned, self.lost_last = "starting", 0, 0, 0, False
        self.fleet.on_members(self.now, [EngineEntry(SLOT, self.epoch, "starting")])

    @rule(moved=st.booleans(), reason=st.sampled_from(["", "a swap"]))
    @precondition(lambda self: self.epoch > 0 and self.told != "gone")
    def it_says_how_it_does(self, moved: bool, reason: str) -> None:
        self.generated += moved
        self.told = "ready" if self.told == "starting" else self.told
        sign = EngineReport(
            epoch=self.epoch,
            version=self.version,
            generated=self.generated,
            outstanding_tokens=10 * self.assigned,
            room=4,
            waiting_on=reason,
        )
        self.fleet.on_report(self.now, SLOT, sign)
        self.lost_last, self.moved_last = False, moved

    @rule()
    @precondition(lambda self: self.epoch > 0 and self.told != "gone")
    def a_call_is_lost(self) -> None:
        self.fleet.on_failure(self.now, SLOT, self.epoch, "lost")
        self.lost_last, self.moved_last = True, False

    @rule()
    @precondition(lambda self: self.epoch > 0 and self.told != "gone")
    def it_is_sent_work(self) -> None:
        self.fleet.assign(self.now, SLOT, self.epoch)
        self.assigned += 1

    @rule()
    @precondition(lambda self: self.assigned > 0)
    def work_ends(self) -> None:
        self.fleet.unassign(SLOT, self.epoch, acknowledged=True)
        self.assigned -= 1

    @rule(what=st.sampled_from(["news", "heard", "lost", "left"]))
    @precondition(lambda self: self.epoch > 1)
    def what_is_said_of_the_dead_changes_nothing(self, what: str) -> None:
        old, before = self.epoch - 1, self.fleet.engines[SLOT]
        held = {name: getattr(before, name) for name in before.__slots__}
        if what == "news":
            self.fleet.on_members(self.now, [EngineEntry(SLOT, old, "ready", 99, 99)])
        elif what == "heard":
            self.fleet.on_report(self.now, SLOT, EngineReport(epoch=old, version=99, generated=10**6))
        elif what == "lost":
            self.fleet.on_failure(self.now, SLOT, old, "an old one")
        else:
            self.fleet.unassign(SLOT, old, acknowledged=True)
        after = self.fleet.engines[SLOT]
        assert held == {name: getattr(after, name) for name in after.__slots__}

    @invariant()
    def it_is_as_the_history_says(self) -> None:
        if not self.epoch:
            return
        state = self.fleet.health(SLOT)
        if self.told == "gone":
            assert state == "dead"
            assert self.fleet.why_revoke(SLOT, self.epoch)
        elif self.told in ("starting", "draining"):
            assert state in ("restarting", "dead")
        elif self.lost_last or self.told == "lapsed":
            assert state in ("suspect", "dead")
        elif self.moved_last:
            assert state == ("healthy" if self.version and self.version == self.committed else "stale")
        lag = self.committed - self.version if self.version else float("inf")
        for allowed in (0, 1, 3):
            if self.fleet.routable(SLOT, allowed):
                assert self.told == "ready" and not self.lost_last and lag <= allowed
            elif state in ("healthy", "stale"):
                assert lag > allowed
        assert (self.fleet.why_not(SLOT, 0) == "") is False
        assert self.fleet.engines[SLOT].assigned == self.assigned


FleetMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestFleet = FleetMachine.TestCase


def ready(fleet: Fleet, now: float = 0.0) -> None:
    fleet.on_committed([VersionRecord(1, 0, 1)])
    fleet.on_members(now, [EngineEntry(SLOT, 1, "ready", 1)])


def sign(generated: int, outstanding: int = 10, **more: object) -> EngineReport:
    return msgspec.convert(
        {"epoch": 1, "version": 1, "generated": generated, "outstanding_tokens": outstanding, "room": 4, **more},
        EngineReport,
    )


def test_the_whole_round() -> None:
    fleet = Fleet(PATIENCE)
    ready(fleet)
    assert fleet.health(SLOT) == "healthy"
    fleet.on_committed([VersionRecord(2, 1, 2)])
    assert fleet.health(SLOT) == "stale"
    assert not fleet.routable(SLOT, 0) and fleet.routable(SLOT, 1)
    fleet.on_failure(1.0, SLOT, 1, "the connection broke")
    assert fleet.health(SLOT) == "suspect"
    fleet.tick(10.0)
    assert fleet.health(SLOT) == "dead"
    fleet.on_members(11.0, [EngineEntry(SLOT, 2, "starting")])
    assert fleet.health(SLOT) == "restarting"
    fleet.on_members(12.0, [EngineEntry(SLOT, 2, "ready", 1)])
    assert fleet.health(SLOT) == "stale"
    fleet.on_members(13.0, [EngineEntry(SLOT, 2, "ready", 2)])
    assert fleet.health(SLOT) == "healthy"


def test_a_stuck_engine_is_suspect_and_gets_one_trial_sequence() -> None:
    fleet = Fleet(PATIENCE)
    ready(fleet)
    for n in range(2):
        fleet.assign(0.0, SLOT, 1)
        fleet.acknowledge(SLOT, 1)
        fleet.on_report(1.0 + n, SLOT, sign(5))
    fleet.tick(6.5)
    assert fleet.health(SLOT) == "suspect" and "no token in 6 s" in fleet.why_revoke(SLOT, 1)
    fleet.unassign(SLOT, 1, acknowledged=True)
    fleet.unassign(SLOT, 1, acknowledged=True)
    fleet.on_report(7.0, SLOT, sign(5, outstanding=20))
    assert fleet.health(SLOT) == "suspect", "it still has what was taken away, so it does not even end sequences"
    fleet.on_report(8.0, SLOT, sign(5, outstanding=0))
    assert fleet.health(SLOT) == "healthy"
    assert fleet.room(8.0, SLOT, 8) == 1
    fleet.assign(8.0, SLOT, 1)
    assert fleet.room(8.0, SLOT, 8) == 0
    fleet.acknowledge(SLOT, 1)
    fleet.on_report(9.0, SLOT, sign(6))
    assert fleet.room(9.0, SLOT, 8) == 4, "it works"


def test_a_paused_engine_has_more_time() -> None:
    fleet = Fleet(PATIENCE)
    ready(fleet)
    fleet.assign(0.0, SLOT, 1)
    fleet.on_report(0.0, SLOT, sign(1, waiting_on="swapping to version 2"))
    fleet.tick(15.0)
    assert fleet.health(SLOT) == "healthy"
    fleet.tick(21.0)
    assert "swapping to version 2" in fleet.why_revoke(SLOT, 1)


def test_unacknowledged_sequences_take_room() -> None:
    fleet = Fleet(PATIENCE)
    ready(fleet)
    fleet.on_report(0.0, SLOT, sign(1, room=4))
    for _ in range(3):
        fleet.assign(0.0, SLOT, 1)
    assert fleet.room(0.0, SLOT, 8) == 1
    fleet.on_report(0.1, SLOT, sign(2, room=4))
    assert fleet.room(0.1, SLOT, 8) == 1, "the engine said so before any of them had arrived"
    fleet.acknowledge(SLOT, 1)
    fleet.on_report(0.2, SLOT, sign(3, room=3))
    assert fleet.room(0.2, SLOT, 8) == 1
    fleet.unassign(SLOT, 1, acknowledged=False)
    assert fleet.room(0.2, SLOT, 8) == 2, "one that never arrived"
    fleet.unassign(SLOT, 1, acknowledged=True)
    assert fleet.room(0.2, SLOT, 8) == 3, "one taken away, which the sign still counts"
    fleet.on_report(0.3, SLOT, sign(4, room=4))
    assert fleet.room(0.3, SLOT, 8) == 3
