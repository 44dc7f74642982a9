"""Random producers, consumers, trainers, kills, restarts and roll-backs, beside a naive model of the ledger."""

from __future__ import annotations

from collections import Counter
from itertools import count

import ledger_views as views
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from ledger_consumers import PICK, Consumers
from ledger_driver import Driver, a_mark, policy, spans
from ledger_model import TRAIN, Model
from msgspec import structs

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.refs import Extent, extents_in, owner_key
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.admission import load_partials
from relax_rt.transport.queue.ledger.messages import (
    Admission,
    BlockPut,
    GroupsPut,
    ItemsAssigned,
    LeaseGrant,
    RowPut,
    SampleKey,
    SavedPartials,
    Ticket,
)
from relax_rt.transport.queue.ledger.policy import QueueLimits
from relax_rt.transport.queue.partials import decode_partial
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation

TASKS = {"reward": ("tokens",), "values": ("tokens",), TRAIN: ("tokens", "reward", "values")}
SPILLED = "spill-1-1.slab"
CHOICES = st.fixed_dictionaries(
    {
        "max_staleness": st.sampled_from([0.0, 1.0, 2.0]),
        "straggler_wait_s": st.sampled_from([0.0, 10.0]),
        "on_straggler": st.sampled_from(["wait", "wait", "requeue", "mask"]),
        "on_failed_member": st.sampled_from(["regenerate", "regenerate", "shrink", "drop"]),
        "frozen_by": st.sampled_from(["", "values"]),
        "over_provision": st.sampled_from([0, 1]),
        "on_surplus": st.sampled_from(["drop", "recycle"]),
        "group_size": st.sampled_from([2, 3]),
    }
)


