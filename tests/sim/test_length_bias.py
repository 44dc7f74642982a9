"""With a frozen policy the lengths trained on are those generated: waiting for stragglers loses no long sample.

Declared beforehand: the seeds, the sizes, and p > 0.01 of the Kolmogorov-Smirnov test. The negative control makes
stragglers again at once, which trains on short samples too often, and the same test must tell it apart.
"""

from __future__ import annotations

import heapq
import math
import random
from itertools import count

import pytest

from relax_rt.transport.identity import Incarnation
from relax_rt.transport.ledger import Entry, Ledger, LedgerPolicy, QueueLimits
from relax_rt.transport.ledger import events as ev
from relax_rt.transport.queue.api import Admission, Batch, BlockRef, Put, RowPut, SampleKey, Ticket, VersionSpan, Want
from relax_rt.transport.versions import VersionRecord

SEEDS = (1, 2, 3)
TRAINED = 6_000
GROUP, GROUPS = 4, 16
ENGINES, MU, SIGMA = 32, 4.0, 0.8
TOKENS_PER_S = 100.0
TRAINER = Incarnation("trainer/0", 1)


def ks_p_value(first: list[float], second: list[float]) -> float:
    """Asymptotic p of the two-sample Kolmogorov-Smirnov test (Numerical Recipes, 3rd edition, section 14.3.3)."""
    a, b = sorted(first), sorted(second)
    i = j = 0
    distance = 0.0
    while i < len(a) and j < len(b):
        x = min(a[i], b[j])
        while i < len(a) and a[i] <= x:
            i += 1
        while j < len(b) and b[j] <= x:
            j += 1
        distance = max(distance, abs(i / len(a) - j / len(b)))
    root = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    at = (root + 0.12 + 0.11 / root) * distance
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * at) ** 2) for k in range(1, 101)))


class Run:
    """Engines that each generate one group at a time, all its members at once; a trainer that takes what is ready."""

    def __init__(self, seed: int, on_straggler: str) -> None:
        self.rng = random.Random(seed)
        self.ledger = Ledger()
        self.now = 0.0
        self.versions, self.numbers = count(1), count(1)
        self.generated: dict[SampleKey, float] = {}
        self.trained: list[float] = []
        self.offsets = count()
        self.busy: list[tuple[float, int, Ticket]] = []
        self.idle = [Incarnation(f"rollout/{i}", 10 + i) for i in range(ENGINES)]
        self.engines = {who.epoch: who for who in self.idle}
        self.known = {TRAINER, *self.idle}
        policy = LedgerPolicy(
            tasks={"train": ("tokens",)},
            group_size=GROUP,
            prompts_per_step=GROUPS,
            max_staleness=1,
            on_straggler=on_straggler,  # type: ignore[arg-type]
            straggler_wait_s=1e6,
        )
        self.apply(ev.Configure(policy, QueueLimits(lease_s=1e6, capacity_bytes=1 << 40)))
        self.apply(ev.Open("run"))
        for who in self.known:
            self.apply(ev.Join(), who)
        self.version = next(self.versions)
        self.call(TRAINER, ev.Rollback(0, VersionRecord(self.version, 0, 0)))

    def apply(self, event: ev.Event, who: Incarnation | None = None, seq: int = 0) -> object:
        return self.ledger.apply(Entry(self.ledger.n + 1, self.now, event, who, seq)).answer

    def call(self, who: Incarnation, event: ev.Event) -> object:
        return self.apply(event, who, next(self.numbers))

    def start_groups(self) -> None:
        waiting: list[Incarnation] = []
        for who in self.idle:
            answer = self.call(who, ev.Admit(self.version, 1))
            assert isinstance(answer, Admission)
            if not answer.tickets:
                waiting.append(who)
                continue
            (ticket,) = answer.tickets
            lengths = [math.ceil(self.rng.lognormvariate(MU, SIGMA)) for _ in ticket.wanted()]
            for member, length in zip(ticket.wanted(), lengths, strict=True):
                self.generated[SampleKey(ticket.group, member)] = length
            heapq.heappush(self.busy, (self.now + max(lengths) / TOKENS_PER_S, who.epoch, ticket))
        self.idle = waiting

    def finish_group(self) -> None:
        self.now, epoch, ticket = heapq.heappop(self.busy)
        who = self.engines[epoch]
        rows = [
            RowPut(
                SampleKey(ticket.group, member),
                row,
                int(self.generated[SampleKey(ticket.group, member)]),
                [VersionSpan(0, 1, ticket.version, ticket.version)],
            )
            for row, member in enumerate(ticket.wanted())
        ]
        self.call(who, ev.PutColumns([Put(BlockRef(None, len(rows), ("tokens",), b"x"), rows)]))
        self.idle.append(who)

    def train(self) -> None:
        while len(self.trained) < TRAINED:
            batch = self.call(TRAINER, ev.Take("train", Want(groups=GROUPS)))
            assert isinstance(batch, Batch)
            if not batch.samples:
                return
            self.trained += [self.generated[info.key] for info in batch.samples]
            parent, self.version = self.version, next(self.versions)
            record = VersionRecord(self.version, parent, len(self.trained))
            self.call(TRAINER, ev.Trained(batch.lease, len(self.trained), record))
            self.call(TRAINER, ev.Committed(len(self.trained), "checkpoint"))

    def run(self) -> None:
        while len(self.trained) < TRAINED:
            self.start_groups()
            self.finish_group()
            self.train()


def drawn(seed: int) -> list[float]:
    rng = random.Random(1000 + seed)
    return [math.ceil(rng.lognormvariate(MU, SIGMA)) for _ in range(50_000)]


@pytest.mark.parametrize("seed", SEEDS)
def test_under_wait_the_lengths_trained_on_are_those_generated(seed: int) -> None:
    run = Run(seed, "wait")
    run.run()
    assert len(run.trained) >= 5_000
    assert ks_p_value(run.trained, drawn(seed)) > 0.01


@pytest.mark.parametrize("seed", SEEDS)
def test_making_stragglers_again_is_told_apart(seed: int) -> None:
    run = Run(seed, "requeue")
    run.run()
    assert ks_p_value(run.trained, drawn(seed)) < 1e-6
    assert run.ledger.account()["dropped(straggler)"] > 0
