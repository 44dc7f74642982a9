"""The slabs of a node, read-only, by name: what a payload server may give out."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from relax_rt.transport.memory.arena.slab import map_read_only, path_of
from relax_rt.transport.rpc.errors import Corrupt, Gone


class Served(Protocol):
    """What a payload server gives out, by name. Used by its thread alone, which an error of another kind would end."""

    def __len__(self) -> int:
        """How many are mapped."""

    def range(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Bytes where they lie; they must not change while a view of them is left.

        Raises:
            RelaxError: they are not to be had; the reader is told.
        """

    def sweep(self) -> None:
        """Called now and then: let go of what nobody needs."""

    def clear(self) -> None:
        """Let go of all."""


class Slabs:
    """Mappings of the files in a node's shared memory and of those spilled to its disk.

    Args:
        shm_dir: where the slabs lie.
        spill_dir: where ``spill-…`` files lie; None: there are none.
        max_slabs: mappings kept.
    """

    def __init__(self, shm_dir: Path, spill_dir: Path | None = None, *, max_slabs: int = 256) -> None:
        self._shm_dir, self._spill_dir, self._max = shm_dir, spill_dir, max_slabs
        self._maps: OrderedDict[str, memoryview] = OrderedDict()

    def __len__(self) -> int:
        return len(self._maps)

    def range(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Bytes of a slab, where they lie.

        Raises:
            Gone: there is no such slab (any more).
            Corrupt: that is no slab's name, or the range is not inside it.
        """
        memory = self._maps.get(name)
        if memory is None:
            memory = self._maps[name] = self._map(name)
            while len(self._maps) > self._max:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(name)
        if offset < 0 or nbytes < 0 or offset + nbytes > len(memory):
            raise Corrupt(
                f"slab '{name}'", why=f"bytes {offset} to {offset + nbytes} are outside its {len(memory)} bytes"
            )
        return memory[offset : offset + nbytes]

    def sweep(self) -> None:
        """Let go of slabs whose files were removed, so that their memory is returned."""
        for name in list(self._maps):
            if not self._path(name).exists():
                del self._maps[name]

    def clear(self) -> None:
        """Let go of all."""
        self._maps.clear()

    def _map(self, name: str) -> memoryview:
        try:
            return map_read_only(self._path(name)).data
        except Corrupt as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise Gone(f"slab '{name}'", why="it is not there (any more): its owner has ended") from error
            raise

    def _path(self, name: str) -> Path:
        return path_of(name, self._shm_dir, self._spill_dir)
