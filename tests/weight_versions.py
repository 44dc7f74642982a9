"""Small versions of weights with known bytes, for tests of what carries them."""

from __future__ import annotations

import random

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.weights.manifest import (
    Layout,
    Manifest,
    bucket_digest,
    bucket_slices,
    layout_of,
    total_digest,
)

LAYOUT = layout_of(
    [
        ("a.weight", "float32", (3, 5), 60),
        ("b", "bfloat16", (7,), 14),
        ("scalar", "float32", (), 4),
        ("none", "int8", (0,), 0),
    ]
)


def fill(layout: Layout, seed: int = 0) -> bytearray:
    """Random tensors; what aligns them is zero."""
    data = bytearray(layout.nbytes)
    rng = random.Random(seed)
    for entry in layout.entries:
        data[entry.offset : entry.offset + entry.nbytes] = rng.randbytes(entry.nbytes)
    return data


def version_of(data: bytearray, layout: Layout = LAYOUT, version: int = 7) -> tuple[VersionRecord, Manifest]:
    """Its record and manifest, as sealing them makes them."""
    with memoryview(data) as view:
        buckets = tuple(bucket_digest(view[part]) for part in bucket_slices(layout.nbytes))
    manifest = Manifest(version, 1, "w0.buf", layout, buckets, total_digest(buckets))
    return VersionRecord(version, version - 1, version, manifest.digest), manifest
