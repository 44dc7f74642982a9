"""Fair admission under random traffic, and its reaction to the load of engines."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relax_rt.roles.rollout.router.admission import (
    AdmissionAction,
    AdmissionLimits,
    Admit,
    FairAdmission,
    FleetLoad,
    Preempt,
    Reject,
)
from relax_rt.transport.rpc.errors import Refused

GROUPS = st.sampled_from("abcde")
LIMITS = AdmissionLimits(first=3, least=1, most=12, waiting=6, wait_s=20.0, every_s=1.0)


class Traffic(RuleBasedStateMachine):
    """Keeps books of its own of who waits, who works and who was sent away."""

    def __init__(self) -> None:
        super().__init__()
        self.core = FairAdmission(LIMITS)
        self.now, self.numbers = 0.0, 0
        self.waits: dict[int, str] = {}
        self.came: dict[int, float] = {}
        self.works: dict[int, str] = {}
        self.pinned: set[int] = set()
        self.preemptions: Counter[int] = Counter()
        self.size: dict[int, int] = {}

    def apply(self, actions: list[AdmissionAction]) -> None:
        for action in actions:
            match action:
                case Admit(number):
                    group = self.waits.pop(number)
                    running = self.sequences()
                    assert not self.works or running.total() + self.size[number] <= self.core.cap, "more than the cap"
                    waiting = set(self.waits.values()) | {group}
                    assert running[group] == min(running[other] for other in waiting), "another had its turn"
                    assert not any(
                        g == group and n < number and self.preemptions[n] == 0 and self.preemptions[number] == 0
                        for n, g in self.waits.items()
                    ), "out of the order in which they came"
                    self.works[number] = group
                case Preempt(number):
                    assert number not in self.pinned, "its caller has seen tokens"
                    self.preemptions[number] += 1
                    assert self.preemptions[number] <= LIMITS.preemptions
                    self.waits[number] = self.works.pop(number)
                    self.came[number] = self.now
                case Reject(number, why, after_s):
                    assert why and 1 <= after_s <= 60
                    del self.waits[number]

    def sequences(self) -> Counter[str]:
        """Of each group at work."""
        found: Counter[str] = Counter()
        for number, group in self.works.items():
            found[group] += self.size[number]
        return found

    @rule(group=GROUPS, sequences=st.sampled_from([1, 1, 1, 2, 5, 30]))
    def arrive(self, group: str, sequences: int) -> None:
        self.numbers += 1
        self.waits[self.numbers], self.came[self.numbers], self.size[self.numbers] = group, self.now, sequences
        self.apply(self.core.submit(self.now, self.numbers, group, sequences))

    @precondition(lambda self: self.works)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.works)))
        del self.works[number]
        self.apply(self.core.finish(self.now, number))

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.waits)))
        del self.waits[number]
        self.apply(self.core.finish(self.now, number))

    @precondition(lambda self: self.works)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.works)))
        self.pinned.add(number)
        self.core.pin(number)

    @rule(s=st.floats(0.1, 8), room=st.integers(0, 20), stalled=st.integers(0, 12), kv=st.floats(0, 1))
    def tick(self, s: float, room: int, stalled: int, kv: float) -> None:
        self.now += s
        before, cap = list(self.works), self.core.cap
        stalled = min(stalled, self.sequences().total())
        actions = self.core.tick(self.now, FleetLoad(room, stalled, kv))
        preempted = {action.number for action in actions if isinstance(action, Preempt)}
        left = [
            n
            for n in before
            if n not in preempted and n not in self.pinned and self.preemptions[n] < LIMITS.preemptions
        ]
        if preempted:
            assert kv >= LIMITS.high or stalled, "nothing was behind"
            order = {number: i for i, number in enumerate(before)}
            assert all(order[a] > order[b] for a in preempted for b in left), (
                "an older one was preempted before a younger one"
            )
        if LIMITS.low <= kv < LIMITS.high and not stalled:
            assert self.core.cap == cap
        assert not before or len(preempted) < len(before), "nothing is left at work"
        self.apply(actions)
        late = [n for n in self.waits if self.now - self.came[n] >= LIMITS.wait_s]
        assert not late, "it waits beyond its time"

    def head(self) -> int:
        """Whose turn is next."""
        return next(iter(self.core._queues[self.core._next_group()]))

    @invariant()
    def books_agree(self) -> None:
        core = self.core
        assert (core.running, core.waiting) == (self.sequences().total(), len(self.waits))
        assert LIMITS.least <= core.cap <= LIMITS.most
        if self.waits:
            assert self.works and core.running + self.size[self.head()] > core.cap, "there is room, and somebody waits"
        preempted = sum(1 for n in self.waits if self.preemptions[n])
        assert core.waiting <= LIMITS.waiting + preempted
        known = set(self.works.values()) | set(self.waits.values())
        assert set(core._queues) | set(core._running) == known and set(core._served) <= known, "it keeps what is gone"


Traffic.TestCase.settings = settings(max_examples=30, stateful_step_count=50)
TestTraffic = Traffic.TestCase


def fill(core: FairAdmission, n: int, group: str = "g", first: int = 1) -> None:
    for number in range(first, first + n):
        core.submit(0.0, number, group)


def test_the_cap_grows_holds_and_preempts_the_youngest() -> None:
    core = FairAdmission(AdmissionLimits(first=8, most=64, every_s=1.0, waiting=100))
    fill(core, 80)
    assert core.running == core.cap == 8
    core.tick(1.0, FleetLoad(room=10, stalled=0, kv_used=0.2))
    assert core.running == core.cap == 18
    core.tick(1.5, FleetLoad(room=10, stalled=0, kv_used=0.2))
    assert core.cap == 18, "what was changed has not shown yet"
    core.tick(2.5, FleetLoad(room=10, stalled=0, kv_used=0.8))
    assert core.cap == 18
    actions = core.tick(4.0, FleetLoad(room=0, stalled=6, kv_used=0.5))
    assert core.cap == 13
    assert [a.number for a in actions] == [18, 17, 16, 15, 14] and all(isinstance(a, Preempt) for a in actions)
    for second in range(5, 30):
        core.tick(float(second), FleetLoad(room=0, stalled=0, kv_used=0.95))
    assert core.cap == 1 and core.running >= 1
    assert core.counts["preempted"] <= 2 * 80, "one was preempted more than twice"


def test_engine_slots_are_kept_busy() -> None:
    """1,000 episodes of several turns at 512 slots, latencies with a long tail, and time lost before and after each
    call: in virtual time."""
    slots, episodes, turns, lost_s = 512, 1000, 8, 0.05
    core, rng = FairAdmission(AdmissionLimits()), random.Random(1)
    events: list[tuple[float, int, str, int]] = []
    line: deque[int] = deque()
    trips: dict[int, float] = {}
    left = dict.fromkeys(range(episodes), turns)
    order, busy, worked, window = 0, 0, 0.0, [0.0, 0.0]

    def at(when: float, what: str, number: int) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (when, order, what, number))

    for number in range(episodes):
        at(0.0, "arrive", number)
    at(0.0, "tick", 0)
    now = 0.0
    while any(left.values()):
        before, (now, _, what, number) = now, heapq.heappop(events)
        enough = sum(map(bool, left.values())) >= slots if what == "tick" else window[1] == before
        if now > 4.0 and enough:
            worked, window = worked + busy * (now - before), [window[0] + now - before, now]
        actions: list[AdmissionAction] = []
        match what:
            case "arrive":
                actions = core.submit(now, number, f"episode {number}")
            case "at the engine" if trips[number] == now:
                line.append(number)
            case "made":
                busy -= 1
                at(now + lost_s, "leave", number)
            case "leave":
                actions = core.finish(now, number)
                left[number] -= 1
                if left[number]:
                    at(now + lost_s, "arrive", number)
            case "tick":
                actions = core.tick(now, FleetLoad(max(0, slots - busy), len(line), 0.3))
                at(now + 0.1, "tick", 0)
        for action in actions:
            match action:
                case Admit(of):
                    trips[of] = now + lost_s
                    at(now + lost_s, "at the engine", of)
                case Preempt(of):
                    assert of in line or trips[of] > now, "an engine had begun it"
                    trips[of] = -1.0
                    if of in line:
                        line.remove(of)
                case Reject():
                    raise AssertionError("nothing was full")
        while line and busy < slots:
            busy += 1
            at(now + rng.lognormvariate(0.7, 0.9), "made", line.popleft())
    assert window[0] > 5 and worked / (slots * window[0]) >= 0.95, worked / (slots * window[0])
    assert core.counts["preempted"] < 0.02 * episodes * turns and not core.counts["rejected"]


def test_preempted_calls_come_first_again() -> None:
    core = FairAdmission(AdmissionLimits(first=2, most=2, every_s=1.0))
    fill(core, 4)
    (preempted,) = core.tick(2.0, FleetLoad(0, 2, 0.95))
    assert preempted == Preempt(2)
    assert core.finish(3.0, 1) == [Admit(2)]


def test_a_preempted_call_gets_a_new_wait_deadline() -> None:
    core = FairAdmission(AdmissionLimits(first=2, most=2, every_s=1.0, wait_s=10.0))
    fill(core, 3)
    # The third has its turn late; when it is preempted, it has been there for longer than anybody may wait.
    assert core.finish(9.0, 1) == [Admit(3)]
    assert core.tick(12.0, FleetLoad(0, 2, 0.95)) == [Preempt(3)]
    assert core.tick(21.0, FleetLoad(0, 0, 0.8)) == []
    (late,) = core.tick(22.0, FleetLoad(0, 0, 0.8))
    assert isinstance(late, Reject) and late.number == 3


def test_the_cap_counts_sequences_not_calls() -> None:
    core = FairAdmission(AdmissionLimits(first=8, most=8, waiting=10))
    assert core.submit(0.0, 1, "a", 6) == [Admit(1)]
    assert core.submit(0.0, 2, "b", 3) == [], "nine sequences would be at work"
    assert core.submit(0.0, 3, "c", 1) == [], "b came first"
    assert core.finish(1.0, 1) == [Admit(2), Admit(3)] and core.running == 4
    assert core.submit(2.0, 4, "d", 100) == []
    assert core.finish(3.0, 2) == [] and core.finish(3.0, 3) == [Admit(4)], "it is larger than the cap, and alone"
    assert core.tick(9.0, FleetLoad(0, 90, 0.95)) == [], "preempting it would change nothing"


@given(st.lists(st.tuples(GROUPS, st.integers(1, 30)), min_size=2, max_size=5, unique_by=lambda pair: pair[0]))
def test_groups_have_equal_shares(groups: list[tuple[str, int]]) -> None:
    core = FairAdmission(AdmissionLimits(first=10, most=10, waiting=1000))
    number = 0
    for group, n in groups:
        fill(core, n, group, number + 1)
        number += n
    served: Counter[str] = Counter()
    owner = {}
    at = 0
    for group, n in groups:
        owner.update(dict.fromkeys(range(at + 1, at + n + 1), group))
        at += n
    # Those that came first hold all places; as they end, the others catch up.
    working = [n for n in owner if n not in core._waiting]
    rounds = 0
    while working and rounds < 200:
        rounds += 1
        ended = working.pop(0)
        served[owner[ended]] += 1
        working += [action.number for action in core.finish(float(rounds), ended) if isinstance(action, Admit)]
        counts = Counter(owner[n] for n in working)
        waiting = {place.group for place in core._waiting.values()}
        if rounds > 10:
            assert all(counts[g] + 1 >= max(counts.values()) - 0 or not waiting for g in waiting)
    assert not core._waiting


def test_a_full_queue_rejects_from_the_longest_group() -> None:
    core = FairAdmission(AdmissionLimits(first=1, most=1, waiting=4))
    fill(core, 5, "greedy")
    (refused, *_) = core.submit(0.0, 6, "modest")
    assert isinstance(refused, Reject) and refused.number == 5
    (refused,) = core.submit(0.0, 7, "greedy")
    assert isinstance(refused, Reject) and refused.number == 7
    assert core.finish(1.0, 1) == [Admit(6)]


def test_limits_that_contradict_each_other_are_refused() -> None:
    for wrong in ({"first": 0}, {"least": 5, "first": 4}, {"low": 0.9, "high": 0.8}, {"shrink": 1.0}):
        with pytest.raises(Refused, match="contradict"):
            AdmissionLimits(**wrong)  # type: ignore[arg-type]
