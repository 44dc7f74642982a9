"""Decisions about a group of ranks, under every order of events that hypothesis finds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_rt.transport.weights.broadcast import machine as ev
from relax_rt.transport.weights.broadcast import protocol as msg
from relax_rt.transport.weights.broadcast.machine import BroadcastMachine, RankReport

LIMITS = ev.BroadcastLimits(hello_s=3.0, start_s=3.0, join_s=4.0, stall_s=5.0, abort_s=2.0)
NAMES = ("root", "a", "b", "c")
DIGEST, BUCKETS, TIMEOUT_S = "good", 8, 200.0
DIGESTS = st.sampled_from([DIGEST, "bad"])
Key = tuple[str, int]


@dataclass
class World:
    """Ranks that do as the machine says, some time later, each as well as it is able to.

    `bent` says what a rank does wrong, from its n-th order on: die, stop (no word any more), hang (answers, but its
    collective does not end), fail, or have other bytes in the end.
    """

    bent: dict[str, tuple[str, int]] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self.machine = BroadcastMachine(LIMITS)
        self.random = random.Random(self.seed)
        self.now = 0.0
        self.living: set[Key] = set()
        self.ended: set[Key] = set()
        self.stopped: set[Key] = set()
        self.hung: set[Key] = set()
        self.orders: dict[str, int] = {}
        self.outcomes: list[msg.BroadcastOutcome] = []
        self.inits: list[tuple[int, Key]] = []
        self.events: list[ev.Event] = []
        self.joining: dict[int, set[Key]] = {}
        self.worlds: dict[int, int] = {}
        self.corrupted: set[tuple[int, str]] = set()
        self.sending: dict[tuple[int, int], dict[Key, str]] = {}

    def ask(self, number: int, members: tuple[str, ...] = NAMES, timeout_s: float = TIMEOUT_S) -> None:
        self.feed(ev.RequestTransfer(number, members, BUCKETS, DIGEST, timeout_s))

    def feed(self, event: ev.Event) -> None:
        if isinstance(event, ev.RankExited):
            self.living.discard((event.member, event.incarnation))
            self.ended.add((event.member, event.incarnation))
        for action in self.machine.step(event, self.now):
            self.do(action)
        assert (self.machine.deadline is None) == (self.machine.phase in ("idle", "closed"))
        if self.machine.deadline is not None:
            assert self.machine.deadline > self.now

    def run(self, outcomes: int) -> None:
        """Let things happen, in any order, until that many transfers are over."""
        for _ in range(5_000):
            if len(self.outcomes) >= outcomes:
                return
            if self.events and self.random.random() < 0.9:
                self.now += 0.001
                self.feed(self.events.pop(self.random.randrange(len(self.events))))
            elif not self.events:
                assert self.machine.deadline is not None, "nothing can happen any more, and there is no deadline"
                self.now = self.machine.deadline
                self.feed(ev.ClockTick())
        raise AssertionError("no end of it")

    def do(self, action: ev.Action) -> None:
        if isinstance(action, ev.FinishTransfer):
            self.outcomes.append(action.outcome)
            return
        key = (action.member, action.incarnation)
        if isinstance(action, ev.SpawnRank):
            assert key not in self.ended and key not in self.living
            self.living.add(key)
        elif isinstance(action, ev.KillRank):
            self.ended.add(key)
            self.living.discard(key)
            self.events = [e for e in self.events if getattr(e, "member", "") != action.member]
            self.events.append(ev.RankExited(*key, "killed"))
            return
        assert key in self.living, "nothing is asked of the dead"
        self.obey(key, action)

    def obey(self, key: Key, action: ev.SpawnRank | ev.InitRank | ev.StartBroadcast | ev.AbortRank) -> None:
        count = self.orders[key[0]] = self.orders.get(key[0], 0) + 1
        how, at = self.bent.get(key[0], ("", 0))
        how = how if count > at else ""
        if isinstance(action, ev.InitRank):
            self.inits.append((action.generation, key))
            self.worlds[action.generation] = action.world
        if how == "die":
            self.events.append(ev.RankExited(*key, "SIGKILL"))
            return
        if how == "stop" or key in self.stopped:
            self.stopped.add(key)
            return
        if isinstance(action, ev.SpawnRank):
            self.events.append(RankReport(*key, msg.RankHello(self.devices.get(key[0], ""))))
        elif isinstance(action, ev.AbortRank):
            self.events.append(RankReport(*key, msg.AbortReceived(action.generation)))
            if key not in self.hung:
                self.events.append(RankReport(*key, msg.RankAborted(action.generation)))
        elif how == "hang":
            self.hung.add(key)
        elif how == "fail":
            self.events.append(RankReport(*key, msg.RankFailed(action.generation, True, "no memory")))
        elif isinstance(action, ev.InitRank):
            self.join(key, action.generation)
        else:
            self.send(key, action, "bad" if how == "corrupt" else DIGEST)

    def join(self, key: Key, generation: int) -> None:
        """Ranks join once all are there: a real group comes about for all of them, or for none."""
        there = self.joining.setdefault(generation, set())
        there.add(key)
        if len(there) == self.worlds[generation]:
            self.events += [RankReport(*k, msg.RankJoined(generation)) for k in there]

    def send(self, key: Key, action: ev.StartBroadcast, digest: str) -> None:
        """Nobody gets through before all are there."""
        there = self.sending.setdefault((action.generation, action.transfer), {})
        there[key] = digest
        if len(there) == self.worlds[action.generation]:
            self.corrupted |= {(action.transfer, one[0]) for one, has in there.items() if has != DIGEST}
            for one, has in there.items():
                self.events.append(RankReport(*one, msg.TransferProgress(action.generation, BUCKETS // 2)))
                self.events.append(RankReport(*one, msg.TransferDone(action.generation, action.transfer, has)))


HOW = st.sampled_from(["die", "stop", "hang", "fail", "corrupt"])
BENT = st.dictionaries(st.sampled_from(NAMES), st.tuples(HOW, st.integers(0, 6)), max_size=4)


@settings(max_examples=150, deadline=None)
@given(bent=BENT, seed=st.integers(0, 1 << 16), transfers=st.integers(1, 4))
def test_each_transfer_has_one_outcome_and_no_dead_rank_is_in_a_later_group(
    bent: dict[str, tuple[str, int]], seed: int, transfers: int
) -> None:
    world = World(bent=bent, seed=seed)
    for number in range(1, transfers + 1):
        world.ask(number)
    world.run(transfers)
    assert [o.transfer for o in world.outcomes] == list(range(1, transfers + 1))
    for outcome in world.outcomes:
        told = [*outcome.delivered, *(lost.member for lost in outcome.lost)]
        assert sorted(told) == ["a", "b", "c"], "each receiver has one fate"
        assert not {(outcome.transfer, name) for name in outcome.delivered} & world.corrupted
    assert world.now <= transfers * TIMEOUT_S


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_order_of_events_leaves_it_without_a_deadline(data: st.DataObject) -> None:
    """Events that no sane rank would send, in any order, with any incarnation and generation."""
    start_s = data.draw(st.sampled_from([3.0, 20.0]))
    machine, now, asked, told = BroadcastMachine(msgspec.structs.replace(LIMITS, start_s=start_s)), 0.0, 0, 0
    dead: set[Key] = set()
    names, small = st.sampled_from(NAMES), st.integers(0, 3)
    for _ in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.floats(0.0, 6.0))
        kind = data.draw(st.integers(0, 11))
        who = (data.draw(names), data.draw(small))
        generation = machine.generation - data.draw(st.integers(0, 1))
        event: ev.Event
        if kind == 0:
            asked += 1
            event = ev.RequestTransfer(asked, NAMES[: data.draw(st.integers(1, 4))], BUCKETS, DIGEST, 30.0)
        else:
            event = {
                1: RankReport(*who, msg.RankHello(data.draw(st.sampled_from(["", "x", "y"])))),
                2: RankReport(*who, msg.RankJoined(generation)),
                3: RankReport(*who, msg.TransferProgress(generation, data.draw(st.integers(0, 9)))),
                4: RankReport(
                    *who, msg.TransferDone(generation, data.draw(small), data.draw(st.sampled_from([DIGEST, "bad"])))
                ),
                5: RankReport(*who, msg.RankFailed(generation, data.draw(st.booleans()), "?")),
                6: RankReport(*who, msg.AbortReceived(generation)),
                7: RankReport(*who, msg.RankAborted(generation)),
                8: ev.RankExited(*who, "?"),
                9: ev.ClockTick(),
                10: ev.CancelTransfer(data.draw(st.integers(0, asked))),
                11: ev.PrestartRanks(NAMES[: data.draw(st.integers(1, 4))]),
            }[kind]
        if isinstance(event, ev.RankExited):
            dead.add(who)
        for action in machine.step(event, now):
            if isinstance(action, ev.FinishTransfer):
                told += 1
                continue
            key = (action.member, action.incarnation)
            if isinstance(action, ev.SpawnRank):
                dead.discard(key)  # a word of a process that had not been started meant nothing
            assert key not in dead, f"{action} after its end"
            if isinstance(action, ev.KillRank):
                dead.add(key)
        assert (machine.deadline is None) == (told == asked)
        assert machine.deadline is None or machine.deadline > now
    while machine.deadline is not None:
        now = machine.deadline
        told += sum(isinstance(action, ev.FinishTransfer) for action in machine.step(ev.ClockTick(), now))
    assert told == asked


@pytest.mark.parametrize(
    ("how", "fate"),
    [("die", "died"), ("stop", "silent"), ("hang", "stuck"), ("fail", "failed"), ("corrupt", "corrupt")],
)
@pytest.mark.parametrize("at", [1, 2])
def test_who_is_to_blame_is_named_and_the_others_are_served(how: str, at: int, fate: str) -> None:
    if (how, at) == ("corrupt", 1):
        at = 2  # there are no bytes yet when ranks meet
    world = World(bent={"b": (how, at)})
    world.ask(1)
    world.run(1)
    (outcome,) = world.outcomes
    assert set(outcome.delivered) == {"a", "c"} and not outcome.error
    assert [(lost.member, lost.fate) for lost in outcome.lost] == [("b", fate)]
    assert world.now < 4 * (LIMITS.join_s + LIMITS.stall_s + LIMITS.abort_s)


@pytest.mark.parametrize("how", ["die", "stop", "hang", "fail"])
def test_a_root_that_is_lost_ends_the_transfer(how: str) -> None:
    world = World(bent={"root": (how, 2)})
    world.ask(1)
    world.run(1)
    assert "root" in world.outcomes[0].error


def test_a_lost_rank_is_started_anew_for_the_next_transfer() -> None:
    world = World(bent={"b": ("die", 1)})
    world.ask(1)
    world.run(1)
    world.bent.clear()
    world.ask(2)
    world.run(2)
    assert set(world.outcomes[1].delivered) == {"a", "b", "c"}
    assert ("b", 2) in {key for _, key in world.inits} and world.machine.members["b"].incarnation == 2


def test_an_unchanged_group_is_used_again() -> None:
    world = World()
    for number in (1, 2, 3):
        world.ask(number)
    world.run(3)
    assert world.machine.generation == 1 and len(world.inits) == len(NAMES)


def test_the_second_rank_on_a_device_is_refused_before_they_meet() -> None:
    world = World(devices={"root": "GPU-0", "a": "GPU-1", "b": "GPU-1", "c": "GPU-2"})
    world.ask(1)
    world.run(1)
    (outcome,) = world.outcomes
    assert [(lost.member, lost.fate) for lost in outcome.lost] == [("b", "duplicate_device")]
    assert "GPU-1" in outcome.lost[0].why and "a" in outcome.lost[0].why
    assert "b" not in {name for _, (name, _) in world.inits}


def test_a_group_in_which_nobody_is_to_blame_is_given_up() -> None:
    """A network between ranks that all answer: no rank is left out for it, and nobody waits for ever."""
    machine = BroadcastMachine(LIMITS)
    told: list[msg.BroadcastOutcome] = []
    now = 0.0
    pending: list[ev.Event] = [ev.RequestTransfer(1, NAMES, BUCKETS, DIGEST, TIMEOUT_S)]
    for _ in range(1_000):
        if told:
            break
        event = pending.pop(0) if pending else ev.ClockTick()
        now = now if not isinstance(event, ev.ClockTick) else machine.deadline or now
        for action in machine.step(event, now):
            if isinstance(action, ev.FinishTransfer):
                told.append(action.outcome)
            elif isinstance(action, ev.SpawnRank):
                pending.append(RankReport(action.member, action.incarnation, msg.RankHello()))
            elif isinstance(action, ev.AbortRank):
                pending.append(RankReport(action.member, action.incarnation, msg.RankAborted(action.generation)))
    assert "every rank answers" in told[0].error and "did not meet" in told[0].error
    assert machine.generation == LIMITS.blameless + 1


def test_transfers_beyond_the_line_are_refused_at_once() -> None:
    world = World()
    for number in range(1, LIMITS.waiting + 3):
        world.ask(number)
    assert [o.transfer for o in world.outcomes] == [LIMITS.waiting + 2]
    assert {lost.fate for lost in world.outcomes[0].lost} == {"late"}


def test_a_cancelled_transfer_ends_at_once_with_whoever_is_in_the_middle_of_it() -> None:
    world = World(bent={"b": ("stop", 2)})
    for number in (1, 2, 3):
        world.ask(number)
    while world.machine.phase != "broadcasting":
        world.feed(world.events.pop(0))
    world.feed(ev.CancelTransfer(2))
    assert [(o.transfer, o.error) for o in world.outcomes] == [(2, "it was cancelled")]
    busy = {name for name, member in world.machine.members.items() if member.state == "broadcasting"}
    assert "b" in busy
    world.bent.clear()
    world.stopped.clear()
    world.feed(ev.CancelTransfer(1))
    assert [o.transfer for o in world.outcomes] == [2, 1] and not world.outcomes[1].delivered
    assert {(name, 1) for name in busy} <= world.ended, "what writes into the memory is ended"
    world.feed(ev.CancelTransfer(1))
    world.run(3)
    assert set(world.outcomes[2].delivered) == {"a", "b", "c"}, "the one behind it is served"


def test_closing_ends_everything() -> None:
    world = World()
    world.ask(1)
    world.ask(2)
    world.feed(ev.CloseGroup())
    assert [o.transfer for o in world.outcomes] == [1, 2] and all("closed" in o.error for o in world.outcomes)
    assert not world.living
    world.ask(3)
    assert world.outcomes[-1].transfer == 3 and world.outcomes[-1].error


def test_a_process_that_is_slow_to_start_costs_transfers_and_is_there_for_a_later_one() -> None:
    """Begun anew for each transfer it would never be there, on a machine where a start takes longer than one has."""
    machine = BroadcastMachine(msgspec.structs.replace(LIMITS, start_s=60.0))
    machine.step(ev.RequestTransfer(1, ("root", "a"), BUCKETS, DIGEST, TIMEOUT_S), 0.0)
    machine.step(RankReport("root", 1, msg.RankHello()), 0.1)
    (report,) = machine.step(ev.ClockTick(), LIMITS.hello_s)
    assert isinstance(report, ev.FinishTransfer)
    assert [(lost.member, lost.fate) for lost in report.outcome.lost] == [("a", "absent")]
    assert machine.present == {"root"}
    assert machine.step(RankReport("a", 1, msg.RankHello()), 10.0) == [] and machine.present == {"root", "a"}
    begun = machine.step(ev.RequestTransfer(2, ("root", "a"), BUCKETS, DIGEST, TIMEOUT_S), 11.0)
    assert {type(action) for action in begun} == {ev.InitRank}, "nobody had to be started"


def test_processes_are_started_ahead_and_given_up_once_they_never_come() -> None:
    machine = BroadcastMachine(msgspec.structs.replace(LIMITS, start_s=60.0))
    assert machine.step(ev.PrestartRanks(("root", "a")), 0.0) == [ev.SpawnRank("root", 1), ev.SpawnRank("a", 1)]
    assert machine.deadline is None and machine.present == frozenset()
    machine.step(RankReport("root", 1, msg.RankHello()), 1.0)
    assert machine.step(ev.PrestartRanks(("root", "a")), 59.0) == []
    again = machine.step(ev.PrestartRanks(("root", "a")), 60.0)
    assert [type(action) for action in again] == [ev.KillRank, ev.SpawnRank] and again[1] == ev.SpawnRank("a", 2)
    machine.step(RankReport("a", 2, msg.RankHello()), 61.0)
    assert machine.present == {"root", "a"}
    machine.step(ev.RankExited("a", 2, "struck"), 62.0)
    assert machine.present == {"root"}
    machine.step(ev.CloseGroup(), 63.0)
    assert machine.step(ev.PrestartRanks(("a",)), 64.0) == []


def test_a_start_outlives_the_transfer_that_it_was_late_for() -> None:
    machine = BroadcastMachine(msgspec.structs.replace(LIMITS, start_s=60.0))
    machine.step(ev.RequestTransfer(1, ("root", "a"), BUCKETS, DIGEST, 2.0), 0.0)
    (report,) = machine.step(ev.ClockTick(), 2.0)
    assert isinstance(report, ev.FinishTransfer) and "not over within 2 s" in report.outcome.error
    machine.step(RankReport("root", 1, msg.RankHello()), 5.0), machine.step(RankReport("a", 1, msg.RankHello()), 6.0)
    assert machine.present == {"root", "a"}


def test_words_of_an_earlier_incarnation_mean_nothing() -> None:
    machine = BroadcastMachine(LIMITS)
    machine.step(ev.RequestTransfer(1, ("root", "a"), BUCKETS, DIGEST, TIMEOUT_S), 0.0)
    machine.step(RankReport("root", 1, msg.RankHello()), 0.1)
    machine.step(ev.ClockTick(), LIMITS.hello_s)
    assert machine.members["a"].state == "dead", "it never said hello"
    spawned = machine.step(ev.RequestTransfer(2, ("root", "a"), BUCKETS, DIGEST, TIMEOUT_S), 5.0)
    assert spawned == [ev.SpawnRank("a", 2)]
    for late in (
        ev.RankExited("a", 1, "killed"),
        RankReport("a", 1, msg.RankHello("?")),
        RankReport("a", 1, msg.RankFailed(0, True, "?")),
    ):
        assert machine.step(late, 5.1) == []
        assert machine.members["a"].state == "starting"
    assert {type(action) for action in machine.step(RankReport("a", 2, msg.RankHello()), 5.2)} == {ev.InitRank}


def test_a_member_whose_processes_end_before_their_first_word_is_given_up_and_the_others_go_on() -> None:
    machine = BroadcastMachine(LIMITS)
    for turn in range(1, LIMITS.starts + 1):
        assert machine.step(ev.PrestartRanks(("a",)), turn) == [ev.SpawnRank("a", turn)] and not machine.given_up
        machine.step(RankReport("a", turn, msg.RankFailed(0, True, "no such library")), turn)
        machine.step(ev.RankExited("a", turn, "exit code 1"), turn)
    assert machine.given_up == {"a": "no such library"}
    assert machine.step(ev.PrestartRanks(("a",)), 50) == []
    assert machine.step(ev.RequestTransfer(1, ("root", "a"), BUCKETS, DIGEST, TIMEOUT_S), 51) == [
        ev.SpawnRank("root", 1)
    ]
    actions = machine.step(RankReport("root", 1, msg.RankHello()), 51.5)
    outcome = next(action.outcome for action in actions if isinstance(action, ev.FinishTransfer))
    assert not outcome.error and [(one.member, one.fate) for one in outcome.lost] == [("a", "absent")]
    assert "no such library" in outcome.lost[0].why


def test_one_that_has_come_up_once_is_started_as_often_as_it_ends() -> None:
    machine = BroadcastMachine(LIMITS)
    for turn in range(1, 3 * LIMITS.starts):
        assert machine.step(ev.PrestartRanks(("a",)), turn) == [ev.SpawnRank("a", turn)]
        machine.step(RankReport("a", turn, msg.RankHello()), turn)
        machine.step(ev.RankExited("a", turn, "SIGKILL"), turn)
    assert not machine.given_up


def test_a_rank_that_is_given_up_while_the_others_gather_is_not_waited_for() -> None:
    """Its last start was in vain as somebody else asked for it: the transfer goes on without it."""
    machine, limits = BroadcastMachine(LIMITS), LIMITS
    for turn in range(1, limits.starts):
        machine.step(ev.PrestartRanks(("a",)), float(turn))
        machine.step(ev.RankExited("a", turn, "no memory"), float(turn))
    machine.step(ev.RequestTransfer(1, ("root", "a"), BUCKETS, DIGEST, 30.0), 10.0)
    machine.step(RankReport("root", 1, msg.RankHello("")), 11.0)
    kill, report = machine.step(ev.PrestartRanks(("a",)), 10.0 + limits.start_s)
    assert isinstance(kill, ev.KillRank) and (kill.member, kill.incarnation) == ("a", limits.starts)
    assert isinstance(report, ev.FinishTransfer) and [entry.fate for entry in report.outcome.lost] == ["absent"]
    assert machine.phase == "idle" and machine.members["root"].state == "idle"
