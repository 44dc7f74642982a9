"""The store's ledger: applies events one after the other, refuses what cannot be, and answers repeated calls alike.

Deterministic and without input or output: the broker journals each event that changed something, and a ledger that
replays the journal is in the same state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence

import msgspec

from relax_rt.transport.compat.store import sampling
from relax_rt.transport.compat.store.api import (
    BlockRows,
    FetchedRows,
    FoundRows,
    RowCount,
    RowNames,
    RowStatus,
    StoreConfig,
    StoredRows,
    Tags,
)
from relax_rt.transport.memory.arena import PlacedBlock
from relax_rt.transport.memory.block_table import BlockTable
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Extent, is_spilled, owner_key, unfit_slot
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation


class StoreLimits(msgspec.Struct, frozen=True):
    """How much the store holds.

    Attributes:
        capacity_bytes: payload in shared memory from which on first columns of rows wait.
        spill_bytes: payload that may be moved to files on disk when shared memory fills; 0: none.
        high_water: part of capacity_bytes from which on blocks are spilled.
        max_row_bytes: a row with more payload in one put is refused.
    """

    capacity_bytes: int = 1 << 62
    spill_bytes: int = 0
    high_water: float = 0.8
    max_row_bytes: int = 1 << 30


class StoreRow(msgspec.Struct, array_like=True):
    """A row of a partition.

    Attributes:
        place: its place in the order in which rows were made in the partition.
        parts: (block, row of it), oldest first; a field is read from the newest block that has it.
    """

    place: int
    key: str = ""
    parts: list[tuple[int, int]] = []
    tags: Tags = {}


class Partition(msgspec.Struct):
    """Rows by index; indexes only grow and are never used again.

    Attributes:
        expected: indexes reserved for rows to come: the first, and how many.
        consumed: rows that each task has taken.
        granted: rows of each batch that a sampler granted and that are still there, by task, rank and batch index.
        past: by task and rank; batches with a lower index (from 0 on) were granted too, and their rows are cleared.
    """

    rows: dict[int, StoreRow] = {}
    keys: dict[str, int] = {}
    expected: tuple[int, int] = (0, 0)
    next_place: int = 0
    consumed: dict[str, set[int]] = {}
    granted: dict[str, dict[int, dict[int, list[int]]]] = {}
    past: dict[str, dict[int, int]] = {}


class Pin(msgspec.Struct, frozen=True, array_like=True):
    """Extents that a caller may be reading."""

    who: Incarnation
    extents: list[Extent]


class KeptAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a reply, to answer a repeated call: runs of rows (first, count), freed extents, pin."""

    rows: list[tuple[int, int]] = []
    freed: list[Extent] = []
    pin: int = 0


class StoreCaller(msgspec.Struct):
    """A process that has joined: its pid and start time, and its newest answers by the calls' numbers."""

    who: Incarnation
    pid: int
    started: int
    answers: dict[int, KeptAnswer] = {}


class StoreState(msgspec.Struct):
    """Everything that the store knows.

    Attributes:
        n: number of the last event applied.
        memory: name of the shared memory that payloads lie in.
        callers: by owner key (see memory.refs).
        partitions: by name, oldest first.
        pins: what is being read, by number.
    """

    n: int = 0
    memory: str = ""
    limits: StoreLimits = StoreLimits()
    callers: dict[str, StoreCaller] = {}
    next_epoch: int = 1
    blocks: BlockTable = msgspec.field(default_factory=BlockTable)
    config: StoreConfig | None = None
    partitions: dict[str, Partition] = {}
    pins: dict[int, Pin] = {}
    next_index: int = 0
    next_pin: int = 1


class StoreOpened(msgspec.Struct, frozen=True, tag="open"):
    """A broker begins. Another memory than before means that every row is lost."""

    memory: str
    limits: StoreLimits


class CallerJoined(msgspec.Struct, frozen=True, tag="join"):
    """A process joins under a name that the broker made unique by an epoch."""

    who: Incarnation
    pid: int
    started: int


class CallerGone(msgspec.Struct, frozen=True, tag="gone"):
    """A process has ended: its pins are released. What it put stays."""

    who: Incarnation


class BlocksSpilled(msgspec.Struct, frozen=True, tag="spilled"):
    """Blocks were copied to disk: id and new place of each."""

    moves: list[tuple[int, Extent]]


