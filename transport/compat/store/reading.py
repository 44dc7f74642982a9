"""What a get answered with, in memory: blocks shared with everybody to copy from, or pages of one's own to keep."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from relax_rt.transport.compat.store.api import Fetched
from relax_rt.transport.memory.arena import Block, Reader
from relax_rt.transport.memory.arena.slab import path_of
from relax_rt.transport.memory.refs import BlockRef, Extent
from relax_rt.transport.rpc.errors import Corrupt

OWN_PAGES_FROM_BYTES = 64 << 10
"""Less than this is copied: a mapping of its own costs more."""


class Piece:
    """`rows` rows of a field, from row `first` of a block on.

    own: the block lies in pages that nobody else sees the changes of; else copy what is to be kept.
    """

    __slots__ = ("block", "first", "own", "rows")

    def __init__(self, block: Block, first: int, rows: int, *, own: bool) -> None:
        self.block, self.first, self.rows, self.own = block, first, rows, own


class Reading:
    """The rows of a Fetched, until `close`. What is made of pages of one's own stays good after it.

    Args:
        fetched: the answer.
        reader: maps slabs.
        shm_dir, spill_dir: where they are.
        unread: called once, from any thread, when nothing looks at the answer's memory any more.
    """

    def __init__(
        self, fetched: Fetched, reader: Reader, shm_dir: Path, spill_dir: Path, unread: Callable[[], None]
    ) -> None:
        self.fields, self.rows = fetched.fields, len(fetched.indexes)
        self._segments = fetched.segments
        self._dirs = (shm_dir, spill_dir)
        self._open = 1
        self._unread = unread
        blobs = {blob.digest: blob.extent for blob in fetched.blobs}
        alone = fetched.segments[0] if len(fetched.segments) == 1 else None
        self._blocks: list[tuple[Block, bool]] = []
        for ref in fetched.blocks:
            # Blobs would need pages of their own too; they are copied.
            own = alone is not None and not blobs and _is_large(ref, alone.rows)
            self._blocks.append((self._own_block(ref) if own else reader.block(ref, blobs), own))

    def _own_block(self, ref: BlockRef) -> Block:
        assert ref.extent is not None
        memory, skip = map_own_pages(ref.extent, *self._dirs)
        self._open += 1
        weakref.finalize(memory, self._closed_one).atexit = False
        data = np.frombuffer(memory, np.uint8)[skip : skip + ref.extent.nbytes]
        block = Block(data, where=f"block {ref.extent.slab}+{ref.extent.offset}", read_only_mapping=True)
        if (block.rows, block.names) != (ref.rows, ref.fields):
            raise Corrupt(block.where, why=f"it has {block.rows} rows of {block.names}, not {ref.rows} of {ref.fields}")
        return block

    def pieces(self, field: str) -> Iterator[Piece]:
        """Where the rows of a field are, in order."""
        for segment in self._segments:
            for index, first in reversed(segment.parts):
                block, own = self._blocks[index]
                if field in block.names:
                    yield Piece(block, first, segment.rows, own=own)
                    break
            else:
                raise Corrupt(f"field '{field}'", why="no block of the answer has it")

    def close(self) -> None:
        """Nothing is looked at here any more but what was made of pages of one's own."""
        for block, _ in self._blocks:
            block.let_go()
        self._blocks = []
        self._closed_one()

    def _closed_one(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._unread()


def _is_large(ref: BlockRef, rows: int) -> bool:
    return ref.extent is not None and ref.extent.nbytes * rows >= OWN_PAGES_FROM_BYTES * ref.rows


def map_own_pages(extent: Extent, shm_dir: Path, spill_dir: Path) -> tuple[mmap.mmap, int]:
    """The pages of an extent, where they are; a page that is written to becomes a copy of one's own.

    Returns:
        The mapping, and where in it the extent begins.

    Raises:
        Corrupt: there is no such memory.
    """
    skip = extent.offset % mmap.ALLOCATIONGRANULARITY
    where = f"extent {extent.slab}+{extent.offset}"
    try:
        path = path_of(extent.slab, shm_dir, spill_dir)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if os.fstat(fd).st_size < extent.offset + extent.nbytes:
                raise Corrupt(where, why=f"its {extent.nbytes} bytes end beyond its file")
            return mmap.mmap(fd, skip + extent.nbytes, access=mmap.ACCESS_COPY, offset=extent.offset - skip), skip
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise Corrupt(where, why=str(error)) from error
