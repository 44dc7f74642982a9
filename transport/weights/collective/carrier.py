"""A staged version to other ranks' memory by a collective, and what a receiver has of it as a WeightSource."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, Refused
from relax_rt.transport.weights import device
from relax_rt.transport.weights.collective import memory as host
from relax_rt.transport.weights.collective.communicator import HostMemory, Memory
from relax_rt.transport.weights.collective.events import Outcome
from relax_rt.transport.weights.collective.group import Collective
from relax_rt.transport.weights.collective.offers import Receiver
from relax_rt.transport.weights.collective.worker import digest_of
from relax_rt.transport.weights.device import DeviceBuffer
from relax_rt.transport.weights.manifest import BUCKET_BYTES, Manifest, Sent, bucket_digest, bucket_slices
from relax_rt.transport.weights.stage import copy_verified, kept, pinned, verify, wire_file

LayOut = Callable[[Path, Manifest], AbstractContextManager[tuple[Memory, str]]]
"""Has a staged version in memory that a root can send from, for the length of a block, with the digest that memory of
its kind has of it."""


@contextmanager
def on_host(folder: Path, manifest: Manifest) -> Iterator[tuple[Memory, str]]:
    """The stage's own buffer, pinned, or the version in fewer bits. See LayOut. Raises Gone."""
    with pinned(folder, manifest):
        if not manifest.wire_bytes:
            yield HostMemory(str(folder / manifest.file), manifest.layout.nbytes), manifest.digest
            return
        path = folder / wire_file(manifest.version)
        narrow = HostMemory(str(path), manifest.wire_bytes)
        # Ranks open it by its name, some time after this.
        with kept(path):
            with host.opened(narrow, writable=False) as view:
                digest = digest_of(view, BUCKET_BYTES)
            yield narrow, digest


class OnDevice:
    """A copy on this process's device, in memory that is kept for the next version. See LayOut."""

    def __init__(self) -> None:
        self._buffer: DeviceBuffer | None = None

    @contextmanager
    def __call__(self, folder: Path, manifest: Manifest) -> Iterator[tuple[Memory, str]]:
        """Raises Gone, DeviceFailed."""
        if self._buffer is None or self._buffer.nbytes != manifest.sent_bytes:
            self._buffer = DeviceBuffer(manifest.sent_bytes)
        with on_host(folder, manifest) as (memory, _), host.opened(memory, writable=False) as view:
            device.copy_from_host(self._buffer.view, view.data)
        yield self._buffer.export(), digest_of(self._buffer.view, BUCKET_BYTES)


async def spread(
    group: Collective,
    root: str,
    folder: Path,
    manifest: Manifest,
    receivers: Mapping[str, Memory],
    timeout_s: float,
    lay_out: LayOut = on_host,
) -> Outcome:
    """Bring a version from this node's stage into the receivers' memory; it is kept for that long.

    Returns:
        Who has it, verified against its digest, and who is lost.

    Raises:
        Gone: the stage has it no more. CollectiveFailed, Refused: see Collective.broadcast.
    """
    with ExitStack() as kept:
        source, digest = await asyncio.to_thread(kept.enter_context, lay_out(folder, manifest))
        return await group.broadcast({root: source, **receivers}, digest, timeout_s)


class HostPlace:
    """Shared memory to receive into. See Place."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.memory: Memory = host.allocate(path, nbytes)

    def copy_into(self, manifest: Manifest, into: memoryview) -> None:
        """See Place."""
        with host.opened(self.memory, writable=False) as view:
            if manifest.wire_bytes:
                widened(manifest, view.data, into)
            else:
                copy_verified(manifest, view.data, into)


class DevicePlace:
    """Memory of this process's device to receive into; `path` is not used. See Place."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._buffer = DeviceBuffer(nbytes)
        self.memory: Memory = self._buffer.export()

    def copy_into(self, manifest: Manifest, into: memoryview) -> None:
        """See Place. It goes through the host, where its digests were taken."""
        if manifest.wire_bytes:
            narrow = memoryview(bytearray(manifest.wire_bytes))
            device.copy_to_host(narrow, self._buffer.view)
            widened(manifest, narrow, into)
            return
        for part, expected in zip(bucket_slices(manifest.layout.nbytes), manifest.buckets, strict=True):
            device.copy_to_host(into[part], self._buffer.view.part(part.start, part.stop))
            if bucket_digest(into[part]) != expected:
                what = f"policy version {manifest.version} on the device, bytes {part.start}-{part.stop}"
                raise Corrupt(what, why="they do not match the digest of the staged version")


def widened(manifest: Manifest, narrow: memoryview, into: memoryview) -> None:
    """Fill `into` with a version that came in fewer bits, and verify it.

    Raises:
        Corrupt: it is another one, or damaged.
    """
    from relax_rt.transport.weights.payloads import decode_wire

    try:
        decode_wire(narrow, manifest.layout, into)
    except Refused as error:
        raise Corrupt(error.what, why=error.why) from error
    verify(manifest, into)


class BroadcastSource:
    """A version as it was broadcast into this engine's memory. See WeightSource.

    Args:
        manifest: of the version on the stage.
        receiver: which `wait` was true of for the version.
    """

    def __init__(self, record: VersionRecord, manifest: Manifest, receiver: Receiver) -> None:
        self.record, self.manifest, self.carrier = record, manifest, "collective"
        self.payload: Sent = "full"
        self.nbytes = manifest.sent_bytes
        self._receiver = receiver

    def copy_into(self, into: memoryview) -> None:
        """See WeightSource."""
        self._receiver.copy_into(self.manifest, into)

    def mapped(self) -> AbstractContextManager[memoryview]:
        """See WeightSource."""
        raise Refused(f"mapping policy version {self.record.version}", why="the next broadcast is received over it")
