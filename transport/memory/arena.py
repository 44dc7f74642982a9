"""Shared memory of a node: each process writes blocks to slabs of its own, all the others read them in place.

Producers and consumers of the queue, the store and the weight stream put with a Writer and look with a ArenaReader.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax_rt.transport.memory.blocks import Block, BlockPlan, ColumnSource, RowLayout, resolver
from relax_rt.transport.memory.refs import SPILL_PREFIX, BlobRef, BlockRef, Extent, is_spilled, slab_name
from relax_rt.transport.memory.slabs import PAGE_BYTES, Slab, aligned, map_read_only, path_of
from relax_rt.transport.memory.values import (
    BLOB,
    BLOB_KIND,
    BYTES,
    SHARE_FROM_BYTES,
    Data,
    Hashes,
    Kind,
    Pairs,
    Shared,
    encoded,
    share_repeated,
)
from relax_rt.transport.rpc.errors import Corrupt, OutOfSpace, Refused, RelaxError
from relax_rt.transport.rpc.identity import Incarnation

Given = tuple[str, Kind, Any]
"""A column to be written: name, kind, and stacked rows or a list of them."""

RowKey = tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]
"""Name, dtype and shape of each array of a row."""
MAX_LAYOUTS = 1024
"""Layouts of rows that are remembered; ragged producers make ever new ones."""
IDLE_S = 30.0
"""An extra slab that was empty for this long is unlinked; making it again costs its page faults."""


class PlacedBlock(msgspec.Struct, frozen=True):
    """Where a put was written.

    Attributes:
        block: the block.
        lengths: of each row, the length of the first dimension of `length_field` (bytes of a str or bytes); -1 if the
            block does not hold it, it has none, or its values are shared.
        blobs: the shared values that rows of the block name, each once.
    """

    block: BlockRef
    lengths: list[int]
    blobs: list[BlobRef] = []

    def extents(self) -> list[Extent]:
        """All extents of the put."""
        block = [self.block.extent] if self.block.extent is not None else []
        return block + [blob.extent for blob in self.blobs]


class ArenaWriterStatistics(msgspec.Struct):
    """Numbers of an ArenaWriter; counts since it was made, unless said otherwise.

    Attributes:
        capacity_bytes: upper limit of all its slabs together.
        slab_bytes: bytes of its slabs now, in use or not.
        used_bytes: bytes of the extents in use now.
        peak_used_bytes: the most that were in use at a time.
        slabs: slabs it has now.
        extents: extents in use now.
        free_extents: pieces that the free bytes of its slabs lie in now.
        largest_free_bytes: the largest of them.
        fragmentation: the part of the free bytes outside the largest free extent of each slab, 0 to 1.
        puts: calls of put_rows and put_columns.
        rows: rows put.
        blocks: blocks written; inline_blocks of them went into messages.
        copied_bytes: bytes written to memory.
        blobs: shared values written.
        deduplicated: values that were not written again, and deduplicated_bytes their bytes.
        frees: extents freed.
        refused: puts that found no room.
        slabs_made: slabs made, and slabs_returned given back to the system.
    """

    capacity_bytes: int = 0
    slab_bytes: int = 0
    used_bytes: int = 0
    peak_used_bytes: int = 0
    slabs: int = 0
    extents: int = 0
    free_extents: int = 0
    largest_free_bytes: int = 0
    fragmentation: float = 0.0
    puts: int = 0
    rows: int = 0
    blocks: int = 0
    inline_blocks: int = 0
    copied_bytes: int = 0
    blobs: int = 0
    deduplicated: int = 0
    deduplicated_bytes: int = 0
    frees: int = 0
    refused: int = 0
    slabs_made: int = 0
    slabs_returned: int = 0


class ArenaWriter:
    """Puts blocks into slabs that only this incarnation writes. Thread-safe; copies run outside its lock.

    Args:
        shm_dir: the run's private directory in shared memory.
        who: the incarnation that owns the slabs; its name is part of theirs.
        slab_bytes: size of one slab; a larger put gets a slab of its own.
        capacity_bytes: upper limit of all its slabs together, used or not.
        idle_s: extra slabs that are empty for so long are given back to the system.
        clock: seconds, monotonic.

    Raises:
        Refused: the slot's name cannot be one of a slab, or the capacity is less than a page.
    """

    def __init__(
        self,
        shm_dir: Path,
        who: Incarnation,
        *,
        slab_bytes: int,
        capacity_bytes: int,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if capacity_bytes < PAGE_BYTES:
            raise Refused(f"an arena of {capacity_bytes} bytes", why=f"a slab has at least a page, {PAGE_BYTES}")
        if is_spilled(slab_name(who, 0)):
            raise Refused(f"slabs of {who}", why=f"names with '{SPILL_PREFIX}' are those of spilled files")
        self._dir, self._who = shm_dir, who
        self._capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self._slab_bytes = min((max(1, -(-slab_bytes // PAGE_BYTES)) * PAGE_BYTES), self._capacity_bytes)
        self._idle_s, self._clock = idle_s, clock
        self._slabs: dict[str, Slab] = {}
        self._total_bytes = self._used_bytes = self._made = self._floor_bytes = 0
        self._closed = False
        self._counters = ArenaWriterStatistics()
        self._layouts: dict[RowKey, RowLayout] = {}
        self._lock = threading.Lock()

    def warm(self, nbytes: int = 1) -> None:
        """Make and pre-fault slabs of `nbytes` in all, at least one, and keep them, so that puts need not.

        Blocks for about a second a GiB.
        """
        with self._lock:
            self._floor_bytes = max(self._floor_bytes, min(nbytes, self._capacity_bytes))
            while self._total_bytes < self._floor_bytes and not self._closed:
                self._make(min(self._slab_bytes, self._capacity_bytes - self._total_bytes))

    def put_rows(
        self, rows: Sequence[Mapping[str, Any]], *, length_field: str = ""
    ) -> list[tuple[PlacedBlock, list[int]]]:
        """Copy rows into shared memory; those with the same fields, dtypes and dimensions lie in one block.

        A value is an array or scalar of numpy or ml_dtypes, a torch tensor, Raw, str, bytes, Shared, or anything that
        msgspec can encode. Rows of a field may differ in shape. bytes and uint8 arrays of 4 KiB and more that come
        twice in the call are stored once, and so are Shared values.

        Returns:
            The blocks, and with each the indices of the rows that lie in it, in its order.

        Raises:
            OutOfSpace: there is no room now; free something, or wait for it. Nothing was put.
            Refused: a value is not of a kind that can be put, or the rows are larger than the arena.
        """
        key = _row_key(rows[0]) if len(rows) == 1 else None
        if key is not None and (layout := self._layouts.get(key)) is not None:
            return [(self._put_row(layout, rows[0], length_field), [0])]
        groups, hashes = _grouped(rows)
        plans = [_planned(columns) for columns, _ in groups]
        placed = self._place(plans, hashes, length_field)
        if key is not None and not hashes.shared and (layout := plans[0].layout()) is not None:
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
        return [(put, indices) for put, (_, indices) in zip(placed, groups, strict=True)]

    def _put_row(self, layout: RowLayout, row: Mapping[str, NDArray[Any]], length_field: str) -> PlacedBlock:
        """Copy a row of arrays like one that was put before."""
        ((slab, extent),) = self._allocate([layout.nbytes])
        try:
            layout.write(slab.memory[extent.offset : extent.offset + extent.nbytes], row.values())
        except BaseException:
            self.free(extent)
            raise
        with self._lock:
            self._counters.puts += 1
            self._counters.rows += 1
            self._counters.blocks += 1
            self._counters.copied_bytes += layout.nbytes
        shape = row[length_field].shape if length_field in row else ()
        return PlacedBlock(BlockRef(extent, 1, layout.fields), [shape[0] if shape else -1])

    def put_columns(self, columns: Mapping[str, Any], *, length_field: str = "") -> PlacedBlock:
        """Copy columns into shared memory, as one block.

        A column is an array, tensor or Raw of shape [rows, …], or a list with a value for each row (see `put_rows`)
        that are all of one dtype and number of dimensions, or one Shared value for all rows. Duplicates are looked
        for in lists, not in stacked arrays.

        Raises:
            OutOfSpace: there is no room now; free something, or wait for it. Nothing was put.
            Refused: a value is not of a kind that can be put, or the columns are larger than the arena.
        """
        given, hashes = _columns(columns)
        return self._place([_planned(given)], hashes, length_field)[0]

    def reserve(self, nbytes: int) -> tuple[Extent, NDArray[np.uint8]]:
        """Allocate an extent for a block that is received from elsewhere; returns it with its writable memory.

        Raises:
            OutOfSpace: there is no room now.
            Refused: it is larger than the arena, or has no bytes.
        """
        if nbytes < 1:
            raise Refused(f"an extent of {nbytes} bytes", why="it must have some")
        ((slab, extent),) = self._allocate([nbytes])
        return extent, slab.memory[extent.offset : extent.offset + nbytes]

    def _place(self, plans: list[BlockPlan], hashes: Hashes, length_field: str) -> list[PlacedBlock]:
        # Blocks do not share the extents of their blobs: each can be freed on its own.
        shared = [
            (i, digest, _planned([(BLOB, *_one_row(*hashes.values[digest]))]))
            for i, plan in enumerate(plans)
            for digest in plan.digests()
        ]
        large = [plan for plan in plans if not plan.inline]
        written = iter(self._write(large + [plan for _, _, plan in shared]))
        extents = [None if plan.inline else next(written) for plan in plans]
        blobs: list[list[BlobRef]] = [[] for _ in plans]
        for (i, digest, _), extent in zip(shared, written, strict=True):
            blobs[i].append(BlobRef(digest, extent))
        placed = [
            PlacedBlock(
                BlockRef(extent, plan.rows, plan.fields, b"" if extent is not None else plan.to_bytes()),
                plan.lengths(length_field),
                refs,
            )
            for plan, extent, refs in zip(plans, extents, blobs, strict=True)
        ]
        self._count(plans, [plan for _, _, plan in shared], hashes)
        return placed

    def _count(self, plans: list[BlockPlan], blobs: list[BlockPlan], hashes: Hashes) -> None:
        with self._lock:
            counters = self._counters
            counters.puts += 1
            counters.blobs += len(blobs)
            counters.copied_bytes += sum([plan.nbytes for plan in blobs])
            counters.deduplicated += hashes.shared - len(blobs)
            counters.deduplicated_bytes += hashes.shared_bytes - sum([plan.data_nbytes for plan in blobs])
            for plan in plans:
                counters.rows += plan.rows
                counters.blocks += 1
                counters.inline_blocks += plan.inline
                counters.copied_bytes += plan.nbytes

    def _write(self, plans: list[BlockPlan]) -> list[Extent]:
        """Write blocks to extents of their own: all of them or none."""
        if not plans:
            return []
        places = self._allocate([plan.nbytes for plan in plans])
        try:
            for plan, (slab, extent) in zip(plans, places, strict=True):
                plan.write(slab.memory[extent.offset : extent.offset + extent.nbytes])
        except BaseException:
            for _, extent in places:
                self.free(extent)
            raise
        return [extent for _, extent in places]

    def _allocate(self, sizes: list[int]) -> list[tuple[Slab, Extent]]:
        # Only the bookkeeping runs under the lock. The copies run outside it, in several threads at once: an extent has
        # one writer until its reference is sent, and readers see it only after the broker has entered the put.
        places: list[tuple[Slab, Extent]] = []
        with self._lock:
            if self._closed:
                raise Refused(f"put by {self._who}", why="its arena is closed")
            try:
                for size in sizes:
                    places.append(self._allocate_one(aligned(size)))
            except RelaxError:
                for slab, extent in places:
                    self._release(slab, extent)
                self._counters.refused += 1
                needed = sum(map(aligned, sizes))
                if needed > self._capacity_bytes:
                    raise Refused(
                        f"a put of {needed} bytes",
                        why=f"the arena of {self._who} has {self._capacity_bytes} in all",
                        hint="put fewer rows at once, or raise its capacity",
                    ) from None
                raise
            self._counters.peak_used_bytes = max(self._counters.peak_used_bytes, self._used_bytes)
        return places

    def _allocate_one(self, nbytes: int) -> tuple[Slab, Extent]:
        for slab in self._slabs.values():
            offset = slab.heap.allocate(nbytes)
            if offset is not None:
                return slab, self._use(slab, offset, nbytes)
        slab = self._make(self._room_for(nbytes))
        offset = slab.heap.allocate(nbytes)
        assert offset is not None
        return slab, self._use(slab, offset, nbytes)

    def _use(self, slab: Slab, offset: int, nbytes: int) -> Extent:
        slab.used[offset] = nbytes
        slab.empty_since = None
        self._used_bytes += nbytes
        return Extent(slab.name, offset, nbytes)

    def _room_for(self, nbytes: int) -> int:
        """Size of a new slab for an extent; empty slabs that are too small for it make room for it.

        Slabs are multiples of one size where the capacity allows it, so that the next large extent fits as well.
        """
        empty = [slab for slab in self._slabs.values() if slab.heap.empty]
        room = self._capacity_bytes - self._total_bytes
        if room < nbytes <= room + sum([slab.nbytes for slab in empty]):
            while room < nbytes:
                slab = empty.pop()
                self._return(slab)
                room += slab.nbytes
        if nbytes > room:
            raise OutOfSpace(
                f"{nbytes} bytes in the shared memory of {self._who}",
                why=f"{self._used_bytes} of {self._capacity_bytes} bytes are in use,"
                f" none of the free extents of {self._total_bytes - self._used_bytes} bytes is as large",
                hint="free something or wait for it",
            )
        return min(-(-nbytes // self._slab_bytes) * self._slab_bytes, room)

    def _make(self, nbytes: int) -> Slab:
        self._made += 1
        slab = Slab(self._dir / slab_name(self._who, self._made), nbytes)
        self._slabs[slab.name] = slab
        self._total_bytes += nbytes
        return slab

    def free(self, extent: Extent) -> None:
        """Free an extent that nobody reads. Does nothing once the arena is closed.

        Raises:
            Corrupt: it is not an extent in use: the ledger and the arena disagree.
        """
        with self._lock:
            if self._closed:
                return
            slab = self._slabs.get(extent.slab)
            if slab is None or slab.used.get(extent.offset) != extent.nbytes:
                raise Corrupt(
                    f"freeing {extent.nbytes} bytes at {extent.slab}+{extent.offset} by {self._who}",
                    why="no such extent is in use",
                )
            self._release(slab, extent)
            self._counters.frees += 1
            self._return_idle()

    def _release(self, slab: Slab, extent: Extent) -> None:
        del slab.used[extent.offset]
        slab.heap.free(extent.offset, extent.nbytes)
        self._used_bytes -= extent.nbytes
        if slab.heap.empty:
            slab.empty_since = self._clock()

    def trim(self) -> None:
        """Unlink extra slabs that were empty for idle_s; `free` does it as well."""
        with self._lock:
            self._return_idle()

    def _return_idle(self) -> None:
        if len(self._slabs) < 2:
            return
        before = self._clock() - self._idle_s
        for slab in list(self._slabs.values())[1:]:
            spare = self._total_bytes - slab.nbytes >= self._floor_bytes
            if spare and slab.empty_since is not None and slab.empty_since <= before:
                self._return(slab)

    def _return(self, slab: Slab) -> None:
        # Readers that still map it keep its memory until they unmap it.
        del self._slabs[slab.name]
        self._total_bytes -= slab.nbytes
        self._counters.slabs_returned += 1
        slab.path.unlink(missing_ok=True)

    @property
    def used_bytes(self) -> int:
        """Bytes of the extents in use."""
        return self._used_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all slabs."""
        return self._total_bytes

    def statistics(self) -> ArenaWriterStatistics:
        """Current statistics."""
        with self._lock:
            heaps = [slab.heap for slab in self._slabs.values()]
            free = self._total_bytes - self._used_bytes
            return msgspec.structs.replace(
                self._counters,
                capacity_bytes=self._capacity_bytes,
                slab_bytes=self._total_bytes,
                used_bytes=self._used_bytes,
                slabs=len(heaps),
                extents=sum(len(slab.used) for slab in self._slabs.values()),
                free_extents=sum(heap.free_extents for heap in heaps),
                largest_free_bytes=max((heap.largest for heap in heaps), default=0),
                fragmentation=1 - sum(heap.largest for heap in heaps) / free if free else 0.0,
                slabs_made=self._made,
            )

    def close(self) -> None:
        """Drop the mappings. The files stay for their readers; the broker unlinks them when none is left."""
        with self._lock:
            self._closed = True
            self._slabs.clear()
            self._total_bytes = self._used_bytes = 0


