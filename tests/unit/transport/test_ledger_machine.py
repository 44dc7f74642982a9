"""Random producers, consumers, trainers, kills, restarts and roll-backs; the ledger must keep its invariants."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_driver import Driver, policy

from relax_rt.transport.errors import Refused, StaleEpoch
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.ledger import QueueLimits
from relax_rt.transport.ledger import events as ev
from relax_rt.transport.queue.api import Batch, SampleKey, Ticket

STALENESS = (0, 1, 2)
OUTCOMES = ("done", "done", "done", "done", "failed", "abandoned")
PICK = st.integers(0, 999)


class LedgerMachine(RuleBasedStateMachine):
    """Keeps its own record of steps, versions and samples, by which the ledger is judged."""

    @initialize(staleness=st.sampled_from(STALENESS), wait_s=st.sampled_from([0.0, 10.0]))
    def start(self, staleness: int, wait_s: float) -> None:
        self.staleness = staleness
        self.d = Driver(
            policy(max_staleness=float(staleness), straggler_wait_s=wait_s),
            QueueLimits(quarantine_after=4, capacity_bytes=60_000),
        )
        self.epochs = count(10)
        self.worlds = count(2)
        self.engines = [self.incarnation(f"rollout/{i}") for i in range(2)]
        self.judges = [self.incarnation(f"reward/{i}") for i in range(2)]
        self.engine_version = [0, 0]
        self.tickets: dict[int, tuple[Incarnation, Ticket, set[int]]] = {}
        self.work: list[tuple[Incarnation, Batch]] = []
        self.dead: list[Incarnation] = []
        self.gone: set[Incarnation] = set()
        self.parents: dict[int, tuple[int, bool]] = {}
        self.path: dict[int, list[tuple[SampleKey, int]]] = {}
        self.checkpoints = {0: 0}
        self.trained_with: dict[SampleKey, int] = {}
        self.digests: dict[SampleKey, tuple[str, int]] = {}
        self.new_trainer()

    def incarnation(self, slot: str) -> Incarnation:
        return Incarnation(slot, next(self.epochs))

    # --- an own idea of distance, by the paths to the root

    def ancestry(self, version: int) -> list[int]:
        return [] if version == 0 else [version, *self.ancestry(self.parents[version][0])]

    def distance(self, a: int, b: int) -> int:
        apart = set(self.ancestry(a)) ^ set(self.ancestry(b))
        return sum(self.parents[version][1] for version in apart)

    # --- trainer

    def new_trainer(self) -> None:
        self.trainer = self.incarnation("trainer/0")
        self.batch: Batch | None = None
        step = max(self.checkpoints)
        self.resume_from(step)

    def resume_from(self, step: int) -> None:
        parent = self.checkpoints[step]
        self.version = self.d.rollback(self.trainer, step, parent, changed=parent == 0)
        self.parents[self.version] = (parent, parent == 0)
        self.step = step
        self.path = {s: samples for s, samples in self.path.items() if s <= step}
        self.checkpoints = {s: v for s, v in self.checkpoints.items() if s <= step}
        self.checkpoints[step] = self.version

    @precondition(lambda self: self.batch is None)
    @rule(groups=st.integers(1, 2))
    def take_batch(self, groups: int) -> None:
        batch = self.d.take(self.trainer, "train", groups=groups)
        if not batch.samples:
            assert batch.waiting_on
            return
        self.batch = batch
        members = Counter(info.key.group for info in batch.samples)
        assert len(members) == groups and set(members.values()) == {2}
        for info in batch.samples:
            versions = {span.version for span in info.versions}
            true = max(self.distance(self.version, version) for version in versions)
            assert info.staleness == true <= self.staleness
            slab = next(column for column in info.columns if column.name == "tokens")
            assert (slab.slab, slab.offset) == self.digests[info.key]

    @precondition(lambda self: self.batch is not None)
    @rule()
    def train(self) -> None:
        assert self.batch is not None
        batch, self.batch = self.batch, None
        try:
            version = self.d.trained(self.trainer, batch, self.step + 1, self.version)
        except Refused:
            assert batch.lease not in self.d.ledger.state.leases
            self.resume_from(max(self.checkpoints))
            return
        self.parents[version] = (self.version, True)
        self.step, self.version = self.step + 1, version
        self.path[self.step] = [(info.key, info.prompt) for info in batch.samples]

    @rule(i=st.integers(0, 1), groups=st.integers(1, 2), update=st.booleans(), rounds=st.integers(1, 2))
    def whole_step(self, i: int, groups: int, update: bool, rounds: int) -> None:
        """Everything from prompt to step, so that random runs get anywhere."""
        if self.batch is None:
            for _ in range(rounds):
                if update:
                    self.update_engine(i)
                self.admit(i, groups)
            for id_ in [id_ for id_, (engine, _, _) in self.tickets.items() if engine == self.engines[i]]:
                while id_ in self.tickets:
                    self.put_one(id_, interrupted=False)
            self.d.reward_all(self.judges[i])
            self.take_batch(groups)
        if self.batch is not None:
            self.train()

    @precondition(lambda self: self.batch is not None)
    @rule()
    def give_batch_up(self) -> None:
        assert self.batch is not None
        self.d.call(self.trainer, ev.Abandon(self.batch.lease, "test"))
        self.batch = None

    @rule(tell=st.booleans())
    def checkpoint(self, tell: bool) -> None:
        self.checkpoints[self.step] = self.version
        if tell:
            self.d.committed(self.trainer, self.step)

    @rule(told=st.booleans())
    def kill_trainer(self, told: bool) -> None:
        if told:
            self.d.gone(self.trainer)
        self.dead.append(self.trainer)
        self.new_trainer()

    @precondition(lambda self: len(self.checkpoints) > 1)
    @rule()
    def newest_checkpoint_is_corrupt(self) -> None:
        del self.checkpoints[max(self.checkpoints)]
        self.dead.append(self.trainer)
        self.new_trainer()

    # --- producers

    @rule(i=st.integers(0, 1))
    def update_engine(self, i: int) -> None:
        self.engine_version[i] = self.version

    @rule(i=st.integers(0, 1), groups=st.integers(1, 6))
    def admit(self, i: int, groups: int) -> None:
        engine, version = self.engines[i], self.engine_version[i]
        answer = self.d.admit(engine, version, groups)
        assert bool(answer.tickets) != bool(answer.waiting_on)
        for ticket in answer.tickets:
            self.tickets[ticket.group] = (engine, ticket, set())
        if answer.tickets:
            held = sum(group.size for group in self.d.ledger.state.groups.values())
            assert held <= (self.staleness + 1 - self.distance(self.version, version)) * 4

    @precondition(lambda self: self.tickets)
    @rule(pick=PICK, interrupted=st.booleans())
    def put(self, pick: int, interrupted: bool) -> None:
        self.put_one(sorted(self.tickets)[pick % len(self.tickets)], interrupted)

    def put_one(self, id_: int, interrupted: bool) -> None:
        engine, ticket, done = self.tickets[id_]
        member = len(done)
        mine = id_ in self.d.ledger.state.groups
        group = self.d.ledger.state.groups.get(id_)
        base = group.base if group is not None else self.version
        key = SampleKey(id_, member)
        try:
            freed = self.d.put(engine, key, *([base, self.version] if interrupted else [base]))
        except StaleEpoch:
            assert engine in self.dead
            del self.tickets[id_]
            return
        being_read = {
            (column.slab, column.offset)
            for who, batch in self.work
            if who not in self.gone
            for info in batch.samples
            for column in info.columns
            if column.slab
        }
        assert not being_read & {(extent.slab, extent.offset) for extent in freed}
        if mine and (group := self.d.ledger.state.groups.get(id_)) is not None:
            column = group.samples[member].columns[0]
            self.digests[key] = (column.slab, column.offset)
        done.add(member)
        if len(done) == ticket.size:
            del self.tickets[id_]

    @precondition(lambda self: self.tickets)
    @rule(pick=PICK)
    def give_back(self, pick: int) -> None:
        id_ = sorted(self.tickets)[pick % len(self.tickets)]
        engine, _, _ = self.tickets.pop(id_)
        if engine not in self.dead:
            self.d.call(engine, ev.GiveBack([id_], "test"))

    @rule(i=st.integers(0, 1), told=st.booleans())
    def kill_engine(self, i: int, told: bool) -> None:
        if told:
            self.d.gone(self.engines[i])
        self.dead.append(self.engines[i])
        self.engines[i] = self.incarnation(f"rollout/{i}")
        if not told:
            self.d.admit(self.engines[i], -1)  # its successor speaks up: the old one is fenced

    # --- reward workers

    @rule(i=st.integers(0, 1), samples=st.integers(1, 4), whole=st.booleans())
    def take_reward(self, i: int, samples: int, whole: bool) -> None:
        batch = self.d.take(self.judges[i], "reward", samples, groups=1 if whole else 0)
        if batch.samples:
            self.work.append((self.judges[i], batch))

    @precondition(lambda self: self.work)
    @rule(pick=PICK, outcome=st.sampled_from(OUTCOMES))
    def finish_reward(self, pick: int, outcome: str) -> None:
        who, batch = self.work.pop(pick % len(self.work))
        if who in self.dead:
            with pytest.raises(StaleEpoch):
                self.d.reward(who, batch)
        elif outcome == "abandoned":
            self.d.call(who, ev.Abandon(batch.lease, "test"))
        else:
            self.d.reward(who, batch, *([batch.samples[0].key] if outcome == "failed" else []))

    @rule(i=st.integers(0, 1))
    def kill_judge(self, i: int) -> None:
        self.d.gone(self.judges[i])
        self.gone.add(self.judges[i])
        self.dead.append(self.judges[i])
        self.judges[i] = self.incarnation(f"reward/{i}")

    # --- the broker, time and repetition

    @rule(seconds=st.sampled_from([1.0, 5.0, 45.0]))
    def tick(self, seconds: float) -> None:
        self.d.tick(seconds)

    @rule()
    def take_snapshot(self) -> None:
        self.d.snapshot = self.d.ledger.snapshot()

    @rule()
    def kill_broker(self) -> None:
        self.d.restart()

    @precondition(lambda self: self.d.last is not None)
    @rule()
    def repeat_the_last_call(self) -> None:
        assert self.d.last is not None
        who, seq, event, answer = self.d.last
        empty = isinstance(event, ev.Take | ev.Admit) and not (
            answer.samples if isinstance(answer, Batch) else answer.tickets  # type: ignore[attr-defined]
        )
        if who in self.dead or empty:
            return
        before = self.d.ledger.snapshot()
        n = self.d.ledger.n
        try:
            again = self.d.apply(event, who, seq)
        except Refused:
            return
        if not isinstance(event, ev.Take):
            assert again == answer
        if self.d.ledger.n != n:
            # Only calls that did nothing are not remembered, and these do nothing again.
            raise AssertionError(f"{event} was applied twice")
        assert self.d.ledger.snapshot() == before

    @rule()
    def node_agent_dies(self) -> None:
        self.d.own(ev.Open(f"run-{next(self.worlds)}"))
        self.dead += [*self.engines, *self.judges, self.trainer]
        self.tickets.clear()
        self.work.clear()
        self.d.last = None
        self.engines = [self.incarnation(f"rollout/{i}") for i in range(2)]
        self.judges = [self.incarnation(f"reward/{i}") for i in range(2)]
        self.d.admit(self.engines[0], self.version)
        self.new_trainer()

    # --- what must hold

    @invariant()
    def ledger_is_sound(self) -> None:
        assert self.d.ledger.audit() == []

    @invariant()
    def path_is_ours(self) -> None:
        theirs = {
            step: sorted((key, record.prompt.index) for record in records for key in keys(record.group, record.size))
            for step, records in self.d.ledger.state.path.items()
        }
        assert theirs == {step: sorted(samples) for step, samples in self.path.items()}
        account = self.d.ledger.account()
        assert account["trained_twice"] == account["prompts_trained_twice"] == 0
        prompts = Counter(prompt for samples in self.path.values() for prompt in {prompt for _, prompt in samples})
        assert not [prompt for prompt, times in prompts.items() if times > 1]

    @invariant()
    def capacity_holds_at_admission(self) -> None:
        # One admission may pass the mark by what is already being generated, never by more.
        bound = 60_000 + (self.staleness + 1) * 4 * 1000
        assert self.d.ledger.state.extents.payload_bytes <= bound

    def teardown(self) -> None:
        """Once the faults end, training goes on."""
        if not hasattr(self, "d"):
            return
        target = self.step + 4
        self.batch = None
        self.resume_from(max(self.checkpoints))
        target = self.step + 4
        for _ in range(60):
            self.d.tick(11.0)
            self.engine_version = [self.version, self.version]
            for i, engine in enumerate(self.engines):
                for ticket in self.d.admit(engine, self.engine_version[i], 2).tickets:
                    for member in range(ticket.size):
                        self.d.put(engine, SampleKey(ticket.group, member), self.engine_version[i])
            self.d.reward_all(self.judges[0])
            batch = self.d.take(self.trainer, "train", groups=2)
            if batch.samples:
                version = self.d.trained(self.trainer, batch, self.step + 1, self.version)
                self.parents[version] = (self.version, True)
                self.step, self.version = self.step + 1, version
                self.d.committed(self.trainer, self.step)
            if self.step >= target:
                break
        else:
            raise AssertionError(f"training stands still: {batch.waiting_on}")
        assert self.d.ledger.audit() == []
        assert self.d.ledger.account()["trained_twice"] == 0


def keys(group: int, size: int) -> list[SampleKey]:
    return [SampleKey(group, member) for member in range(size)]


LedgerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedgerMachine = LedgerMachine.TestCase


@pytest.mark.parametrize("seed", range(24))
def test_a_long_run_with_faults(seed: int) -> None:
    """Hypothesis looks for short cases; this walks far, with faults as rare as steps can stand."""
    rng = random.Random(seed)
    m = LedgerMachine()
    m.start(staleness=seed % 3, wait_s=rng.choice([0.0, 10.0]))
    coin, two, pick = lambda: rng.random() < 0.5, lambda: rng.randrange(2), lambda: rng.randrange(999)
    moves: list[tuple[float, Callable[[], bool], Callable[[], None]]] = [
        (6, lambda: True, lambda: m.admit(two(), rng.randint(1, 4))),
        (14, lambda: bool(m.tickets), lambda: m.put(pick(), rng.random() < 0.1)),
        (6, lambda: True, lambda: m.take_reward(two(), rng.randint(1, 4), rng.random() < 0.2)),
        (7, lambda: bool(m.work), lambda: m.finish_reward(pick(), rng.choice(OUTCOMES))),
        (6, lambda: m.batch is None, lambda: m.take_batch(rng.choice([1, 2, 2, 2]))),
        (4, lambda: m.batch is not None, lambda: m.train()),
        (4, lambda: True, lambda: m.update_engine(two())),
        (2, lambda: True, lambda: m.tick(rng.choice([0.5, 2.0, 40.0]))),
        (0.6, lambda: True, lambda: m.checkpoint(coin())),
        (0.3, lambda: m.batch is not None, lambda: m.give_batch_up()),
        (0.3, lambda: bool(m.tickets), lambda: m.give_back(pick())),
        (0.3, lambda: True, lambda: m.kill_engine(two(), coin())),
        (0.3, lambda: True, lambda: m.kill_judge(two())),
        (0.3, lambda: True, lambda: m.kill_trainer(coin())),
        (0.3, lambda: True, lambda: m.kill_broker()),
        (0.2, lambda: True, lambda: m.take_snapshot()),
        (0.5, lambda: m.d.last is not None, lambda: m.repeat_the_last_call()),
        (0.05, lambda: len(m.checkpoints) > 1, lambda: m.newest_checkpoint_is_corrupt()),
        (0.05, lambda: True, lambda: m.node_agent_dies()),
    ]
    for _ in range(500):
        possible = [(weight, act) for weight, may, act in moves if may()]
        rng.choices([act for _, act in possible], [weight for weight, _ in possible])[0]()
        m.ledger_is_sound()
        m.path_is_ours()
        m.capacity_holds_at_admission()
    m.teardown()
