"""Which values of a put are the same, so that they are stored once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from relax_rt.transport.memory.values import (
    BLOB_KIND,
    BYTES,
    SHARE_FROM_BYTES,
    SHARED,
    Data,
    Kind,
    data_nbytes,
    digest_of,
    sketch_of,
)

Pairs = list[tuple[Kind, Any]]
"""Values as kind and data."""


class Hashes:
    """The values of one call that are stored by content.

    Attributes:
        values: kind and data by digest.
        shared: places that hold a digest, and shared_bytes those of the values that stood there.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, tuple[Kind, Data]] = {}
        self.shared = self.shared_bytes = 0
        # An id is that of one object as long as the object lives.
        self._digests: dict[int, tuple[Data, bytes]] = {}

    def digest(self, kind: Kind, data: Data) -> bytes:
        """The digest of a value; a value that is the same object as an earlier one is not looked at again."""
        found = self._digests.get(id(data))
        if found is None:
            found = self._digests[id(data)] = (data, digest_of(kind, data))
        return found[1]

    def share(self, kind: Kind, data: Data) -> bytes:
        """Store the value by content; its digest stands in its place."""
        digest = self.digest(kind, data)
        self.values.setdefault(digest, (kind, data))
        self.shared += 1
        self.shared_bytes += data_nbytes(data)
        return digest


def may_repeat(kind: Kind) -> bool:
    """Whether values of this kind are looked at for duplicates."""
    return kind is SHARED or kind is BYTES or kind[0] == "|u1"


def share_repeated(columns: Iterable[Pairs], hashes: Hashes) -> None:
    """Replace, in place, values marked as shared and large ones that come twice by their digests.

    Only values of which a few bytes agree are hashed, so that distinct ones cost next to nothing.
    """
    sketches: dict[tuple[Kind, int, bytes], list[tuple[Pairs, int]]] = {}
    for pairs in columns:
        for i, (kind, data) in enumerate(pairs):
            if kind is SHARED:
                pairs[i] = (BLOB_KIND, hashes.share(*data))
            elif may_repeat(kind) and data_nbytes(data) >= SHARE_FROM_BYTES:
                sketches.setdefault(sketch_of(kind, data), []).append((pairs, i))
    for places in sketches.values():
        if len(places) > 1:
            _share_equal(places, hashes)


def _share_equal(places: list[tuple[Pairs, int]], hashes: Hashes) -> None:
    by_digest: dict[bytes, list[tuple[Pairs, int]]] = {}
    for pairs, i in places:
        by_digest.setdefault(hashes.digest(*pairs[i]), []).append((pairs, i))
    for same in by_digest.values():
        if len(same) > 1:
            for pairs, i in same:
                pairs[i] = (BLOB_KIND, hashes.share(*pairs[i]))
