"""Spill cold blocks from shared memory to files on the broker's disk, and unlink slabs that are no longer needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Sequence
from pathlib import Path

from relax_rt.transport.memory.refs import SPILL_PREFIX, Extent, is_spilled, owner_of
from relax_rt.transport.rpc.errors import OutOfSpace

Moves = list[tuple[int, Extent]]


class SpillFiles:
    """Blocking; for a thread.

    Args:
        shm_dir: where slabs lie.
        spill_dir: where spilled blocks go; made when first needed.
        epoch: a number that no earlier broker of this folder has used, for the names of spill files.
    """

    def __init__(self, shm_dir: Path, spill_dir: Path, epoch: int) -> None:
        self._shm_dir, self._spill_dir, self._epoch = shm_dir, spill_dir, epoch
        self._made = 0
        self._writing = ""

    def spill(self, moves: Sequence[tuple[int, Extent]]) -> tuple[Moves, dict[int, str]]:
        """Copy blocks from their slabs into a new file; answers with where each is now, and which could not be read.

        Raises:
            OutOfSpace: the file could not be written.
        """
        self._spill_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._made += 1
        name = f"{SPILL_PREFIX}{self._epoch}-{self._made}.slab"
        self._writing = name
        path = self._spill_dir / name
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                return self._copy_all(fd, name, moves)
            finally:
                os.close(fd)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise OutOfSpace(
                f"spilling {len(moves)} blocks to {path}", why=str(error), hint="make room on its disk"
            ) from error

    def _copy_all(self, fd: int, name: str, moves: Sequence[tuple[int, Extent]]) -> tuple[Moves, dict[int, str]]:
        copied: Moves = []
        unreadable: dict[int, str] = {}
        for id_, extent in moves:
            try:
                source = os.open(self._shm_dir / extent.slab, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except (OSError, ValueError) as error:
                unreadable[id_] = str(error)
                continue
            try:
                if os.fstat(source).st_size < extent.offset + extent.nbytes:
                    unreadable[id_] = f"slab {extent.slab} ends before {extent.offset}+{extent.nbytes}"
                    continue
                at, done = os.lseek(fd, 0, os.SEEK_CUR), 0
                while done < extent.nbytes:
                    n = os.sendfile(fd, source, extent.offset + done, extent.nbytes - done)
                    if n == 0:
                        raise OSError(f"slab {extent.slab} ends before {extent.offset}+{extent.nbytes}")
                    done += n
                copied.append((id_, Extent(name, at, extent.nbytes)))
            except OSError:
                if not copied:
                    raise
                # What fitted is of use; the rest is tried again.
                last = copied[-1][1]
                os.ftruncate(fd, last.offset + last.nbytes)
                break
            finally:
                os.close(source)
        return copied, unreadable

    def written(self) -> None:
        """The moves of the last spill are in the ledger."""
        self._writing = ""

    def names(self) -> list[str]:
        """Slabs and spill files that are there."""
        found = [path.name for path in self._shm_dir.glob("*.slab")]
        return found + [
            path.name for path in self._spill_dir.glob(f"{SPILL_PREFIX}*.slab") if path.name != self._writing
        ]

    def unlink(self, names: Sequence[str]) -> None:
        for name in names:
            folder = self._spill_dir if is_spilled(name) else self._shm_dir
            (folder / name).unlink(missing_ok=True)


def dead_slabs(names: Sequence[str], live: Container[str], ended: Callable[[str], bool]) -> list[str]:
    """Slabs whose owner has ended, and spill files, of which no extent is live.

    Args:
        live: slabs with live extents.
        ended: whether the owner with this key (see refs.owner_key) can no longer put.
    """
    return [name for name in names if name not in live and (is_spilled(name) or ended(owner_of(name)))]
