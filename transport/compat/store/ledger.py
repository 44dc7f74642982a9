"""The store's ledger: applies events one after the other, refuses what cannot be, and answers repeated calls alike.

Deterministic and without input or output: the broker journals each event that changed something, and a ledger that
replays the journal is in the same state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

import msgspec

from relax_rt.transport.compat.store import state as ev
from relax_rt.transport.compat.store.api import FetchedRows, FoundRows, StoreConfig, StoredRows
from relax_rt.transport.compat.store.rows import RowTable
from relax_rt.transport.compat.store.state import KeptAnswer, StoreCaller, StoreState
from relax_rt.transport.memory.arena import PlacedBlock
from relax_rt.transport.memory.refs import Extent, is_spilled, owner_key, unfit_slot
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation

ROOM, ROWS = "room", "rows"
"""What calls wait for: puts for room, samples for rows."""
ANSWERS_KEPT = 128
"""Answers kept for each caller: twice as many as a client has calls under way (see base.calls)."""
SPILL_ROUND_BYTES = 64 << 20
"""Payload of one round of spilling, so that memory comes free in steps."""

Reply = StoreConfig | StoredRows | FoundRows | FetchedRows | list[Extent] | bool | None


class StoreOutcome(msgspec.Struct, frozen=True):
    """What an event did.

    Attributes:
        reply: for the caller.
        changed: the state changed, so the event must be journaled before the reply is sent.
        touched: topics whose waiting calls are to be tried again.
    """

    reply: Reply
    changed: bool
    touched: frozenset[str] = frozenset()


class StoreLedger:
    """Applies events to the store's state. An event that is refused, or that changes nothing, leaves no trace."""

    def __init__(self, snapshot: bytes = b"") -> None:
        self.state = msgspec.msgpack.decode(snapshot, type=StoreState) if snapshot else StoreState()
        self.rows = RowTable(self.state)
        self._touched: set[str] = set()

    def snapshot(self) -> bytes:
        """The whole state."""
        return msgspec.msgpack.encode(self.state)

    def apply(self, entry: ev.StoreEntry) -> StoreOutcome:
        """Apply one event.

        Raises:
            Refused: it is not possible; nothing changed.
            StaleEpoch: the caller has not joined, or is known to have ended.
        """
        rows, event = self.rows, entry.event
        rows.changed, self._touched = False, set()
        count, nbytes = len(rows), self.state.blocks.payload_bytes
        reply = self._own(event) if entry.who is None else self._called(entry.who, event, entry.seq)
        if len(rows) < count or self.state.blocks.payload_bytes < nbytes:
            self._touched.add(ROOM)
        if rows.changed:
            self.state.n = entry.n
        return StoreOutcome(reply, rows.changed, frozenset(self._touched))

    # --- the broker's own events

    def _own(self, event: object) -> Reply:
        match event:
            case ev.StoreOpened(memory, limits):
                if (memory, limits) != (self.state.memory, self.state.limits):
                    self.rows.changed = True
                if memory != self.state.memory:
                    self.rows.lose_payloads()
                    self.state.callers.clear()
                self.state.memory, self.state.limits = memory, limits
            case ev.CallerJoined():
                return self._join(event)
            case ev.CallerGone(who):
                if self.state.callers.pop(owner_key(who), None) is not None:
                    self.rows.changed = True
                    self.state.blocks.forget_owner(who)
                    self.rows.forget(who)
            case ev.BlocksSpilled(moves):
                return self._spilled(moves)
            case _:
                raise Refused(f"event {type(event).__name__}", why="it needs a caller")
        return None

    def _join(self, event: ev.CallerJoined) -> Reply:
        who = event.who
        if unfit := unfit_slot(who):
            raise Refused(f"joining as {who.slot[:200]!r}", why=unfit, hint="use one as reader/0")
        self.state.callers[owner_key(who)] = StoreCaller(who, event.pid, event.started)
        self.state.next_epoch = max(self.state.next_epoch, who.epoch + 1)
        self.rows.changed = True
        return None

    # --- calls

    def check_caller(self, who: Incarnation) -> None:
        """Raises:
        StaleEpoch: the caller has not joined, has ended, or joined before the shared memory began anew.
        """
        if owner_key(who) not in self.state.callers:
            raise StaleEpoch(
                f"call of {who}",
                why="it has not joined since the store's memory began anew, and what it puts would lie in the old one",
                hint="connect again",
            )

    def _called(self, who: Incarnation, event: object, seq: int) -> Reply:
        # A client repeats a call under its number until it is answered, also to the next broker. So the answer is part
        # of the state: it is journaled with the call, by replay, and kept for as many calls as can be in flight.
        self.check_caller(who)
        answers = self.state.callers[owner_key(who)].answers
        if (known := answers.get(seq)) is not None:
            return self._repeated(who, event, known)
        if len(answers) >= ANSWERS_KEPT and seq < min(answers):
            raise Refused(f"call {seq} of {who}", why=f"answers are kept for the last {ANSWERS_KEPT} calls only")
        reply = self._first(who, event)
        if self.rows.changed and seq:
            answers[seq] = _kept(reply)
            if len(answers) > ANSWERS_KEPT:
                del answers[min(answers)]
        return reply

    def _first(self, who: Incarnation, event: object) -> Reply:
        rows = self.rows
        match event:
            case ev.PutRows():
                return self._put(who, event)
            case ev.GetRows():
                return rows.get(who, event)
            case ev.SampleRows():
                return rows.sample(event)
            case ev.UnpinRows(pins):
                rows.unpin(who, pins)
                return self._collect(who)
            case ev.ClearRows(named):
                rows.clear(named)
                return self._collect(who)
            case ev.ResetTask():
                if known := rows.reset(event):
                    self._touched.add(ROWS)
                return known
            case ev.ConfigureStore(config):
                return rows.configure(config)
            case _:
                raise Refused(f"event {type(event).__name__} of {who}", why="it is the broker's own")

    def _put(self, who: Incarnation, event: ev.PutRows) -> StoredRows:
        self.rows.check_put(event)
        if event.block is not None:
            self._check_payload(who, PlacedBlock(event.block, [], event.blobs))
        # First columns wait for room. Columns for rows that have some do not: whoever waits for room waits for rows to
        # be cleared, which those who add columns bring about.
        if self.rows.is_first_payload(event) and (full := self._full()):
            return StoredRows([], [], [], waiting_on=full)
        stored = self.rows.put(event)
        self._touched.add(ROWS)
        return StoredRows(stored.indexes, stored.fields, stored.tags, self._collect(who))

    def _check_payload(self, who: Incarnation, placed: PlacedBlock) -> None:
        self.state.blocks.check_extents([placed], who)
        limits, block = self.state.limits, placed.block
        nbytes = block.extent.nbytes if block.extent is not None else len(block.inline)
        each = max([nbytes // max(block.rows, 1), *(blob.extent.nbytes for blob in placed.blobs)])
        if each > limits.max_row_bytes:
            raise Refused(f"put by {who}", why=f"a row has {each} bytes, max_row_bytes is {limits.max_row_bytes}")
        if nbytes > limits.capacity_bytes:
            raise Refused(
                f"put by {who}",
                why=f"a block has {nbytes} bytes, the store's capacity is {limits.capacity_bytes}",
                hint="put fewer rows at once",
            )

    def _full(self) -> str:
        """Why there is no room for first columns; empty if there is."""
        used, limits = self.state.blocks.payload_bytes, self.state.limits
        if used < limits.capacity_bytes:
            return ""
        spill = ", the disk for spilled payloads is full" if limits.spill_bytes else ""
        return f"payloads fill the capacity: {used} of {limits.capacity_bytes} bytes{spill}"

    def _collect(self, who: Incarnation) -> list[Extent]:
        """The caller's extents that came free since it last asked."""
        freed = self.state.blocks.collect(who)
        self.rows.changed = self.rows.changed or bool(freed)
        return freed

    def _repeated(self, who: Incarnation, event: object, known: KeptAnswer) -> Reply:
        """The reply to a call that came before, under the same number. Rows are described as they are now."""
        indexes = [index for first, count in known.rows for index in range(first, first + count)]
        match event:
            case ev.PutRows():
                stored = self.rows.stored(indexes)
                return StoredRows(stored.indexes, stored.fields, stored.tags, known.freed)
            case ev.SampleRows():
                return self.rows.granted(indexes)
            case ev.GetRows():
                if known.pin not in self.state.pins:
                    # The caller has released the pin, so it had the reply: this copy of the call came late.
                    return FetchedRows()
                return self.rows.get(who, event, pin=known.pin)
            case ev.UnpinRows() | ev.ClearRows():
                return known.freed
            case ev.ResetTask():
                return event.partition in self.state.partitions
            case _:
                return self.rows.config

    # --- spilling

    def to_spill(self, skip: Container[int] = ()) -> list[tuple[int, Extent]]:
        """Blocks to copy to disk now, the oldest first; none while memory is filled below the high-water mark.

        Blobs stay, as several blocks share them. What is being read stays, as its memory would not come free. So does
        what could not be copied before (`skip`).
        """
        blocks, limits = self.state.blocks, self.state.limits
        over = blocks.payload_bytes - int(limits.high_water * limits.capacity_bytes)
        room = min(limits.spill_bytes - blocks.spilled_bytes, SPILL_ROUND_BYTES)
        moves: list[tuple[int, Extent]] = []
        for id_, block in blocks.blocks.items():
            extent = block.ref.extent
            if over <= 0 or room <= 0:
                break
            if extent is None or is_spilled(extent.slab) or extent.nbytes > room or id_ in skip:
                continue
            if not self._is_read(extent):
                moves.append((id_, extent))
                over -= extent.nbytes
                room -= extent.nbytes
        return moves

    def _is_read(self, extent: Extent) -> bool:
        return self.state.blocks.live[extent.slab][extent.offset].references > 1

    def _spilled(self, moves: Iterable[tuple[int, Extent]]) -> list[Extent]:
        """The copies are on disk; answers with those of no use, as the block ended or is being read meanwhile."""
        useless: list[Extent] = []
        for id_, to in moves:
            block = self.state.blocks.blocks.get(id_)
            now = block.ref.extent if block is not None else None
            if now is None or is_spilled(now.slab) or self._is_read(now):
                useless.append(to)
                continue
            self.state.blocks.move(id_, to, lambda owner: owner in self.state.callers)
            self.rows.changed = True
        return useless

    def audit(self) -> list[str]:
        """Violated invariants, for tests; empty unless the ledger has a defect."""
        wrong, table = self.rows.audit(), self.state.blocks
        counted = {id_: block.rows for id_, block in table.blocks.items()}
        if counted != (lie := self.rows.references()):
            wrong.append(f"blocks count the rows {counted}, {lie} lie in them")
        naming = Counter(digest for block in table.blocks.values() for digest in block.blobs)
        if {digest: blob.blocks for digest, blob in table.blobs.items()} != dict(naming):
            wrong.append("blobs are not named as often as counted")
        extents = [block.ref.extent for block in table.blocks.values() if block.ref.extent is not None]
        extents += [blob.extent for blob in table.blobs.values()]
        extents += [extent for pin in self.state.pins.values() for extent in pin.extents]
        references = Counter((extent.slab, extent.offset) for extent in extents)
        live = {(slab, at): one.references for slab, found in table.live.items() for at, one in found.items()}
        if live != dict(references):
            wrong.append(f"extents {live} are live, {dict(references)} referred to")
        totals = {True: 0, False: 0}
        for slab, found in table.live.items():
            totals[is_spilled(slab)] += sum(one.nbytes for one in found.values())
        if (totals[False], totals[True]) != (table.payload_bytes, table.spilled_bytes):
            wrong.append(f"{totals} payload bytes live, {table.payload_bytes} and {table.spilled_bytes} counted")
        return wrong


def _kept(reply: Reply) -> KeptAnswer:
    """What is kept of a reply, to give it again."""
    match reply:
        case StoredRows(indexes, _, _, freed):
            return KeptAnswer(_runs(indexes), freed)
        case FoundRows(indexes):
            return KeptAnswer(_runs(indexes))
        case FetchedRows(pin=pin):
            return KeptAnswer(pin=pin)
        case list():
            return KeptAnswer(freed=reply)
        case _:
            return KeptAnswer()


def _runs(indexes: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for index in indexes:
        if runs and runs[-1][0] + runs[-1][1] == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
