"""Which engines of a node receive a broadcast, and how it ended: files beside the node's weight stage.

An engine registers a buffer to receive into; the registration is valid as long as its process lives. Before a version
is committed, the sender reserves the buffers that nobody reads from and writes a record of whom it serves, then how the
broadcast ended. An engine that learns of the version reads in the record whether the version comes by broadcast: one
that registered later, whose buffer was being read, or that was lost is not in it and takes the version from the stage.

File locks guard a buffer: exclusive while a broadcast writes it, shared while its engine reads. The kernel drops the
locks of a dead process. Whatever lies in a buffer is verified against the version's digests while it is copied out.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from relax_rt.transport.base.process_stat import start_time
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Gone
from relax_rt.transport.weights.manifest import Manifest
from relax_rt.transport.weights.memory import Memory

GRACE_S = 2.0
"""Added to a broadcast's own timeout, for its sender to record how it ended."""
POLL_EVERY_S = 0.005
_UNREADABLE = (OSError, msgspec.MsgspecError, UnicodeDecodeError)


class Registration(msgspec.Struct, frozen=True):
    """A buffer of the engine in a slot, for whole versions of memory.nbytes.

    Attributes:
        pid, started: the engine's process.
        device: CUDA_VISIBLE_DEVICES of a rank on its device; empty: nothing is set.
    """

    slot: str
    epoch: int
    memory: Memory
    pid: int
    started: int
    device: str = ""

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.started


class BroadcastRecord(msgspec.Struct, frozen=True):
    """The engines that the broadcast of a version serves, and its end.

    Attributes:
        members: epochs by slot.
        pid, started: the sender's process.
        timeout_s: it has ended after that time at the latest.
        lost: reason by slot; once finished, all others have the version in their buffers.
    """

    version: int
    digest: str
    members: dict[str, int]
    pid: int
    started: int
    timeout_s: float
    finished: bool = False
    lost: dict[str, str] = {}


class ReceiveBuffer(Protocol):
    """Memory of this process that a rank can receive into."""

    memory: Memory

    def copy_into(self, manifest: Manifest, into: memoryview) -> None:
        """Copy the version out and verify the copy. Raises Corrupt: it is another one, or damaged."""


class MakeBuffer(Protocol):
    """Makes a buffer of a size; `path` is a name in shared memory that it may use. Raises OutOfSpace."""

    def __call__(self, path: Path, nbytes: int) -> ReceiveBuffer: ...


def _stem(folder: Path, slot: str, epoch: int) -> Path:
    return folder / f"{slot.replace('/', '~')}-{epoch:08d}"


def _put(path: Path, what: Registration | BroadcastRecord) -> None:
    temporary = path.with_suffix(".tmp")
    # For this user alone: it may hold the handle of device memory.
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.msgpack.encode(what))
    temporary.rename(path)


def _remove_files(stem: Path) -> None:
    """Remove all files of an engine; a process that has mapped its memory keeps it."""
    for path in stem.parent.glob(f"{stem.name}.*"):
        path.unlink(missing_ok=True)


def _lock(path: Path, kind: int) -> int:
    """Return a descriptor that holds the lock; -1 where another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    return descriptor


class BroadcastReceiver:
    """An engine's side. Its calls block; call from one thread at a time.

    Args:
        folder: of registrations and records, beside the node's stage.
        make: makes the buffer.
        device: CUDA_VISIBLE_DEVICES of a rank on its device; empty: nothing is set.
    """

    def __init__(self, folder: Path, slot: str, epoch: int, make: MakeBuffer, device: str = "") -> None:
        self._folder, self._slot, self._epoch, self._make, self._device = folder, slot, epoch, make, device
        self._stem = _stem(folder, slot, epoch)
        self._buffer: ReceiveBuffer | None = None

    def register(self, nbytes: int) -> None:
        """Receive broadcasts of versions of this size from now on.

        Raises:
            OutOfSpace: there is no room for the memory.
        """
        if self._buffer is not None and self._buffer.memory.nbytes == nbytes:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.close()
        name = self._slot.replace("/", "~")
        for earlier in self._folder.glob(f"{name}-*.*"):
            earlier.unlink(missing_ok=True)  # of incarnations before this one
        self._buffer = self._make(self._stem.with_suffix(".mem"), nbytes)
        self._stem.with_suffix(".pin").touch(0o600)
        mine = os.getpid()
        registration = Registration(self._slot, self._epoch, self._buffer.memory, mine, start_time(mine), self._device)
        _put(self._stem.with_suffix(".receiver"), registration)

    def wait(self, record: VersionRecord) -> bool:
        """Return whether a broadcast has brought this version here. Waits for one that is under way, while its sender
        lives, and no longer than its timeout."""
        deadline = None
        while True:
            found = read_record(self._folder, record)
            if found is None or self._buffer is None or found.members.get(self._slot) != self._epoch:
                return False
            if found.finished:
                return self._slot not in found.lost
            now = time.monotonic()
            deadline = now + found.timeout_s + GRACE_S if deadline is None else deadline
            if now > deadline or start_time(found.pid) != found.started:
                return False
            time.sleep(POLL_EVERY_S)

    def copy_into(self, manifest: Manifest, into: memoryview) -> None:
        """Copy the version out of the buffer and verify it against the manifest's digests.

        Raises:
            Gone: a broadcast writes there again. Corrupt: it is not that version.
        """
        what = f"policy version {manifest.version} as it was broadcast"
        if self._buffer is None:
            raise Gone(what, why="no buffer is registered")
        if (descriptor := _lock(self._stem.with_suffix(".pin"), fcntl.LOCK_SH)) < 0:
            raise Gone(what, why="a newer one is being received over it")
        try:
            self._buffer.copy_into(manifest, into)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Remove the registration and the buffer."""
        _remove_files(self._stem)
        self._buffer = None


