"""The arena over long runs, and against a naive model."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arena_world import PAGE, Clock, free, read, writer
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relax_rt.transport.memory.arena import ArenaReader, PlacedBlock
from relax_rt.transport.memory.slabs import Heap, aligned
from relax_rt.transport.memory.values import Shared
from relax_rt.transport.rpc.errors import Corrupt, OutOfSpace, Refused

# A long run.


def lengths(rng: random.Random) -> Iterator[int]:
    """Bytes of blocks as rollouts make them: log-normal, now and then a large batch."""
    while True:
        yield min(
            1 << 20, int(rng.lognormvariate(9.5, 1.2)) + 64 if rng.random() < 0.99 else rng.randrange(1 << 20) + 1
        )


@pytest.mark.parametrize("seed", range(3))
def test_memory_does_not_grow_over_a_long_run(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    arena = writer(tmp_path, slab_bytes=4 << 20, capacity_bytes=1 << 30)
    bound, held, used, most = 16 << 20, [], 0, [0, 0]
    for step, nbytes in zip(range(40_000), lengths(rng), strict=False):
        while used + aligned(nbytes) > bound:
            # Mostly in the order of arrival, as leases do, but not quite.
            extent = held.pop(min(len(held) - 1, int(rng.expovariate(0.05))))
            used -= extent.nbytes
            arena.free(extent)
        held.append(arena.reserve(nbytes)[0])
        used += aligned(nbytes)
        most[step >= 20_000] = max(most[step >= 20_000], arena.total_bytes)
    assert arena.used_bytes == used
    assert most[1] <= most[0] + (4 << 20) and most[1] <= 1.75 * bound
    for extent in held:
        arena.free(extent)
    numbers_ = arena.statistics()
    assert numbers_.used_bytes == 0 and numbers_.fragmentation == 0 and numbers_.free_extents == numbers_.slabs


@pytest.mark.parametrize("seed", range(3))
def test_a_heap_ends_as_one_extent(seed: int) -> None:
    rng = random.Random(seed)
    heap = Heap(1 << 20)
    used: dict[int, int] = {}
    for _ in range(5000):
        nbytes = aligned(int(rng.lognormvariate(8, 1.5)) + 1)
        offset = heap.allocate(nbytes) if rng.random() < 0.55 else None
        if offset is not None:
            assert offset % 64 == 0
            assert all(offset + nbytes <= at or at + size <= offset for at, size in used.items())
            used[offset] = nbytes
        elif used:
            at = rng.choice(list(used))
            heap.free(at, used.pop(at))
        assert heap.free_bytes == heap.nbytes - sum(used.values())
    for at, size in used.items():
        heap.free(at, size)
    assert heap.empty and heap.largest == 1 << 20 and heap.free_extents == 1


# Against a naive model.

KINDS = ["<i4", "|u1", "<f8", "str", "bytes", "object"]


def _value(kind: str, n: int, mark: int) -> Any:
    match kind:
        case "str":
            return chr(97 + mark % 26) * n
        case "bytes":
            return bytes([mark % 256]) * n
        case "object":
            return [mark] * (n // 8)
        case _:
            return np.full(n // np.dtype(kind).itemsize, mark % 128, kind)


def _equal(found: Any, value: Any) -> bool:
    return np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value


class ArenaMachine(RuleBasedStateMachine):
    SLAB, CAPACITY = 4 * PAGE, 16 * PAGE

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self.scratch.name)
        self.clock = Clock()
        self.arena = writer(self.folder, self.SLAB, self.CAPACITY, clock=self.clock, idle_s=5)
        self.reader = ArenaReader(self.folder, max_slabs=2)
        self.live: list[tuple[PlacedBlock, list[dict[str, Any]], list[tuple[int, str, Any]]]] = []
        self.puts = 0

    def _keep(self, placed: PlacedBlock, rows: list[dict[str, Any]]) -> None:
        assert placed.block.rows == len(rows)
        self.live.append((placed, rows, []))

    @rule(
        specs=st.lists(
            st.tuples(st.sampled_from(KINDS), st.integers(0, 9000), st.integers(0, 2), st.booleans()),
            min_size=1,
            max_size=5,
        )
    )
    def put_rows(self, specs: list[tuple[str, int, int, bool]]) -> None:
        self.puts += 1
        rows = []
        for kind, n, mark, shared in specs:
            # Marks repeat within a call, so that some values are the same.
            value = _value(kind, n, self.puts + mark)
            rows.append({"x": value, "i": np.int64(self.puts)} | ({"y": Shared(value)} if shared else {}))
        before = self.arena.used_bytes
        try:
            placed = self.arena.put_rows(rows)
        except (OutOfSpace, Refused):
            assert self.arena.used_bytes == before
            return
        assert sorted(i for _, indices in placed for i in indices) == list(range(len(rows)))
        for put, indices in placed:
            self._keep(
                put,
                [{k: v.value if isinstance(v, Shared) else v for k, v in rows[i].items()} for i in indices],
            )

    @rule(n=st.integers(1, 40), width=st.integers(0, 300))
    def put_columns(self, n: int, width: int) -> None:
        self.puts += 1
        table = np.full((n, width), self.puts, np.float32)
        try:
            placed = self.arena.put_columns({"t": table, "s": ["x" * i for i in range(n)]}, length_field="t")
        except OutOfSpace:
            return
        assert placed.lengths == [width] * n
        self._keep(placed, [{"t": table[i], "s": "x" * i} for i in range(n)])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        placed, _, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        free(self.arena, placed)
        for extent in placed.extents():
            with pytest.raises(Corrupt):
                self.arena.free(extent)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def hold_a_view(self, data: st.DataObject) -> None:
        placed, rows, views = self.live[data.draw(st.integers(0, len(self.live) - 1))]
        row = data.draw(st.integers(0, len(rows) - 1))
        for name in rows[row]:
            views.append((row, name, read(self.reader, placed).value(name, row)))

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.arena.trim()
        self.reader.trim()

    @invariant()
    def capacity_is_kept(self) -> None:
        on_disk = sum(path.stat().st_size for path in self.folder.iterdir())
        assert self.arena.total_bytes == on_disk <= self.CAPACITY
        assert len(self.reader._maps) <= 2

    @invariant()
    def extents_do_not_overlap(self) -> None:
        extents = [extent for placed, _, _ in self.live for extent in placed.extents()]
        spans = sorted((extent.slab, extent.offset, extent.nbytes) for extent in extents)
        for (slab, offset, nbytes), (next_slab, next_offset, _) in pairwise(spans):
            assert slab != next_slab or offset + nbytes <= next_offset
        numbers_ = self.arena.statistics()
        assert numbers_.used_bytes == sum(nbytes for _, _, nbytes in spans) and numbers_.extents == len(spans)

    @invariant()
    def live_rows_are_what_was_put(self) -> None:
        for placed, rows, views in self.live:
            block = read(self.reader, placed)
            for i, row in enumerate(rows):
                assert all(_equal(block.value(name, i), value) for name, value in row.items())
            assert all(_equal(view, rows[i][name]) for i, name, view in views)

    def teardown(self) -> None:
        try:
            for placed, _, _ in self.live:
                free(self.arena, placed)
            numbers_ = self.arena.statistics()
            assert numbers_.used_bytes == 0 and numbers_.free_extents == numbers_.slabs and numbers_.fragmentation == 0
            self.clock.now += 10
            self.arena.trim()
            assert self.arena.statistics().slabs <= 1
        finally:
            self.arena.close(), self.reader.close()
            self.scratch.cleanup()


ArenaMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestArenaMachine = ArenaMachine.TestCase
