"""Deltas between two versions: the changed elements by index and value, one block for each bucket.

A block is a header, the gaps from one changed element to the next, and the elements. Gaps are one or two bytes,
whichever makes the block smaller; a gap that does not fit is bridged by elements that did not change. A bucket whose
block would not be smaller than the bucket is stored whole. The result is verified by the digests of the whole version,
so that a wrong base or a damaged block is never used.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded
from relax_rt.transport.weights.manifest import Layout, Manifest, bucket_digest, bucket_slices

_HEADER = struct.Struct("<BBxxI")
"""Coding of the bucket, bytes of an element, number of elements."""
_RAW, _GAPS8, _GAPS16 = 0, 1, 2
_ELEMENTS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_GAPS: dict[int, type[np.uint8] | type[np.uint16]] = {_GAPS8: np.uint8, _GAPS16: np.uint16}

Bytes = NDArray[np.uint8]


def element_bytes(layout: Layout) -> Literal[1, 2, 4, 8]:
    """Return the size of the compared elements: that of the smallest dtype in the layout."""
    sizes = {e.nbytes // max(1, int(np.prod(e.shape, dtype=np.int64))) for e in layout.entries if e.nbytes}
    smallest = min(sizes, default=1)
    return smallest if smallest in _ELEMENTS else 1  # type: ignore[return-value]


def encode(base: memoryview, new: memoryview, layout: Layout) -> Iterator[bytes]:
    """Yield the blocks that turn `base` into `new`, both of the layout's size."""
    size = element_bytes(layout)
    old, fresh = np.frombuffer(base, np.uint8), np.frombuffer(new, np.uint8)
    try:
        for part in bucket_slices(layout.nbytes):
            yield _encode_bucket(old[part], fresh[part], size)
    finally:
        del old, fresh  # views of pinned memory


def apply(
    deltas: Sequence[memoryview],
    into: memoryview,
    manifest: Manifest,
    *,
    verified: bool = True,
    until: float = math.inf,
) -> None:
    """Turn the base that `into` holds into the deltas' version, and verify every bucket of it.

    Args:
        deltas: the blocks of each, applied one after the other.
        manifest: of the version, see Manifest.as_delta.
        verified: False: the caller verifies `into`.
        until: deadline by time.monotonic(), checked between buckets.

    Raises:
        Corrupt: the blocks are damaged, or `into` held something else; what it holds now must not be used.
        DeadlineExceeded: it was not done in time; the same holds for `into`.
    """
    what = f"delta from policy version {manifest.base} to {manifest.version}"
    places = [0] * len(deltas)
    for part, expected in zip(bucket_slices(manifest.layout.nbytes), manifest.buckets, strict=True):
        if time.monotonic() > until:
            raise DeadlineExceeded(f"{what} was not applied in time", why="its deadline has passed")
        bucket = into[part]
        for number, blocks in enumerate(deltas):
            places[number] = _apply_bucket(blocks, places[number], np.frombuffer(bucket, np.uint8), what)
        if verified and bucket_digest(bucket) != expected:
            raise Corrupt(
                f"{what}, bytes {part.start}-{part.stop}",
                why=f"the result does not match its digest: the delta is damaged, or not of what was version "
                f"{manifest.base} here",
                hint="fetch the version in full",
            )
    for blocks, at in zip(deltas, places, strict=True):
        if at != len(blocks):
            raise Corrupt(what, why=f"{len(blocks) - at} bytes too many")


def _encode_bucket(old: Bytes, new: Bytes, size: int) -> bytes:
    whole = len(new) - len(new) % size
    element = _ELEMENTS[size]
    differs = old[:whole].view(element) != new[:whole].view(element)
    raw = _HEADER.pack(_RAW, size, len(new))
    if np.count_nonzero(differs) * (1 + size) >= len(new) or bool((old[whole:] != new[whole:]).any()):
        return raw + new.tobytes()
    changed = np.flatnonzero(differs)
    # Cost by width of the gap; the fillers that long gaps need are counted here and made below.
    gaps = np.diff(changed, prepend=-1)
    costs = {
        coding: (len(changed) + int(((gaps - 1) >> (8 * width)).sum())) * (width + size)
        for coding, width in ((_GAPS8, 1), (_GAPS16, 2))
    }
    coding = min(costs, key=lambda c: costs[c])
    if costs[coding] >= len(new):
        return raw + new.tobytes()
    places = _with_fillers(changed, 1 << 8 * np.dtype(_GAPS[coding]).itemsize)
    stored = (np.diff(places, prepend=-1) - 1).astype(_GAPS[coding])
    return _HEADER.pack(coding, size, len(places)) + stored.tobytes() + new[:whole].view(element)[places].tobytes()


def _with_fillers(changed: NDArray[np.int64], reach: int) -> NDArray[np.int64]:
    """Add places so that none is further than `reach` from the one before."""
    before = np.concatenate([[-1], changed[:-1]]) if len(changed) else changed
    extra = (changed - before - 1) // reach
    if not extra.any():
        return changed
    # Filler k of a gap lies k * reach behind the gap's start.
    starts = np.repeat(before, extra)
    number = np.arange(len(starts)) - np.repeat(np.cumsum(extra) - extra, extra) + 1
    return np.sort(np.concatenate([changed, starts + number * reach]))


def _apply_bucket(blocks: memoryview, at: int, bucket: Bytes, what: str) -> int:
    """Apply the block at `at`; return the place of the next one."""
    if at + _HEADER.size > len(blocks):
        raise Corrupt(what, why="it ends too soon")
    coding, size, count = map(int, _HEADER.unpack_from(blocks, at))
    at += _HEADER.size
    if coding == _RAW:
        if count != len(bucket) or at + count > len(blocks):
            raise Corrupt(what, why=f"a whole bucket of {count} bytes where {len(bucket)} belong")
        bucket[:] = np.frombuffer(blocks[at : at + count], np.uint8)
        return at + count
    if coding not in _GAPS or size not in _ELEMENTS:
        raise Corrupt(what, why=f"a block of kind {coding} with elements of {size} bytes")
    width = np.dtype(_GAPS[coding]).itemsize
    middle, end = at + count * width, at + count * (width + size)
    elements = bucket[: len(bucket) - len(bucket) % size].view(_ELEMENTS[size])
    if end > len(blocks) or count > len(elements):
        raise Corrupt(what, why="it ends too soon")
    if count:
        places = np.frombuffer(blocks[at:middle], _GAPS[coding]).astype(np.int64)
        places = np.cumsum(places + 1) - 1
        if places[-1] >= len(elements):
            raise Corrupt(what, why=f"element {places[-1]} of a bucket that has {len(elements)}")
        elements[places] = np.frombuffer(blocks[middle:end], np.uint8).view(_ELEMENTS[size])
    return end
