"""Rules of the ledger's random test: consumers that reward samples, and ranks that compute values together."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from ledger_driver import INLINE, Driver
from ledger_model import Model

from relax_rt.transport.memory.refs import BlockRef, Extent
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.messages import Batch, Put, RowPut, SampleKey
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
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
    ranks: list[Incarnation]
    work: list[tuple[Incarnation, Batch]]
    reads: list[tuple[Incarnation, int]]
    index: list[int]
    shared: list[Batch | None]

    def fresh(self, slot: str) -> Incarnation:
        raise NotImplementedError

    def got(self, who: Incarnation, freed: list[Extent], puts: list[Put] = ()) -> None:  # type: ignore[assignment]
        raise NotImplementedError

    def gone(self, who: Incarnation) -> None:
        raise NotImplementedError

    def sees_its_columns(self, batch: Batch) -> None:
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

    def columns(self, who: Incarnation, field: str, keys: list[SampleKey], version: int = -1) -> list[Put]:
        rows = [RowPut(key, row) for row, key in enumerate(keys)]
        if not rows:
            return []
        if len(rows) % 2:
            return [Put(BlockRef(None, len(rows), (field,), INLINE), rows, version=version)]
        return [self.d.rows(who, rows, field, version=version)]

    def complete(self, who: Incarnation, task: str, batch: Batch, outcome: str, puts: list[Put]) -> None:
        failed = {batch.samples[0].key} if outcome == "failed" and batch.samples else set()
        try:
            if outcome == "abandoned":
                self.d.call(who, ev.Abandon(batch.lease, "test"))
                self.m.abandon(who, batch.lease)
                return
            pinned = outcome == "pinned"
            freed = self.d.complete(who, task, batch, *puts, failed=sorted(failed), pinned=pinned)
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
        self.complete(who, "reward", batch, outcome, self.columns(who, "reward", keys))

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

    # --- the ranks that compute values together

    @rule(i=st.integers(0, 1), samples=st.integers(1, 4))
    def take_values(self, i: int, samples: int) -> None:
        if self.shared[i] is not None:
            return
        who, index, live = self.ranks[i], self.index[i], {lease.index: lease for lease in self.m.leases.values()}
        try:
            batch = self.d.take(who, "values", samples, stream="s", index=index, readers=2)
        except Refused:
            done = index in live and (who in live[index].finished or len(live[index].finished) > 0)
            assert done or (index < self.m.next_index and index not in live)
            self.index[i] = self.m.next_index if index not in live else index + 1
            return
        keys = [info.key for info in batch.samples]
        if index in live:
            assert (batch.lease, keys) == (live[index].id, live[index].keys)
            live[index].holders.add(who)
        elif index == self.m.next_index:
            self.chosen(keys, samples, self.m.ready("values"))
            if keys:
                self.m.grant(who, batch.lease, "values", keys, index, readers=2)
                self.sees_its_columns(batch)
        else:
            assert not batch.lease and batch.waiting_on
        if batch.lease:
            self.shared[i] = batch
            self.index[i] = index + 1

    @rule(i=st.integers(0, 1), outcome=st.sampled_from(OUTCOMES), late=st.booleans())
    def finish_values(self, i: int, outcome: str, late: bool) -> None:
        """Each rank puts the values of its half of the samples; some are of the weights before the last."""
        batch, self.shared[i] = self.shared[i], None
        if batch is None:
            return
        version = max((v for v in self.m.parents if v < self.version), default=0) if late else self.version
        keys = [info.key for info in batch.samples if info.key.member % 2 == i][outcome == "failed" :]
        self.complete(self.ranks[i], "values", batch, outcome, self.columns(self.ranks[i], "values", keys, version))

    @rule(i=st.integers(0, 1), told=st.booleans())
    def kill_rank(self, i: int, told: bool) -> None:
        if told:
            self.gone(self.ranks[i])
        self.dead.append(self.ranks[i])
        self.ranks[i] = self.fresh(f"critic/{i}")
        self.shared[i] = None
