"""Long generations must not be lost more often than short ones: the lengths trained on follow the lengths generated.

The policy is frozen: publications move the version, the distribution of lengths stays. A generation takes time in
proportion to its length, engines work in parallel, and a sequence in flight goes on over an update with its tokens.

Declared beforehand: SEEDS, at least MIN_TRAINED trained samples, two-sample Kolmogorov-Smirnov with p above ALPHA, and
below CONTROL for a queue that drops what an update overtakes.

Groups beyond the bound (over_provision) cost a bias to short ones: a step takes what ends first, and what is dropped is
drawn anew. Declared beforehand, on SURPLUS_SEEDS: the control, `drop`, is told apart (p below CONTROL); with `recycle`
the mean length is below the generated one by at most MAX_SHORTENED of it, which `drop` exceeds.
"""

from __future__ import annotations

import bisect
import math
import random
from collections import deque
from statistics import fmean
from typing import Any

import pytest
from sim_kernel import Kernel

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.refs import BlockRef
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.events import JournalEntry
from relax_rt.transport.queue.ledger.machine import Ledger
from relax_rt.transport.queue.ledger.messages import BlockPut, LeaseRequest, RowPut, SampleKey, Ticket, VersionSpan
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.identity import Incarnation

SEEDS = (1, 2, 3, 4, 5)
MIN_TRAINED = 5_000
ALPHA = 0.01
CONTROL = 1e-4
SURPLUS_SEEDS, SURPLUS_GROUPS, MAX_SHORTENED = (1, 2), 4, 0.1
GROUP, GROUPS = 4, 16
SLOTS = 48
"""Sequences that are generated at the same time."""
TOKENS_PER_S = 100.0
STEP_S = 3.0
MEDIAN_TOKENS, SIGMA = 200, 1.0
ENGINE, JUDGE, TRAINER = Incarnation("rollout/0", 1), Incarnation("reward/0", 1), Incarnation("trainer/0", 1)


def kolmogorov(x: float) -> float:
    """Q(x), the chance that the Kolmogorov distribution exceeds x."""
    if x < 0.2:
        return 1.0
    return min(1.0, max(0.0, 2 * sum(math.exp(-2 * k * k * x * x) * (1 if k % 2 else -1) for k in range(1, 101))))


def two_sample_p(a: list[int], b: list[int]) -> float:
    """p of the two-sample Kolmogorov-Smirnov test, asymptotic with the correction of Stephens (J. R. Stat. Soc. B 32,
    1970, 115-122). With ties, as lengths have them, the true p is larger: the test is on the safe side."""
    a, b = sorted(a), sorted(b)
    values = sorted({*a, *b})
    d = max(abs(bisect.bisect_right(a, x) / len(a) - bisect.bisect_right(b, x) / len(b)) for x in values)
    root = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    return kolmogorov((root + 0.12 + 0.11 / root) * d)


def draw(rng: random.Random) -> int:
    return max(1, min(round(rng.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)), 16_384))


class FrozenPolicyRun:
    """Engines, a reward that takes no time, and a trainer, on the ledger itself."""

    def __init__(
        self, seed: int, on_straggler: str, max_staleness: float, *, parts: bool = False, **surplus: object
    ) -> None:
        self.parts = parts
        self.taken: list[tuple[int, list[SampleKey]]] = []
        self.kernel, self.ledger, self.rng = Kernel(seed), Ledger(), random.Random(seed)
        self.policy = LedgerPolicy(
            tasks={"reward": ("tokens",), "train": ("tokens", "reward")},
            group_size=GROUP,
            prompts_per_step=GROUPS,
            max_staleness=max_staleness,
            on_straggler=on_straggler,  # type: ignore[arg-type]
            straggler_wait_s=1e6,
            **surplus,  # type: ignore[arg-type]
        )
        self.version = self.step = 0
        self.begun: list[int] = []
        self.trained: list[int] = []
        self.length: dict[SampleKey, int] = {}
        self.waiting: deque[tuple[Ticket, int]] = deque()
        self.busy = 0
        self.training = False
        self.started = 0.0
        self.apply(ev.ConfigureQueue(self.policy, QueueLimits(lease_s=1e7, capacity_bytes=1 << 40)), None)
        self.apply(ev.OpenRun("run-1"), None)
        for who in (ENGINE, JUDGE, TRAINER):
            self.apply(ev.JoinQueue(), who)
        self.publish(ev.Rollback(0, VersionRecord(1, 0, 0)))

    def apply(self, event: ev.Event, who: Incarnation | None) -> Any:
        return self.ledger.apply(JournalEntry(self.ledger.n + 1, self.kernel.now, event, who)).answer

    def publish(self, event: ev.Rollback | ev.CompleteStep) -> None:
        """Engines serve the new weights at once, also in the middle of a sequence."""
        self.apply(event, TRAINER)
        self.version = event.weights.version

    def run(self, steps: int) -> None:
        self.go_on()
        assert self.kernel.run(lambda: self.step >= steps, 1e7), self.ledger.account()

    def go_on(self) -> None:
        """Whatever can begin begins."""
        while self.busy < SLOTS and (self.waiting or self.admit()):
            ticket, member = self.waiting.popleft()
            self.begin(SampleKey(ticket.group, member), draw(self.rng), self.version)
        if not self.training:
            self.take()

    def take(self) -> None:
        """What is ready of a step, in parts or all of it; the last of it begins the training."""
        lacking = GROUPS - len({key.group for _, keys in self.taken for key in keys})
        batch = self.apply(ev.RequestLease("train", LeaseRequest(groups=lacking, at_least=int(self.parts))), TRAINER)
        if not batch.samples:
            return
        keys = [info.key for info in batch.samples]
        self.taken.append((batch.lease, keys))
        if len({key.group for key in keys}) == lacking:
            self.training = True
            self.kernel.after(STEP_S, self.stepped)

    def admit(self) -> bool:
        tickets = self.apply(ev.RequestTickets(self.version, 4), ENGINE).tickets
        self.waiting.extend((ticket, member) for ticket in tickets for member in ticket.wanted())
        return bool(tickets)

    def begin(self, key: SampleKey, length: int, version: int) -> None:
        self.begun.append(length)
        self.busy += 1
        self.kernel.after(length / TOKENS_PER_S, lambda: self.generated(key, length, version))

    def generated(self, key: SampleKey, length: int, first: int) -> None:
        self.busy -= 1
        spans = [VersionSpan(n, n + 1, version, version) for n, version in enumerate(range(first, self.version + 1))]
        self.length[key] = length
        block = BlockRef(None, 1, ("tokens",), b"x")
        self.apply(ev.PutSamples([BlockPut(block, [RowPut(key, 0, length, spans)])]), ENGINE)
        while (batch := self.apply(ev.RequestLease("reward", LeaseRequest(samples=64)), JUDGE)).samples:
            rows = [RowPut(info.key, row) for row, info in enumerate(batch.samples)]
            put = BlockPut(BlockRef(None, len(rows), ("reward",), b"x"), rows)
            self.apply(ev.CompleteLease(batch.lease, [put], []), JUDGE)
        self.go_on()

    def stepped(self) -> None:
        self.training, self.step = False, self.step + 1
        taken, self.taken = self.taken, []
        self.trained += [self.length[key] for _, keys in taken for key in keys]
        leases = [lease for lease, _ in taken]
        self.publish(ev.CompleteStep(leases, self.step, VersionRecord(self.version + 1, self.version, self.step)))
        self.apply(ev.Commit(self.step, "x"), TRAINER)
        self.go_on()