def _row_key(row: Mapping[str, Any]) -> RowKey | None:
    """What decides the layout of a row of arrays; None if it is anything else, or may hold a value twice."""
    key = []
    for name, value in row.items():
        if type(value) is not np.ndarray or (value.nbytes >= SHARE_FROM_BYTES and value.dtype == np.uint8):
            return None
        key.append((name, value.dtype, value.shape))
    return tuple(key)


def _planned(columns: list[Given]) -> BlockPlan:
    return BlockPlan([ColumnSource(name, kind, data) for name, kind, data in columns])


def _one_row(kind: Kind, data: Data) -> tuple[Kind, Any]:
    return kind, data[None] if isinstance(data, np.ndarray) else [data]


def _grouped(rows: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[list[Given], list[int]]], Hashes]:
    """Rows of the same fields and kinds, column by column, with their indices."""
    hashes = Hashes()
    # The order of the fields makes no difference: that of the first row with the same ones counts.
    by_names: dict[tuple[str, ...], tuple[str, ...]] = {}
    by_set: dict[frozenset[str], tuple[str, ...]] = {}
    fields: list[tuple[str, ...]] = []
    pairs: list[Pairs] = []
    for row in rows:
        names = tuple(row)
        order = by_names.get(names)
        if order is None:
            order = by_names[names] = by_set.setdefault(frozenset(names), names)
        fields.append(order)
        pairs.append([encoded(name, row[name]) for name in order])
    share_repeated(pairs, hashes)
    groups: dict[Any, list[int]] = {}
    for i, row_pairs in enumerate(pairs):
        groups.setdefault((fields[i], *[kind for kind, _ in row_pairs]), []).append(i)
    return [
        (
            [
                (name, kind, [pairs[i][at][1] for i in indices])
                for at, (name, kind) in enumerate(zip(key[0], key[1:], strict=True))
            ],
            indices,
        )
        for key, indices in groups.items()
    ], hashes


