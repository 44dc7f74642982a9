"""The table of live memory: blocks and their rows, extents and their references, blobs that blocks share.

The ledgers of the queue and of the store each keep one; it decides when an owner may reuse an extent. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from relax_rt.transport.memory.refs import (
    BlobRef,
    BlockRef,
    Extent,
    Payload,
    extents_in,
    is_slab_name,
    is_spilled,
    owner_key,
    owner_of,
)
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

AliveTest = Callable[[str], bool]
"""Whether the owner with this key is still a caller, so that freed extents are kept for it."""


class LiveExtent(msgspec.Struct, array_like=True, gc=False):
    """A live extent. Its block counts as one reference, and every lease that can read it as one more (a pin)."""

    nbytes: int
    references: int = 1


class LiveBlock(msgspec.Struct, array_like=True, gc=False):
    """A block in use.

    Attributes:
        rows: samples that still have a row in it.
        blobs: digests of the blobs that its rows name.
    """

    ref: BlockRef
    rows: int
    blobs: list[bytes] = []


class LiveBlob(msgspec.Struct, array_like=True, gc=False):
    """A shared value: where it lies, and how many blocks name it."""

    extent: Extent
    blocks: int = 1


class BlockTable(msgspec.Struct):
    """Live blocks by id, extents by slab and offset, blobs by digest; freed extents by owner until it collects them.

    Attributes:
        payload_bytes: in shared memory. spilled_bytes: in files on the broker's disk.
        inline_bytes: in the ledger itself.
        deduplicated_bytes: payload that was not stored again since the run began.
    """

    next_id: int = 1
    blocks: dict[int, LiveBlock] = {}
    live: dict[str, dict[int, LiveExtent]] = {}
    blobs: dict[bytes, LiveBlob] = {}
    freed: dict[str, list[Extent]] = {}
    payload_bytes: int = 0
    spilled_bytes: int = 0
    inline_bytes: int = 0
    deduplicated_bytes: int = 0

    def check_extents(self, puts: Sequence[Payload], who: Incarnation) -> None:
        """Raises:
        Refused: an extent is not in the caller's own slab, is in use, or comes twice; a block is nowhere.
        """
        seen: set[tuple[str, int]] = set()
        mine = owner_key(who)
        for extent in extents_in(puts):
            at = (extent.slab, extent.offset)
            if at in seen:
                raise Refused(f"put by {who}", why=f"extent {extent.slab}+{extent.offset} is twice in the same call")
            seen.add(at)
            if owner_of(extent.slab) != mine or not is_slab_name(extent.slab):
                raise Refused(f"put by {who}", why=f"slab {extent.slab!r} is not its own")
            if extent.offset in self.live.get(extent.slab, ()):
                raise Refused(f"put by {who}", why=f"extent {extent.slab}+{extent.offset} is in use")
            if extent.offset < 0 or extent.nbytes < 1:
                raise Refused(f"put by {who}", why=f"extent {extent.slab}+{extent.offset} has {extent.nbytes} bytes")
        for put in puts:
            if put.block.extent is None and not put.block.inline:
                raise Refused(f"put by {who}", why="a block has neither an extent nor bytes")

    def add(self, put: Payload, rows: int, alive: AliveTest) -> int:
        """Enter a put's block, used by `rows` samples; returns its id.

        The extent of a blob that is already there is freed at once.
        """
        id_ = self.next_id
        self.next_id += 1
        self._enter(put.block.extent)
        self.inline_bytes += len(put.block.inline)
        digests: list[bytes] = []
        for blob in put.blobs:
            known = self.blobs.get(blob.digest)
            if known is None:
                self.blobs[blob.digest] = LiveBlob(blob.extent)
                self._enter(blob.extent)
            else:
                known.blocks += 1
                self.deduplicated_bytes += blob.extent.nbytes
                self.return_to_owner(blob.extent, alive)
            digests.append(blob.digest)
        self.blocks[id_] = LiveBlock(put.block, rows, digests)
        return id_

    def _enter(self, extent: Extent | None) -> None:
        if extent is not None:
            self.live.setdefault(extent.slab, {})[extent.offset] = LiveExtent(extent.nbytes)
            self._count(extent, extent.nbytes)

    def _count(self, extent: Extent, nbytes: int) -> None:
        if is_spilled(extent.slab):
            self.spilled_bytes += nbytes
        else:
            self.payload_bytes += nbytes

    def drop_row(self, id_: int, alive: AliveTest) -> None:
        """A sample with a row in the block has ended; the last one frees the block."""
        self.drop_rows(id_, 1, alive)

    def drop_rows(self, id_: int, rows: int, alive: AliveTest) -> None:
        """Some samples with a row in the block have ended."""
        block = self.blocks[id_]
        block.rows -= rows
        if block.rows:
            return
        del self.blocks[id_]
        self.inline_bytes -= len(block.ref.inline)
        if block.ref.extent is not None:
            self.unpin([block.ref.extent], alive)
        for digest in block.blobs:
            blob = self.blobs[digest]
            blob.blocks -= 1
            if blob.blocks == 0:
                del self.blobs[digest]
                self.unpin([blob.extent], alive)

    def extents_of(self, ids: Iterable[int]) -> list[Extent]:
        """The extents that a reader of these blocks reads, each once."""
        found: dict[tuple[str, int], Extent] = {}
        for id_ in ids:
            block = self.blocks[id_]
            if block.ref.extent is not None:
                found[block.ref.extent.slab, block.ref.extent.offset] = block.ref.extent
            for digest in block.blobs:
                extent = self.blobs[digest].extent
                found[extent.slab, extent.offset] = extent
        return list(found.values())

    def ids_in(self, owner: str) -> set[int]:
        """Blocks that lie in this owner's slabs, or name blobs that do."""
        blobs = {digest for digest, blob in self.blobs.items() if owner_of(blob.extent.slab) == owner}
        return {
            id_
            for id_, block in self.blocks.items()
            if (block.ref.extent is not None and owner_of(block.ref.extent.slab) == owner)
            or not blobs.isdisjoint(block.blobs)
        }

    def blob_refs(self, ids: Iterable[int]) -> list[BlobRef]:
        """Where the blobs of these blocks lie."""
        digests = dict.fromkeys(digest for id_ in ids for digest in self.blocks[id_].blobs)
        return [BlobRef(digest, self.blobs[digest].extent) for digest in digests]

    def pin(self, extents: Iterable[Extent]) -> None:
        """One more reference to each."""
        for extent in extents:
            self.live[extent.slab][extent.offset].references += 1

    def unpin(self, extents: Iterable[Extent], alive: AliveTest) -> None:
        """One reference less; the last one frees the extent."""
        for extent in extents:
            slab = self.live[extent.slab]
            one = slab[extent.offset]
            one.references -= 1
            if one.references == 0:
                del slab[extent.offset]
                if not slab:
                    del self.live[extent.slab]
                self._count(extent, -extent.nbytes)
                self.return_to_owner(extent, alive)

    def move(self, id_: int, to: Extent, alive: AliveTest) -> None:
        """The block's bytes have moved to `to`; pins keep the old extent until they are released."""
        block = self.blocks[id_]
        old = block.ref.extent
        assert old is not None
        self._enter(to)
        block.ref = BlockRef(to, block.ref.rows, block.ref.fields)
        self.unpin([old], alive)

    def return_to_owner(self, extent: Extent, alive: AliveTest) -> None:
        """Free an extent: its owner collects it with its next answer; a dead owner's is dropped."""
        owner = owner_of(extent.slab)
        if alive(owner):
            self.freed.setdefault(owner, []).append(extent)

    def collect(self, who: Incarnation) -> list[Extent]:
        """Take the caller's extents freed since it last collected."""
        return self.freed.pop(owner_key(who), [])

    def forget_owner(self, who: Incarnation) -> None:
        """The owner is dead: drop its freed extents."""
        self.freed.pop(owner_key(who), None)

    def clear(self) -> None:
        """Drop everything: the shared memory is gone."""
        self.blocks, self.live, self.blobs, self.freed = {}, {}, {}, {}
        self.payload_bytes = self.spilled_bytes = self.inline_bytes = 0
