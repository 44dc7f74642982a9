"""One committed version as a node can get it: the interface of all carriers of weights, and the one over shared memory.

Who takes part: the follower of a role makes a source of each committed version, its engine's `prepare` uses it off the
event loop, into memory that is the engine's own. Nothing half-read is ever used: a source either gives every byte,
verified, or raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from relax_rt.transport.errors import Corrupt
from relax_rt.transport.versions import VersionRecord
from relax_rt.transport.weights.manifest import Manifest
from relax_rt.transport.weights.stage import copy_verified, pinned, read_manifest, verify


class WeightSource(Protocol):
    """One committed version as this node can get it. Calls block: make them off the event loop.

    Attributes:
        record: the version as the registry has it.
        manifest: its layout and digests; those of the whole version, whatever the payload is.
    """

    record: VersionRecord
    manifest: Manifest

    def copy_into(self, into: memoryview) -> None:
        """Fill `into`, of manifest.layout.nbytes, and verify what lies there then, bucket by bucket.

        With payload "delta" `into` must hold version manifest.base, which is checked as well.

        Raises:
            Gone: the version is not to be had any more; a newer one is, or soon will be.
            Corrupt: what lies in `into` is not that version; it must not be used.
        """

    def mapped(self) -> AbstractContextManager[memoryview]:
        """The version's bytes themselves, read-only, verified once, pinned until the block ends.

        The views made from it must be gone by then.

        Raises:
            Gone, Corrupt: as for copy_into.
            Refused: this carrier has no memory to map.
        """


class StageSource:
    """A version on the stage of this node, in shared memory.

    Raises:
        Gone: it is not there.
        Corrupt: another content was staged under its number than was committed.
    """

    def __init__(self, folder: Path, record: VersionRecord) -> None:
        self.record = record
        self.manifest = read_manifest(folder, record.version)
        self._folder = folder
        if record.digest and self.manifest.digest != record.digest:
            raise Corrupt(
                f"policy version {record.version}",
                why=f"committed with digest {record.digest}, staged with {self.manifest.digest}",
            )

    def copy_into(self, into: memoryview) -> None:
        """See WeightSource."""
        with pinned(self._folder, self.manifest) as view:
            copy_verified(self.manifest, view, into)

    @contextmanager
    def mapped(self) -> Iterator[memoryview]:
        """See WeightSource."""
        with pinned(self._folder, self.manifest) as view:
            verify(self.manifest, view)
            yield view
