"""The transaction under any order of deaths, failures, lies, late news and newer versions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_rt.interfaces.registry import Member
from relax_rt.roles.rollout.engines.weight_follower import (
    RETRY_S,
    AcknowledgeVersion,
    Action,
    FetchVersion,
    RemoveEngine,
    SwapVersion,
    VersionMachine,
    VersionOvertaken,
    WaitForVersion,
)
from relax_rt.roles.training.publication.engine_tracker import (
    EngineLate,
    EngineLost,
    EngineTracker,
    TrackerReport,
    VersionSettled,
)
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.identity import Incarnation

TIMEOUT_S = 10.0
SLOTS = 2
HALF_LOADED = -1
OUTCOMES = ["ok", "gone", "corrupt", "refused", "lies", "failed"]
WEIGHTS = [12, 2, 2, 1, 1, 1]


def record(version: int) -> VersionRecord:
    return VersionRecord(version, version - 1, version, f"digest {version}")


def member(slot: str, epoch: int, version: int, state: str = "ready", detail: str = "") -> Member:
    return Member(Incarnation(slot, epoch), policy_version=version, state=state, detail=detail)


# One engine's side.


def test_an_engine_gets_from_commit_to_acknowledgement() -> None:
    engine = VersionMachine(TIMEOUT_S)
    assert engine.follow(record(1), 0.0) == FetchVersion(record(1), full=False)
    assert engine.fetched(1, 2.0) == SwapVersion(record(1))
    assert engine.whole is None, "not before it samples from it"
    assert engine.swapped(1, 1, 3.0) == AcknowledgeVersion(record(1))
    assert engine.whole == record(1)
    assert engine.follow(record(2), 4.0) == FetchVersion(record(2), full=False)
    assert engine.whole == record(1), "generation goes on at the version before"


def test_an_engine_that_says_yes_and_did_not_load_is_out() -> None:
    engine = VersionMachine(TIMEOUT_S)
    engine.follow(record(4), 0.0)
    engine.fetched(4, 1.0)
    answer = engine.swapped(4, 3, 2.0)
    assert isinstance(answer, RemoveEngine)
    assert "samples from version 3" in answer.why
    assert engine.whole is None
    assert engine.follow(record(5), 3.0) is None, "out is for good"


@pytest.mark.parametrize(("failure", "out"), [("refused", True), ("failed", True), ("corrupt", False), ("gone", False)])
def test_a_fetch_that_failed_is_tried_again_in_full_where_that_can_help(failure: str, out: bool) -> None:
    engine = VersionMachine(TIMEOUT_S)
    engine.follow(record(1), 0.0)
    answer = engine.failed(1, failure, "the reason", 1.0)  # type: ignore[arg-type]
    if out:
        assert answer == RemoveEngine(record(1), "the reason")
        return
    assert answer == WaitForVersion(RETRY_S)
    assert engine.tick(1.2) == FetchVersion(record(1), full=True)


def test_what_can_never_be_fetched_ends_the_engine_at_its_deadline_with_the_last_reason() -> None:
    engine = VersionMachine(TIMEOUT_S)
    now, answer = 0.0, engine.follow(record(1), 0.0)
    while isinstance(answer, FetchVersion | WaitForVersion):
        now += 0.2
        answer = (
            engine.failed(1, "corrupt", "flipped bits", now) if isinstance(answer, FetchVersion) else engine.tick(now)
        )
        assert now < TIMEOUT_S + 1
    assert isinstance(answer, RemoveEngine)
    assert "flipped bits" in answer.why
    assert "10 s" in answer.why


def test_a_version_that_is_gone_is_given_up_for_a_newer_one() -> None:
    engine = VersionMachine(TIMEOUT_S)
    engine.follow(record(1), 0.0)
    engine.failed(1, "gone", "retired", 1.0)
    engine.committed(2)
    assert engine.tick(1.2) == VersionOvertaken(record(1))
    assert engine.follow(record(2), 1.3) == FetchVersion(record(2), full=False)


def test_newer_versions_give_an_engine_that_can_take_none_no_more_time() -> None:
    engine = VersionMachine(TIMEOUT_S)
    now, version, answer = 0.0, 0, None
    while not isinstance(answer, RemoveEngine):
        version += 1
        now += 100.0  # nothing is asked of it meanwhile: that is not its time
        assert engine.follow(record(version), now) == FetchVersion(record(version), full=False)
        now += 1.5
        assert isinstance(engine.failed(version, "corrupt", "flipped bits", now), WaitForVersion)
        engine.committed(version + 1)
        answer = engine.tick(now + RETRY_S)
        assert isinstance(answer, VersionOvertaken | RemoveEngine)
    assert version == 6, "1.7 s each"
    assert "flipped bits" in answer.why


def test_a_failed_swap_is_the_end_whatever_failed() -> None:
    for failure in ("gone", "corrupt", "refused", "failed"):
        engine = VersionMachine(TIMEOUT_S)
        engine.follow(record(1), 0.0)
        engine.fetched(1, 1.0)
        answer = engine.failed(1, failure, "lost half way", 2.0)
        assert isinstance(answer, RemoveEngine)
        assert "lost half way" in answer.why


@pytest.mark.parametrize("stage", ["fetching", "swapping"])
def test_an_engine_that_is_stuck_is_out_at_its_deadline(stage: str) -> None:
    engine = VersionMachine(TIMEOUT_S)
    engine.follow(record(1), 0.0)
    if stage == "swapping":
        engine.fetched(1, 1.0)
    assert engine.tick(TIMEOUT_S) is None
    answer = engine.tick(TIMEOUT_S + 0.1)
    assert isinstance(answer, RemoveEngine)
    assert "not whole after 10 s" in answer.why
    assert engine.left_s(TIMEOUT_S) == 0


# The trainer's side.


def test_a_publication_settles_when_all_have_it() -> None:
    trainer = EngineTracker({"rollout"}, TIMEOUT_S)
    trainer.members([member("rollout/0", 1, 3), member("rollout/1", 2, 3), member("reward/0", 9, 0)], 0.0)
    assert trainer.committed(4, 1.0) == []
    assert trainer.members([member("rollout/0", 1, 4)], 2.0) == []
    assert trainer.patience_s(2.0) == pytest.approx(9.0)
    assert trainer.members([member("rollout/1", 2, 4)], 3.0) == [VersionSettled(4, 2, 0, 0, 2.0)]
    assert trainer.patience_s(3.0) == 0.0


def test_a_late_engine_is_told_once_and_the_rest_settle_without_it() -> None:
    trainer = EngineTracker({"rollout"}, TIMEOUT_S)
    trainer.members([member("rollout/0", 1, 1), member("rollout/1", 2, 1)], 0.0)
    trainer.committed(2, 0.0)
    trainer.members([member("rollout/0", 1, 2)], 1.0)
    assert trainer.tick(TIMEOUT_S) == []
    late = EngineLate(Incarnation("rollout/1", 2), 2, 1, TIMEOUT_S + 1)
    assert trainer.tick(TIMEOUT_S + 1) == [late, VersionSettled(2, 1, 1, 0, TIMEOUT_S + 1)]
    assert trainer.tick(TIMEOUT_S + 2) == []
    assert trainer.patience_s(1.0) == 0.0, "nobody waits for an engine that is late"
    trainer.members([member("rollout/1", 2, 2)], 30.0)
    assert trainer.whole(2) == [Incarnation("rollout/0", 1), Incarnation("rollout/1", 2)]


def test_an_engine_that_never_catches_up_is_late_although_versions_keep_coming() -> None:
    trainer = EngineTracker({"rollout"}, TIMEOUT_S)
    trainer.members([member("rollout/0", 1, 1)], 0.0)
    reports: list[TrackerReport] = []
    for version in range(2, 15):
        reports += trainer.committed(version, float(version))
    assert [r for r in reports if isinstance(r, EngineLate)] == [EngineLate(Incarnation("rollout/0", 1), 13, 1, 11.0)]


def test_the_dead_are_not_waited_for_and_their_successors_count_anew() -> None:
    trainer = EngineTracker({"rollout"}, TIMEOUT_S)
    trainer.members([member("rollout/0", 1, 1), member("rollout/1", 2, 1)], 0.0)
    trainer.committed(2, 0.0)
    trainer.members([member("rollout/0", 1, 2)], 1.0)
    died = trainer.members([member("rollout/1", 2, 1, "gone", "SIGKILL")], 2.0)
    assert died == [EngineLost(Incarnation("rollout/1", 2), 2, 1, "gone: SIGKILL"), VersionSettled(2, 1, 0, 0, 2.0)]
    trainer.members([member("rollout/1", 5, 0, "starting")], 3.0)
    assert trainer.whole(2) == [Incarnation("rollout/0", 1)]
    assert trainer.members([member("rollout/1", 2, 2)], 3.5) == [], "a word of the dead incarnation"
    assert trainer.whole(2) == [Incarnation("rollout/0", 1)]
    trainer.members([member("rollout/1", 5, 2)], 4.0)
    assert trainer.whole(2) == [Incarnation("rollout/0", 1), Incarnation("rollout/1", 5)]


# Both sides, and the registry between them.


@dataclass
class Engine:
    """One incarnation, with the truth about it that neither machine sees."""

    who: Incarnation
    receiver: VersionMachine = field(default_factory=lambda: VersionMachine(TIMEOUT_S))
    action: Action | None = None
    samples: int = 0
    verified: set[int] = field(default_factory=set)
    was: set[int] = field(default_factory=set)
    trying_s: float = 0.0


class Transaction:
    """Engines, a registry whose news arrive late, a trainer that comes and goes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.committed = 0
        self.committed_at = 0.0
        self.epoch = 0
        self.registry: dict[str, Member] = {}
        self.news: set[str] = set()
        self.ever: dict[Incarnation, Engine] = {}
        self.living: dict[str, Engine] = {}
        self.trainer = EngineTracker({"rollout"}, TIMEOUT_S)
        self.late: list[tuple[Incarnation, int]] = []
        self.actions: set[type] = set()
        self.reports: list[TrackerReport] = []
        for number in range(SLOTS):
            self.begin(f"rollout/{number}")

    def begin(self, slot: str) -> None:
        self.epoch += 1
        engine = self.living[slot] = Engine(Incarnation(slot, self.epoch))
        self.ever[engine.who] = engine
        self.put(Member(engine.who))

    def put(self, entry: Member) -> None:
        self.registry[entry.who.slot] = entry
        self.news.add(entry.who.slot)

    def take(self, engine: Engine, action: Action | None) -> None:
        if action is None:
            return
        engine.action = action
        self.actions.add(type(action))
        if isinstance(action, AcknowledgeVersion):
            version = action.record.version
            assert version in engine.verified
            assert engine.samples == version
            self.put(Member(engine.who, state="ready", policy_version=version))
            engine.action, engine.trying_s = None, 0.0
        elif isinstance(action, RemoveEngine):
            self.end(engine, action.why)
        elif isinstance(action, VersionOvertaken):
            engine.action = None

    def end(self, engine: Engine, why: str) -> None:
        del self.living[engine.who.slot]
        version = self.registry[engine.who.slot].policy_version
        self.put(Member(engine.who, state="gone", policy_version=version, detail=why))

    def a_version_is_committed(self) -> None:
        self.committed += 1
        self.committed_at = self.now
        self.reported(self.trainer.committed(self.committed, self.now))

    def an_engine_moves(self, slot: str, outcomes: list[Any]) -> None:
        for outcome in outcomes:
            if (engine := self.living.get(slot)) is not None:
                self.moves(engine, outcome)

    def moves(self, engine: Engine, outcome: Any) -> None:
        """Whatever it is at ends, well or not; one that is at nothing hears of the newest version."""
        receiver = engine.receiver
        receiver.committed(self.committed)
        if engine.action is None and self.committed > engine.samples:
            self.take(engine, receiver.follow(record(self.committed), self.now))
        elif isinstance(engine.action, FetchVersion | SwapVersion):
            version = engine.action.record.version
            swapping = isinstance(engine.action, SwapVersion)
            if outcome not in ("ok", "lies"):
                engine.samples = HALF_LOADED if swapping else engine.samples
                self.take(engine, receiver.failed(version, outcome, outcome, self.now))
            elif not swapping:
                engine.verified.add(version)
                self.take(engine, receiver.fetched(version, self.now))
            else:
                engine.samples = version if outcome == "ok" else engine.samples
                engine.was.add(engine.samples)
                self.take(engine, receiver.swapped(version, engine.samples, self.now))

    def an_engine_is_killed(self, slot: str) -> None:
        if (engine := self.living.get(slot)) is not None:
            self.end(engine, "killed")

    def the_dead_are_started_again(self) -> None:
        for slot in self.registry:
            if slot not in self.living:
                self.begin(slot)

    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for engine in list(self.living.values()):
            engine.trying_s += seconds if engine.action is not None else 0.0
            self.take(engine, engine.receiver.tick(self.now))
        self.reported(self.trainer.tick(self.now))

    def news_arrive(self, all_of_them: bool) -> None:
        """As a watch gives them: of each slot its newest entry; all of them after a reconnect."""
        slots = set(self.registry) if all_of_them else self.news
        self.news = set()
        self.reported(self.trainer.members([self.registry[slot] for slot in sorted(slots)], self.now))

    def a_new_trainer_begins(self) -> None:
        self.trainer = EngineTracker({"rollout"}, TIMEOUT_S)
        self.news, self.late = set(), []
        self.reported(self.trainer.members(self.registry.values(), self.now))
        self.committed_at = self.now
        self.reported(self.trainer.committed(self.committed, self.now))

    def reported(self, reports: list[TrackerReport]) -> None:
        self.reports += reports
        for report in reports:
            if isinstance(report, EngineLate):
                assert report.after_s > TIMEOUT_S
                assert (report.who, report.has) not in self.late, "told twice"
                self.late.append((report.who, report.has))

    def nobody_counts_as_whole_who_has_not_verified(self) -> None:
        for version in range(1, self.committed + 1):
            for who in self.trainer.whole(version):
                truth = self.ever[who]
                assert version in truth.verified
                assert version in truth.was
        for engine in self.living.values():
            assert engine.receiver.whole is None or engine.receiver.whole.version == engine.samples

    def once_the_news_are_in_only_the_living_count(self) -> None:
        if self.news:
            return
        for who in self.trainer.whole(self.committed) if self.committed else ():
            assert self.living[who.slot].who == who
            assert self.living[who.slot].samples == self.committed

    def an_engine_that_failed_is_out(self) -> None:
        assert all(engine.receiver.state != "out" for engine in self.living.values())

    def the_trainer_waits_for_nobody_past_its_deadline(self) -> None:
        assert self.trainer.patience_s(self.now) <= max(0.0, self.committed_at + TIMEOUT_S - self.now)

    def an_engine_is_never_long_at_it(self) -> None:
        for engine in self.living.values():
            assert engine.trying_s <= TIMEOUT_S

    def step(self, chance: random.Random) -> None:
        """One thing happens; what keeps the transaction going happens more often."""
        slot = chance.choice(sorted(self.registry))
        what = chance.choices(range(7), [2, 8, 1, 2, 4, 3, 0.5])[0]
        if what == 0:
            self.a_version_is_committed()
        elif what == 1:
            self.an_engine_moves(slot, chance.choices(OUTCOMES, WEIGHTS, k=chance.randint(1, 4)))
        elif what == 2:
            self.an_engine_is_killed(slot)
        elif what == 3:
            self.the_dead_are_started_again()
        elif what == 4:
            self.time_passes(chance.choice([0.125, 0.125, 0.25, 1.0, 6.0, 11.0]))
        elif what == 5 and self.news:
            self.news_arrive(chance.random() < 0.2)
        elif what == 6:
            self.a_new_trainer_begins()

    def check(self) -> None:
        self.nobody_counts_as_whole_who_has_not_verified()
        self.once_the_news_are_in_only_the_living_count()
        self.an_engine_that_failed_is_out()
        self.the_trainer_waits_for_nobody_past_its_deadline()
        self.an_engine_is_never_long_at_it()


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_nothing_counts_that_was_not_verified_whatever_happens(seed: int) -> None:
    chance, world = random.Random(seed), Transaction()
    for _ in range(150):
        world.step(chance)
        world.check()


def test_the_walk_goes_everywhere() -> None:
    seen: set[type] = set()
    for seed in range(20):
        chance, world = random.Random(seed), Transaction()
        for _ in range(150):
            world.step(chance)
        seen |= world.actions | {type(report) for report in world.reports}
    assert seen == {
        FetchVersion,
        SwapVersion,
        AcknowledgeVersion,
        WaitForVersion,
        VersionOvertaken,
        RemoveEngine,
        EngineLate,
        EngineLost,
        VersionSettled,
    }
