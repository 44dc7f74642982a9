"""Shared memory of a node: each process writes blocks to slabs of its own, all the others read them in place."""

from relax_rt.transport.memory.arena.reader import Reader, ReaderStatistics
from relax_rt.transport.memory.arena.writer import Placed, Writer, WriterStatistics
from relax_rt.transport.memory.block import ALIGNMENT, INLINE_BYTES, Block
from relax_rt.transport.memory.slab_names import SPILL_PREFIX, slab_name
from relax_rt.transport.memory.values import Bf16, Raw, Shared

__all__ = [
    "ALIGNMENT",
    "INLINE_BYTES",
    "SPILL_PREFIX",
    "Bf16",
    "Block",
    "Placed",
    "Raw",
    "Reader",
    "ReaderStatistics",
    "Shared",
    "Writer",
    "WriterStatistics",
    "slab_name",
]