class ConfigureStore(msgspec.Struct, frozen=True, tag="configure"):
    """StoreApi.configure."""

    config: StoreConfig


class PutRows(msgspec.Struct, frozen=True, tag="put"):
    """StoreApi.put."""

    rows: RowNames
    new: RowCount = 0
    block: BlockRef | None = None
    blobs: list[BlobRef] = []
    tags: list[Tags] = []
    replace_tags: bool = False


class GetRows(msgspec.Struct, frozen=True, tag="get"):
    """StoreApi.get."""

    rows: RowNames
    fields: list[str] | None = None


class UnpinRows(msgspec.Struct, frozen=True, tag="unpin"):
    """StoreApi.unpin."""

    pins: list[int]


class ClearRows(msgspec.Struct, frozen=True, tag="clear"):
    """StoreApi.clear."""

    rows: RowNames


class SampleRows(msgspec.Struct, frozen=True, tag="sample"):
    """StoreApi.sample."""

    partition: str
    task: str
    fields: list[str]
    batch: int
    rank: int | None = None
    batch_index: int | None = None


class ResetTask(msgspec.Struct, frozen=True, tag="reset"):
    """StoreApi.reset."""

    partition: str
    task: str | None = None


StoreCall = ConfigureStore | PutRows | GetRows | UnpinRows | ClearRows | SampleRows | ResetTask
"""An event of a caller."""


class StoreEntry(msgspec.Struct, frozen=True, array_like=True):
    """An event as it is journaled. who, seq: the caller and the number of its call; none for the broker's own."""

    n: int
    event: StoreOpened | CallerJoined | CallerGone | BlocksSpilled | StoreCall
    who: Incarnation | None = None
    seq: int = 0


LENGTH_TAG = "total_lengths"
"""Tag with a row's tokens, for the balanced sampler."""
Named = tuple[str, int, StoreRow]
"""Partition, index and row."""


