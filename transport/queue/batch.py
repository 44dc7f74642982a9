"""Samples on lease, as a consumer sees them, and the arrays that outlive their lease."""

from __future__ import annotations

import asyncio
import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from relax_rt.transport.memory.blocks import Block
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Extent, owner_of
from relax_rt.transport.memory.values import STORAGE
from relax_rt.transport.queue.ledger.messages import LeaseGrant, SampleInfo, SampleKey
from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
OpenBlock = Callable[[BlockRef, Mapping[bytes, Extent]], Block]
OnDrop = Callable[[int, list[weakref.ref[Any]]], None]


class LeasedSample:
    """A sample on lease; ``sample["tokens"]`` is a read-only view in shared memory.

    Arrays taken from it stay good as long as they are referred to, also after the lease.
    """

    __slots__ = ("_memory", "attempt", "info", "key", "prompt", "staleness", "versions")

    def __init__(self, info: SampleInfo, memory: LeasedMemory) -> None:
        self.info, self._memory = info, memory
        self.key, self.prompt, self.attempt = info.key, info.prompt, info.attempt
        self.versions, self.staleness = info.versions, info.staleness

    @property
    def length(self) -> int:
        """Tokens; -1 if its producer did not say."""
        return self.info.length

    @property
    def masked(self) -> list[tuple[int, int]]:
        """Token ranges [start, end) over the staleness bound: context only, their loss mask counts as 0."""
        return self.info.masked

    @property
    def names(self) -> list[str]:
        """Names of its columns."""
        refs = self._memory.refs
        return [name for block, _ in self.info.parts for name in refs[block].fields]

    def __contains__(self, name: str) -> bool:
        return any(name in self._memory.refs[block].fields for block, _ in self.info.parts)

    def place(self, name: str) -> tuple[Block, int]:
        """The block and the row in which a column is.

        Raises:
            Refused: the sample has no such column.
        """
        for block, row in self.info.parts:
            if name in self._memory.refs[block].fields:
                return self._memory.block(block), row
        raise Refused(f"column '{name}' of sample {self.key}", why=f"it has {', '.join(self.names)}")

    def __getitem__(self, name: str) -> Any:
        """A read-only array, a str, bytes or an object.

        Raises:
            Refused: the sample has no such column, or its batch was finished.
            Corrupt: the memory does not hold what the ledger says.
        """
        block, row = self.place(name)
        return block.value(name, row)

    def tensor(self, name: str) -> torch.Tensor:
        """The column as a torch tensor over the same memory. A write to it ends the process: clone it before."""
        block, row = self.place(name)
        return block.tensor(name, row)

    def decode(self, name: str, type_: type[T]) -> T:
        """A msgpack column as an object of the given type."""
        block, row = self.place(name)
        value: T = block.decode(name, row, type_)
        return value


class LeasedMemory:
    """The blocks of a lease, mapped when they are first asked for. LeaseGrant and samples refer to it, it to neither.

    Args:
        batch: what the broker granted.
        open_block: maps a block.
        on_drop: gets a lease that is forgotten unfinished, and what views of it refer to; called by the garbage
            collector, in any thread.
    """

    def __init__(self, batch: LeaseGrant, open_block: OpenBlock, on_drop: OnDrop | None) -> None:
        self._finished = False
        self._dropped_blocks: set[int] = set()
        self._on_drop = on_drop if batch.lease else None
        self._lease, self._remote = batch.lease, batch.remote
        self.refs = batch.blocks
        self.blobs = {blob.digest: blob.extent for blob in batch.blobs}
        self._open = open_block
        self._blocks: dict[int, Block] = {}
        self._roots: list[weakref.ref[Any]] = []

    def __del__(self) -> None:
        if not self._finished and self._on_drop is not None:
            self._on_drop(self._lease, self.finish())

    def block(self, index: int) -> Block:
        """One of the blocks.

        Raises:
            Refused: the lease was finished.
        """
        if self._finished:
            raise Refused(
                f"columns of lease {self._lease}", why="it is finished", hint="take what you need before `complete`"
            )
        if index in self._dropped_blocks:
            raise Refused(f"columns of lease {self._lease}", why="their group was left out of the step")
        found = self._blocks.get(index)
        if found is None:
            found = self._blocks[index] = self._open(self.refs[index], self.blobs)
        return found

    def finish(self) -> list[weakref.ref[Any]]:
        """Drop the memory; answers with what views handed out still refer to."""
        self._finished = True
        self._forget(list(self._blocks))
        return self._roots

    def drop_blocks(self, indices: Iterable[int]) -> bool:
        """Forget these blocks for good. True if views of them, or of earlier ones, are still referred to."""
        gone = set(indices)
        self._dropped_blocks |= gone
        self._forget([index for index in self._blocks if index in gone])
        return bool(self._roots)

    def _forget(self, indices: list[int]) -> None:
        blocks = [self._blocks.pop(index) for index in indices if self._is_shared(index)]
        for index in indices:
            self._blocks.pop(index, None)
        self._roots += [weakref.ref(root) for block in blocks for root in block.roots()]
        del blocks
        self._roots = [root for root in self._roots if root() is not None]

    def _is_shared(self, index: int) -> bool:
        """Whether the block lies in shared memory; one fetched from another node is a private copy."""
        extent = self.refs[index].extent
        return extent is not None and owner_of(extent.slab) not in self._remote

    def reopen(self) -> None:
        """Undo `finish`: the lease is held after all."""
        self._finished = bool(self._remote)