def _columns(columns: Mapping[str, Any]) -> tuple[list[Given], Hashes]:
    """Columns as they were given; one Shared value for all rows is repeated for each."""
    hashes = Hashes()
    given: dict[str, Given | None] = {}
    rows = 0
    for name, value in columns.items():
        if isinstance(value, Shared):
            given[name] = None
            continue
        given[name] = _list_column(name, value, hashes) if isinstance(value, list | tuple) else _stacked(name, value)
        rows = len(given[name][2])  # type: ignore[index]
    for name, column in given.items():
        if column is None:
            if not rows:
                raise Refused(f"field '{name}'", why="one Shared value for all rows, and no other field has rows")
            _, data = encoded(name, columns[name])
            given[name] = (name, BLOB_KIND, [hashes.share(*data) for _ in range(rows)])
    return [column for column in given.values() if column is not None], hashes


def _stacked(name: str, value: Any) -> Given:
    (code, ndim), data = encoded(name, value)
    if ndim < 1:
        raise Refused(
            f"column '{name}' of type {type(value).__name__}",
            why="it is neither an array [rows, …] nor a list of values",
        )
    return name, (code, ndim - 1), data


def _list_column(name: str, values: Sequence[Any], hashes: Hashes) -> Given:
    pairs: Pairs = [encoded(name, value) for value in values]
    share_repeated([pairs], hashes)
    kinds = {kind for kind, _ in pairs}
    if BLOB_KIND in kinds and len(kinds) > 1:
        # One column is of one kind: with some values shared, all are.
        pairs = [pair if pair[0] is BLOB_KIND else (BLOB_KIND, hashes.share(*pair)) for pair in pairs]
    elif len(kinds) > 1:
        found = ", ".join(sorted(f"{code} of {ndim} dimensions" if ndim >= 0 else code for code, ndim in kinds))
        raise Refused(f"column '{name}'", why=f"its rows are of several kinds: {found}")
    return name, pairs[0][0] if pairs else BYTES, [data for _, data in pairs]


