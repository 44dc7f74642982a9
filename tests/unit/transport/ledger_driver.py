"""Drives a ledger as the broker would: journals what changed, joins callers, keeps time."""

from __future__ import annotations

from itertools import count

from relax_rt.transport.identity import Incarnation
from relax_rt.transport.ledger import Entry, Ledger, LedgerPolicy, QueueLimits
from relax_rt.transport.ledger import events as ev
from relax_rt.transport.queue.api import Admission, Batch, Column, Failure, Freed, Put, SampleKey, Ticket, VersionSpan
from relax_rt.transport.versions import VersionRecord

TASKS = {"reward": ("tokens",), "train": ("tokens", "reward")}
DEFAULT = QueueLimits(quarantine_after=3)
AGENT = Incarnation("agent/0", 1)


def policy(**changes: object) -> LedgerPolicy:
    values: dict[str, object] = {
        "group_size": 2,
        "prompts_per_step": 2,
        "max_staleness": 1,
        "tasks": TASKS,
        "straggler_wait_s": 10.0,
    }
    return LedgerPolicy(**{**values, **changes})  # type: ignore[arg-type]


class Driver:
    def __init__(self, policy: LedgerPolicy, limits: QueueLimits = DEFAULT) -> None:
        self.ledger = Ledger()
        self.journal: list[Entry] = []
        self.snapshot = b""
        self.now = 100.0
        self.sequence: dict[Incarnation, count[int]] = {}
        self.offsets = count(0, 4096)
        self.versions = count(1)
        self.last: tuple[Incarnation, int, ev.Event, object] | None = None
        self.own(ev.Configure(policy, limits))
        self.own(ev.Open("run-1"))

    def apply(self, event: ev.Event, who: Incarnation | None, seq: int = 0) -> object:
        before = self.ledger.snapshot()
        entry = Entry(self.ledger.n + 1, self.now, event, who, seq)
        try:
            outcome = self.ledger.apply(entry)
        except Exception:
            assert self.ledger.snapshot() == before, "a refused event left a trace"
            raise
        if outcome.changed:
            self.journal.append(entry)
        else:
            assert self.ledger.snapshot() == before, "an unchanged ledger changed"
        return outcome.answer

    def own(self, event: ev.Event) -> None:
        self.apply(event, None)

    def call(self, who: Incarnation, event: ev.Event) -> object:
        if not self.ledger.knows(who):
            self.apply(ev.Join(), who)
        seq = next(self.sequence.setdefault(who, count(1)))
        answer = self.apply(event, who, seq)
        self.last = (who, seq, event, answer)
        return answer

    def restart(self) -> None:
        """Kill the broker: its successor starts from the snapshot and the journal."""
        successor = Ledger(self.snapshot)
        for entry in self.journal:
            if entry.n > successor.n:
                assert successor.apply(entry).changed
        assert successor.snapshot() == self.ledger.snapshot()
        self.ledger = successor
        self.now += 1000.0
        successor.restart_deadlines(self.now)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        due = self.ledger.due(self.now)
        if due is not None:
            self.own(due)

    # --- what roles do

    def rollback(self, trainer: Incarnation, step: int, parent: int, *, changed: bool = False) -> int:
        version = next(self.versions)
        self.call(trainer, ev.Rollback(step, VersionRecord(version, parent, step, changed=changed)))
        return version

    def admit(self, who: Incarnation, version: int, groups: int = 1) -> Admission:
        answer = self.call(who, ev.Admit(version, groups))
        assert isinstance(answer, Admission)
        return answer

    def columns(self, who: Incarnation, name: str = "tokens") -> list[Column]:
        slab = f"{who.slot.replace('/', '-')}-{who.epoch}-1.slab"
        return [Column(name, "|u1", (1000,), slab, next(self.offsets), 1000)]

    def put(self, who: Incarnation, key: SampleKey, *versions: int) -> list[Freed]:
        spans = [VersionSpan(i, i + 1, version, version) for i, version in enumerate(versions)]
        answer = self.call(who, ev.PutColumns([Put(key, self.columns(who), spans)]))
        assert isinstance(answer, list)
        return answer

    def generate(self, who: Incarnation, ticket: Ticket, version: int) -> None:
        for member in range(ticket.size):
            self.put(who, SampleKey(ticket.group, member), version)

    def take(self, who: Incarnation, task: str, samples: int = 0, groups: int = 0) -> Batch:
        answer = self.call(who, ev.Take(task, samples, groups))
        assert isinstance(answer, Batch)
        return answer

    def reward(self, who: Incarnation, batch: Batch, *failed: SampleKey) -> list[Freed]:
        puts = [
            Put(info.key, [Column("reward", "msgpack", (1,), inline=b"\x01")])
            for info in batch.samples
            if info.key not in failed
        ]
        answer = self.call(who, ev.Complete("reward", batch.lease, puts, [Failure(key, "bad") for key in failed]))
        assert isinstance(answer, list)
        return answer

    def reward_all(self, who: Incarnation) -> None:
        while (batch := self.take(who, "reward", samples=16)).samples:
            self.reward(who, batch)

    def trained(self, who: Incarnation, batch: Batch, step: int, parent: int) -> int:
        version = next(self.versions)
        self.call(who, ev.Trained(batch.lease, step, VersionRecord(version, parent, step)))
        return version

    def committed(self, who: Incarnation, step: int) -> None:
        self.call(who, ev.Committed(step, f"step-{step}"))

    def gone(self, who: Incarnation) -> None:
        self.call(AGENT, ev.Gone(who, "killed"))
