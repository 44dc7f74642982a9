"""A queue without prompts and steps beside a naive model of it: offer, take in order, complete, finish."""

from __future__ import annotations

from collections import Counter
from itertools import count

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_driver import ROW_BYTES, Driver, free_policy

from relax_rt.transport.memory.refs import BlockRef, Extent, extents_in, owner_key
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.messages import BlockPut, GroupsPut, LeaseGrant, RowPut, SampleKey
from relax_rt.transport.queue.ledger.policy import QueueLimits
from relax_rt.transport.rpc.identity import Incarnation

TASKS = {"judge": ("tokens",), "index": ("tokens", "label"), "pair": ("tokens",)}
OUTCOMES = ("done", "done", "done", "pinned", "failed", "abandoned", "silent")
PICK = st.integers(0, 999)
LIMITS = QueueLimits(quarantine_after=3, capacity_bytes=30_000, capacity_samples=25, high_water=0.5, spill_bytes=9_000)


class Work:
    """A lease of the model: what was taken, by whom, and which memory it sees."""

    def __init__(self, who: Incarnation, task: str, batch: LeaseGrant, pins: set[Extent]) -> None:
        self.who, self.task, self.batch, self.pins = who, task, batch, pins
        self.keys = [info.key for info in batch.samples]


class FreeQueueMachine(RuleBasedStateMachine):
    """The model: who waits for which task in which order, where each sample's columns lie, who reads what."""

    tasks = TASKS

    @initialize()
    def start(self) -> None:
        self.d = Driver(free_policy(tasks=self.tasks), LIMITS)
        self.epochs = count(10)
        self.producer = Incarnation("producer/0", next(self.epochs))
        self.readers = [Incarnation(f"reader/{i}", next(self.epochs)) for i in range(2)]
        self.queues: dict[str, list[SampleKey]] = {task: [] for task in TASKS}
        self.places: dict[SampleKey, list[BlockPut]] = {}
        self.lengths: dict[SampleKey, int] = {}
        self.done: dict[SampleKey, set[str]] = {}
        self.deaths: Counter[SampleKey] = Counter()
        self.groups: dict[int, set[SampleKey]] = {}
        self.moved: dict[Extent, Extent] = {}
        self.working: list[Work] = []
        self.reading: list[Work] = []
        self.ended: Counter[str] = Counter()
        self.offered = 0
        self.brought: dict[str, set[Extent]] = {}
        self.returned: dict[str, list[Extent]] = {}
        self.homes: dict[bytes, Extent] = {}

    # --- memory

    def puts_in_use(self) -> list[BlockPut]:
        return list({id(put): put for puts in self.places.values() for put in puts}.values())

    def place_of(self, put: BlockPut) -> Extent | None:
        return self.moved.get(put.block.extent, put.block.extent) if put.block.extent is not None else None

    def seen_through(self, puts: list[BlockPut]) -> set[Extent]:
        found = {self.place_of(put) for put in puts} | {self.homes[blob.digest] for put in puts for blob in put.blobs}
        return found - {None}  # type: ignore[return-value]

    def live(self) -> set[Extent]:
        return self.seen_through(self.puts_in_use()).union(*(w.pins for w in [*self.working, *self.reading]))

    def used_bytes(self) -> int:
        return sum(extent.nbytes for extent in self.live() if not extent.slab.startswith("spill"))

    def got(self, who: Incarnation, freed: list[Extent], puts: list[BlockPut] = ()) -> None:  # type: ignore[assignment]
        self.brought.setdefault(owner_key(who), set()).update(extents_in(puts))
        self.returned.setdefault(owner_key(who), []).extend(freed)

    # --- producers

    @rule(
        sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
        blob=st.sampled_from(["", "", "cat", "dog"]),
        length=st.integers(1, 9),
        form=st.sampled_from(["short", "one block", "two blocks"]),
    )
    def offer(self, sizes: list[int], blob: str, length: int, form: str) -> None:
        who, n = self.producer, sum(sizes)
        keys = [SampleKey(group, member) for group, size in enumerate(sizes) for member in range(size)]
        blobs = [self.d.blob(who, blob, 2000)] if blob else []
        if form == "short":
            puts = [BlockPut(self.d.block(who, n), [], blobs, lengths=[length] * n)]
        else:
            parts = [keys] if form == "one block" or n == 1 else [keys[::2], keys[1::2]]
            puts = [self.d.rows(who, [RowPut(k, row, length) for row, k in enumerate(part)]) for part in parts]
        full = self.used_bytes() >= LIMITS.capacity_bytes or len(self.places) + n > LIMITS.capacity_samples
        answer = self.d.call(who, ev.PutGroups(puts, sizes))
        assert isinstance(answer, GroupsPut) and bool(answer.waiting_on) == full == (not answer.groups)
        if full:
            return
        named = {one.digest for put in self.puts_in_use() for one in put.blobs}
        for one in blobs if form == "short" else []:
            if one.digest not in named:
                self.homes[one.digest] = one.extent
        for key in keys:
            group = answer.groups[key.group]
            mine = SampleKey(group, key.member)
            self.places[mine] = [p for p in puts if not p.rows or key in [row.key for row in p.rows]]
            self.groups.setdefault(group, set()).add(mine)
            self.lengths[mine], self.done[mine] = length, set()
            for task, fields in self.tasks.items():
                if fields == ("tokens",):
                    self.queues[task].append(mine)
        self.offered += n
        self.got(who, answer.freed, puts)

    @rule(n=st.integers(1, 9), length=st.integers(1, 9))
    def offer_run(self, n: int, length: int) -> None:
        """Samples that the ledger keeps as one record."""
        self.offer([1] * n, "", length, "short")

    @rule()
    def new_producer(self) -> None:
        """The old one dies; what it offered stays."""
        self.d.gone(self.producer)
        self.producer = Incarnation("producer/0", next(self.epochs))

    # --- consumers

    @rule(
        i=st.integers(0, 1), task=st.sampled_from(sorted(TASKS)), n=st.integers(1, 5), tokens=st.sampled_from([0, 12])
    )
    def take(self, i: int, task: str, n: int, tokens: int) -> None:
        expected = self.queues[task][:n]
        if tokens:
            total, within = 0, 0
            for key in expected:
                total += self.lengths[key]
                if total > tokens and within:
                    break
                within += 1
            expected = expected[:within]
        # One that its consumers' next death would set aside goes alone.
        suspects = [key for key in expected if self.deaths[key] >= LIMITS.quarantine_after - 1]
        expected = suspects[:1] or expected
        self.granted(i, task, self.d.take(self.readers[i], task, n, tokens=tokens), expected)

    @rule(i=st.integers(0, 1), groups=st.integers(1, 2))
    def take_groups(self, i: int, groups: int) -> None:
        waiting = self.queues["pair"]
        whole: list[list[SampleKey]] = []
        for id_ in dict.fromkeys(key.group for key in waiting):
            keys = sorted(key for key in self.groups[id_] if "pair" not in self.done[key])
            if set(keys) <= set(waiting):
                whole.append(keys)
        expected = [key for keys in whole[:groups] for key in keys] if len(whole) >= groups else []
        self.granted(i, "pair", self.d.take(self.readers[i], "pair", groups=groups), expected)

    def granted(self, i: int, task: str, batch: LeaseGrant, expected: list[SampleKey]) -> None:
        assert [info.key for info in batch.samples] == expected
        assert bool(batch.lease) == bool(expected) != bool(batch.waiting_on)
        if not expected:
            return
        puts = [put for key in expected for put in self.places[key]]
        self.working.append(Work(self.readers[i], task, batch, self.seen_through(puts)))
        self.queues[task] = [key for key in self.queues[task] if key not in expected]
        for info in batch.samples:
            assert info.length == self.lengths[info.key]
            shown = {batch.blocks[block].extent for block, _ in info.parts}
            assert shown == {self.place_of(put) for put in self.places[info.key]}

    @precondition(lambda self: self.working)
    @rule(pick=PICK, outcome=st.sampled_from(OUTCOMES))
    def finish(self, pick: int, outcome: str) -> None:
        work = self.working.pop(pick % len(self.working))
        if outcome == "abandoned":
            self.d.call(work.who, ev.ReleaseLease(work.batch.lease, "test"))
            self.back(work)
            return
        failed = [work.keys[0]] if outcome == "failed" else []
        held = [key for key in work.keys if key in self.places]
        puts: list[BlockPut] = []
        if work.task == "judge" and outcome != "silent":
            rows = [RowPut(key, row) for row, key in enumerate(key for key in work.keys if key not in failed)]
            if rows:
                puts = [self.d.rows(work.who, rows, "label")]
        freed = self.d.complete(work.who, work.batch, *puts, failed=failed, pinned=outcome == "pinned")
        self.got(work.who, freed, puts)
        for key in failed:
            if key in held:
                self.end(key, "failed")
        for key in [key for key in held if key not in failed]:
            self.done[key].add(work.task)
            self.deaths[key] = 0
            self.places[key] += puts
        # What becomes ready at the same time does so group by group.
        order = list(dict.fromkeys(key.group for key in work.keys))
        for key in sorted(held, key=lambda key: (order.index(key.group), key.member)):
            if puts and key not in failed and "label" in self.tasks["index"]:
                self.queues["index"].append(key)
        for key in held:
            if key in self.places and self.is_stuck(key):
                self.end(key, "failed")
        self.finish_groups()
        if outcome == "pinned":
            self.reading.append(work)

    def is_stuck(self, key: SampleKey) -> bool:
        """Done with by all, or lacking what nobody will put."""
        busy = any(key in work.keys for work in self.working) or any(key in queue for queue in self.queues.values())
        return not busy and self.done[key] != set(TASKS)

    def end(self, key: SampleKey, state: str) -> None:
        self.ended[state] += 1
        del self.places[key], self.done[key]
        self.groups[key.group].discard(key)
        for queue in self.queues.values():
            if key in queue:
                queue.remove(key)

    def finish_groups(self) -> None:
        for keys in [keys for keys in self.groups.values() if keys and all(self.done[k] == set(TASKS) for k in keys)]:
            for key in list(keys):
                self.end(key, "finished")

    def back(self, work: Work) -> None:
        """Its samples go before the others again, in their order."""
        self.queues[work.task][:0] = [key for key in work.keys if key in self.places]

    @precondition(lambda self: self.reading)
    @rule(pick=PICK)
    def read_no_more(self, pick: int) -> None:
        work = self.reading.pop(pick % len(self.reading))
        self.got(work.who, self.d.unpin(work.who, work.batch.lease))

    # --- deaths

    def lapse(self, work: Work) -> None:
        for key in work.keys:
            self.deaths[key] += key in self.places
        self.back(work)
        for id_ in {key.group for key in work.keys}:
            bad = {key for key in self.groups[id_] if self.deaths[key] >= LIMITS.quarantine_after}
            for key in list(self.groups[id_]) if bad else []:
                self.end(key, "quarantined" if key in bad else "dropped(sibling)")

    @rule(i=st.integers(0, 1))
    def kill_reader(self, i: int) -> None:
        self.d.gone(self.readers[i])
        for work in [work for work in reversed(self.working) if work.who == self.readers[i]]:
            self.working.remove(work)
            self.lapse(work)
        self.reading = [work for work in self.reading if work.who != self.readers[i]]
        self.readers[i] = Incarnation(f"reader/{i}", next(self.epochs))

    @rule(seconds=st.sampled_from([20.0, 61.0]))
    def tick(self, seconds: float) -> None:
        self.d.now += seconds
        due = self.d.ledger.due(self.d.now)
        if due is None:
            return
        self.d.own(due)
        late = {work.batch.lease: work for work in self.working}
        for id_ in reversed(due.leases):
            self.working.remove(late[id_])
            self.lapse(late[id_])
            self.reading.append(late[id_])  # it may still be reading

    # --- disk and broker

    @rule()
    def spill(self) -> None:
        moves = self.d.ledger.to_spill()
        read = set().union(*(work.pins for work in [*self.working, *self.reading]))
        blobs = set(self.homes.values())
        assert not read & {extent for _, extent in moves} and not blobs & {extent for _, extent in moves}
        copies = [(id_, Extent("spill-1-1.slab", next(self.d.spilled_at), old.nbytes)) for id_, old in moves]
        assert self.d.moved(copies) == []
        self.moved.update({old: new for (_, old), (_, new) in zip(moves, copies, strict=True)})

    @rule(keep=st.booleans())
    def kill_broker(self, keep: bool) -> None:
        if keep:
            self.d.snapshot = self.d.ledger.snapshot()
        self.d.restart()
        # Which of several ready samples came first is not in a snapshot: they are offered in the order of their names.
        ready = self.d.ledger.core.ready
        for task, queue in self.queues.items():
            assert set(ready[task]) == set(queue)
            self.queues[task] = list(ready[task])

    @precondition(lambda self: self.d.last is not None)
    @rule()
    def repeat_the_last_call(self) -> None:
        assert self.d.last is not None
        who, seq, event, answer = self.d.last
        if who in (self.producer, *self.readers) and not getattr(answer, "waiting_on", ""):
            again = self.d.outcome(event, who, seq)
            assert not again.changed
            assert isinstance(event, ev.RequestLease) or again.answer == answer

    # --- what must hold

    @invariant()
    def ledger_is_sound(self) -> None:
        assert self.d.ledger.audit() == []

    @invariant()
    def samples_are_where_they_should_be(self) -> None:
        assert {task: list(queue) for task, queue in self.d.ledger.core.ready.items()} == self.queues
        account = self.d.ledger.account()
        assert {name: n for name, n in account.items() if n and name in self.ended} == dict(self.ended)
        assert account["samples_issued"] == self.offered == len(self.places) + self.ended.total()
        assert self.d.ledger.core.held == len(self.places)

    @invariant()
    def memory_is_what_is_needed(self) -> None:
        live, table = self.live(), self.d.ledger.state.blocks
        assert {(slab, at) for slab, at_ in table.live.items() for at in at_} == {(e.slab, e.offset) for e in live}
        for owner in self.d.ledger.state.callers.replies:
            back = [*self.returned.get(owner, []), *table.freed.get(owner, [])]
            assert Counter(back) == Counter(self.brought.get(owner, set()) - live)

    def teardown(self) -> None:
        """In the end everything is finished, and no memory is held."""
        if not hasattr(self, "d"):
            return
        self.d.check_replay()
        for i in (0, 1):
            self.kill_reader(i)
        for _ in range(99):
            for task in ("judge", "pair", "index"):
                self.take(0, task, 99, 0)
            while self.working:
                self.finish(0, "done")
            if not any(self.queues.values()):
                break
        assert not self.places
        self.memory_is_what_is_needed()


FreeQueueMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestFreeQueueMachine = FreeQueueMachine.TestCase


class PackedQueueMachine(FreeQueueMachine):
    """Each task can work on what was just put, so that most samples end as part of the record of their put."""

    tasks = dict.fromkeys(TASKS, ("tokens",))

    def offer(self, sizes: list[int], blob: str, length: int, form: str) -> None:
        """No rule here: groups of several samples are never packed, and would stand in front of those that are."""
        super().offer(sizes, blob, length, form)

    def kill_reader(self, i: int) -> None:
        """No rule either, so that most leases live long enough to be completed."""
        super().kill_reader(i)

    @precondition(lambda self: any(self.queues.values()))
    @rule(
        i=st.integers(0, 1), task=st.sampled_from(sorted(TASKS)), n=st.integers(1, 9), outcome=st.sampled_from(OUTCOMES)
    )
    def take_and_finish(self, i: int, task: str, n: int, outcome: str) -> None:
        """The oldest work or the newest, mostly without new columns."""
        self.take(i, task, n, 0)
        if self.working:
            self.finish(0 if n % 2 else len(self.working) - 1, "silent" if outcome == "done" else outcome)

    @precondition(lambda self: any(self.queues.values()))
    @rule(i=st.integers(0, 1), task=st.sampled_from(sorted(TASKS)), n=st.integers(1, 9))
    def take_some(self, i: int, task: str, n: int) -> None:
        self.take(i, task, n, 0)


PackedQueueMachine.TestCase.settings = FreeQueueMachine.TestCase.settings
TestPackedQueueMachine = PackedQueueMachine.TestCase


def test_the_block_of_an_offer_is_freed_with_its_last_sample() -> None:
    m = FreeQueueMachine()
    m.start()
    m.offer([1, 1], "cat", 3, "short")
    for _ in range(2):
        for task in ("judge", "pair", "index"):
            m.take(0, task, 1, 0)
            m.finish(0, "done")
            m.memory_is_what_is_needed()
    assert not m.live() and m.d.ledger.account()["finished"] == 2
    assert len(m.returned["producer-0-10"]) + len(m.d.ledger.state.blocks.freed["producer-0-10"]) == 2
    assert m.d.extent(m.producer, ROW_BYTES).slab == "producer-0-10-1.slab"
    assert BlockRef(None, 0, ()).extent is None