def _record_path(folder: Path, version: int) -> Path:
    return folder / f"b{version:08d}.broadcast"


def read_record(folder: Path, record: VersionRecord) -> BroadcastRecord | None:
    """Read the record of a version's broadcast; None: there is none."""
    try:
        found = msgspec.msgpack.decode(_record_path(folder, record.version).read_bytes(), type=BroadcastRecord)
    except _UNREADABLE:
        return None
    return found if found.digest == record.digest else None


class ReservedReceivers:
    """The buffers that a broadcast may write, locked until `finish`."""

    def __init__(
        self, folder: Path, record: BroadcastRecord, receivers: Mapping[str, Registration], locks: Mapping[str, int]
    ) -> None:
        self._folder, self._record, self._locks = folder, record, dict(locks)
        self.receivers = dict(receivers)

    def finish(self, lost: Mapping[str, str], unusable: bool = False) -> None:
        """Record which slots did not get the version, and why; all others have it.

        Args:
            unusable: a rank may still write into the buffers: they stay locked and are not used again.
        """
        try:
            with suppress(OSError):  # a reader that finds no end waits until the timeout
                _put(
                    _record_path(self._folder, self._record.version),
                    msgspec.structs.replace(self._record, finished=True, lost=dict(lost)),
                )
        finally:
            if not unusable:
                for descriptor in self._locks.values():
                    os.close(descriptor)
            self._locks.clear()


class BroadcastReceivers:
    """The sender's side. Its calls block only for the reading and writing of a few small files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def registered(self) -> list[Registration]:
        """Return the registrations of the living engines."""
        return [registration for _, registration in sorted(self._registered(), key=lambda one: one[0])]

    def reserve(
        self, version: int, digest: str, nbytes: int, timeout_s: float, among: Collection[str] | None = None
    ) -> ReservedReceivers | None:
        """Lock the buffers of the living engines and record that they will be served; call it before the commit.

        Returns None if no engine is registered, or all buffers are being read.

        Args:
            nbytes: size of what will be sent; buffers of another size are left alone.
            among: the slots that can be served; None: all.
        """
        receivers: dict[str, Registration] = {}
        locks: dict[str, int] = {}
        for path, registration in sorted(self._registered(), key=lambda one: one[0]):
            if among is not None and registration.slot not in among:
                continue
            if registration.memory.nbytes == nbytes and (lock := _lock(path.with_suffix(".pin"), fcntl.LOCK_EX)) >= 0:
                receivers[registration.slot], locks[registration.slot] = registration, lock
        if not receivers:
            return None
        mine, members = os.getpid(), {slot: registration.epoch for slot, registration in receivers.items()}
        record = BroadcastRecord(version, digest, members, mine, start_time(mine), timeout_s)
        reserved = ReservedReceivers(self._folder, record, receivers, locks)
        try:
            _put(_record_path(self._folder, version), record)
        except OSError:
            reserved.finish({})
            return None
        return reserved

    def retire(self, committed: int) -> None:
        """Remove the records of the versions before the committed one."""
        for path in self._folder.glob("b*.broadcast"):
            if int(path.stem[1:]) < committed:
                path.unlink(missing_ok=True)

    def _registered(self) -> Iterator[tuple[Path, Registration]]:
        for path in self._folder.glob("*.receiver"):
            try:
                registration = msgspec.msgpack.decode(path.read_bytes(), type=Registration)
            except _UNREADABLE:
                continue
            if registration.alive:
                yield path, registration
            else:
                _remove_files(path.with_suffix(""))
