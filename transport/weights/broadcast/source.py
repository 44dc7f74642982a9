"""Broadcast a staged version into receivers' buffers, and read it there as a WeightSource."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, Refused
from relax_rt.transport.weights import device
from relax_rt.transport.weights.broadcast.group import BroadcastGroup
from relax_rt.transport.weights.broadcast.protocol import BroadcastOutcome
from relax_rt.transport.weights.broadcast.rank import digest_of
from relax_rt.transport.weights.broadcast.receivers import BroadcastReceiver
from relax_rt.transport.weights.device import DeviceBuffer
from relax_rt.transport.weights.manifest import BUCKET_BYTES, Manifest, Sent, bucket_digest, bucket_slices
from relax_rt.transport.weights.memory import HostMemory, Memory, allocate_host_memory, map_host_memory
from relax_rt.transport.weights.payloads import decode_wire
from relax_rt.transport.weights.stage import copy_verified, keep_file, pinned, verify, wire_file

SendBuffer = Callable[[Path, Manifest], AbstractContextManager[tuple[Memory, str]]]
"""Context manager that holds a staged version in memory which a root can send from; gives the memory and its digest."""


@contextmanager
def host_send_buffer(folder: Path, manifest: Manifest) -> Iterator[tuple[Memory, str]]:
    """Pin the stage's own buffer, or the version in fewer bits, to send from. Raises Gone."""
    with pinned(folder, manifest):
        if not manifest.wire_bytes:
            yield HostMemory(str(folder / manifest.file), manifest.layout.nbytes), manifest.digest
            return
        path = folder / wire_file(manifest.version)
        narrow = HostMemory(str(path), manifest.wire_bytes)
        # Ranks open it by its name, later.
        with keep_file(path):
            with map_host_memory(narrow, writable=False) as view:
                digest = digest_of(view, BUCKET_BYTES)
            yield narrow, digest


class DeviceSendBuffer:
    """Copies the version to this process's device to send from; the memory is reused for the next version."""

    def __init__(self) -> None:
        self._buffer: DeviceBuffer | None = None

    @contextmanager
    def __call__(self, folder: Path, manifest: Manifest) -> Iterator[tuple[Memory, str]]:
        """Raises Gone, DeviceFailed."""
        if self._buffer is None or self._buffer.nbytes != manifest.sent_bytes:
            self._buffer = DeviceBuffer(manifest.sent_bytes)
        with host_send_buffer(folder, manifest) as (memory, _), map_host_memory(memory, writable=False) as view:
            device.copy_from_host(self._buffer.view, view.data)
        yield self._buffer.export(), digest_of(self._buffer.view, BUCKET_BYTES)


async def broadcast_version(
    group: BroadcastGroup,
    root: str,
    folder: Path,
    manifest: Manifest,
    receivers: Mapping[str, Memory],
    timeout_s: float,
    send_buffer: SendBuffer = host_send_buffer,
) -> BroadcastOutcome:
    """Broadcast a version from this node's stage into the receivers' memory; the version stays pinned meanwhile.

    Returns:
        Who has it, verified against its digest, and who is lost.

    Raises:
        Gone: the stage has it no more. BroadcastFailed, Refused: see BroadcastGroup.broadcast.
    """
    with ExitStack() as kept:
        source, digest = await asyncio.to_thread(kept.enter_context, send_buffer(folder, manifest))
        return await group.broadcast({root: source, **receivers}, digest, timeout_s)


class HostReceiveBuffer:
    """Shared memory to receive into. Implements ReceiveBuffer."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.memory: Memory = allocate_host_memory(path, nbytes)

    def copy_into(self, manifest: Manifest, into: memoryview) -> None:
        with map_host_memory(self.memory, writable=False) as view:
            if manifest.wire_bytes:
                widen(manifest, view.data, into)
            else:
                copy_verified(manifest, view.data, into)


class DeviceReceiveBuffer:
    """Memory of this process's device to receive into; `path` is not used. Implements ReceiveBuffer."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._buffer = DeviceBuffer(nbytes)
        self.memory: Memory = self._buffer.export()

    def copy_into(self, manifest: Manifest, into: memoryview) -> None:
        # Through the host, where the digests of the version were taken.
        if manifest.wire_bytes:
            narrow = memoryview(bytearray(manifest.wire_bytes))
            device.copy_to_host(narrow, self._buffer.view)
            widen(manifest, narrow, into)
            return
        for part, expected in zip(bucket_slices(manifest.layout.nbytes), manifest.buckets, strict=True):
            device.copy_to_host(into[part], self._buffer.view.part(part.start, part.stop))
            if bucket_digest(into[part]) != expected:
                what = f"policy version {manifest.version} on the device, bytes {part.start}-{part.stop}"
                raise Corrupt(what, why="they do not match the digest of the staged version")


def widen(manifest: Manifest, narrow: memoryview, into: memoryview) -> None:
    """Fill `into` with a version that came in fewer bits, and verify it.

    Raises:
        Corrupt: it is another one, or damaged.
    """
    try:
        decode_wire(narrow, manifest.layout, into)
    except Refused as error:
        raise Corrupt(error.what, why=error.why) from error
    verify(manifest, into)


class BroadcastSource:
    """A version as it was broadcast into this engine's buffer. Implements WeightSource.

    Args:
        manifest: of the version on the stage.
        receiver: its `wait` has returned True for the version.
    """

    def __init__(self, record: VersionRecord, manifest: Manifest, receiver: BroadcastReceiver) -> None:
        self.record, self.manifest, self.carrier = record, manifest, "collective"
        self.payload: Sent = "full"
        self.nbytes = manifest.sent_bytes
        self._receiver = receiver

    def copy_into(self, into: memoryview) -> None:
        self._receiver.copy_into(self.manifest, into)

    def mapped(self) -> AbstractContextManager[memoryview]:
        raise Refused(f"mapping policy version {self.record.version}", why="the next broadcast is received over it")