TRIM_EVERY_S = 10.0
"""How often a reader unmaps slabs that their owners have unlinked."""
_NO_BLOBS: Mapping[bytes, Extent] = {}


class ArenaReaderStatistics(msgspec.Struct, frozen=True):
    """Numbers of an ArenaReader; counts since it was made, unless said otherwise.

    Attributes:
        mapped_slabs: slabs and spilled files in its cache now.
        mapped_bytes: bytes of these.
        maps: files mapped.
        unmaps: mappings that left the cache (views may keep them alive).
        blocks: blocks read, with those that were inline.
        inline_blocks: blocks that came inline.
        block_bytes: bytes of the blocks read; none of them were copied.
    """

    mapped_slabs: int
    mapped_bytes: int
    maps: int
    unmaps: int
    blocks: int
    inline_blocks: int
    block_bytes: int


class ArenaReader:
    """Reads blocks in place. Keeps at most max_slabs slabs mapped that no view refers to. Thread-safe.

    Every array, tensor and block keeps its slab mapped. What it shows is good until the memory's pin is released: then
    the owner may use it again, so copy what must outlive that.

    Args:
        shm_dir: the run's private directory in shared memory.
        spill_dir: where files named ``spill-…`` are, if anything is spilled.
        max_slabs: how many mappings are kept at hand.
        source: asked first for the bytes of an extent; None from it means that they lie on this node. It gives
            read-only mappings, a new array each time.
    """

    def __init__(
        self,
        shm_dir: Path,
        spill_dir: Path | None = None,
        *,
        max_slabs: int = 256,
        source: Callable[[Extent], NDArray[np.uint8] | None] | None = None,
    ) -> None:
        self._dir, self._spill_dir, self._max = shm_dir, spill_dir, max_slabs
        self._source = source
        self._maps: OrderedDict[str, NDArray[np.uint8]] = OrderedDict()
        self._trim_at = time.monotonic() + TRIM_EVERY_S
        self._lock = threading.Lock()
        self._mapped = self._unmapped = self._blocks = self._inline = self._bytes = 0

    def block(self, ref: BlockRef, blobs: Mapping[bytes, Extent] = _NO_BLOBS) -> Block:
        """The block at `ref`; values that it only names are found in `blobs`.

        Raises:
            Corrupt: the memory does not hold such a block, or there is no such memory.
        """
        block = self._block(ref)
        if block.rows != ref.rows or block.names != ref.fields:
            raise Corrupt(
                block.where, why=f"{block.rows} rows of {block.names}, announced were {ref.rows} of {ref.fields}"
            )
        block.blobs_from(resolver(blobs, self._blob, block.where))
        return block

    def memory(self, extent: Extent) -> NDArray[np.uint8]:
        """The bytes of an extent, read-only and in place.

        Raises:
            Corrupt: it lies outside its slab, or there is no such slab.
        """
        if self._source is not None and (fetched := self._source(extent)) is not None:
            return fetched
        slab = self._slab(extent.slab)
        if extent.offset < 0 or extent.nbytes < 0 or extent.offset + extent.nbytes > len(slab):
            raise Corrupt(
                f"extent {extent.slab}+{extent.offset}",
                why=f"its {extent.nbytes} bytes end beyond the slab's {len(slab)}",
            )
        # A separate array, not a view of the slab's: all views of it have it as their base, so that its lifetime tells
        # how long the extent is read.
        part: NDArray[np.uint8] = np.frombuffer(slab.data[extent.offset : extent.offset + extent.nbytes], np.uint8)
        return part

    def _block(self, ref: BlockRef) -> Block:
        extent = ref.extent
        if extent is None:
            block = Block(np.frombuffer(ref.inline, np.uint8), where="an inline block")
        else:
            block = Block(self.memory(extent), where=f"block {extent.slab}+{extent.offset}", read_only_mapping=True)
        with self._lock:
            self._blocks += 1
            self._inline += extent is None
            self._bytes += block.nbytes
        return block

    def _blob(self, extent: Extent) -> Block:
        return self._block(BlockRef(extent, 1, (BLOB,)))

    def _slab(self, name: str) -> NDArray[np.uint8]:
        with self._lock:
            if time.monotonic() >= self._trim_at:
                self._trim()
            found = self._maps.get(name)
            if found is None:
                found = self._maps[name] = map_read_only(path_of(name, self._dir, self._spill_dir))
                self._mapped += 1
                while len(self._maps) > self._max:
                    # Views keep their slab mapped; without any, it is unmapped here.
                    self._maps.popitem(last=False)
                    self._unmapped += 1
            else:
                self._maps.move_to_end(name)
            return found

    def trim(self) -> None:
        """Unmap slabs whose files are gone, so that their memory is freed. Also done every TRIM_EVERY_S."""
        with self._lock:
            self._trim()

    def _trim(self) -> None:
        self._trim_at = time.monotonic() + TRIM_EVERY_S
        for name in list(self._maps):
            if not path_of(name, self._dir, self._spill_dir).exists():
                del self._maps[name]
                self._unmapped += 1

    def statistics(self) -> ArenaReaderStatistics:
        """Current statistics."""
        with self._lock:
            return ArenaReaderStatistics(
                mapped_slabs=len(self._maps),
                mapped_bytes=sum(map(len, self._maps.values())),
                maps=self._mapped,
                unmaps=self._unmapped,
                blocks=self._blocks,
                inline_blocks=self._inline,
                block_bytes=self._bytes,
            )

    def close(self) -> None:
        """Drop the mappings that no view refers to."""
        with self._lock:
            self._unmapped += len(self._maps)
            self._maps.clear()
