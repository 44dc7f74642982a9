"""A ledger that only its keyed store is used of, with its journal and callers."""

from __future__ import annotations

from typing import Any

import msgspec

from relax_rt.transport.compat.store import state as sv
from relax_rt.transport.compat.store.api import Fetched, Found, Rows, StoreConfig, Stored
from relax_rt.transport.memory.refs import BlockRef, Extent
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.events import Entry
from relax_rt.transport.queue.ledger.machine import Ledger, Outcome
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.identity import Incarnation

POLICY = LedgerPolicy(tasks={"none": ("x",)}, step_task="")
WHO = {name: Incarnation(f"{name}/0", epoch) for epoch, name in enumerate("abc", 1)}


class Driver:
    """A ledger with its journal, and extents that are given out once."""

    def __init__(
        self, config: StoreConfig | None = None, limits: QueueLimits | None = None, policy: LedgerPolicy = POLICY
    ) -> None:
        self.ledger, self.journal = Ledger(), list[bytes]()
        self.seq = dict.fromkeys(WHO, 0)
        self.offset = 0
        self.free: list[Extent] = []
        self.enter(ev.Configure(policy, limits or QueueLimits()))
        self.enter(ev.OpenRun("run"))
        for who in WHO.values():
            self.enter(ev.Join(issued=True), who)
        if config is not None:
            self.call("a", sv.Configure(config))

    def enter(self, event: ev.Event, who: Incarnation | None = None, seq: int = 0) -> Any:
        return self._applied(event, who, seq).answer

    def _applied(self, event: ev.Event, who: Incarnation | None, seq: int) -> Outcome:
        entry = Entry(self.ledger.n + 1, 0.0, event, who, seq)
        outcome = self.ledger.apply(entry)
        if outcome.changed:
            assert outcome.event is not None
            self.journal.append(msgspec.msgpack.encode(Entry(entry.n, 0.0, outcome.event, who, seq)))
        return outcome

    def outcome(self, name: str, event: sv.StoreEvent) -> Outcome:
        """All that a call of the store did."""
        self.seq[name] += 1
        return self._applied(ev.StoreCall(event), WHO[name], self.seq[name])

    def call(self, name: str, event: sv.StoreEvent, *, seq: int = 0) -> Any:
        """A call of the store; `seq` repeats an older one."""
        if not seq:
            self.seq[name] += 1
        answer = self.enter(ev.StoreCall(event), WHO[name], seq or self.seq[name])
        if not seq:
            self.free += answer if isinstance(answer, list) else getattr(answer, "freed", [])
        return answer

    def gone(self, name: str) -> None:
        self.enter(ev.ProcessExited(WHO[name], "killed"))

    def block(self, name: str, rows: int, fields: tuple[str, ...]) -> BlockRef:
        """A block of 64 bytes a row in a slab of the caller's."""
        extent = Extent(f"{name}-0-{WHO[name].epoch}-1.slab", self.offset, 64 * rows)
        self.offset += extent.nbytes
        return BlockRef(extent, rows, fields)

    def put(self, name: str, partition: str, keys: list[str], *fields: str, **more: Any) -> Stored:
        block = self.block(name, len(keys), fields) if fields else None
        answer = self.call(name, sv.Put(Rows(partition, keys), block=block, **more))
        assert isinstance(answer, Stored)
        return answer

    def get(self, name: str, rows: Rows, fields: list[str] | None = None) -> Fetched:
        answer = self.call(name, sv.Get(rows, fields))
        assert isinstance(answer, Fetched)
        return answer

    def sample(self, task: str, batch: int, *fields: str, **more: Any) -> list[int]:
        answer = self.call("a", sv.Sample("p", task, list(fields), batch, **more))
        assert isinstance(answer, Found)
        return answer.indexes

    def replayed(self) -> Ledger:
        """A ledger made from the journal."""
        ledger = Ledger()
        for record in self.journal:
            assert ledger.apply(msgspec.msgpack.decode(record, type=Entry)).changed
        return ledger
