"""Rules of the ledger's random test: consumers that reward samples, and critics that compute their values."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from ledger_driver import INLINE, Driver
from ledger_model import Model

from relax_rt.transport.memory.refs import BlockRef, Extent
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.messages import BlockPut, LeaseGrant, RowPut, SampleKey
from relax_rt.transport.rpc.errors import StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation

OUTCOMES = ("done", "done", "done", "done", "pinned", "failed", "abandoned")
PICK = st.integers(0, 999)


class Consumers(RuleBasedStateMachine):
    """Those who work on samples; what they do is told to the model too."""

    d: Driver
    m: Model
    version: int
    dead: list[Incarnation]
    judges: list[Incarnation]
    critics: list[Incarnation]
    work: list[tuple[Incarnation, LeaseGrant]]
    reads: list[tuple[Incarnation, int]]
    values: list[LeaseGrant | None]

    def fresh(self, slot: str) -> Incarnation:
        raise NotImplementedError

    def got(self, who: Incarnation, freed: list[Extent], puts: list[BlockPut] = ()) -> None:  # type: ignore[assignment]
        raise NotImplementedError

    def gone(self, who: Incarnation) -> None:
        raise NotImplementedError

    def sees_its_columns(self, batch: LeaseGrant) -> None:
        pins = self.m.leases[batch.lease].pins
        assert {block.extent for block in batch.blocks if block.extent} <= set(pins)
        assert {blob.extent for blob in batch.blobs} <= set(pins)
        for info in batch.samples:
            shown = {(batch.blocks[block].extent, row) for block, row in info.parts}
            assert shown == {(part.block.extent, part.row) for part in self.m.sample(info.key).parts}

    # --- reward workers

    @rule(i=st.integers(0, 1), samples=st.integers(1, 4), whole=st.booleans())
    def take_reward(self, i: int, samples: int, whole: bool) -> None:
        batch = self.d.take(self.judges[i], "reward", samples, groups=1 if whole else 0)
        keys = [info.key for info in batch.samples]
        if whole:
            may = self.m.whole("reward")
            assert set(keys) == may[keys[0].group] if keys else not may
        else:
            self.chosen(keys, samples, self.m.ready("reward"))
        if keys:
            self.m.grant(self.judges[i], batch.lease, "reward", keys)
            self.sees_its_columns(batch)
            self.work.append((self.judges[i], batch))

    def chosen(self, keys: list[SampleKey], samples: int, ready: set[SampleKey]) -> None:
        """As many as were wanted, or one that is suspected to kill its consumers."""
        alone = len(keys) == 1 and self.m.sample(keys[0]).deaths >= self.m.limits.quarantine_after - 1
        assert set(keys) <= ready and (alone or len(keys) == min(samples, len(ready)))

    def columns(self, who: Incarnation, field: str, keys: list[SampleKey], version: int = -1) -> list[BlockPut]:
        rows = [RowPut(key, row) for row, key in enumerate(keys)]
        if not rows:
            return []
        if len(rows) % 2:
            return [BlockPut(BlockRef(None, len(rows), (field,), INLINE), rows, version=version)]
        return [self.d.rows(who, rows, field, version=version)]

    def complete(self, who: Incarnation, batch: LeaseGrant, outcome: str, puts: list[BlockPut]) -> None:
        failed = {batch.samples[0].key} if outcome == "failed" and batch.samples else set()
        try:
            if outcome == "abandoned":
                self.d.call(who, ev.ReleaseLease(batch.lease, "test"))
                self.m.abandon(who, batch.lease)
                return
            pinned = outcome == "pinned"
            freed = self.d.complete(who, batch, *puts, failed=sorted(failed), pinned=pinned)
        except StaleEpoch:
            assert who in self.dead
            return
        self.m.complete(who, batch.lease, puts, failed, pinned)
        self.got(who, freed, puts)
        if pinned:
            self.reads.append((who, batch.lease))

    @precondition(lambda self: self.work)
    @rule(pick=PICK, outcome=st.sampled_from(OUTCOMES))
    def finish_reward(self, pick: int, outcome: str) -> None:
        who, batch = self.work.pop(pick % len(self.work))
        keys = [info.key for info in batch.samples][outcome == "failed" :]
        self.complete(who, batch, outcome, self.columns(who, "reward", keys))

    @precondition(lambda self: self.reads)
    @rule(pick=PICK)
    def read_no_more(self, pick: int) -> None:
        who, lease = self.reads.pop(pick % len(self.reads))
        if who not in self.dead:
            freed = self.d.unpin(who, lease)
            self.m.unpin(who, lease)
            self.got(who, freed)

    @rule(i=st.integers(0, 1))
    def kill_judge(self, i: int) -> None:
        self.gone(self.judges[i])
        self.judges[i] = self.fresh(f"reward/{i}")

    # --- critics

    @rule(i=st.integers(0, 1), samples=st.integers(1, 4))
    def take_values(self, i: int, samples: int) -> None:
        if self.values[i] is not None:
            return
        batch = self.d.take(self.critics[i], "values", samples)
        keys = [info.key for info in batch.samples]
        self.chosen(keys, samples, self.m.ready("values"))
        if keys:
            self.m.grant(self.critics[i], batch.lease, "values", keys)
            self.sees_its_columns(batch)
            self.values[i] = batch

    @rule(i=st.integers(0, 1), outcome=st.sampled_from(OUTCOMES), late=st.booleans())
    def finish_values(self, i: int, outcome: str, late: bool) -> None:
        """Some values are of the weights before the last."""
        batch, self.values[i] = self.values[i], None
        if batch is None:
            return
        version = max((v for v in self.m.parents if v < self.version), default=0) if late else self.version
        keys = [info.key for info in batch.samples][outcome == "failed" :]
        self.complete(self.critics[i], batch, outcome, self.columns(self.critics[i], "values", keys, version))

    @rule(i=st.integers(0, 1), told=st.booleans())
    def kill_critic(self, i: int, told: bool) -> None:
        if told:
            self.gone(self.critics[i])
        self.dead.append(self.critics[i])
        self.critics[i] = self.fresh(f"critic/{i}")
        self.values[i] = None
