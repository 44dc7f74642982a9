"""The manifest of a version: tensors in one flat buffer, digests by bucket; and the checks of one from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec
import xxhash

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt
from relax_rt.transport.rpc.interface import idempotent

STAGE_DIR = "weights"
"""The stage's folder in the shared memory of a node."""
ALIGNMENT = 64
BUCKET_BYTES = 16 << 20
"""Digests are taken over buckets of this size, so that a reader checks while it copies."""
MAX_DELTA = 0.5
"""A delta, or several, or adapters of more than this part of the whole are not worth the work of applying them."""
MAX_DELTAS = 16
"""Deltas that are kept, to be applied one after the other."""
MAX_WEIGHT_BYTES = 1 << 44
MAX_WIRE_HEADER_BYTES = 64 << 20


class StageApi(Protocol):
    """The interface that names the server of a run's stage to other nodes; the queue's role implements it."""

    @idempotent
    async def where(self) -> str:
        """Return its ``tcp://host:port``; another one after a restart. Empty in a run of one node."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: dtype is torch's name (``bfloat16``), offset and nbytes are in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Layout(msgspec.Struct, frozen=True):
    """Where every tensor lies in a flat buffer of `nbytes`."""

    entries: tuple[TensorEntry, ...]
    nbytes: int


Payload = Literal["full", "delta"]
Sent = Literal["full", "delta", "adapters"]
"""The form in which a version travels."""


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """What turns version `base` into `version`: a file beside the versions, named by the version and its digest."""

    version: int
    digest: str
    base: int
    base_digest: str
    nbytes: int


class Manifest(msgspec.Struct, frozen=True):
    """A staged version: made by incarnation `epoch` of the trainer, lying in `file` beside the manifest.

    Attributes:
        layout, buckets, digest: of the whole version's weights, whatever the payload is.
        payload: full: `file` holds the weights; delta: only what changed since version `base`, as a source has it.
        base: the version that must be there before a delta is applied to it, or that adapters are added to;
            base_digest: that version's digest.
        deltas: those beside it that lead here, each from the version that the one before makes; no_delta: why there
            is none from the version before, where there should be.
        wire_bytes: of the same version in fewer bits, which lies beside it for carriers that send it; 0: there is none.
        adapter_bytes: of the adapters that make this version of the base, beside it; 0: there are none.
    """

    version: int
    epoch: int
    file: str
    layout: Layout
    buckets: tuple[str, ...]
    digest: str
    payload: Payload = "full"
    base: int = 0
    base_digest: str = ""
    wire_bytes: int = 0
    adapter_bytes: int = 0
    deltas: tuple[Delta, ...] = ()
    no_delta: str = ""

    @property
    def sent_bytes(self) -> int:
        """What a broadcast of it sends."""
        return self.wire_bytes or self.layout.nbytes

    def since(self, version: int, digest: str) -> tuple[Delta, ...]:
        """The deltas that make this version of that one, in order; empty: none do."""
        bases = [(delta.base, delta.base_digest) for delta in self.deltas]
        return self.deltas[bases.index((version, digest)) :] if (version, digest) in bases else ()

    def as_delta(self, version: int, digest: str) -> Manifest:
        """The same version, for who makes it of that one."""
        return msgspec.structs.replace(self, payload="delta", base=version, base_digest=digest)


def worth_applying(deltas: tuple[Delta, ...], nbytes: int) -> tuple[Delta, ...]:
    """The last of them, as many as a reader may fetch and apply in place of a version of `nbytes`."""
    deltas = deltas[-MAX_DELTAS:]
    while sum(delta.nbytes for delta in deltas) > MAX_DELTA * nbytes:
        deltas = deltas[1:]
    return deltas


def layout_of(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> Layout:
    """Lay (name, dtype, shape, nbytes) out one after the other, aligned for vector loads."""
    entries, offset = [], 0
    for name, dtype, shape, nbytes in tensors:
        entries.append(TensorEntry(name, dtype, shape, offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(entries), offset)


def bucket_slices(nbytes: int) -> list[slice]:
    """The byte ranges that are digested one by one."""
    return [slice(at, min(at + BUCKET_BYTES, nbytes)) for at in range(0, nbytes, BUCKET_BYTES)]


def bucket_digest(data: memoryview) -> str:
    """xxh3-128 of a bucket, hex. It finds torn and mixed-up bytes; it is no defence against an attacker."""
    return xxhash.xxh3_128_hexdigest(data)


def total_digest(buckets: Iterable[str]) -> str:
    """The digest of a version: over its buckets' digests, in order."""
    return xxhash.xxh3_128_hexdigest("".join(buckets).encode())


def check_manifest(manifest: Manifest, record: VersionRecord, what: str) -> None:
    """Check a manifest against itself and the version's record, before a byte is read or reserved by it.

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
    """Check that each delta makes the next one's base, and that all together are within the size limit."""
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
    """Check that tensors neither overlap, lie outside nor share a name.

    Raises:
        Corrupt: they do.
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
