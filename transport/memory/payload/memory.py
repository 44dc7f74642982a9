"""Where fetched payloads lie: private memory of this process, bounded, pre-faulted and reused."""

from __future__ import annotations

import collections
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_rt.transport.memory.arena.allocator import Heap, aligned
from relax_rt.transport.rpc.errors import OutOfSpace


class _Segment:
    """Memory mapped twice: writable for what arrives, and read-only for those who look at it. And what of it is free.

    Raises:
        OutOfSpace: the system gives no memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        fd = os.memfd_create("relax-payload", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            # The pages must be there before bytes come: a fault costs more than the copy into it.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self.writable = memoryview(mmap.mmap(fd, nbytes, flags=flags))
            self.readable = np.frombuffer(mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ), np.uint8)
        except OSError as error:
            raise OutOfSpace(f"{nbytes} bytes for payloads from other nodes", why=str(error)) from error
        finally:
            os.close(fd)
        self.address = self.readable.ctypes.data
        self.heap = Heap(nbytes)


class Region:
    """Bytes of a segment. They are free again when neither the region nor an array made of it exists any more."""

    __slots__ = ("_give_back", "_segment", "memory", "nbytes", "offset", "size")

    def __init__(self, segment: _Segment, offset: int, nbytes: int, size: int, give_back: _GiveBack) -> None:
        self.memory = segment.writable[offset : offset + nbytes]
        self.offset, self.nbytes, self.size = offset, nbytes, size
        self._segment, self._give_back = segment, give_back

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # numpy: an array that is made of this keeps it alive, and so does every view of that array.
        return {
            "data": (self._segment.address + self.offset, True),
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def array(self) -> NDArray[np.uint8]:
        """The bytes, read-only."""
        return np.asarray(self)

    def __del__(self) -> None:
        self._give_back(self._segment, self.offset, self.size)


_GiveBack = Callable[[_Segment, int, int], None]


class LocalMemory:
    """Regions within capacity_bytes. Used by one thread; only what ends a region's life may happen in any.

    Args:
        capacity_bytes: of all segments together.
        segment_bytes: what is taken from the system at a time; a larger region gets a segment of its own.
        on_free: called, in whatever thread, when a region has become free.
    """

    def __init__(self, capacity_bytes: int, segment_bytes: int, on_free: Callable[[], None] = lambda: None) -> None:
        self.capacity_bytes = aligned(capacity_bytes)
        self._segment_bytes = min(aligned(segment_bytes), self.capacity_bytes)
        self._on_free = on_free
        self._segments: list[_Segment] = []
        self._freed: collections.deque[tuple[_Segment, int, int]] = collections.deque()
        self.used_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.nbytes for segment in self._segments)

    def warm(self) -> None:
        """Make the first segment, its pages there, so that the first fetch does not have to."""
        if not self._segments:
            self._segments.append(_Segment(self._segment_bytes))

    def allocate(self, nbytes: int) -> Region | None:
        """A region; None if there is no room for it now.

        Raises:
            OutOfSpace: the system gives no memory.
        """
        self.collect()
        size = aligned(max(nbytes, 1))
        for segment in self._segments:
            offset = segment.heap.allocate(size)
            if offset is not None:
                return self._region(segment, offset, nbytes, size)
        wanted = max(size, self._segment_bytes)
        if not self._make_room(wanted):
            wanted = size
            if not self._make_room(wanted):
                return None
        segment = _Segment(wanted)
        self._segments.append(segment)
        offset = segment.heap.allocate(size)
        assert offset is not None
        return self._region(segment, offset, nbytes, size)

    def collect(self) -> bool:
        """Take back what has become free; whether anything has."""
        some = bool(self._freed)
        while self._freed:
            segment, offset, size = self._freed.popleft()
            segment.heap.free(offset, size)
            self.used_bytes -= size
        return some

    def _region(self, segment: _Segment, offset: int, nbytes: int, size: int) -> Region:
        self.used_bytes += size
        return Region(segment, offset, nbytes, size, self._give_back)

    def _give_back(self, segment: _Segment, offset: int, size: int) -> None:
        # A region may end in the middle of anything, in any thread: no lock here, a deque's append is atomic.
        self._freed.append((segment, offset, size))
        self._on_free()

    def _make_room(self, nbytes: int) -> bool:
        """Return unused segments to the system until another of nbytes fits."""
        excess = self.total_bytes + nbytes - self.capacity_bytes
        unused = sorted((one for one in self._segments if one.heap.empty), key=lambda one: one.nbytes)
        if excess > sum(segment.nbytes for segment in unused):
            return False
        while excess > 0:
            segment = unused.pop()
            self._segments.remove(segment)
            excess -= segment.nbytes
        return True

    def close(self) -> None:
        """Let go of all segments; those that arrays refer to live as long as these."""
        self._segments.clear()
