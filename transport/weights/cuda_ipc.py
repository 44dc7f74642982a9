"""Versions for engines on the trainer's own device: exported by CUDA IPC, with one copy on the device.

The trainer's process owns the memory and writes a file into the node's stage folder that names the memory, the version
and the owning process. A reader holds a shared lock on the export's pin file while it copies, so that the memory is not
overwritten; the kernel drops a dead reader's lock. When the *owner* dies its memory is gone: a reader checks before and
after its copy whether the owner lives, and verifies the copy in any case.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec

from relax_rt.transport.base.process_stat import start_time
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, Gone, OutOfSpace, Refused
from relax_rt.transport.weights import device
from relax_rt.transport.weights.device import DeviceBuffer, DeviceFailed, DeviceView
from relax_rt.transport.weights.manifest import Manifest, Sent, bucket_digest, bucket_slices, check_manifest
from relax_rt.transport.weights.memory import DeviceMemory

SLOTS = 2
"""One version that is read, one that is being written."""
COPY_TIMEOUT_S = 60.0


class Export(msgspec.Struct, frozen=True):
    """A version in device memory.

    Attributes:
        buckets: digests of the buckets as the device computes them.
        pin: name of the file that readers lock.
        pid, started: its owner's process.
    """

    version: int
    digest: str
    memory: DeviceMemory
    buckets: tuple[str, ...]
    pin: str
    pid: int
    started: int


def _export_path(folder: Path, version: int) -> Path:
    return folder / f"v{version:08d}.cuda"


def read_export(folder: Path, version: int) -> Export:
    """Read the export of a version.

    Raises:
        Gone: it is not exported, or its owner is dead.
    """
    what = f"weights of policy version {version} on the device"
    try:
        export = msgspec.msgpack.decode(_export_path(folder, version).read_bytes(), type=Export)
    except FileNotFoundError:
        raise Gone(what, why=f"not exported in {folder}") from None
    check_owner(export)
    return export


def check_owner(export: Export) -> None:
    """Raises Gone if the process that owns the memory has ended."""
    if start_time(export.pid) != export.started:
        raise Gone(
            f"weights of policy version {export.version} on the device",
            why=f"process {export.pid}, which owned their memory, has ended",
            hint="take them from the node's stage in shared memory",
        )


class CudaStage:
    """The trainer's side. Its memory is allocated once and reused for every version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._slots: dict[int, DeviceBuffer] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def publish(self, manifest: Manifest, fill: Callable[[DeviceView], None]) -> Export:
        """Export a version to the engines on this device.

        Args:
            manifest: of the version, as it is staged.
            fill: puts the weights into the view, as the manifest lays them out, and waits until they are there.

        Raises:
            OutOfSpace: every slot is pinned by readers. DeviceFailed: see there.
            Corrupt: what lies on the device does not match the manifest; nothing is exported.
        """
        number, pin = self._free_slot()
        try:
            buffer = self._slots.get(number)
            if buffer is None or buffer.nbytes < manifest.layout.nbytes:
                if buffer is not None:
                    buffer.free()
                buffer = self._slots[number] = DeviceBuffer(manifest.layout.nbytes)
            view = buffer.view.part(0, manifest.layout.nbytes)
            fill(view)
            buckets = _digests(manifest, view)
            memory = msgspec.structs.replace(buffer.export(), nbytes=view.nbytes)
            mine = os.getpid()
            export = Export(
                manifest.version, manifest.digest, memory, buckets, f"cuda{number}.pin", mine, start_time(mine)
            )
            path = _export_path(self._folder, manifest.version)
            temporary = path.with_suffix(".tmp")
            temporary.unlink(missing_ok=True)
            # Mode 0600 whatever the umask is: the file has the handle of the memory.
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.msgpack.encode(export))
            temporary.rename(path)
            return export
        finally:
            os.close(pin)

    def retire(self, committed: int) -> None:
        """Withdraw the exports of the versions before the committed one."""
        for path in self._folder.glob("v*.cuda"):
            if int(path.stem[1:]) < committed:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Free the memory. Readers in the middle of a copy find the version gone."""
        self.retire(1 << 62)
        for buffer in self._slots.values():
            buffer.free()
        self._slots.clear()

    def _free_slot(self) -> tuple[int, int]:
        """Lock the pin of a slot that nobody reads and withdraw what it held; the newest version's slot stays."""
        paths = sorted(self._folder.glob("v*.cuda"))
        exports = {path: msgspec.msgpack.decode(path.read_bytes(), type=Export) for path in paths}
        newest = max((e.version for e in exports.values()), default=0)
        for number in range(SLOTS):
            name = f"cuda{number}.pin"
            holds = {path for path, export in exports.items() if export.pin == name}
            if any(exports[path].version == newest and exports[path].pid == os.getpid() for path in holds):
                continue
            descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            for path in holds:
                path.unlink(missing_ok=True)
            return number, descriptor
        raise OutOfSpace("device memory for a version", why="readers hold every slot", hint="see `why`")


