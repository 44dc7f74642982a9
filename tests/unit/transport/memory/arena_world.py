"""What the tests of arenas have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_rt.transport.memory.arena import ArenaReader, ArenaWriter, PlacedBlock
from relax_rt.transport.memory.blocks import Block
from relax_rt.transport.rpc.identity import Incarnation

WHO = Incarnation("rollout/0", 7)
PAGE = 4096


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def writer(folder: Path, slab_bytes: int = 1 << 16, capacity_bytes: int = 1 << 18, **more: Any) -> ArenaWriter:
    return ArenaWriter(folder, WHO, slab_bytes=slab_bytes, capacity_bytes=capacity_bytes, **more)


def read(reader: ArenaReader, placed: PlacedBlock) -> Block:
    return reader.block(placed.block, {blob.digest: blob.extent for blob in placed.blobs})


def free(arena: ArenaWriter, placed: PlacedBlock) -> None:
    for extent in placed.extents():
        arena.free(extent)
