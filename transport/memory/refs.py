"""Where payload lies: references to extents of slabs, to blocks and to shared values, as they travel in messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Protocol

import msgspec

# The decoder checks these bounds, so that sums of such numbers stay within 64 bits.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Inline = Annotated[bytes, msgspec.Meta(max_length=4096)]


class Extent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes of a slab, the unit in which memory is allocated and freed.

    The slab's name begins with its owner, ``<slot>-<epoch>-``, or with ``spill-`` for a file on the broker's disk.
    """

    slab: str
    offset: Count
    nbytes: Count


class BlockRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a block lies: columns of `rows` samples, in an extent or, when tiny, inline."""

    extent: Extent | None
    rows: Count
    fields: tuple[str, ...]
    inline: Inline = b""


class BlobRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A value that several samples share, as an image of a group's prompt: a block of one row and one column.

    digest is the xxh3-128 of dtype, shape and bytes; rows of other blocks name the blob by it.
    """

    digest: Digest
    extent: Extent


class Payload(Protocol):
    """A block and the shared values that its rows name: what a put brings."""

    @property
    def block(self) -> BlockRef:
        """The block."""

    @property
    def blobs(self) -> list[BlobRef]:
        """Shared values that its rows name, each once."""


def extents_in(payloads: Iterable[Payload]) -> list[Extent]:
    """Every extent of the payloads: their blocks' and their blobs'."""
    found: list[Extent] = []
    for payload in payloads:
        if payload.block.extent is not None:
            found.append(payload.block.extent)
        found += [blob.extent for blob in payload.blobs]
    return found