def _digests(manifest: Manifest, view: DeviceView) -> tuple[str, ...]:
    """Compute the device's digests of the buckets, after verifying each against the manifest's.

    One bucket at a time is copied to the host, where the committed digest is computed.
    """
    found, parts = [], bucket_slices(view.nbytes)
    scratch = memoryview(bytearray(max((part.stop - part.start for part in parts), default=0)))
    with device.diagnosed("digests of weights on the device"):
        for part, expected in zip(parts, manifest.buckets, strict=True):
            piece, host = view.part(part.start, part.stop), scratch[: part.stop - part.start]
            found.append(piece.digest())
            device.copy_to_host(host, piece)
            if bucket_digest(host) != expected:
                raise Corrupt(
                    f"weights of policy version {manifest.version} on the device, bytes {part.start}-{part.stop}",
                    why="they do not match the digest of the staged version",
                    hint="fill them from the same weights, and wait until the device has them",
                )
    return tuple(found)


class CudaIpcSource:
    """A committed version in the trainer's device memory, for an engine on the same device. Implements WeightSource.

    Raises:
        Gone: the trainer has withdrawn it, or is dead. Corrupt: another content was committed under its number.
    """

    def __init__(self, folder: Path, record: VersionRecord, manifest: Manifest) -> None:
        self.record, self.manifest, self.carrier, self._folder = record, manifest, "cuda_ipc", folder
        self._export = read_export(folder, record.version)
        self.payload: Sent = "full"
        self.nbytes = manifest.layout.nbytes
        if self._export.digest != record.digest and record.digest:
            raise Corrupt(
                f"policy version {record.version}",
                why=f"committed with digest {record.digest}, exported with {self._export.digest}",
            )
        check_manifest(manifest, record, f"policy version {record.version} on the device")

    def copy_into(self, into: memoryview) -> None:
        with self._pinned() as view:
            for part, expected in zip(bucket_slices(view.nbytes), self.manifest.buckets, strict=True):
                device.copy_to_host(into[part], view.part(part.start, part.stop))
                if bucket_digest(into[part]) != expected:
                    self._differs(part)

    def copy_to_device(self, into: DeviceView, timeout_s: float = COPY_TIMEOUT_S) -> None:
        """Fill device memory of this process, and verify what lies there then.

        Raises:
            Gone, Corrupt: as for copy_into. DeadlineExceeded: the device did not get it done.
            DeviceFailed: this process's context is lost; nothing on the device may be used.
        """
        with self._pinned() as view:
            device.copy(into.part(0, view.nbytes), view, timeout_s)
            for part, expected in zip(bucket_slices(view.nbytes), self._export.buckets, strict=True):
                if into.part(part.start, part.stop).digest() != expected:
                    self._differs(part)

    def mapped(self) -> AbstractContextManager[memoryview]:
        raise Refused(f"mapping policy version {self.record.version}", why="it lies in device memory")

    @contextmanager
    def _pinned(self) -> Iterator[DeviceView]:
        descriptor = os.open(self._folder / self._export.pin, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Gone(f"policy version {self.record.version}", why="its memory is being filled anew") from None
            if read_export(self._folder, self.record.version) != self._export:
                raise Gone(f"policy version {self.record.version}", why="exported again by another incarnation")
            with device.open_device_memory(self._export.memory) as view:
                yield view
        except DeviceFailed:
            # If the owner is dead, say so instead of the CUDA error that follows from it.
            check_owner(self._export)
            raise
        finally:
            os.close(descriptor)

    def _differs(self, part: slice) -> None:
        check_owner(self._export)
        raise Corrupt(
            f"weights of policy version {self.record.version}, bytes {part.start}-{part.stop}",
            why="the copy does not match the digest computed at export",
        )
