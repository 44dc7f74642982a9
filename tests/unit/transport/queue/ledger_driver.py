"""Drives a ledger as the broker would: journals what changed, joins callers, keeps time.

A twin follows the journal alone, entry by entry, so that every replay is compared with what happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import msgspec

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Extent, owner_key
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.admission import admission_blocker, capacity_blocker
from relax_rt.transport.queue.ledger.core import ROOM
from relax_rt.transport.queue.ledger.events import JournalEntry
from relax_rt.transport.queue.ledger.machine import EventOutcome, Ledger
from relax_rt.transport.queue.ledger.messages import (
    Admission,
    BlockPut,
    Failure,
    Freed,
    GroupsPut,
    LeaseGrant,
    LeaseRequest,
    PartialChunk,
    RowPut,
    SampleInfo,
    SampleKey,
    SavedPartials,
    StepReply,
    Ticket,
    VersionSpan,
)
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.queue.ledger.selection import stragglers
from relax_rt.transport.queue.partials import partial_chunk
from relax_rt.transport.queue.samplers.builtin import load_sampler
from relax_rt.transport.rpc.identity import Incarnation

TASKS = {"reward": ("tokens",), "train": ("tokens", "reward")}
DEFAULT = QueueLimits(quarantine_after=3)
AGENT = Incarnation("agent/0", 1)
ENGINE, OTHER = Incarnation("rollout/0", 1), Incarnation("rollout/1", 2)
JUDGE, CRITIC = Incarnation("reward/0", 3), Incarnation("critic/0", 5)
TRAINER = Incarnation("trainer/0", 4)
ROW_BYTES = 1000
INLINE = b"\x01"


def policy(**changes: object) -> LedgerPolicy:
    values: dict[str, object] = {
        "group_size": 2,
        "prompts_per_step": 2,
        "max_staleness": 1,
        "tasks": TASKS,
        "straggler_wait_s": 10.0,
    }
    return LedgerPolicy(**{**values, **changes})  # type: ignore[arg-type]


def free_policy(**changes: object) -> LedgerPolicy:
    """A queue without prompts and without steps."""
    values: dict[str, object] = {"tasks": {"a": ("tokens",), "b": ("tokens", "label")}, "step_task": ""}
    return LedgerPolicy(**{**values, **changes})  # type: ignore[arg-type]


def spans(*versions: int) -> list[VersionSpan]:
    return [VersionSpan(i, i + 1, version, version) for i, version in enumerate(versions)]


def a_mark(ticket: Ticket, member: int, start: int, tokens: Sequence[tuple[int, int]]) -> PartialChunk:
    """Tokens with their versions, from `start` on; token n has the log-probability -n."""
    versions = [VersionSpan(start + n, start + n + 1, version, version) for n, (_, version) in enumerate(tokens)]
    runs = versions[:1]
    for span in versions[1:]:
        last = runs[-1]
        if last.version == span.version:
            runs[-1] = VersionSpan(last.start, span.end, span.version, span.kv_version)
        else:
            runs.append(span)
    values = [token for token, _ in tokens]
    return partial_chunk(ticket, member, start, values, [-float(token) for token in values], runs)


def fields_of(batch: LeaseGrant, info: SampleInfo) -> set[str]:
    """Names of the columns that a batch shows of a sample."""
    return {name for block, _ in info.parts for name in batch.blocks[block].fields}


class Driver:
    def __init__(self, policy: LedgerPolicy, limits: QueueLimits = DEFAULT) -> None:
        self.ledger, self.twin = Ledger(load_sampler=load_sampler), Ledger(load_sampler=load_sampler)
        self.journal: list[bytes] = []
        self.snapshot = b""
        self.now = 100.0
        self.sequence: dict[Incarnation, count[int]] = {}
        self.offsets = count(0, 4096)
        self.spilled_at = count(0, 4096)
        self.versions = count(1)
        self.last: tuple[Incarnation, int, ev.Event, object] | None = None
        self.own(ev.ConfigureQueue(policy, limits))
        self.own(ev.OpenRun("run-1"))

    def outcome(self, event: ev.Event, who: Incarnation | None, seq: int = 0) -> EventOutcome:
        before, possible = self.ledger.snapshot(), self.possible()
        # As it comes over the wire: nothing in it is shared with the caller.
        entry = wired(JournalEntry(self.ledger.n + 1, self.now, event, who, seq))
        try:
            outcome = self.ledger.apply(entry)
        except Exception:
            assert self.ledger.snapshot() == before, "a refused event left a trace"
            raise
        if outcome.changed:
            assert outcome.event is not None
            self.journal.append(msgspec.msgpack.encode(JournalEntry(entry.n, entry.at, outcome.event, who, seq)))
        else:
            assert self.ledger.snapshot() == before, "an unchanged ledger changed"
        for topic, now in ({} if isinstance(event, ev.ConfigureQueue) else self.possible()).items():
            new = now - possible.get(topic, set())
            assert not new or topic in outcome.touched, f"{event} makes {new} possible, who waits for {topic} sleeps on"
        return outcome

    def possible(self) -> dict[str, set[object]]:
        """What those who wait may get, by what they wait for."""
        core = self.ledger.core
        if core.state.policy is None:
            return {}
        found: dict[str, set[object]] = {task: set(ready) for task, ready in core.ready.items()}
        step_task, at_work = core.policy.step_task, {lease.task for lease in core.state.leases.values()}
        if step_task and core.state.trainer_version is not None:
            held = core.state.blocked_since is None or stragglers(core)
            found[step_task] = {*core.step_ready, *(["unheld"] if not held else [])}
            # Parts are granted beside others, whole batches are not.
            found[step_task] |= {("whole", id_) for id_ in core.step_ready if step_task not in at_work}
        announced = core.state.trainer_version
        may_admit = core.policy.group_size and announced is not None and not admission_blocker(core, announced)
        room = may_admit if core.policy.group_size else not capacity_blocker(core)
        found[ROOM] = {*core.state.reopened, *(["room"] if room else [])}
        return found

    def apply(self, event: ev.Event, who: Incarnation | None, seq: int = 0) -> object:
        return self.outcome(event, who, seq).answer

    def own(self, event: ev.Event) -> object:
        return self.apply(event, None)

    def call(self, who: Incarnation, event: ev.Event) -> object:
        if not self.ledger.knows(who):
            self.apply(ev.JoinQueue(), who)
        seq = next(self.sequence.setdefault(who, count(1)))
        answer = self.apply(event, who, seq)
        self.last = (who, seq, event, answer)
        return answer

    def check_replay(self) -> None:
        """A ledger that only follows the journal is the same."""
        replay(self.twin, self.journal)
        assert self.twin.snapshot() == self.ledger.snapshot()

    def entries(self) -> list[JournalEntry]:
        return [msgspec.msgpack.decode(record, type=JournalEntry) for record in self.journal]

    def restart(self) -> None:
        """Kill the broker: its successor starts from the snapshot and the journal."""
        successor = Ledger(self.snapshot, load_sampler)
        replay(successor, self.journal)
        assert successor.snapshot() == self.ledger.snapshot()
        self.ledger = successor
        self.now += 1000.0
        successor.restart_deadlines(self.now)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        due = self.ledger.due(self.now)
        if due is not None:
            self.own(due)

    # --- what producers do

    def admit(self, who: Incarnation, version: int, groups: int = 1) -> Admission:
        answer = self.call(who, ev.RequestTickets(version, groups))
        assert isinstance(answer, Admission)
        return answer

    def extent(self, who: Incarnation, nbytes: int) -> Extent:
        """Memory in a slab of the caller that was never used before."""
        return Extent(f"{owner_key(who)}-1.slab", next(self.offsets), nbytes)

    def block(self, who: Incarnation, rows: int = 1, *fields: str, nbytes: int = 0) -> BlockRef:
        return BlockRef(self.extent(who, nbytes or rows * ROW_BYTES), rows, fields or ("tokens",))

    def blob(self, who: Incarnation, digest: str, nbytes: int = 5000) -> BlobRef:
        return BlobRef(digest.encode().ljust(16), self.extent(who, nbytes))

    def rows(
        self, who: Incarnation, rows: Sequence[RowPut], *fields: str, blobs: Sequence[BlobRef] = (), version: int = -1
    ) -> BlockPut:
        return BlockPut(self.block(who, len(rows), *fields), list(rows), list(blobs), version)

    def put(self, who: Incarnation, key: SampleKey, *versions: int, length: int = -1) -> list[Extent]:
        """One sample in a block of its own."""
        return self.put_all(who, [self.rows(who, [RowPut(key, 0, length, spans(*versions))])])

    def put_all(self, who: Incarnation, puts: list[BlockPut]) -> list[Extent]:
        answer = self.call(who, ev.PutSamples(puts))
        assert isinstance(answer, Freed)
        return answer.extents

    def mark(self, who: Incarnation, ticket: Ticket, member: int, start: int, tokens: Sequence[tuple[int, int]]) -> int:
        """Tokens with their versions, from `start` on; token n has the log-probability -n."""
        answer = self.call(who, ev.SavePartials([a_mark(ticket, member, start, tokens)]))
        assert isinstance(answer, SavedPartials)
        return answer.held[0]

    def give_back(self, who: Incarnation, *groups: int, losses: int = 0) -> None:
        self.call(who, ev.ReleaseGroups(list(groups), "test", losses=losses))

    def generate(self, who: Incarnation, ticket: Ticket, version: int) -> None:
        """All members that the ticket asks for, in one block."""
        keys = [SampleKey(ticket.group, member) for member in ticket.wanted()]
        self.put_all(who, [self.rows(who, [RowPut(key, row, 1, spans(version)) for row, key in enumerate(keys)])])

    def offer(
        self, who: Incarnation, *groups: int, fields: Sequence[str] = ("tokens",), lengths: int = -1
    ) -> GroupsPut:
        """Groups of these sizes in one block."""
        keys = [SampleKey(group, member) for group, size in enumerate(groups) for member in range(size)]
        put = self.rows(who, [RowPut(key, row, lengths) for row, key in enumerate(keys)], *fields)
        answer = self.call(who, ev.PutGroups([put], list(groups)))
        assert isinstance(answer, GroupsPut)
        return answer

    # --- what consumers do

    def take(self, who: Incarnation, task: str, samples: int = 0, groups: int = 0, **want: object) -> LeaseGrant:
        answer = self.call(who, ev.RequestLease(task, LeaseRequest(samples, groups, **want)))  # type: ignore[arg-type]
        assert isinstance(answer, LeaseGrant)
        return msgspec.structs.replace(answer, samples=answer.infos(), runs=[])

    def complete(
        self,
        who: Incarnation,
        batch: LeaseGrant,
        *puts: BlockPut,
        failed: Sequence[SampleKey] = (),
        pinned: bool = False,
    ) -> list[Extent]:
        failures = [Failure(key, "bad") for key in failed]
        answer = self.call(who, ev.CompleteLease(batch.lease, list(puts), failures, pinned))
        assert isinstance(answer, Freed)
        return answer.extents

    def columns(
        self, batch: LeaseGrant, *fields: str, version: int = -1, without: Sequence[SampleKey] = ()
    ) -> list[BlockPut]:
        """A tiny block with a row for each sample of the batch."""
        keys = [info.key for info in batch.samples if info.key not in without]
        if not keys:
            return []
        block = BlockRef(None, len(keys), fields, INLINE)
        return [BlockPut(block, [RowPut(key, row) for row, key in enumerate(keys)], version=version)]

    def reward(self, who: Incarnation, batch: LeaseGrant, *failed: SampleKey, pinned: bool = False) -> list[Extent]:
        puts = self.columns(batch, "reward", without=failed)
        return self.complete(who, batch, *puts, failed=failed, pinned=pinned)

    def reward_all(self, who: Incarnation) -> None:
        while (batch := self.take(who, "reward", samples=16)).samples:
            self.reward(who, batch)

    def unpin(self, who: Incarnation, *leases: int) -> list[Extent]:
        answer = self.call(who, ev.UnpinLeases(list(leases)))
        assert isinstance(answer, Freed)
        return answer.extents

    # --- what the trainer does

    def rollback(self, trainer: Incarnation, step: int, parent: int, *, changed: bool = False) -> int:
        version = next(self.versions)
        self.call(trainer, ev.Rollback(step, VersionRecord(version, parent, step, changed=changed)))
        return version

    def trained(self, who: Incarnation, batch: LeaseGrant, step: int, parent: int) -> int:
        version = next(self.versions)
        answer = self.call(who, ev.CompleteStep([batch.lease], step, VersionRecord(version, parent, step)))
        assert isinstance(answer, StepReply)
        return version

    def skip(self, who: Incarnation, batch: LeaseGrant, step: int, weights: VersionRecord) -> None:
        """The step came to nothing; the weights are the ones of before."""
        self.call(who, ev.CompleteStep([batch.lease], step, weights, skipped=True))

    def weights(self) -> VersionRecord:
        """The trainer's weights."""
        state = self.ledger.state
        return next(record for record in state.versions if record.version == state.trainer_version)

    def committed(self, who: Incarnation, step: int) -> None:
        self.call(who, ev.Commit(step, f"step-{step}"))

    # --- what the node does

    def gone(self, who: Incarnation) -> None:
        self.call(AGENT, ev.ProcessExited(who, "killed"))

    def reopen(self, run_id: str = "run-1") -> None:
        """A broker begins to serve; another run id means that shared memory is another one."""
        self.own(ev.OpenRun(run_id))

    def spill(self) -> list[Extent]:
        """Copy what should go to disk; answers with the copies that are of no use."""
        moves = [
            (id_, Extent("spill-1-1.slab", next(self.spilled_at), extent.nbytes))
            for id_, extent in self.ledger.to_spill()
        ]
        return self.moved(moves)

    def moved(self, moves: list[tuple[int, Extent]]) -> list[Extent]:
        answer = self.own(ev.MoveBlocks(moves))
        assert isinstance(answer, Freed)
        return answer.extents


def started(limits: QueueLimits = DEFAULT, **changes: object) -> tuple[Driver, int]:
    """A queue whose trainer has announced its first weights."""
    d = Driver(policy(**changes), limits)
    return d, d.rollback(TRAINER, 0, 0, changed=True)


def make(d: Driver, version: int, groups: int = 1, who: Incarnation = ENGINE) -> list[Ticket]:
    """Whole groups."""
    tickets = d.admit(who, version, groups).tickets
    for ticket in tickets:
        d.generate(who, ticket, version)
    return tickets


def step(d: Driver, number: int, version: int, who: Incarnation = TRAINER) -> int:
    """Reward everything and train on two groups."""
    d.reward_all(JUDGE)
    batch = d.take(who, "train", groups=2)
    assert batch.samples, batch.waiting_on
    return d.trained(who, batch, number, version)


def wired(entry: JournalEntry) -> JournalEntry:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=JournalEntry)


def replay(ledger: Ledger, journal: Sequence[bytes]) -> None:
    """Bring a ledger up to the end of the journal."""
    for record in journal[ledger.n :]:
        entry = msgspec.msgpack.decode(record, type=JournalEntry)
        assert ledger.apply(entry).changed and ledger.n == entry.n