class RowTable:
    """The partitions of a StoreState, with indexes to find rows, batches and ready rows.

    A row counts once in each block that it has a part in. A call that is refused (by an exception) leaves no trace;
    `changed` says whether calls since it was last reset changed the state.
    """

    def __init__(self, known: StoreState) -> None:
        self.state, self._blocks = known, known.blocks
        self._alive = lambda owner: owner in known.callers
        self._where = {index: name for name, partition in known.partitions.items() for index in partition.rows}
        self._batches: dict[int, list[tuple[str, int, int]]] = {}
        for partition in known.partitions.values():
            for task, rank, number, batch in _batches(partition):
                self._enter_batch(task, rank, number, batch)
        self._ready = sampling.ReadyRows()
        self._fields: dict[tuple[int, ...], frozenset[str]] = {}
        self.changed = False

    def __len__(self) -> int:
        return len(self._where)

    @property
    def config(self) -> StoreConfig:
        return self.state.config or StoreConfig()

    def configure(self, config: StoreConfig) -> StoreConfig:
        """Set the configuration, if there is none.

        Raises:
            Refused: there is no such sampler.
        """
        if self.state.config is None:
            sampling.check(config.sampler)
            self.state.config = config
            self.changed = True
        return self.config

    # --- rows

    def _partition(self, name: str) -> Partition:
        partition = self.state.partitions.get(name)
        if partition is None:
            partition = self.state.partitions[name] = Partition()
            partition.expected = (self.state.next_index, self.config.expected)
            self.state.next_index += self.config.expected
        return partition

    def _make_rows(self, name: str, keys: Sequence[str]) -> list[Named]:
        """New rows, an empty key for none, at the end of the partition."""
        partition = self._partition(name)
        first, left = partition.expected
        old, fresh = min(left, len(keys)), max(len(keys) - left, 0)
        partition.expected = (first + old, left - old)
        beyond = self.state.next_index
        self.state.next_index += fresh
        made: list[Named] = []
        for key, index in zip(keys, (*range(first, first + old), *range(beyond, beyond + fresh)), strict=True):
            row = StoreRow(partition.next_place, key)
            partition.next_place += 1
            partition.rows[index] = row
            self._where[index] = name
            if key:
                partition.keys[key] = index
            made.append((name, index, row))
        return made

    def _find_rows(self, rows: RowNames) -> list[Named]:
        """The rows named that are there, in the order of the names."""
        partitions = self.state.partitions
        if rows.indexes:
            return self._rows_at(rows.indexes)
        partition = partitions.get(rows.partition)
        if partition is None:
            return []
        if not rows.keys:
            return [(rows.partition, index, row) for index, row in partition.rows.items()]
        indexes = [partition.keys.get(key) for key in rows.keys]
        return [(rows.partition, index, partition.rows[index]) for index in indexes if index is not None]

    def _rows_at(self, indexes: Iterable[int]) -> list[Named]:
        names = [(self._where.get(index), index) for index in indexes]
        return [(name, index, self.state.partitions[name].rows[index]) for name, index in names if name is not None]

    def _to_put(self, event: PutRows) -> list[Named]:
        rows = event.rows
        if rows.indexes:
            return self._find_rows(rows)
        if event.new:
            return self._make_rows(rows.partition, [""] * event.new)
        keys = self._partition(rows.partition).keys
        missing = [key for key in rows.keys if key not in keys]
        if missing:
            self._make_rows(rows.partition, missing)
        return self._find_rows(rows)

    # --- put

    def check_put(self, event: PutRows) -> None:
        """Raises:
        Refused: the call names no rows, names one twice or one that is gone, its parts do not fit together,
            or there would be more rows than the configuration allows.
        """
        rows, what = event.rows, f"put to partition {event.rows.partition!r}"
        count = len(rows.indexes) or event.new or len(rows.keys)
        if sum(map(bool, (rows.indexes, event.new, rows.keys))) != 1 or count < 1:
            raise Refused(what, why="rows are named by keys, by indexes, or as new ones: by exactly one of these")
        named: Sequence[object] = rows.keys or rows.indexes
        if len(set(named)) != len(named):
            raise Refused(what, why="a row is named twice")
        if "" in rows.keys:
            raise Refused(what, why="a key is empty")
        if event.block is None and event.blobs:
            raise Refused(what, why="blobs came without a block that names them")
        if event.block is not None and not event.block.fields:
            raise Refused(what, why="a block has no fields")
        if event.block is not None and event.block.rows != count:
            raise Refused(what, why=f"a block of {event.block.rows} rows came for {count} rows")
        if event.tags and len(event.tags) != count:
            raise Refused(what, why=f"tags for {len(event.tags)} rows came for {count} rows")
        gone = [index for index in rows.indexes if index not in self._where]
        if gone:
            raise Refused(what, why=f"rows {gone[:8]} are not there", hint="they were cleared, or never put")
        limit = self.config.max_rows
        if limit and (more := self.new_rows(event)) and len(self) + more > limit:
            raise Refused(what, why=f"{len(self)} rows are there and {limit} are allowed")

    def new_rows(self, event: PutRows) -> int:
        """How many rows the put makes."""
        if event.rows.indexes:
            return 0
        known = self.state.partitions.get(event.rows.partition, Partition()).keys
        return event.new or sum(key not in known for key in event.rows.keys)

    def is_first_payload(self, event: PutRows) -> bool:
        """Whether the put brings columns to a row that has none."""
        if event.block is None:
            return False
        return self.new_rows(event) > 0 or any(not row.parts for _, _, row in self._find_rows(event.rows))

    def put(self, event: PutRows) -> StoredRows:
        """Enter a block's rows and tags; what is wrong with the call was found by check_put and by the block table."""
        self.changed = True
        named = self._to_put(event)
        if event.block is not None:
            self._enter_block(event.block, event.blobs, [row for _, _, row in named])
        self._enter_ready(named)
        for (_, _, row), tags in zip(named, event.tags, strict=False):
            row.tags = tags if event.replace_tags else {**row.tags, **tags}
        return self.stored([index for _, index, _ in named])

    def stored(self, indexes: Iterable[int]) -> StoredRows:
        """The answer to a put of these rows, as they are now."""
        named = self._rows_at(indexes)
        return StoredRows([index for _, index, _ in named], self._common(named), [row.tags for _, _, row in named])

    def _enter_block(self, block_ref: BlockRef, blobs: list[BlobRef], rows: list[StoreRow]) -> None:
        id_ = self._blocks.add(PlacedBlock(block_ref, [], blobs), len(rows), self._alive)
        stays: dict[tuple[int, ...], list[bool]] = {}
        for number, row in enumerate(rows):
            if row.parts:
                signature = tuple(block for block, _ in row.parts)
                if signature not in stays:
                    stays[signature] = self._not_covered((*signature, id_))
                for (block, _), stay in zip(row.parts, stays[signature], strict=True):
                    if not stay:
                        self._blocks.drop_row(block, self._alive)
                row.parts = [part for part, stay in zip(row.parts, stays[signature], strict=True) if stay]
            row.parts.append((id_, number))

    def _not_covered(self, blocks: tuple[int, ...]) -> list[bool]:
        """For each block but the newest: whether it has a field that no newer block has."""
        newer: set[str] = set()
        stays: list[bool] = []
        for block in reversed(blocks):
            fields = self._blocks.blocks[block].ref.fields
            stays.append(not newer.issuperset(fields))
            newer.update(fields)
        return stays[:0:-1]

    def _enter_ready(self, named: list[Named]) -> None:
        for name in {name for name, _, _ in named}:
            for (_, task, fields), view in self._ready.of(name):
                given = self._unavailable(self.state.partitions[name], task)
                for of, index, row in named:
                    if of == name and index not in given and fields <= self._fields_of(row):
                        sampling.enter(view, index)

    def _fields_of(self, row: StoreRow) -> frozenset[str]:
        signature = tuple(block for block, _ in row.parts)
        fields = self._fields.get(signature)
        if fields is None:
            if len(self._fields) > 4096:
                self._fields.clear()
            fields = frozenset(name for block in signature for name in self._blocks.blocks[block].ref.fields)
            self._fields[signature] = fields
        return fields

    def _common(self, named: list[Named]) -> list[str]:
        """Fields that all have, sorted."""
        sets = {self._fields_of(row) for _, _, row in named}
        return sorted(frozenset.intersection(*sets)) if sets else []

    # --- read

    def find(self, rows: RowNames) -> FoundRows:
        """The rows that are there, in the order of the names."""
        return self._found(self._find_rows(rows))

    def _found(self, named: list[Named]) -> FoundRows:
        return FoundRows(
            [index for _, index, _ in named],
            [row.key for _, _, row in named],
            [name for name, _, _ in named],
            self._common(named),
            [row.tags for _, _, row in named],
        )

    def get(self, who: Incarnation, event: GetRows, pin: int = 0) -> FetchedRows:
        """Pin the fields of rows, and answer where they lie.

        pin: of the first call, when this is its repetition: what it reads now is pinned under the same number.
        """
        if pin and self.state.pins.get(pin, Pin(who, [])).who == who:
            self._release(pin)
            self.changed = True
        named = self._find_rows(event.rows)
        common = self._common(named)
        fields = common if event.fields is None else sorted(set(common).intersection(event.fields))
        if not fields:
            return FetchedRows([index for _, index, _ in named])
        ids, segments = self._segments(named, frozenset(fields))
        extents = self._blocks.extents_of(ids)
        if extents:
            if not pin:
                pin = self.state.next_pin
                self.state.next_pin += 1
            self._blocks.pin(extents)
            self.state.pins[pin] = Pin(who, extents)
            self.changed = True
        return FetchedRows(
            [index for _, index, _ in named],
            fields,
            segments,
            [self._blocks.blocks[id_].ref for id_ in ids],
            self._blocks.blob_refs(ids),
            pin if extents else 0,
        )

    def _segments(self, named: list[Named], fields: frozenset[str]) -> tuple[list[int], list[BlockRows]]:
        """The blocks to read, each once, and runs of rows that are consecutive in the same blocks."""
        blocks = self._blocks.blocks
        ids: dict[int, int] = {}
        wanted: dict[int, bool] = {}
        segments: list[BlockRows] = []
        expected: list[tuple[int, int]] | None = None
        first: list[tuple[int, int]] = []
        count = 0
        for _, _, row in named:
            if row.parts == expected:
                count += 1
            else:
                if count:
                    segments.append(BlockRows(count, first))
                count, first = 1, []
                for block, number in row.parts:
                    if block not in wanted:
                        wanted[block] = not fields.isdisjoint(blocks[block].ref.fields)
                    if wanted[block]:
                        first.append((ids.setdefault(block, len(ids)), number))
            expected = [(block, number + 1) for block, number in row.parts]
        segments.append(BlockRows(count, first))
        return list(ids), segments

    def unpin(self, who: Incarnation, pins: Iterable[int]) -> None:
        """Release the caller's pins; those of others are ignored."""
        for pin in pins:
            if pin in self.state.pins and self.state.pins[pin].who == who:
                self._release(pin)
                self.changed = True

    def _release(self, pin: int) -> None:
        known = self.state.pins.pop(pin, None)
        if known is not None:
            self._blocks.unpin(known.extents, self._alive)

    # --- clear

    def clear(self, rows: RowNames) -> None:
        """Remove rows; with neither keys nor indexes the whole partition."""
        whole = not rows.keys and not rows.indexes
        named = self._find_rows(rows)
        by_partition: dict[str, list[int]] = {}
        for name, index, row in named:
            partition = self.state.partitions[name]
            if partition.rows.pop(index, None) is None:
                continue
            by_partition.setdefault(name, []).append(index)
            del self._where[index]
            if row.key:
                del partition.keys[row.key]
            for consumed in partition.consumed.values():
                consumed.discard(index)
            for block, _ in row.parts:
                self._blocks.drop_row(block, self._alive)
            self.changed = True
        for name, indexes in by_partition.items():
            self._ready.remove(name, indexes)
            self._trim_batches(self.state.partitions[name], set(indexes))
        if whole and self.state.partitions.pop(rows.partition, None) is not None:
            self._ready.forget(rows.partition)
            self.changed = True

    def _trim_batches(self, partition: Partition, gone: set[int]) -> None:
        for task, rank, number in {at for index in gone for at in self._batches.pop(index, ())}:
            batches = partition.granted[task][rank]
            batches[number] = [index for index in batches[number] if index not in gone]
            past = partition.past.get(task, {}).get(rank, 0)
            if batches.get(past) == []:
                while batches.get(past) == []:
                    del batches[past]
                    past += 1
                partition.past.setdefault(task, {})[rank] = past

    def forget(self, who: Incarnation) -> None:
        """Release the pins of a process that has ended. What it put stays."""
        for pin in [pin for pin, known in self.state.pins.items() if known.who == who]:
            self._release(pin)
            self.changed = True

    def lose_payloads(self) -> None:
        """Shared memory is gone, and with it every row and pin."""
        self._blocks.clear()
        self.state.partitions, self.state.pins = {}, {}
        self._where.clear()
        self._batches.clear()
        self._fields.clear()
        self._ready = sampling.ReadyRows()

    # --- consumption

    def _unavailable(self, partition: Partition, task: str) -> set[int]:
        """Rows that the task has consumed, or that were dealt to a rank that has not asked for them yet."""
        given = partition.consumed.get(task, set())
        if self.config.sampler.kind == "balanced":
            dealt = [batch for batches in partition.granted.get(task, {}).values() for batch in batches.values()]
            given = given.union(*dealt)
        return given

    def _enter_batch(self, task: str, rank: int, number: int, batch: Iterable[int]) -> None:
        for index in batch:
            self._batches.setdefault(index, []).append((task, rank, number))

    @staticmethod
    def _batch_granted(partition: Partition, task: str, at: sampling.BatchKey | None) -> list[int] | None:
        """What is left of a batch that was granted before; None if it was not."""
        if at is None:
            return None
        rank, number = at
        if 0 <= number < partition.past.get(task, {}).get(rank, 0):
            return []
        return partition.granted.get(task, {}).get(rank, {}).get(number)

    def _ready_for(self, event: SampleRows, partition: Partition) -> list[int]:
        wanted = (event.partition, event.task, frozenset(event.fields))
        return self._ready.get(wanted, lambda: self._search_ready(partition, event.task, wanted[2]))

    def _search_ready(self, partition: Partition, task: str, fields: frozenset[str]) -> list[int]:
        given = self._unavailable(partition, task)
        return sorted(i for i, row in partition.rows.items() if i not in given and fields <= self._fields_of(row))

    def sample(self, event: SampleRows) -> FoundRows:
        """Choose rows for a task by the sampler, and mark them consumed.

        Raises:
            Refused: the sampler cannot make such a batch.
        """
        partition = self.state.partitions.get(event.partition)
        if partition is None:
            return FoundRows(waiting_on=f"partition {event.partition!r} to be put")
        if event.batch < 1:
            raise Refused(f"sample of {event.batch} rows", why="a batch has at least one row")
        at = sampling.batch_of(self.config.sampler, event.rank, event.batch_index)
        known = self._batch_granted(partition, event.task, at)
        if known is not None and not known:
            return FoundRows(waiting_on=f"batch and rank {at}, which were given before and whose rows are cleared")
        chosen = known or self._chosen(event, partition, at)
        if not chosen:
            ready = len(self._ready_for(event, partition))
            return FoundRows(waiting_on=f"{event.batch} rows for {event.task!r}, of which {ready} are ready")
        consumed = partition.consumed.setdefault(event.task, set())
        self.changed = self.changed or not consumed.issuperset(chosen)
        consumed.update(chosen)
        self._ready.remove(event.partition, chosen, event.task)
        return self.granted(chosen)

    def _chosen(self, event: SampleRows, partition: Partition, at: sampling.BatchKey | None) -> list[int]:
        """A new batch; one with a rank and index is kept, to be granted again."""
        shares = sampling.choose(
            self.config.sampler,
            self._ready_for(event, partition),
            event.batch,
            place=lambda index: partition.rows[index].place,
            length=lambda index: _length(partition.rows[index].tags),
        )
        if not shares or at is None:
            return shares[0] if shares else []
        rank, number = at
        ranks = range(len(shares)) if self.config.sampler.kind == "balanced" else (rank,)
        granted = partition.granted.setdefault(event.task, {})
        for to, share in zip(ranks, shares, strict=True):
            granted.setdefault(to, {})[number] = share
            self._enter_batch(event.task, to, number, share)
            self._ready.remove(event.partition, share, event.task)
        self.changed = True
        return granted[rank][number]

    def granted(self, indexes: Iterable[int]) -> FoundRows:
        """The answer to a sample of these rows; those cleared meanwhile are left out."""
        return self._found(self._rows_at(indexes))

    def reset(self, event: ResetTask) -> bool:
        """Let a task consume the partition anew.

        Batches granted to a rank are kept, as other processes of the rank may still ask for them.
        """
        partition = self.state.partitions.get(event.partition)
        if partition is None:
            return False
        for task in list(partition.consumed) if event.task is None else [event.task]:
            if partition.consumed.pop(task, None) is not None:
                self.changed = True
        self._ready.forget(event.partition, event.task)
        return True

    # --- questions

    def list_keys(self, name: str | None) -> dict[str, dict[str, Tags]]:
        """Keys and their tags, by partition."""
        names = list(self.state.partitions) if name is None else [name]
        return {
            name: {key: partition.rows[index].tags for key, index in partition.keys.items()}
            for name in names
            if (partition := self.state.partitions.get(name)) is not None
        }

    def consumed(self, name: str, task: str) -> RowStatus:
        """Which rows the task has consumed."""
        partition = self.state.partitions.get(name)
        if partition is None:
            return RowStatus()
        done = partition.consumed.get(task, set())
        indexes = _indexes(partition)
        return RowStatus(True, indexes, [[index in done] for index in indexes])

    def produced(self, name: str, fields: list[str]) -> RowStatus:
        """Which of the fields each row has."""
        partition = self.state.partitions.get(name)
        if partition is None or not fields:
            return RowStatus()
        have = {index: self._fields_of(row) for index, row in partition.rows.items()}
        if not set(fields) <= frozenset().union(*have.values()):
            return RowStatus()
        indexes = _indexes(partition)
        return RowStatus(True, indexes, [[name in have.get(index, ()) for name in fields] for index in indexes])

    def audit(self) -> list[str]:
        """Violated invariants; empty unless the store has a defect."""
        wrong: list[str] = []
        for name, partition in self.state.partitions.items():
            for key, index in partition.keys.items():
                if index not in partition.rows or partition.rows[index].key != key:
                    wrong.append(f"key {key!r} of {name!r} names a row that is not its own")
            for task, consumed in partition.consumed.items():
                if not consumed <= partition.rows.keys():
                    wrong.append(f"task {task!r} has consumed rows that are not in {name!r}")
            for task, rank, number, batch in _batches(partition):
                if not partition.rows.keys() >= set(batch):
                    wrong.append(f"batch {number} of rank {rank} and {task!r} has rows that are not in {name!r}")
            for (_, task, fields), view in self._ready.of(name):
                if view != self._search_ready(partition, task, fields):
                    wrong.append(f"rows of {name!r} ready for {task!r} with {sorted(fields)} are not {view}")
            for index, row in partition.rows.items():
                if self._where.get(index) != name:
                    wrong.append(f"row {index} of {name!r} is not found by its index")
                gone = [block for block, _ in row.parts if block not in self._blocks.blocks]
                wrong += [f"row {index} lies in block {block}, which is gone" for block in gone]
        return wrong

    def references(self) -> dict[int, int]:
        """Rows that lie in each block."""
        counts: dict[int, int] = {}
        for partition in self.state.partitions.values():
            for row in partition.rows.values():
                for block, _ in row.parts:
                    counts[block] = counts.get(block, 0) + 1
        return counts


