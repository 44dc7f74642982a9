"""Files of shared memory, their names, and how each side maps them."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relax_rt.transport.memory.arena.allocator import Heap
from relax_rt.transport.memory.slab_names import is_slab_name, is_spill_name
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
