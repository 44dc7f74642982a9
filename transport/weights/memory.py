"""Memory that a version lies in: a file of shared memory, or memory of a device; and views of the former."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from relax_rt.transport.rpc.errors import OutOfSpace, Refused
from relax_rt.transport.weights.manifest import bucket_digest


class HostMemory(msgspec.Struct, frozen=True, tag="host"):
    """A file in shared memory: `nbytes` from its start."""

    path: str
    nbytes: int


class DeviceMemory(msgspec.Struct, frozen=True, tag="device"):
    """Device memory of another process: `nbytes` from `offset` in the allocation that the IPC handle names.

    `device` is the UUID of the device that it lies on.
    """

    handle: bytes
    device: str
    offset: int
    nbytes: int


Memory = HostMemory | DeviceMemory


class View(Protocol):
    """Opened memory, in the form that its communicator takes."""

    nbytes: int

    def part(self, start: int, stop: int) -> View:
        """Return the bytes from start to stop, not copied."""

    def digest(self) -> str:
        """Digest the bytes: xxh3-128 on the host, a digest of its own on a device."""


class HostView:
    """Mapped bytes. Implements View."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.nbytes = data.nbytes

    def part(self, start: int, stop: int) -> HostView:
        return HostView(self.data[start:stop])

    def digest(self) -> str:
        return bucket_digest(self.data)


@contextmanager
def map_host_memory(memory: Memory, *, writable: bool) -> Iterator[HostView]:
    """Map a file of shared memory for the length of a block.

    Raises:
        Refused: it is not there, is shorter than stated, or is not memory of the CPU.
    """
    if not isinstance(memory, HostMemory):
        raise Refused(f"memory of device {memory.device}", why="shared memory of the CPU is wanted")
    try:
        descriptor = os.open(memory.path, os.O_RDWR if writable else os.O_RDONLY)
    except OSError as error:
        raise Refused(f"shared memory {memory.path}", why=str(error)) from error
    try:
        if (size := os.fstat(descriptor).st_size) < memory.nbytes:
            raise Refused(f"shared memory {memory.path}", why=f"it has {size} bytes of {memory.nbytes}")
        # A reader's mapping is private: a library that writes where it must not harms its own pages.
        flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
        mapping = mmap.mmap(descriptor, memory.nbytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    try:
        yield HostView(memoryview(mapping))
    finally:
        try:
            mapping.close()
        except BufferError:
            pass  # a library that was aborted may still hold a view; its pages go with the process


def allocate_host_memory(path: Path, nbytes: int) -> HostMemory:
    """Create the file `path`, which lies in shared memory, with all its pages.

    Raises:
        OutOfSpace: there is no room.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OutOfSpace(f"{nbytes >> 20} MiB of shared memory at {path}", why=str(error)) from error
    finally:
        os.close(descriptor)
    return HostMemory(str(path), nbytes)