class LeasedBatch:
    """Samples on lease. Empty (and false) when nothing was ready in time: `waiting_on` says why.

    Finish it with `complete` or `release`: if it is forgotten, the garbage collector releases it.

    Args:
        task: the task of the lease.
        batch, open_block, on_drop: see LeasedMemory.
    """

    def __init__(self, task: str, batch: LeaseGrant, open_block: OpenBlock, on_drop: OnDrop | None = None) -> None:
        self.task, self.lease, self.waiting_on = task, batch.lease, batch.waiting_on
        self._memory = LeasedMemory(batch, open_block, on_drop)
        self.refs = batch.blocks
        self._infos, self._runs = batch.samples, batch.runs
        self._samples: list[LeasedSample] | None = None
        self._length = len(batch)

    def __bool__(self) -> bool:
        return self._length > 0

    def __len__(self) -> int:
        return self._length

    @property
    def samples(self) -> list[LeasedSample]:
        """The samples, in order."""
        if self._samples is None:
            infos = [*self._infos, *(info for run in self._runs for info in run.infos())]
            self._samples = [LeasedSample(info, self._memory) for info in infos]
        return self._samples

    @property
    def keys(self) -> list[SampleKey]:
        """Keys of its samples, in order."""
        return [sample.key for sample in self.samples]

    def block(self, index: int) -> Block:
        """One of its blocks, mapped when first asked for."""
        return self._memory.block(index)

    def groups(self) -> dict[int, list[LeasedSample]]:
        """The samples by group, in the order of the batch."""
        groups: dict[int, list[LeasedSample]] = {}
        for sample in self.samples:
            groups.setdefault(sample.key.group, []).append(sample)
        return groups

    def column(self, name: str) -> NDArray[Any]:
        """A column of all samples as one array [samples, …].

        Without a copy when the samples lie one after the other in one block, else gathered into a new array.

        Raises:
            Refused: a sample lacks the column, or its values differ in shape or are not numbers.
        """
        self._check_some(name)
        span = self._contiguous(name)
        if span is not None:
            block, first = span
            return block.column(name)[first : first + len(self)]
        values = [sample[name] for sample in self.samples]
        numbers = all(isinstance(value, np.ndarray | np.generic | bool | int | float) for value in values)
        if not numbers or len({np.shape(value) for value in values}) > 1:
            raise Refused(
                f"column '{name}' of {len(values)} samples as one array",
                why="its values differ in shape or are not numbers",
                hint="use values() or packed()",
            )
        gathered: NDArray[Any] = np.stack([np.asarray(value) for value in values])
        return gathered

    def _run_of(self, name: str) -> tuple[Block, int] | None:
        """The block and first row of a column, when the batch is one run (the samples of one put)."""
        if len(self._runs) == 1 and not self._infos:
            for index, row in self._runs[0].parts:
                if name in self.refs[index].fields:
                    return self.block(index), row
        return None

    def _contiguous(self, name: str) -> tuple[Block, int] | None:
        """The block and first row, when the column of all samples is one stretch of a block."""
        found = self._run_of(name)
        if found is not None:
            return found if _stacks(found[0], name) else None
        places: list[tuple[int, int]] = []
        for sample in self.samples:
            for index, row in sample.info.parts:
                if name in self.refs[index].fields:
                    places.append((index, row))
                    break
            if not places or places[-1] != (places[0][0], places[0][1] + len(places) - 1):
                return None
        if len(places) != len(self.samples):
            return None
        block = self.block(places[0][0])
        return (block, places[0][1]) if _stacks(block, name) else None

    def values(self, name: str) -> list[Any]:
        """A column of all samples, value by value."""
        span = self._run_of(name)
        if span is not None:
            block, first = span
            return [block.value(name, row) for row in range(first, first + len(self))]
        return [sample[name] for sample in self.samples]

    def packed(self, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """A ragged column of all samples, one after the other without padding, and the n + 1 offsets into it."""
        self._check_some(name)
        span = self._run_of(name)
        if span is not None and isinstance(span[0].value(name, span[1]), np.ndarray | np.generic):
            block, first = span
            if np.ndim(block.value(name, first)) > 1 or block.dtype(name) == "blob":
                return self._concatenated(name)
            flat, at = block.packed(name)
            at = at[first : first + len(self) + 1]
            return flat[at[0] : at[-1]], at - at[0]
        return self._concatenated(name)

    def without(self, groups: Collection[int]) -> LeasedBatch:
        """Return the batch without these groups, over the same memory."""
        rest = copy.copy(self)
        rest._infos = [info for info in self._infos if info.key.group not in groups]
        rest._samples, rest._length = None, len(rest._infos)
        return rest

    def part(self, keys: Collection[SampleKey]) -> LeaseGrant:
        """Return the grant of some of its samples alone, to be read by another process while this lease is held.

        There `LeasedBatch(task, part, open_block)` is the batch. Which memory is remote depends on who reads, so
        `remote` is empty: see `QueueApi.payload_servers`.
        """
        infos = [sample.info for sample in self.samples if sample.key in keys]
        place = {block: number for number, block in enumerate(dict.fromkeys(b for one in infos for b, _ in one.parts))}
        moved = [replace(one, parts=[(place[block], row) for block, row in one.parts]) for one in infos]
        blobs = [BlobRef(digest, extent) for digest, extent in self._memory.blobs.items()]
        return LeaseGrant(self.lease, moved, blocks=[self.refs[block] for block in place], blobs=blobs)

    def drop_blocks_beside(self, rest: LeasedBatch) -> bool:
        """Drop memory that only the other samples lie in. True if views of it are still referred to."""
        needed = {block for info in rest._infos for block, _ in info.parts}
        return self._memory.drop_blocks(set(range(len(self.refs))) - needed)

    def _check_some(self, name: str) -> None:
        if not self:
            raise Refused(f"column '{name}' of an empty batch", why=self.waiting_on, hint="test `if batch:` first")

    def __repr__(self) -> str:
        return (
            f"<{len(self)} samples for '{self.task}', lease {self.lease}>" if self else f"<no batch: {self.waiting_on}>"
        )

    def _concatenated(self, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        found = self.values(name)
        if any(isinstance(value, str | bytes | dict) for value in found):
            raise Refused(f"column '{name}', packed", why="its values are not arrays", hint="use values()")
        values = [np.atleast_1d(value) for value in found]
        offsets = np.zeros(len(values) + 1, np.int64)
        np.cumsum([len(value) for value in values], out=offsets[1:])
        return np.concatenate(values), offsets

    def finish(self) -> list[weakref.ref[Any]]:
        """Drop the memory. Answers with what views handed out still refer to: it must stay pinned for them."""
        return self._memory.finish()

    def reopen(self) -> None:
        """Undo `finish`: its lease is held after all. Payload from another node was dropped and stays so."""
        self._memory.reopen()


def _stacks(block: Block, name: str) -> bool:
    """Whether the rows of a column lie in the block as one array."""
    return not block.ragged(name) and block.dtype(name) in STORAGE


def extents_of(batch: LeaseGrant) -> list[Extent]:
    """All extents that a batch's blocks and blobs lie in."""
    found = [block.extent for block in batch.blocks if block.extent is not None]
    return found + [blob.extent for blob in batch.blobs]


class ViewTracker:
    """Finished leases over whose memory arrays are still referred to: the memory must stay pinned for them.

    Args:
        on_gone: gets the leases of which the last array is gone.
    """

    def __init__(self, on_gone: Callable[[list[int]], None]) -> None:
        self._on_gone = on_gone
        self._views: dict[int, int] = {}
        self._done: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._views)

    def watch(self, lease: int, roots: Sequence[weakref.ref[Any]]) -> None:
        """Watch what arrays over the lease's memory refer to (see LeasedBatch.finish)."""
        if not roots:
            return
        self._loop = asyncio.get_running_loop()
        alive = [root for ref in roots if (root := ref()) is not None]
        self._views[lease] = max(len(alive), 1)
        for root in alive:
            weakref.finalize(root, self._gone, lease).atexit = False
        if not alive:
            self._count(lease)

    def _gone(self, lease: int) -> None:
        """Called by the garbage collector, in any thread."""
        if self._loop is not None:
            # The loop is closed: there is nothing to notify.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._count, lease)

    def _count(self, lease: int) -> None:
        self._views[lease] -= 1
        if self._views[lease]:
            return
        del self._views[lease]
        if not self._done and self._loop is not None:
            self._loop.call_soon(self._tell)
        self._done.append(lease)

    def _tell(self) -> None:
        leases, self._done = self._done, []
        self._on_gone(leases)
