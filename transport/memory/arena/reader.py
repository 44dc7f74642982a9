"""The reading side: blocks of all slabs of the node, in place."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax_rt.transport.memory.arena.slab import map_read_only, path_of
from relax_rt.transport.memory.block import Block, resolver
from relax_rt.transport.memory.refs import BlockRef, Extent
from relax_rt.transport.memory.values import BLOB
from relax_rt.transport.rpc.errors import Corrupt

TRIM_EVERY_S = 10.0
"""How often a reader lets go of slabs that their owners have given back."""
_NO_BLOBS: Mapping[bytes, Extent] = {}


class ReaderStatistics(msgspec.Struct, frozen=True):
    """Numbers of a Reader; counts since it was made, unless said otherwise.

    Attributes:
        mapped_slabs: slabs and spilled files in its cache now.
        mapped_bytes: bytes of these.
        maps: files mapped.
        unmaps: mappings that left the cache (views may keep them alive).
        blocks: blocks looked at, with those that were inline.
        inline_blocks: blocks that came inline.
        block_bytes: bytes of the blocks looked at; none of them were copied.
    """

    mapped_slabs: int
    mapped_bytes: int
    maps: int
    unmaps: int
    blocks: int
    inline_blocks: int
    block_bytes: int


class Reader:
    """Looks at blocks, in place. Keeps at most max_slabs slabs mapped that no view refers to. Thread-safe.

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
        """The bytes of an extent, read-only and in place, to send them elsewhere.

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
        # An array of its own, not a view of the slab's: numpy lets all views of it refer to it, which tells how long
        # the extent is looked at.
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
        """Let go of slabs whose files are gone, so that their memory can go too. Done by itself now and then."""
        with self._lock:
            self._trim()

    def _trim(self) -> None:
        self._trim_at = time.monotonic() + TRIM_EVERY_S
        for name in list(self._maps):
            if not path_of(name, self._dir, self._spill_dir).exists():
                del self._maps[name]
                self._unmapped += 1

    def statistics(self) -> ReaderStatistics:
        """Numbers for people and metrics."""
        with self._lock:
            return ReaderStatistics(
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