def _batches(partition: Partition) -> Iterator[tuple[str, int, int, list[int]]]:
    for task, ranks in partition.granted.items():
        for rank, batches in ranks.items():
            for number, batch in batches.items():
                yield task, rank, number, batch


def _indexes(partition: Partition) -> list[int]:
    """Indexes of the rows that are there, and of expected ones."""
    first, left = partition.expected
    return sorted([*partition.rows, *range(first, first + left)])


def _length(tags: Tags) -> int:
    try:
        length = msgspec.msgpack.decode(tags.get(LENGTH_TAG, b"\x01"), type=int)
    except msgspec.DecodeError as error:
        raise Refused(f"tag {LENGTH_TAG!r}", why="the balanced sampler needs a whole number in it") from error
    return max(length, 0)


ROOM, ROWS = "room", "rows"
"""What calls wait for: puts for room, samples for rows."""
ANSWERS_KEPT = 128
"""Answers kept for each caller: twice as many as a client has calls under way (see base.calls)."""
SPILL_ROUND_BYTES = 64 << 20
"""Payload of one round of spilling, so that memory is freed in steps."""

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

    @property
    def n(self) -> int:
        """Number of the last event that changed something."""
        return self.state.n

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self.state)

    def apply(self, entry: StoreEntry) -> StoreOutcome:
        """Apply one event.

        Raises:
            Refused: it is not possible; nothing changed.
            StaleEpoch: the caller has not joined, or is known to have ended.
        """
        rows, event = self.rows, entry.event
        rows.changed, self._touched = False, set()
        count, nbytes = len(rows), self.state.blocks.payload_bytes
        reply = self._apply_own(event) if entry.who is None else self._apply_call(entry.who, event, entry.seq)
        if len(rows) < count or self.state.blocks.payload_bytes < nbytes:
            self._touched.add(ROOM)
        if rows.changed:
            self.state.n = entry.n
        return StoreOutcome(reply, rows.changed, frozenset(self._touched))

    # --- the broker's own events

    def _apply_own(self, event: object) -> Reply:
        match event:
            case StoreOpened(memory, limits):
                if (memory, limits) != (self.state.memory, self.state.limits):
                    self.rows.changed = True
                if memory != self.state.memory:
                    self.rows.lose_payloads()
                    self.state.callers.clear()
                self.state.memory, self.state.limits = memory, limits
            case CallerJoined(who, pid, started):
                if unfit := unfit_slot(who):
                    raise Refused(f"joining as {who.slot[:200]!r}", why=unfit, hint="use one as reader/0")
                self.state.callers[owner_key(who)] = StoreCaller(who, pid, started)
                self.state.next_epoch = max(self.state.next_epoch, who.epoch + 1)
                self.rows.changed = True
            case CallerGone(who):
                if self.state.callers.pop(owner_key(who), None) is not None:
                    self.rows.changed = True
                    self.state.blocks.forget_owner(who)
                    self.rows.forget(who)
            case BlocksSpilled(moves):
                # The copies are on disk. Answer with those of no use: their block has ended or is being read meanwhile.
                useless: list[Extent] = []
                for id_, to in moves:
                    block = self.state.blocks.blocks.get(id_)
                    now = block.ref.extent if block is not None else None
                    if now is None or is_spilled(now.slab) or self._is_pinned(now):
                        useless.append(to)
                        continue
                    self.state.blocks.move(id_, to, lambda owner: owner in self.state.callers)
                    self.rows.changed = True
                return useless
            case _:
                raise Refused(f"event {type(event).__name__}", why="it needs a caller")
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

    def _apply_call(self, who: Incarnation, event: object, seq: int) -> Reply:
        # A client repeats a call under its number until it is answered, also to the next broker. So the answer is part
        # of the state: it is journaled with the call, by replay, and kept for as many calls as can be in flight.
        self.check_caller(who)
        answers = self.state.callers[owner_key(who)].answers
        if (known := answers.get(seq)) is not None:
            return self._repeat_reply(who, event, known)
        if len(answers) >= ANSWERS_KEPT and seq < min(answers):
            raise Refused(f"call {seq} of {who}", why=f"answers are kept for the last {ANSWERS_KEPT} calls only")
        reply = self._apply_new(who, event)
        if self.rows.changed and seq:
            answers[seq] = _answer_to_keep(reply)
            if len(answers) > ANSWERS_KEPT:
                del answers[min(answers)]
        return reply

    def _apply_new(self, who: Incarnation, event: object) -> Reply:
        rows = self.rows
        match event:
            case PutRows():
                return self._put(who, event)
            case GetRows():
                return rows.get(who, event)
            case SampleRows():
                return rows.sample(event)
            case UnpinRows(pins):
                rows.unpin(who, pins)
                return self._collect(who)
            case ClearRows(named):
                rows.clear(named)
                return self._collect(who)
            case ResetTask():
                if known := rows.reset(event):
                    self._touched.add(ROWS)
                return known
            case ConfigureStore(config):
                return rows.configure(config)
            case _:
                raise Refused(f"event {type(event).__name__} of {who}", why="it is the broker's own")

    def _put(self, who: Incarnation, event: PutRows) -> StoredRows:
        self.rows.check_put(event)
        if event.block is not None:
            placed = PlacedBlock(event.block, [], event.blobs)
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
        # First columns wait for room. Columns for rows that have some do not: whoever waits for room waits for rows to
        # be cleared, which those who add columns bring about.
        if self.rows.is_first_payload(event) and (full := self._full()):
            return StoredRows([], [], [], waiting_on=full)
        stored = self.rows.put(event)
        self._touched.add(ROWS)
        return StoredRows(stored.indexes, stored.fields, stored.tags, self._collect(who))

    def _full(self) -> str:
        """Why there is no room for first columns; empty if there is."""
        used, limits = self.state.blocks.payload_bytes, self.state.limits
        if used < limits.capacity_bytes:
            return ""
        spill = ", the disk for spilled payloads is full" if limits.spill_bytes else ""
        return f"payloads fill the capacity: {used} of {limits.capacity_bytes} bytes{spill}"

    def _collect(self, who: Incarnation) -> list[Extent]:
        """The caller's extents that were freed since it last asked."""
        freed = self.state.blocks.collect(who)
        self.rows.changed = self.rows.changed or bool(freed)
        return freed

    def _repeat_reply(self, who: Incarnation, event: object, known: KeptAnswer) -> Reply:
        """The reply to a call that came before, under the same number. Rows are described as they are now."""
        indexes = [index for first, count in known.rows for index in range(first, first + count)]
        match event:
            case PutRows():
                stored = self.rows.stored(indexes)
                return StoredRows(stored.indexes, stored.fields, stored.tags, known.freed)
            case SampleRows():
                return self.rows.granted(indexes)
            case GetRows():
                if known.pin not in self.state.pins:
                    # The caller has released the pin, so it had the reply: this copy of the call came late.
                    return FetchedRows()
                return self.rows.get(who, event, pin=known.pin)
            case UnpinRows() | ClearRows():
                return known.freed
            case ResetTask():
                return event.partition in self.state.partitions
            case _:
                return self.rows.config

    # --- spilling

    def to_spill(self, skip: Container[int] = ()) -> list[tuple[int, Extent]]:
        """Blocks to copy to disk now, the oldest first; none while memory is filled below the high-water mark.

        Blobs stay, as several blocks share them. What is being read stays, as its memory would not be freed. So does
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
            if not self._is_pinned(extent):
                moves.append((id_, extent))
                over -= extent.nbytes
                room -= extent.nbytes
        return moves

    def _is_pinned(self, extent: Extent) -> bool:
        return self.state.blocks.live[extent.slab][extent.offset].references > 1

    def audit(self) -> list[str]:
        """Violated invariants, for tests; empty unless the ledger has a defect."""
        wrong, table = self.rows.audit(), self.state.blocks
        counted = {id_: block.rows for id_, block in table.blocks.items()}
        if counted != (rows := self.rows.references()):
            wrong.append(f"blocks count the rows {counted}, {rows} lie in them")
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


def _answer_to_keep(reply: Reply) -> KeptAnswer:
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
