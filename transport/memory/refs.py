"""Where payload lies: references to extents, blocks and shared values as they travel in messages, and slab names.

A slab's name says whose memory it is: ``<slot>-<epoch>-<n>.slab``; ``spill-…`` is a file on the broker's disk.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Annotated, Protocol

import msgspec

from relax_rt.transport.rpc.identity import Incarnation

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


SPILL = "spill"
"""Owner in the names of slabs that are files on the broker's disk."""
SPILL_PREFIX = SPILL + "-"
"""Names of files on the broker's disk begin with it; no other slab's does."""
_SLAB = re.compile(r"[A-Za-z0-9_.-]{1,200}-\d{1,20}-\d{1,20}\.slab")
_SPILLED = re.compile(r"spill-[A-Za-z0-9_.-]{1,200}")
_SLOT = re.compile(r"[A-Za-z0-9_.-]{1,100}/\d{1,9}")


@functools.lru_cache(maxsize=4096)
def owner_key(who: Incarnation) -> str:
    """The incarnation's name in slab names."""
    return f"{who.slot.replace('/', '-')}-{who.epoch}"


def slab_name(who: Incarnation, n: int) -> str:
    """``rollout-0-7-1.slab``: slot, epoch, running number."""
    return f"{owner_key(who)}-{n}.slab"


def owner_of(slab: str) -> str:
    """The owner's key in a slab's name."""
    return slab.rpartition("-")[0]


def is_slab_name(name: str) -> bool:
    """Whether an incarnation's slab can have this name."""
    return not is_spilled(name) and _SLAB.fullmatch(name) is not None


def is_spill_name(name: str) -> bool:
    """Whether a file of spilled payload can have this name."""
    return _SPILLED.fullmatch(name) is not None


def is_spilled(slab: str) -> bool:
    """Whether the slab of this name is a file on the broker's disk."""
    return slab.startswith(SPILL_PREFIX)


def unfit_slot(who: Incarnation) -> str:
    """Why the incarnation's slot cannot be part of slab names; empty if it can.

    Slots that pass have distinct keys.
    """
    if not _SLOT.fullmatch(who.slot):
        return "a slot's name is letters, digits, _ . - then / and a number"
    if is_spilled(owner_key(who)):
        return f"'{SPILL}' is how files of spilled payloads are named"
    return ""