class LedgerMachine(Consumers):
    """Each rule is a call; the model is told what came of it, and must then look as the ledger does."""

    @initialize(choices=CHOICES)
    def start(self, choices: dict[str, object]) -> None:
        self.policy = policy(tasks=TASKS, versioned=("values",), failures_per_prompt=3, **choices)
        limits = QueueLimits(
            quarantine_after=4,
            capacity_bytes=40_000,
            high_water=0.3,
            spill_bytes=15_000,
            partial_bytes=250,
            partials_bytes=900,
        )
        self.tokens = count(1)
        self.d, self.m = Driver(self.policy, limits), Model(self.policy, limits)
        self.epochs, self.worlds = count(10), count(2)
        self.dead: list[Incarnation] = []
        self.brought: dict[str, set[Extent]] = {}
        self.returned: dict[str, list[Extent]] = {}
        self.checkpoints = {0: 0}
        self.copied: list[tuple[int, Extent, Extent]] = []
        self.new_node()

    def new_node(self) -> None:
        self.engines = [self.fresh(f"rollout/{i}") for i in range(2)]
        self.judges = [self.fresh(f"reward/{i}") for i in range(2)]
        self.critics = [self.fresh(f"critic/{i}") for i in range(2)]
        self.engine_version = [0, 0]
        self.tickets: dict[int, tuple[Incarnation, Ticket, list[int]]] = {}
        self.work: list[tuple[Incarnation, LeaseGrant]] = []
        self.values: list[LeaseGrant | None] = [None, None]
        self.reads: list[tuple[Incarnation, int]] = []
        self.new_trainer()

    # --- who speaks

    def fresh(self, slot: str) -> Incarnation:
        who = Incarnation(slot, next(self.epochs))
        self.d.apply(ev.JoinQueue(), who)
        self.m.end_work(lambda other: other.slot == slot and other.epoch < who.epoch, dead=False)
        return who

    def got(self, who: Incarnation, freed: list[Extent], puts: list[BlockPut] = ()) -> None:  # type: ignore[assignment]
        self.brought.setdefault(owner_key(who), set()).update(extents_in(puts))
        self.returned.setdefault(owner_key(who), []).extend(freed)

    def gone(self, who: Incarnation) -> None:
        self.d.gone(who)
        self.m.gone(who)
        self.dead.append(who)

    # --- trainer

    def new_trainer(self) -> None:
        self.trainer = self.fresh("trainer/0")
        self.resume_from(max(self.checkpoints))

    def resume_from(self, step: int) -> None:
        self.batches: list[LeaseGrant] = []
        parent = self.checkpoints[step]
        self.version = next(self.d.versions)
        self.m.parents[self.version] = (parent, parent == 0)
        self.d.call(self.trainer, ev.Rollback(step, VersionRecord(self.version, parent, step, changed=parent == 0)))
        self.m.rollback(self.trainer, step, self.version)
        self.step = step
        self.checkpoints = {s: v for s, v in self.checkpoints.items() if s <= step}
        self.checkpoints[step] = self.version

    @precondition(lambda self: len(self.batches) < 3)
    @rule(groups=st.integers(1, 3), part=st.sampled_from([0, 0, 1]))
    def take_batch(self, groups: int, part: int) -> None:
        batch = self.d.take(self.trainer, TRAIN, groups=groups, at_least=part)
        keys = self.m.may_train(self.trainer, groups, self.d.now, part=bool(part))
        assert [info.key for info in batch.samples] == keys
        if not batch.samples:
            assert batch.waiting_on
            return
        self.batches.append(batch)
        bound = self.policy.max_staleness
        for info in batch.samples:
            lags = {span: self.m.lag(span.version) for span in info.versions}
            shown = {span: lag for span, lag in lags.items() if (span.start, span.end) not in info.masked}
            assert info.staleness == max(shown.values()) <= bound
            assert all(lag > bound for span, lag in lags.items() if span not in shown)
        self.m.grant(self.trainer, batch.lease, TRAIN, keys)
        self.sees_its_columns(batch)

    @precondition(lambda self: self.batches)
    @rule(skipped=st.sampled_from([False, False, False, True]), left=st.sampled_from([0, 0, 0, 1]))
    def train(self, skipped: bool, left: int) -> None:
        """A step over all that was taken for it; now and then one batch is forgotten."""
        batches, self.batches = self.batches[: len(self.batches) - left] or self.batches, []
        ids = [batch.lease for batch in batches]
        version = self.version if skipped else next(self.d.versions)
        record = self.d.weights() if skipped else VersionRecord(version, self.version, self.step + 1)
        try:
            self.d.call(self.trainer, ev.CompleteStep(ids, self.step + 1, record, skipped))
        except Refused:
            assert not self.m.leases.keys() >= set(ids)
            self.resume_from(max(self.checkpoints))
            return
        if not skipped:
            self.m.parents[version] = (self.version, True)
        self.step, self.version = self.step + 1, version
        self.m.step_done(self.trainer, ids, self.step, version, skipped=skipped)

    @precondition(lambda self: self.batches)
    @rule(pick=PICK, whole=st.booleans(), pinned=st.booleans())
    def filter_groups(self, pick: int, whole: bool, pinned: bool) -> None:
        """A group of a batch is left out of the step, or all of them."""
        batch = self.batches[pick % len(self.batches)]
        groups = sorted({info.key.group for info in batch.samples})[: None if whole else 1]
        try:
            self.d.call(self.trainer, ev.FilterGroups(batch.lease, groups, "rule: why", pinned))
        except Refused:
            assert batch.lease not in self.m.leases
            return
        self.m.filter(self.trainer, batch.lease, groups, pinned=pinned)
        rest = structs.replace(batch, samples=[info for info in batch.samples if info.key.group not in groups])
        self.batches = [rest if one is batch else one for one in self.batches if one is not batch or rest.samples]
        if pinned and not rest.samples:
            self.reads.append((self.trainer, batch.lease))

    @rule(groups=st.integers(0, 2))
    def ask(self, groups: int) -> None:
        self.d.call(self.trainer, ev.RequestSurplus(groups))
        self.m.ask(groups)

    @rule(items=st.dictionaries(st.integers(0, 8), st.integers(0, 50), max_size=3))
    def choose(self, items: dict[int, int]) -> None:
        """The items of places around the first that was not given out."""
        places = {max(0, self.m.cursor - 2 + place): item for place, item in items.items()}
        answer = self.d.call(self.trainer, ev.AssignItems(places))
        self.m.choose(places)
        assert answer == ItemsAssigned(self.m.cursor)

    @rule(i=st.integers(0, 1), groups=st.integers(1, 2), update=st.booleans(), rounds=st.integers(1, 2))
    def whole_step(self, i: int, groups: int, update: bool, rounds: int) -> None:
        """Everything from prompt to step, so that random runs get anywhere."""
        if not self.batches:
            for _ in range(rounds):
                if update:
                    self.update_engine(i)
                self.admit(i, groups)
            for id_ in [id_ for id_, (engine, _, _) in self.tickets.items() if engine == self.engines[i]]:
                self.put(sorted(self.tickets).index(id_), 9, interrupted=False, blob="cat", with_next=False)
            self.consume_all()
            self.take_batch(groups, 0)
        if self.batches:
            self.train(False, 0)

    def consume_all(self) -> None:
        for _ in range(8):
            self.take_reward(0, 16, whole=False)
            while self.work:
                self.finish_reward(0, "done")
            for i in (0, 1):
                self.take_values(i, 16)
            for i in (0, 1):
                self.finish_values(i, "done", late=False)
            if not self.m.ready("reward") | self.m.ready("values"):
                break

    @precondition(lambda self: self.batches)
    @rule(fail=st.booleans())
    def give_batch_up(self, fail: bool) -> None:
        batch = self.batches.pop(0)
        if not fail:
            self.d.call(self.trainer, ev.ReleaseLease(batch.lease, "test"))
            self.m.abandon(self.trainer, batch.lease)
            return
        bad = batch.samples[0].key
        self.d.complete(self.trainer, batch, failed=[bad])
        self.m.complete(self.trainer, batch.lease, [], {bad}, pinned=False)

    @rule(tell=st.booleans())
    def checkpoint(self, tell: bool) -> None:
        self.checkpoints[self.step] = self.version
        if tell:
            self.d.committed(self.trainer, self.step)
            self.m.commit(self.step)

    @rule(told=st.booleans())
    def kill_trainer(self, told: bool) -> None:
        if told:
            self.gone(self.trainer)
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
        self.m.admit(engine, version, groups, answer.tickets)
        for ticket in answer.tickets:
            self.tickets[ticket.group] = (engine, ticket, list(ticket.wanted()))

    @precondition(lambda self: self.tickets)
    @rule(
        pick=PICK,
        members=st.integers(1, 3),
        interrupted=st.booleans(),
        blob=st.sampled_from(["", "cat", "dog"]),
        with_next=st.booleans(),
    )
    def put(self, pick: int, members: int, interrupted: bool, blob: str, with_next: bool) -> None:
        """Members of a ticket, and of the engine's next one, in one block."""
        ids = sorted(self.tickets)
        first = ids[pick % len(ids)]
        engine = self.tickets[first][0]
        mine = [first, *[id_ for id_ in ids if id_ > first and self.tickets[id_][0] == engine][:with_next]]
        keys = [SampleKey(id_, member) for id_ in mine for member in self.tickets[id_][2][:members]]
        group = self.m.groups.get(first)
        base = group.base if group is not None else self.version
        made_with = spans(*([base, self.version] if interrupted else [base]))
        rows = [RowPut(key, row, 1, made_with) for row, key in enumerate(keys)]
        puts = [self.d.rows(engine, rows, blobs=[self.d.blob(engine, blob)] if blob else [])]
        for id_ in mine:
            del self.tickets[id_][2][:members]
            if not self.tickets[id_][2]:
                del self.tickets[id_]
        try:
            freed = self.d.put_all(engine, puts)
        except StaleEpoch:
            assert engine in self.dead
            return
        self.m.put(engine, puts)
        self.got(engine, freed, puts)

    @precondition(lambda self: self.tickets)
    @rule(
        pick=PICK,
        members=st.integers(1, 3),
        tokens=st.integers(1, 6),
        back=st.sampled_from([0, 0, 0, 1, 3, -1]),
        interrupted=st.booleans(),
        late=st.sampled_from([False, False, False, True]),
    )
    def mark(self, pick: int, members: int, tokens: int, back: int, interrupted: bool, late: bool) -> None:
        """More tokens of members of a ticket: from where the last mark ended, before it, or beyond it."""
        id_ = sorted(self.tickets)[pick % len(self.tickets)]
        engine, ticket, todo = self.tickets[id_]
        ticket = structs.replace(ticket, issue=ticket.issue - late)
        group = self.m.groups.get(id_)
        base = group.base if group is not None else self.version
        marks, expected = [], []
        for member in todo[:members]:
            have = len(group.samples[member].partial) if group is not None else 0
            new = [(next(self.tokens), self.version if interrupted and n % 2 else base) for n in range(tokens)]
            marks.append((member, max(0, have - back), new))
        try:
            held = self.d.call(engine, ev.SavePartials([a_mark(ticket, *one) for one in marks]))
        except StaleEpoch:
            assert engine in self.dead
            return
        for member, start, new in marks:
            expected.append(self.m.mark(engine, ticket.issue, SampleKey(id_, member), start, new))
        assert held == SavedPartials(expected)

    @precondition(lambda self: self.tickets)
    @rule(pick=PICK)
    def fetch_partials(self, pick: int) -> None:
        """Whoever holds the group gets what is kept, and nobody else."""
        id_ = sorted(self.tickets)[pick % len(self.tickets)]
        engine, _, todo = self.tickets[id_]
        found = load_partials(self.d.ledger.core, engine, [SampleKey(id_, member) for member in todo])
        group = self.m.groups.get(id_)
        mine = group is not None and group.holder == engine
        kept = {n: group.samples[n].partial for n in todo if n in group.making} if group is not None and mine else {}
        assert {mark.key.member for mark in found} == {n for n, mark in kept.items() if mark}
        for mark in found:
            assert decode_partial(mark).tokens == [token for token, _ in kept[mark.key.member]]

    @precondition(lambda self: self.tickets)
    @rule(pick=PICK, losses=st.sampled_from([0, 1, 3]))
    def give_back(self, pick: int, losses: int) -> None:
        id_ = sorted(self.tickets)[pick % len(self.tickets)]
        engine, _, _ = self.tickets.pop(id_)
        if engine not in self.dead:
            self.d.give_back(engine, id_, losses=losses)
            self.m.give_up(lambda group: group.id == id_ and group.holder == engine, "dropped(returned)", losses)

    @rule(i=st.integers(0, 1), told=st.booleans())
    def kill_engine(self, i: int, told: bool) -> None:
        if told:
            self.gone(self.engines[i])
        self.dead.append(self.engines[i])
        self.engines[i] = self.fresh(f"rollout/{i}")

    # --- disk

    @rule()
    def copy_to_disk(self) -> None:
        references = self.m.references()
        moves = self.d.ledger.to_spill()
        self.copied = [(id_, old, Extent(SPILLED, next(self.d.spilled_at), old.nbytes)) for id_, old in moves]
        assert all(references[old] == 1 and not old.slab.startswith("spill") for _, old, _ in self.copied)
        assert not moves or self.m.payload_bytes() > 12_000

    @precondition(lambda self: self.copied)
    @rule()
    def copies_are_there(self) -> None:
        copied, self.copied = self.copied, []
        useless = self.d.moved([(id_, new) for id_, _, new in copied])
        assert useless == self.m.spilled([(old, new) for _, old, new in copied])

    # --- the broker, time and repetition

    @rule(seconds=st.sampled_from([1.0, 5.0, 45.0]))
    def tick(self, seconds: float) -> None:
        self.d.now += seconds
        due = self.d.ledger.due(self.d.now)
        if due is None:
            return
        self.d.own(due)
        for id_ in due.groups:
            self.m.give_up(lambda group, id_=id_: group.id == id_, "dropped(lapsed)")  # type: ignore[misc]
        for id_ in due.leases:
            self.m.lapse(self.m.leases[id_], pinned=True)

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
        if who in self.dead or (isinstance(answer, LeaseGrant | Admission | GroupsPut) and answer.waiting_on):
            return  # nothing was done, and may be done now
        again = self.d.outcome(event, who, seq)
        assert not again.changed
        if isinstance(event, ev.RequestLease):
            lease = self.m.leases.get(answer.lease)  # type: ignore[attr-defined]
            pins = set(lease.pins) if lease is not None else set()
            assert isinstance(again.answer, LeaseGrant)
            assert {block.extent for block in again.answer.blocks if block.extent} <= pins
        else:
            assert again.answer == answer

    @rule()
    def node_agent_dies(self) -> None:
        self.d.reopen(f"run-{next(self.worlds)}")
        self.m.new_memory()
        self.dead += [*self.engines, *self.judges, *self.critics, self.trainer]
        self.brought, self.returned, self.copied, self.d.last = {}, {}, [], None
        self.new_node()

    # --- what must hold

    @invariant()
    def ledger_is_sound(self) -> None:
        assert self.d.ledger.audit() == []

    @invariant()
    def marks_are_bounded(self) -> None:
        state = self.d.ledger.state
        assert state.partials_bytes <= state.limits.partials_bytes
        held = [sample.partial for group in state.groups.values() for sample in group.samples if sample.partial]
        assert all(mark.nbytes <= state.limits.partial_bytes for mark in held)

    @invariant()
    def ledger_is_as_the_model(self) -> None:
        theirs, ours = views.of_ledger(self.d.ledger.state), views.of_model(self.m)
        for what, expected in ours.items():
            assert theirs[what] == expected, what

    @invariant()
    def memory_comes_back_once(self) -> None:
        live = self.m.references()
        for owner in self.d.ledger.state.callers.replies:
            back = [*self.returned.get(owner, []), *self.d.ledger.state.blocks.freed.get(owner, [])]
            assert Counter(back) == Counter(self.brought.get(owner, set()) - live.keys())

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        on_path = [group for records in self.m.path.values() for group, _ in records]
        assert not [id_ for id_, times in Counter(group.id for group in on_path).items() if times > 1]
        assert not [prompt for prompt, times in Counter(group.prompt for group in on_path).items() if times > 1]
        assert not set(self.m.filtered) & {*(group.prompt for group in on_path), *self.m.waiting}
        assert len(self.m.filtered) == len(set(self.m.filtered))
        account = self.d.ledger.account()
        assert account["trained_twice"] == account["prompts_trained_twice"] == 0

    def teardown(self) -> None:
        """Once the faults end, training goes on."""
        if not hasattr(self, "d"):
            return
        self.d.check_replay()
        self.copied, self.values, self.work = [], [None, None], []
        for who in list(self.dead):
            self.gone(who)  # those whose end nobody noticed may be reading still
        for i in (0, 1):
            self.kill_critic(i, told=True)
            self.kill_judge(i)
            self.kill_engine(i, told=True)
        self.tickets.clear()
        self.kill_trainer(told=True)
        target = self.step + 4
        for _ in range(60):
            self.tick(11.0)
            self.whole_step(0, 2, update=True, rounds=2)
            self.checkpoint(tell=True)
            if self.step >= target:
                break
        else:
            raise AssertionError(f"training stands still: {self.d.take(self.trainer, TRAIN, groups=2).waiting_on}")
        self.ledger_is_sound()
        self.ledger_is_as_the_model()
        self.memory_comes_back_once()
        self.nothing_is_trained_twice()


LedgerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedgerMachine = LedgerMachine.TestCase
