"""A store's ledger with its journal, three callers, and extents that are given out once."""

from __future__ import annotations

from typing import Any

import msgspec

from relax_rt.transport.compat.store import ledger as ev
from relax_rt.transport.compat.store.api import FetchedRows, FoundRows, RowNames, StoreConfig, StoredRows
from relax_rt.transport.compat.store.ledger import StoreLedger, StoreOutcome
from relax_rt.transport.memory.refs import BlockRef, Extent
from relax_rt.transport.rpc.identity import Incarnation

WHO = {name: Incarnation(f"{name}/0", epoch) for epoch, name in enumerate("abc", 1)}


class Driver:
    def __init__(self, config: StoreConfig | None = None, limits: ev.StoreLimits | None = None) -> None:
        self.ledger, self.journal = StoreLedger(), list[bytes]()
        self.seq = dict.fromkeys(WHO, 0)
        self.offset = 0
        self.free: list[Extent] = []
        self.enter(ev.StoreOpened("memory", limits or ev.StoreLimits()))
        for who in WHO.values():
            self.enter(ev.CallerJoined(who, 1, 1))
        if config is not None:
            self.call("a", ev.ConfigureStore(config))

    def enter(self, event: Any, who: Incarnation | None = None, seq: int = 0) -> StoreOutcome:
        entry = ev.StoreEntry(self.ledger.state.n + 1, event, who, seq)
        outcome = self.ledger.apply(entry)
        if outcome.changed:
            self.journal.append(msgspec.msgpack.encode(entry))
        return outcome

    def outcome(self, name: str, event: ev.StoreCall) -> StoreOutcome:
        """All that a call did."""
        self.seq[name] += 1
        return self.enter(event, WHO[name], self.seq[name])

    def call(self, name: str, event: ev.StoreCall, *, seq: int = 0) -> Any:
        """The reply to a call; `seq` repeats an older one."""
        if seq:
            return self.enter(event, WHO[name], seq).reply
        reply = self.outcome(name, event).reply
        self.free += reply if isinstance(reply, list) else getattr(reply, "freed", [])
        return reply

    def gone(self, name: str) -> None:
        self.enter(ev.CallerGone(WHO[name]))

    def block(self, name: str, rows: int, fields: tuple[str, ...]) -> BlockRef:
        """A block of 64 bytes a row in a slab of the caller's."""
        extent = Extent(f"{name}-0-{WHO[name].epoch}-1.slab", self.offset, 64 * rows)
        self.offset += extent.nbytes
        return BlockRef(extent, rows, fields)

    def put(self, name: str, partition: str, keys: list[str], *fields: str, **more: Any) -> StoredRows:
        block = self.block(name, len(keys), fields) if fields else None
        reply = self.call(name, ev.PutRows(RowNames(partition, keys), block=block, **more))
        assert isinstance(reply, StoredRows)
        return reply

    def get(self, name: str, rows: RowNames, fields: list[str] | None = None) -> FetchedRows:
        reply = self.call(name, ev.GetRows(rows, fields))
        assert isinstance(reply, FetchedRows)
        return reply

    def sample(self, task: str, batch: int, *fields: str, **more: Any) -> list[int]:
        reply = self.call("a", ev.SampleRows("p", task, list(fields), batch, **more))
        assert isinstance(reply, FoundRows)
        return reply.indexes

    def replayed(self) -> StoreLedger:
        """A ledger made from the journal."""
        ledger = StoreLedger()
        for record in self.journal:
            assert ledger.apply(msgspec.msgpack.decode(record, type=ev.StoreEntry)).changed
        return ledger
