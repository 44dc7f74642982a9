"""Whether a manifest that came from elsewhere can be true, before a byte is read or reserved by its word."""

from __future__ import annotations

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt
from relax_rt.transport.weights.manifest import (
    MAX_DELTA,
    MAX_DELTAS,
    Layout,
    Manifest,
    bucket_slices,
    total_digest,
)

MAX_WEIGHT_BYTES = 1 << 44
MAX_WIRE_HEADER_BYTES = 64 << 20


def check_manifest(manifest: Manifest, record: VersionRecord, what: str) -> None:
    """Hold a manifest against itself and against the version's record.

    Raises:
        Corrupt: it cannot be that of the version.
    """
    if manifest.version != record.version:
        raise Corrupt(what, why=f"its manifest is of version {manifest.version}")
    if record.digest and record.digest != manifest.digest:
        raise Corrupt(what, why=f"committed with digest {record.digest}, here is {manifest.digest}")
    if not 0 < manifest.layout.nbytes <= MAX_WEIGHT_BYTES:
        raise Corrupt(what, why=f"it has {manifest.layout.nbytes} bytes")
    if not 0 <= manifest.wire_bytes <= manifest.layout.nbytes + MAX_WIRE_HEADER_BYTES:
        raise Corrupt(what, why=f"in fewer bits it has {manifest.wire_bytes} bytes of {manifest.layout.nbytes}")
    if not 0 <= manifest.adapter_bytes <= manifest.layout.nbytes:
        raise Corrupt(what, why=f"its adapters have {manifest.adapter_bytes} bytes of {manifest.layout.nbytes}")
    _check_deltas(manifest, what)
    if len(manifest.buckets) != len(bucket_slices(manifest.layout.nbytes)):
        raise Corrupt(what, why=f"{len(manifest.buckets)} digests are not those of {manifest.layout.nbytes} bytes")
    if total_digest(manifest.buckets) != manifest.digest:
        raise Corrupt(what, why="the digests of its buckets do not make that of the whole")
    check_layout(manifest.layout, what)


def _check_deltas(manifest: Manifest, what: str) -> None:
    """Whether each makes the next one's base, and all are as small as who applies them counts on."""
    deltas = manifest.deltas
    if len(deltas) > MAX_DELTAS or any(delta.nbytes <= 0 for delta in deltas):
        raise Corrupt(what, why=f"it has {len(deltas)} deltas, of {[delta.nbytes for delta in deltas]} bytes")
    if (total := sum(delta.nbytes for delta in deltas)) > MAX_DELTA * manifest.layout.nbytes:
        raise Corrupt(what, why=f"its deltas have {total} bytes of {manifest.layout.nbytes}")
    made = [(delta.version, delta.digest) for delta in deltas]
    wanted = [*((delta.base, delta.base_digest) for delta in deltas[1:]), (manifest.version, manifest.digest)]
    if deltas and made != wanted:
        raise Corrupt(what, why=f"its deltas make the versions {[version for version, _ in made]} one of another")


def check_layout(layout: Layout, what: str) -> None:
    """Raises:
    Corrupt: tensors overlap, lie outside, or have the same name.
    """
    at, names = 0, set[str]()
    for entry in layout.entries:
        if entry.offset < at or entry.nbytes < 0:
            raise Corrupt(f"tensor {entry.name} of {what}", why="it overlaps another one in the manifest")
        if entry.name in names:
            raise Corrupt(f"tensor {entry.name} of {what}", why="it is there twice in the manifest")
        names.add(entry.name)
        at = entry.offset + entry.nbytes
    if at > layout.nbytes:
        raise Corrupt(what, why="its tensors do not lie inside the layout")
