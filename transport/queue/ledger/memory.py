"""Cold payloads move from shared memory to files on the broker's disk when memory fills."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from relax_rt.transport.memory.block_table import LiveBlock
from relax_rt.transport.memory.refs import Extent, is_spilled, owner_of
from relax_rt.transport.queue.ledger.core import ROOM, Core
from relax_rt.transport.queue.ledger.events import MoveBlocks
from relax_rt.transport.queue.ledger.messages import Freed

_NOBODY: Mapping[str, int] = {}
MOVE_BYTES = 64 << 20
"""Payload of one round of moves, so that memory comes free in steps."""


def wanted(core: Core, skip: Container[int] = (), short: Mapping[str, int] = _NOBODY) -> list[tuple[int, Extent]]:
    """Blocks to copy to disk now, coldest first: trained ones, which only wait for a checkpoint, then the oldest.

    Blobs stay: several blocks share them. What is on lease stays: it is about to be read, and its memory with it. So
    does what lies on another node, and what could not be copied before (`skip`).

    short: bytes that owners of slabs (by key) need and have not, though all memory together is not too full.
    """
    limits, callers = core.state.limits, core.state.callers
    over = core.blocks.payload_bytes - int(limits.high_water * limits.capacity_bytes)
    room = min(limits.spill_bytes - core.blocks.spilled_bytes, MOVE_BYTES)
    needs = dict(short)
    if (over <= 0 and not needs) or room <= 0:
        return []
    found: list[tuple[int, Extent]] = []
    for id_, block in _coldest(core):
        extent = block.ref.extent
        if over <= 0 and not needs:
            break
        if extent is None or is_spilled(extent.slab) or extent.nbytes > room or _is_read(core, extent) or id_ in skip:
            continue
        owner = owner_of(extent.slab)
        if (over <= 0 and owner not in needs) or (callers.processes and callers.node_of(owner) != callers.node):
            continue
        found.append((id_, extent))
        over -= extent.nbytes
        room -= extent.nbytes
        if owner in needs:
            needs[owner] -= extent.nbytes
            if needs[owner] <= 0:
                del needs[owner]
    return found


def _coldest(core: Core) -> Iterator[tuple[int, LiveBlock]]:
    blocks = core.blocks.blocks
    seen: set[int] = set()
    for group in core.state.trained.values():
        for sample in group.samples:
            for part in sample.parts:
                if part.block not in seen:
                    seen.add(part.block)
                    yield part.block, blocks[part.block]
    for id_, block in blocks.items():
        if id_ not in seen:
            yield id_, block


def _is_read(core: Core, extent: Extent) -> bool:
    return core.blocks.live[extent.slab][extent.offset].references > 1


def moved(core: Core, event: MoveBlocks) -> Freed:
    """The copies are on disk; answers with those that are of no use, as the block ended or is read meanwhile."""
    useless: list[Extent] = []
    for id_, to in event.moves:
        block = core.blocks.blocks.get(id_)
        now = block.ref.extent if block is not None else None
        # Who took it while it was copied has pinned the old place, and may ask once more where that is.
        if now is None or is_spilled(now.slab) or _is_read(core, now):
            useless.append(to)
            continue
        core.blocks.move(id_, to, core.state.callers.alive)
        core.tally("blocks_spilled")
        core.tally("bytes_spilled", to.nbytes)
        core.changed = True
    core.touched.add(ROOM)
    return Freed(useless)
