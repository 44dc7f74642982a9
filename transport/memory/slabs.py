"""Files of shared memory: how each side maps them, and which bytes of one are free."""

from __future__ import annotations

import mmap
import os
import stat
from bisect import bisect_left, insort
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relax_rt.transport.memory.refs import is_slab_name, is_spill_name
from relax_rt.transport.rpc.errors import Corrupt, OutOfSpace, Refused

PAGE_BYTES = mmap.PAGESIZE


def path_of(name: str, shm_dir: Path, spill_dir: Path | None) -> Path:
    """Where the slab or spilled file of this name is.

    Raises:
        Corrupt: it is not a name of ours; nothing is looked up outside the two folders.
    """
    if is_slab_name(name):
        return shm_dir / name
    if spill_dir is not None and is_spill_name(name):
        return spill_dir / name
    raise Corrupt(f"slab {name[:256]!r}", why="that is not a slab's name")


class Slab:
    """One file of shared memory, mapped writable, its pages there from the start."""

    def __init__(self, path: Path, nbytes: int) -> None:
        """
        Raises:
            OutOfSpace: the system has no memory for it.
        Refused: the folder cannot be written to, or the file is there already.
        """
        self.path, self.name, self.nbytes = path, path.name, nbytes
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise Refused(f"slab {path}", why="it is there already", hint="an incarnation has one arena") from error
        except OSError as error:
            raise Refused(f"slab {path}", why=str(error)) from error
        try:
            # Reserving the pages now turns a full /dev/shm into an error here instead of a SIGBUS later.
            os.posix_fallocate(fd, 0, nbytes)
            memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            path.unlink()
            raise OutOfSpace(
                f"slab {path} of {nbytes} bytes", why=str(error), hint="lower [queue] capacity_mib or enlarge /dev/shm"
            ) from error
        finally:
            os.close(fd)
        self.memory = np.frombuffer(memory, dtype=np.uint8)
        self.heap = Heap(nbytes)
        self.used: dict[int, int] = {}
        self.empty_since: float | None = None


def map_read_only(path: Path) -> NDArray[np.uint8]:
    """The whole file as read-only bytes; the arrays made of them keep it mapped.

    Raises:
        Corrupt: it is not there, not a regular file, or empty.
    """
    try:
        # O_NONBLOCK: opening a pipe that was put there must not wait for its other end.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Corrupt(f"slab {path}", why=str(error)) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Corrupt(f"slab {path}", why="not a regular file")
        return np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise Corrupt(f"slab {path}", why=str(error)) from error
    finally:
        os.close(fd)


ALIGNMENT = 64
"""Bytes; extents begin at multiples of this."""


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Heap:
    """Free extents of a slab, found by size (ties: the lowest offset) and merged by their ends.

    The smallest extent that is large enough is used, so that large ones stay whole; a search is a bisection.
    Large requests are cut from the end of an extent and small ones from its beginning: extents that come and go at
    different rates then do not lie between each other.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.free_bytes = nbytes
        self._by_size: list[tuple[int, int]] = [(nbytes, 0)]
        self._size_at: dict[int, int] = {0: nbytes}
        self._begin_of_end: dict[int, int] = {nbytes: 0}
        self._large = nbytes // 512

    @property
    def largest(self) -> int:
        """Bytes of the largest free extent."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def free_extents(self) -> int:
        """How many free extents there are."""
        return len(self._by_size)

    @property
    def empty(self) -> bool:
        """Nothing is in use."""
        return self.free_bytes == self.nbytes

    def allocate(self, nbytes: int) -> int | None:
        """Allocate `nbytes` (a multiple of ALIGNMENT); returns their offset, or None if no free extent is as large."""
        place = bisect_left(self._by_size, (nbytes, 0))
        if place == len(self._by_size):
            return None
        size, offset = self._by_size[place]
        self._remove(offset, size)
        self.free_bytes -= nbytes
        if size > nbytes:
            if nbytes >= self._large:
                self._insert(offset, size - nbytes)
                return offset + size - nbytes
            self._insert(offset + nbytes, size - nbytes)
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Free bytes that were allocated."""
        self.free_bytes += nbytes
        before = self._begin_of_end.get(offset)
        after = self._size_at.get(offset + nbytes)
        if after is not None:
            self._remove(offset + nbytes, after)
            nbytes += after
        if before is not None:
            size = self._size_at[before]
            self._remove(before, size)
            offset, nbytes = before, nbytes + size
        self._insert(offset, nbytes)

    def _insert(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._size_at[offset] = size
        self._begin_of_end[offset + size] = offset

    def _remove(self, offset: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        del self._size_at[offset]
        del self._begin_of_end[offset + size]
