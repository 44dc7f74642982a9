"""The interface of all carriers of weights, and the carrier over shared memory.

The follower of a role makes a source of each committed version; its engine's `prepare` copies from it, off the event
loop, into the engine's own memory. A source either gives every byte, verified, or raises: nothing half-read is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.rpc.errors import Gone, Refused
from relax_rt.transport.weights.delta import apply
from relax_rt.transport.weights.manifest import Manifest, Sent, check_manifest
from relax_rt.transport.weights.payloads import Lora, decode_lora, merge_lora
from relax_rt.transport.weights.stage import copy_verified, delta_view, pinned, read_manifest, verify


class WeightSource(Protocol):
    """One committed version and a way to get it. Calls block: make them off the event loop.

    Attributes:
        record: the version as the registry has it.
        manifest: its layout and digests; those of the whole version, whatever the payload is.
        carrier: how it comes, for people: shared_memory, stream, directory, collective, cuda_ipc.
        payload, nbytes: the form in which it comes, and its size in that form.
    """

    record: VersionRecord
    manifest: Manifest
    carrier: str

    @property
    def payload(self) -> Sent: ...
    @property
    def nbytes(self) -> int: ...

    def copy_into(self, into: memoryview) -> None:
        """Fill `into`, of manifest.layout.nbytes, and verify what lies there then, bucket by bucket.

        With payload "delta" `into` must hold version manifest.base, which is checked as well.

        Raises:
            Gone: the version is not to be had any more; a newer one is, or soon will be.
            Corrupt: what lies in `into` is not that version; it must not be used.
        """

    def mapped(self) -> AbstractContextManager[memoryview]:
        """Map the version read-only, verified once and pinned until the block ends; no view may outlive the block.

        Raises:
            Gone, Corrupt: as for copy_into.
            Refused: this carrier has no memory to map.
        """


class StageSource:
    """A version on the stage of this node, in shared memory.

    Raises:
        Gone: it is not there.
        Corrupt: another content was staged under its number than was committed, or its manifest cannot be true.
    """

    def __init__(self, folder: Path, record: VersionRecord) -> None:
        self.record, self.carrier = record, "shared_memory"
        self.manifest = read_manifest(folder, record.version)
        self._folder = folder
        check_manifest(self.manifest, record, f"policy version {record.version} on the stage")
        self.payload: Sent = "full"
        self.nbytes = self.manifest.layout.nbytes

    def copy_into(self, into: memoryview) -> None:
        with pinned(self._folder, self.manifest) as view:
            copy_verified(self.manifest, view, into)

    @contextmanager
    def mapped(self) -> Iterator[memoryview]:
        with pinned(self._folder, self.manifest) as view:
            verify(self.manifest, view)
            yield view


class DeltaSource:
    """A version on the stage of this node as the changes since another one, which the receiver holds.

    Raises:
        Gone: there is no delta to it. Corrupt: as for StageSource.
        Refused: its deltas are of other versions than `holds`, or of other weights of that version.
    """

    payload: Sent = "delta"

    def __init__(self, folder: Path, record: VersionRecord, holds: VersionRecord) -> None:
        self.record, self.carrier = record, "shared_memory"
        self._folder, what = folder, f"delta to policy version {record.version}"
        manifest = read_manifest(folder, record.version)
        check_manifest(manifest, record, f"policy version {record.version} on the stage")
        if not manifest.deltas:
            raise Gone(what, why=manifest.no_delta or "none was made")
        self._deltas = manifest.since(holds.version, holds.digest)
        if not self._deltas:
            raise Refused(
                what,
                why=f"there are some of {bases_of(manifest)}; here is version {holds.version} with digest "
                f"{holds.digest or 'none'}",
                hint="fetch the version in full",
            )
        self.manifest = manifest.as_delta(holds.version, holds.digest)
        self.nbytes = sum(delta.nbytes for delta in self._deltas)

    def copy_into(self, into: memoryview) -> None:
        blobs = []
        for delta in self._deltas:
            # Copied: a reader that is stopped must not keep retired files in shared memory.
            with delta_view(self._folder, delta.version, delta.digest) as view:
                blobs.append(memoryview(bytes(view)))
        apply(blobs, into, self.manifest)

    def mapped(self) -> AbstractContextManager[memoryview]:
        raise Refused(f"mapping a delta to policy version {self.record.version}", why="it is not the whole version")


def bases_of(manifest: Manifest) -> str:
    """Name the versions from which deltas lead here, for people."""
    *older, newest = manifest.deltas
    others = f" and {older[0].base} to {older[-1].base}" if older else ""
    return f"version {newest.base} with digest {newest.base_digest}{others}"


def add_adapters(blob: memoryview, folder: Path, base: Manifest, into: memoryview) -> None:
    """Fill `into` with a base on this stage and add adapters to it; a receiver has to verify the result.

    Raises:
        Gone: the base is not here any more. Corrupt: it is damaged, or the adapters are.
        Refused: they are for another base, or do not fit the model.
    """
    lora = lora_for(blob, base)
    with pinned(folder, base) as view:
        copy_verified(base, view, into)
    merge_lora(lora, base.layout, into)


def lora_for(blob: memoryview, base: Manifest) -> Lora:
    """Decode adapters and check that they are for this base.

    Raises:
        Corrupt: they are damaged. Refused: they are for another base.
    """
    lora = decode_lora(blob)
    if (lora.base, lora.base_digest) != (base.version, base.digest):
        raise _other_base("adapters", lora.base_digest, base.digest)
    return lora


def base_of(folder: Path, manifest: Manifest) -> Manifest:
    """Read the manifest of the base of a version's adapters from this stage.

    Raises:
        Gone: nothing lies there. Corrupt: its manifest cannot be true.
        Refused: it is another model's, or was published in another dtype.
    """
    base = read_manifest(folder, ROOT)
    if base.digest != manifest.base_digest or base.layout != manifest.layout:
        raise _other_base(f"adapters of policy version {manifest.version}", manifest.base_digest, base.digest)
    check_manifest(base, VersionRecord(ROOT, ROOT, 0, base.digest), f"the model's own weights in {folder}")
    return base


def _other_base(what: str, wanted: str, here: str) -> Refused:
    return Refused(
        what,
        why=f"they are for weights with digest {wanted or 'none'}, here are those with {here}",
        hint="fetch the version in full",
    )


def stage_source(folder: Path, record: VersionRecord, holds: VersionRecord | None = None) -> WeightSource:
    """Make the source of a version on this node's stage: a delta to what the receiver holds if there is one, else full.

    Adapters are for other nodes (StageMirror): on this node copying the version is faster than merging adapters.

    Raises:
        Gone, Corrupt: as for StageSource.
    """
    if holds is not None and holds.version:
        with suppress(Gone, Refused):
            return DeltaSource(folder, record, holds)
    return StageSource(folder, record)