def ran(seed: int, on_straggler: str, max_staleness: float, **settings: Any) -> FrozenPolicyRun:
    """A run that has trained on enough."""
    run = FrozenPolicyRun(seed, on_straggler, max_staleness, **settings)
    run.run(-(-MIN_TRAINED // (GROUP * GROUPS)) + 2)
    assert len(run.trained) >= MIN_TRAINED
    return run


def lengths(seed: int, on_straggler: str, max_staleness: float, *, parts: bool = False) -> tuple[list[int], list[int]]:
    """What was trained on, and all that was begun to be generated."""
    run = ran(seed, on_straggler, max_staleness, parts=parts)
    return run.trained, run.begun


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_under_wait_the_trained_lengths_follow_the_generated_ones(seed: int, parts: bool) -> None:
    trained, begun = lengths(seed, "wait", 1.0, parts=parts)
    assert two_sample_p(trained, begun) > ALPHA
    other = random.Random(1_000_000 + seed)
    assert two_sample_p(trained, [draw(other) for _ in range(20_000)]) > ALPHA


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_test_tells_a_queue_apart_that_drops_what_an_update_overtakes(seed: int) -> None:
    trained, begun = lengths(seed, "requeue", 1.0)
    assert two_sample_p(trained, begun) < CONTROL
    other = random.Random(1_000_000 + seed)
    assert two_sample_p(trained, [draw(other) for _ in range(20_000)]) < CONTROL


@pytest.mark.parametrize("seed", SURPLUS_SEEDS)
def test_surplus_that_goes_on_shortens_little_and_surplus_that_is_dropped_is_told_apart(seed: int) -> None:
    other = random.Random(1_000_000 + seed)
    generated = [draw(other) for _ in range(20_000)]
    runs = {
        on_surplus: ran(seed, "wait", 1.0, over_provision=SURPLUS_GROUPS, on_surplus=on_surplus)
        for on_surplus in ("drop", "recycle")
    }
    least = (1 - MAX_SHORTENED) * fmean(generated)
    assert fmean(runs["recycle"].trained) >= least > fmean(runs["drop"].trained)
    assert two_sample_p(runs["drop"].trained, generated) < CONTROL
    assert all(run.ledger.audit() == [] for run in runs.values())


def test_the_statistic_is_the_one_of_the_tables() -> None:
    # Critical values of the Kolmogorov distribution (Smirnov 1948).
    for x, p in ((1.2238, 0.10), (1.3581, 0.05), (1.6276, 0.01), (1.9495, 0.001)):
        assert math.isclose(kolmogorov(x), p, rel_tol=2e-3)
    rng = random.Random(7)
    same = [two_sample_p([draw(rng) for _ in range(300)], [draw(rng) for _ in range(300)]) for _ in range(400)]
    assert 0.02 < sum(p < 0.1 for p in same) / 400 < 0.17
    longer = [x + 20 for x in (draw(rng) for _ in range(5000))]
    assert two_sample_p(longer, [draw(rng) for _ in range(5000)]) < CONTROL
