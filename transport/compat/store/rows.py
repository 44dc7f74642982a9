"""The rows of the store: what each call does to partitions, and which memory their rows need. No input or output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from relax_rt.transport.compat.store import sampling, state
from relax_rt.transport.compat.store.api import (
    FetchedRows,
    FoundRows,
    RowNames,
    RowRun,
    RowStatus,
    StoreConfig,
    StoredRows,
    Tags,
)
from relax_rt.transport.compat.store.state import Partition, Pin, StoreRow, StoreState
from relax_rt.transport.memory.arena import PlacedBlock
from relax_rt.transport.memory.refs import BlobRef, BlockRef
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

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
        """The configuration in force."""
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

    def _make(self, name: str, keys: Sequence[str]) -> list[Named]:
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

    def _known(self, rows: RowNames) -> list[Named]:
        """The rows named that are there, in the order of the names."""
        partitions = self.state.partitions
        if rows.indexes:
            return self._at(rows.indexes)
        partition = partitions.get(rows.partition)
        if partition is None:
            return []
        if not rows.keys:
            return [(rows.partition, index, row) for index, row in partition.rows.items()]
        indexes = [partition.keys.get(key) for key in rows.keys]
        return [(rows.partition, index, partition.rows[index]) for index in indexes if index is not None]

    def _at(self, indexes: Iterable[int]) -> list[Named]:
        names = [(self._where.get(index), index) for index in indexes]
        return [(name, index, self.state.partitions[name].rows[index]) for name, index in names if name is not None]

    def _to_put(self, event: state.PutRows) -> list[Named]:
        rows = event.rows
        if rows.indexes:
            return self._known(rows)
        if event.new:
            return self._make(rows.partition, [""] * event.new)
        keys = self._partition(rows.partition).keys
        missing = [key for key in rows.keys if key not in keys]
        if missing:
            self._make(rows.partition, missing)
        return self._known(rows)

    # --- put

    def check_put(self, event: state.PutRows) -> None:
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

    def new_rows(self, event: state.PutRows) -> int:
        """How many rows the put makes."""
        if event.rows.indexes:
            return 0
        known = self.state.partitions.get(event.rows.partition, Partition()).keys
        return event.new or sum(key not in known for key in event.rows.keys)

    def is_first_payload(self, event: state.PutRows) -> bool:
        """Whether the put brings columns to a row that has none."""
        if event.block is None:
            return False
        return self.new_rows(event) > 0 or any(not row.parts for _, _, row in self._known(event.rows))

    def put(self, event: state.PutRows) -> StoredRows:
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
        named = self._at(indexes)
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
                given = self._taken(self.state.partitions[name], task)
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
        return self._found(self._known(rows))

    def _found(self, named: list[Named]) -> FoundRows:
        return FoundRows(
            [index for _, index, _ in named],
            [row.key for _, _, row in named],
            [name for name, _, _ in named],
            self._common(named),
            [row.tags for _, _, row in named],
        )

    def get(self, who: Incarnation, event: state.GetRows, pin: int = 0) -> FetchedRows:
        """Pin the fields of rows, and answer where they lie.

        pin: of the first call, when this is its repetition: what it reads now is pinned under the same number.
        """
        if pin and self.state.pins.get(pin, Pin(who, [])).who == who:
            self._release(pin)
            self.changed = True
        named = self._known(event.rows)
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

    def _segments(self, named: list[Named], fields: frozenset[str]) -> tuple[list[int], list[RowRun]]:
        """The blocks to read, each once, and runs of rows that are consecutive in the same blocks."""
        blocks = self._blocks.blocks
        ids: dict[int, int] = {}
        wanted: dict[int, bool] = {}
        segments: list[RowRun] = []
        expected: list[tuple[int, int]] | None = None
        first: list[tuple[int, int]] = []
        count = 0
        for _, _, row in named:
            if row.parts == expected:
                count += 1
            else:
                if count:
                    segments.append(RowRun(count, first))
                count, first = 1, []
                for block, number in row.parts:
                    if block not in wanted:
                        wanted[block] = not fields.isdisjoint(blocks[block].ref.fields)
                    if wanted[block]:
                        first.append((ids.setdefault(block, len(ids)), number))
            expected = [(block, number + 1) for block, number in row.parts]
        segments.append(RowRun(count, first))
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
        named = self._known(rows)
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

    def _taken(self, partition: Partition, task: str) -> set[int]:
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

    def _ready_for(self, event: state.SampleRows, partition: Partition) -> list[int]:
        wanted = (event.partition, event.task, frozenset(event.fields))
        return self._ready.get(wanted, lambda: self._search_ready(partition, event.task, wanted[2]))

    def _search_ready(self, partition: Partition, task: str, fields: frozenset[str]) -> list[int]:
        given = self._taken(partition, task)
        return sorted(i for i, row in partition.rows.items() if i not in given and fields <= self._fields_of(row))

    def sample(self, event: state.SampleRows) -> FoundRows:
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

    def _chosen(self, event: state.SampleRows, partition: Partition, at: sampling.BatchKey | None) -> list[int]:
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
        return self._found(self._at(indexes))

    def reset(self, event: state.ResetTask) -> bool:
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
