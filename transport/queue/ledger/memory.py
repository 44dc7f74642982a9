"""Payload memory: which cold blocks move to disk, and what becomes of samples when shared memory began anew."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from relax_rt.transport.memory.block_table import LiveBlock
from relax_rt.transport.memory.refs import Extent, is_spilled, owner_of
from relax_rt.transport.queue.ledger import packed
from relax_rt.transport.queue.ledger.admission import has_partials, reopen
from relax_rt.transport.queue.ledger.consumption import lapse
from relax_rt.transport.queue.ledger.core import ROOM, Core
from relax_rt.transport.queue.ledger.events import MoveBlocks
from relax_rt.transport.queue.ledger.messages import Freed
from relax_rt.transport.queue.ledger.state import SampleGroup, SampleState

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


def lose_payloads(core: Core) -> None:
    """Shared memory is gone, and with it every process of before: all that is not committed is lost.

    Groups trained but not known to be committed keep their place on the path until the trainer's roll-back says
    which checkpoint it found: one may have been renamed into place without its commit being reported.
    """
    state = core.state
    packed.unpack_all(core)
    state.blocks.clear()
    state.leases, state.pinned = {}, {}
    state.callers.replies, state.callers.processes = {}, {}
    for group in [*state.groups.values(), *state.trained.values()]:
        group.lease = 0
        for sample in group.samples:
            sample.parts, sample.leases = [], {}
    core.log("payloads_lost", samples=sum(group.size for group in state.groups.values()))
    for group in list(state.groups.values()):
        if has_partials(group) and core.policy.on_failed_member != "drop":
            _keep_partials(core, group)
        else:
            core.end(group, "lost")
    if state.groups:
        core.reindex()
    state.payloads_lost = sorted(state.trained)
    state.trainer_version, state.blocked_since, state.since_update = None, None, 0
    core.deadlines.clear()
    core.changed = True


def _keep_partials(core: Core, group: SampleGroup) -> None:
    """Only its partial completions are left, in the journal: finished members are made again, the others go on."""
    if group.holder is not None:
        reopen(core, group, "dropped(producer gone)")
    finished = [member for member, sample in enumerate(group.samples) if sample.generated and not sample.excluded]
    for member in finished:
        core.losses.lost(group.samples[member].length, "lost")
        group.samples[member] = SampleState()
    if finished:
        core.log("members_ended", group=group.id, members=finished, state="lost")
    core.count_end("lost", len(finished))
    core.state.issued += len(finished)
    core.state.reopened[group.id] = None


def keep_payloads(core: Core) -> None:
    """Every process of before is gone, but payloads lie in files that are still there: only the work in hand ends."""
    state = core.state
    for lease in list(state.leases.values()):
        lapse(core, lease, pinned=False, blame=False)
    for lease in list(state.pinned.values()):
        core.release_pins(lease)
    state.callers.replies, state.callers.processes = {}, {}
    state.blocks.freed = {}
    for group in list(state.groups.values()):
        if group.holder is not None:
            reopen(core, group, "dropped(producer gone)")
    core.log("payloads_kept", samples=core.held, nbytes=state.blocks.payload_bytes + state.blocks.spilled_bytes)
    core.changed = True
