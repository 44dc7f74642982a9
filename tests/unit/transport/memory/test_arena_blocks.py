from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from arena_world import PAGE, WHO, Clock, free, read, writer

from relax_rt.transport.memory import values as values_module
from relax_rt.transport.memory.arena import ArenaReader, ArenaWriter, PlacedBlock
from relax_rt.transport.memory.refs import BlockRef, Extent, slab_name
from relax_rt.transport.memory.values import Bf16, Shared, digest_of
from relax_rt.transport.rpc.errors import Corrupt, OutOfSpace, Refused
from relax_rt.transport.rpc.identity import Incarnation


def numbers(n: int, mark: int = 0) -> dict[str, Any]:
    """A row of about n bytes."""
    return {"a": np.full(n, mark, np.int8)}


# Puts and what comes of them.


def test_rows_round_trip(tmp_path: Path) -> None:
    rows = [
        {
            "tokens": np.arange(100 + i, dtype=np.int32),
            "text": "ß" * i,
            "reward": 0.5 * i,
            "x": Bf16(np.full(3, i, "<u2")),
        }
        for i in range(20)
    ]
    ((placed, indices),) = writer(tmp_path).put_rows(rows, length_field="tokens")
    assert indices == list(range(20)) and placed.lengths == [100 + i for i in range(20)]
    assert placed.block.rows == 20 and placed.block.fields == ("tokens", "text", "reward", "x")
    block = read(ArenaReader(tmp_path), placed)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(block.value("tokens", i), row["tokens"])
        assert (block.value("text", i), block.value("reward", i)) == (row["text"], row["reward"])
        assert block.value("x", i).tolist() == [i] * 3


def test_rows_of_different_kinds_lie_in_different_blocks(tmp_path: Path) -> None:
    a, b = np.arange(600, dtype=np.int32), np.arange(600, dtype=np.int64)
    rows: list[dict[str, Any]] = [
        {"x": a, "y": 1},
        {"x": b, "y": 1},
        {"y": 2, "x": a[:500]},
        {"x": a},
        {"x": a.reshape(2, 300), "y": 1},
        {"x": b, "y": 3},
    ]
    placed = writer(tmp_path).put_rows(rows, length_field="x")
    assert [indices for _, indices in placed] == [[0, 2], [1, 5], [3], [4]]
    assert [put.lengths for put, _ in placed] == [[600, 500], [600, 600], [600], [2]]
    reader = ArenaReader(tmp_path)
    for put, indices in placed:
        for at, index in enumerate(indices):
            for name, value in rows[index].items():
                np.testing.assert_array_equal(read(reader, put).value(name, at), value)
    assert writer(tmp_path / "none").put_rows([]) == []


def test_a_row_like_one_before_lies_as_if_it_was_planned(tmp_path: Path) -> None:
    """The second put of a row's names, dtypes and shapes only copies."""
    arena, reader = writer(tmp_path), ArenaReader(tmp_path)
    for i in range(3):
        row = {
            "tokens": np.arange(i, 400 + i, dtype=np.int32),
            "big": np.full((2, 300), i, ">f8"),
            "part": np.arange(800, dtype=np.int64)[::2],
            "one": np.array(i, np.float32),
        }
        ((placed, indices),) = arena.put_rows([row], length_field="tokens")
        assert indices == [0] and placed.lengths == [400] and placed.blobs == []
        assert placed.block.rows == 1 and placed.block.fields == tuple(row)
        block = read(reader, placed)
        for name, value in row.items():
            np.testing.assert_array_equal(block.value(name, 0), value)
    (other,) = arena.put_rows([{"tokens": np.arange(400, dtype=np.int64), "big": np.zeros((2, 300))}])
    assert read(reader, other[0]).value("tokens", 0).dtype == np.int64
    ((placed, _),) = arena.put_rows([{"tokens": np.arange(399, dtype=np.int32)}], length_field="big")
    assert placed.lengths == [-1]
    known = arena.statistics()
    assert (known.puts, known.rows, known.blocks, known.inline_blocks) == (5, 5, 5, 0)
    for _ in range(2):
        images = {"a": np.zeros(5000, np.uint8), "b": np.zeros(5000, np.uint8)}
        ((placed, _),) = arena.put_rows([images])
        assert len(placed.blobs) == 1


def test_a_second_row_of_bf16_lies_as_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ml_dtypes may not be installed: a dtype of two bytes that numpy does not convert stands for its bfloat16."""
    monkeypatch.setitem(values_module._BY_NAME, "void16", "bf16")
    arena, reader = writer(tmp_path), ArenaReader(tmp_path)
    for i in range(3):
        bits = np.arange(i, 800 + i, dtype="<u2")
        ((placed, _),) = arena.put_rows([{"x": bits.view("V2"), "y": np.full(8, i)}])
        block = read(reader, placed)
        assert block.dtype("x") == "bf16"
        np.testing.assert_array_equal(block.value("x", 0), bits)
        np.testing.assert_array_equal(block.value("y", 0), np.full(8, i))


def test_columns_round_trip(tmp_path: Path) -> None:
    matrix = np.arange(12.0).reshape(3, 4)
    placed = writer(tmp_path).put_columns(
        {
            "matrix": matrix,
            "turned": np.arange(15).reshape(5, 3).T,
            "ragged": [np.arange(i) for i in range(3)],
            "text": ("a", "", "c"),
            "reward": [1, 0.5, None],
            "half": Bf16(np.zeros((3, 2), np.uint16)),
            "prompt": Shared("the same for all"),
        },
        length_field="ragged",
    )
    assert placed.lengths == [0, 1, 2] and len(placed.blobs) == 1
    block = read(ArenaReader(tmp_path), placed)
    np.testing.assert_array_equal(block.column("matrix"), matrix)
    np.testing.assert_array_equal(block.column("turned"), np.arange(15).reshape(5, 3).T)
    assert [value.tolist() for value in block.values("ragged")] == [[], [0], [0, 1]]
    assert block.values("text") == ["a", "", "c"] and block.values("reward") == [1, 0.5, None]
    assert block.values("prompt") == ["the same for all"] * 3


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": np.arange(3), "b": np.arange(4)}, "field 'b' of 4 rows: 'a' of the same put has 3"),
        ({"a": np.float32(1)}, "column 'a' of type float32"),
        ({"a": "text"}, "column 'a' of type str: it is neither"),
        ({"a": [np.zeros(2), np.zeros(2, np.int8)]}, "column 'a': its rows are of several kinds: <f8 .* \\|i1"),
        ({"a": [np.zeros(2), "b"]}, "of several kinds"),
        ({"a": []}, "0 rows"),
        ({}, "no columns"),
        ({"a": Shared(1)}, "no other field has rows"),
        ({"a": [Shared(Shared(1))]}, "Shared value in a Shared"),
        ({1: np.zeros(3)}, "no name"),
    ],
)
def test_bad_columns_are_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    arena = writer(tmp_path)
    with pytest.raises(Refused, match=message):
        arena.put_columns(columns)
    with pytest.raises(Refused, match="no columns"):
        arena.put_rows([{}])
    assert arena.used_bytes == 0


def test_tiny_blocks_travel_inline(tmp_path: Path) -> None:
    arena, reader = writer(tmp_path), ArenaReader(tmp_path)
    ((placed, _),) = arena.put_rows([{"reward": 0.5}, {"reward": 1.0}])
    assert placed.block.extent is None and placed.extents() == [] and list(tmp_path.iterdir()) == []
    assert reader.block(placed.block).values("reward") == [0.5, 1.0]
    sizes = set()
    for n in range(900, 1100):
        ((placed, _),) = arena.put_rows([numbers(n, 3)])
        assert (placed.block.extent is None) == bool(placed.block.inline)
        assert len(placed.block.inline) <= 1024
        assert read(reader, placed).value("a", 0).tolist() == [3] * n
        sizes.add(placed.block.extent is None)
    assert sizes == {True, False}


def test_a_view_is_no_copy_and_cannot_be_written(tmp_path: Path) -> None:
    arena, first, second = writer(tmp_path), ArenaReader(tmp_path), ArenaReader(tmp_path)
    ((placed, _),) = arena.put_rows([numbers(5000, 1)])
    view = read(first, placed).value("a", 0)
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    free(arena, placed)
    ((again, _),) = arena.put_rows([numbers(5000, 2)])
    assert again.block.extent == placed.block.extent
    assert view[0] == 2 == read(second, again).value("a", 0)[0]
    assert again.block.extent is not None
    assert stat.S_IMODE((tmp_path / again.block.extent.slab).stat().st_mode) == 0o600


# Shared values.


def test_the_same_image_is_stored_once(tmp_path: Path) -> None:
    arena, reader = writer(tmp_path), ArenaReader(tmp_path)
    image = np.random.default_rng(0).integers(0, 255, (64, 65, 3)).astype(np.uint8)
    rows = [{"image": image.copy(), "tokens": np.arange(i)} for i in range(8)]
    ((placed, _),) = arena.put_rows(rows)
    (blob,) = placed.blobs
    assert blob.digest == digest_of(("|u1", 3), image)
    assert arena.used_bytes < image.nbytes + 2000
    block = read(reader, placed)
    assert all((block.value("image", i) == image).all() for i in range(8))
    assert block.dtype("image") == "blob"
    statistics = arena.statistics()
    assert (statistics.blobs, statistics.deduplicated) == (1, 7)
    assert statistics.deduplicated_bytes == 7 * image.nbytes
    inner = reader.block(BlockRef(blob.extent, 1, ("blob",)))
    assert inner.names == ("blob",) and (inner.value("blob", 0) == image).all()
    free(arena, placed)
    assert arena.used_bytes == 0


def test_only_repeated_values_are_shared(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, 5000).astype(np.uint8) for _ in range(3)]
    # Equal in what a first look compares.
    almost = images[0].copy()
    almost[7] ^= 1
    turned = np.asfortranarray(images[1].reshape(50, 100))
    rows = [
        {"image": image}
        for image in (images[0], images[0].copy(), almost, images[2], images[2].tobytes(), images[2].tobytes())
    ] + [{"image": images[1].reshape(50, 100)}, {"image": turned}, {"image": np.zeros(100, np.uint8)}]
    placed = writer(tmp_path).put_rows(rows)
    assert [(indices, len(put.blobs)) for put, indices in placed] == [
        ([0, 1, 4, 5, 6, 7], 3),
        ([2, 3, 8], 0),
    ]
    for put, indices in placed:
        block = read(ArenaReader(tmp_path), put)
        for at, index in enumerate(indices):
            np.testing.assert_array_equal(block.value("image", at), rows[index]["image"])


def test_blocks_of_a_call_own_their_blobs(tmp_path: Path) -> None:
    arena = writer(tmp_path)
    image = Shared(np.arange(10))
    placed = [put for put, _ in arena.put_rows([{"image": image}, {"image": image, "x": 1}, {"image": image}])]
    assert [len(put.blobs) for put in placed] == [1, 1]
    extents = [extent for put in placed for extent in put.extents()]
    assert len({(extent.slab, extent.offset) for extent in extents}) == 4
    assert placed[0].blobs[0].digest == placed[1].blobs[0].digest
    free(arena, placed[0])
    assert read(ArenaReader(tmp_path), placed[1]).value("image", 0).tolist() == list(range(10))


def test_a_list_column_with_repeats_is_shared_whole(tmp_path: Path) -> None:
    images = [bytes([i]) * 5000 for i in (1, 2, 1)]
    placed = writer(tmp_path).put_columns({"image": images, "i": np.arange(3)})
    assert len(placed.blobs) == 2
    assert read(ArenaReader(tmp_path), placed).values("image") == images


def test_a_missing_blob_is_named(tmp_path: Path) -> None:
    arena, reader = writer(tmp_path), ArenaReader(tmp_path)
    ((placed, _),) = arena.put_rows([{"a": Shared("x"), "b": 1}])
    ((other, _),) = arena.put_rows([{"a": np.arange(500)}, {"a": np.arange(500)}])
    digest = placed.blobs[0].digest
    with pytest.raises(Corrupt, match=f"blob {digest.hex()} of block .* not among the 0"):
        reader.block(placed.block).value("a", 0)
    assert other.block.extent is not None and placed.block.extent is not None
    for wrong in (other.block.extent, placed.block.extent):
        with pytest.raises(Corrupt):
            reader.block(placed.block, {digest: wrong}).value("a", 0)
    assert reader.block(placed.block).value("b", 0) == 1


# Capacity.


def test_a_full_arena_refuses_until_extents_are_freed(tmp_path: Path) -> None:
    arena = writer(tmp_path, slab_bytes=2 * PAGE, capacity_bytes=4 * PAGE)
    held = [arena.put_rows([numbers(3800)])[0][0] for _ in range(4)]
    used = arena.used_bytes
    with pytest.raises(OutOfSpace, match=f"3968 bytes .*{used} of {4 * PAGE} bytes are in use"):
        arena.put_rows([numbers(3800)])
    for placed in held[:2]:
        free(arena, placed)
    ((large, _),) = arena.put_rows([numbers(7900)])
    with pytest.raises(Corrupt, match="no such extent"):
        free(arena, held[1])
    free(arena, large)
    assert arena.statistics().refused == 1


def test_what_can_never_fit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    arena = writer(tmp_path, slab_bytes=PAGE, capacity_bytes=4 * PAGE)
    with pytest.raises(Refused, match=f"a put of 16448 bytes: the arena of {WHO} has {4 * PAGE} in all"):
        arena.put_rows([numbers(4 * PAGE - 100)])
    with pytest.raises(Refused, match="in all"):
        arena.put_rows([{"a": np.zeros(PAGE)}, {"b": np.zeros(PAGE)}])
    held, _ = arena.put_rows([numbers(2000)])[0]
    with pytest.raises(OutOfSpace):
        arena.put_rows([numbers(4 * PAGE - 300)])
    free(arena, held)
    arena.put_rows([numbers(4 * PAGE - 300)])
    assert arena.total_bytes == 4 * PAGE
    with pytest.raises(Refused, match="at least a page"):
        writer(tmp_path, capacity_bytes=100)


def test_a_put_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    clock = Clock()
    arena = writer(tmp_path, slab_bytes=PAGE, capacity_bytes=2 * PAGE, clock=clock)
    rows: list[dict[str, Any]] = [{"a": np.zeros(300)}, {"b": np.zeros(400)}]
    held, _ = arena.put_rows([{"c": np.zeros(400)}])[0]
    with pytest.raises(OutOfSpace):
        arena.put_rows(rows)
    assert arena.statistics().extents == 1
    # The slab that it made is an extra one like any other.
    assert arena.statistics().slabs == 2
    clock.now = 60
    arena.trim()
    assert arena.statistics().slabs == 1
    free(arena, held)
    assert len(arena.put_rows(rows)) == 2


def test_a_failed_copy_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = writer(tmp_path)

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("relax_rt.transport.memory.blocks.ColumnSource.write", fail)
        arena.put_rows([numbers(5000)])
    assert arena.used_bytes == 0 and arena.statistics().extents == 0


def test_a_large_put_gets_a_slab_of_whole_multiples(tmp_path: Path) -> None:
    arena = writer(tmp_path, slab_bytes=4 * PAGE, capacity_bytes=64 * PAGE)
    arena.warm()
    ((placed, _),) = arena.put_rows([numbers(5 * PAGE, 4)])
    assert arena.total_bytes == 12 * PAGE
    assert (read(ArenaReader(tmp_path), placed).value("a", 0) == 4).all()


def test_a_system_without_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    arena = writer(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(OutOfSpace, match="No space left"):
        patch.setattr(os, "posix_fallocate", full)
        arena.put_rows([numbers(5000)])
    assert list(tmp_path.iterdir()) == [] and arena.total_bytes == 0
    arena.put_rows([numbers(5000)])


def test_names_are_checked(tmp_path: Path) -> None:
    assert slab_name(Incarnation("a/b", 3), 4) == "a-b-3-4.slab"
    with pytest.raises(Refused, match="spilled"):
        ArenaWriter(tmp_path, Incarnation("spill/0", 1), slab_bytes=PAGE, capacity_bytes=PAGE)
    writer(tmp_path).warm()
    with pytest.raises(Refused, match="there already"):
        writer(tmp_path).warm()


def test_a_closed_arena_takes_nothing(tmp_path: Path) -> None:
    arena = writer(tmp_path)
    ((placed, _),) = arena.put_rows([numbers(5000, 5)])
    arena.close()
    free(arena, placed)
    with pytest.raises(Refused, match="closed"):
        arena.put_rows([numbers(5000)])
    assert (read(ArenaReader(tmp_path), placed).value("a", 0) == 5).all()


def test_reserved_memory_takes_a_block_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    far, near = writer(tmp_path / "far"), writer(tmp_path)
    ((placed, _),) = far.put_rows([numbers(5000, 6)])
    assert placed.block.extent is not None
    data = ArenaReader(tmp_path / "far").memory(placed.block.extent)
    extent, memory = near.reserve(len(data))
    memory[:] = data
    local = msgspec.structs.replace(placed.block, extent=extent)
    assert (ArenaReader(tmp_path).block(local).value("a", 0) == 6).all()
    near.free(extent)
    assert near.used_bytes == 0
    with pytest.raises(Refused):
        near.reserve(0)


# Slabs that come and go.


def test_extra_slabs_go_back_after_a_while(tmp_path: Path) -> None:
    clock = Clock()
    arena = writer(tmp_path, slab_bytes=2 * PAGE, capacity_bytes=32 * PAGE, clock=clock, idle_s=10)
    held = [arena.put_rows([numbers(7000)])[0][0] for _ in range(5)]
    reader = ArenaReader(tmp_path)
    views = [read(reader, placed).value("a", 0) for placed in held]
    assert len(list(tmp_path.iterdir())) == 5
    for placed in held[1:]:
        free(arena, placed)
    assert arena.statistics().slabs == 5
    clock.now = 9
    kept, _ = arena.put_rows([numbers(7000)])[0]
    clock.now = 10
    arena.trim()
    assert {path.name for path in tmp_path.iterdir()} == {"rollout-0-7-1.slab", "rollout-0-7-2.slab"}
    assert arena.total_bytes == 4 * PAGE and arena.statistics().slabs_returned == 3
    assert all(len(view) == 7000 for view in views)
    assert reader.statistics().mapped_slabs == 5
    reader.trim()
    assert reader.statistics().mapped_slabs == 2
    free(arena, kept), free(arena, held[0])
    clock.now = 30
    arena.trim()
    assert {path.name for path in tmp_path.iterdir()} == {"rollout-0-7-1.slab"}
    ((again, _),) = arena.put_rows([numbers(7000)])
    assert again.block.extent is not None and again.block.extent.slab == "rollout-0-7-1.slab"


def test_empty_slabs_make_room_for_a_larger_one(tmp_path: Path) -> None:
    arena = writer(tmp_path, slab_bytes=2 * PAGE, capacity_bytes=8 * PAGE)
    held = [arena.put_rows([numbers(7000)])[0][0] for _ in range(4)]
    for placed in held[1:]:
        free(arena, placed)
    ((placed, _),) = arena.put_rows([numbers(3 * PAGE)])
    assert arena.total_bytes == 8 * PAGE and arena.statistics().slabs == 3
    assert placed.block.extent is not None and placed.block.extent.slab == "rollout-0-7-5.slab"


def mapped(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_views_keep_their_memory_and_nothing_else_does(tmp_path: Path) -> None:
    arena = writer(tmp_path, slab_bytes=PAGE, capacity_bytes=64 * PAGE)
    held = [arena.put_rows([numbers(3000, i)])[0][0] for i in range(8)]
    reader = ArenaReader(tmp_path, max_slabs=2)
    views = [read(reader, placed).value("a", 0)[10:] for placed in held]
    assert reader.statistics().mapped_slabs == 2 and reader.statistics().unmaps == 6
    reader.close(), arena.close()
    for path in tmp_path.iterdir():
        path.unlink()
    gc.collect()
    assert [int(view[17]) for view in views] == list(range(8))
    assert mapped(tmp_path) == 8
    del views[1:]
    gc.collect()
    assert mapped(tmp_path) == 1
    views.clear()
    gc.collect()
    assert mapped(tmp_path) == 0


def test_a_block_goes_without_garbage_collection(tmp_path: Path) -> None:
    arena, reader = writer(tmp_path), ArenaReader(tmp_path)
    rows = [{"x": np.arange(400 + i), "y": np.zeros(3), "s": "a", "b": Shared(np.arange(5000))} for i in range(2)]
    ((placed, _),) = arena.put_rows(rows)
    block = read(reader, placed)
    assert [len(block.values(name)) for name in block.names] == [2] * 4
    roots = [weakref.ref(root) for root in block.roots()]
    assert len(roots) == 2
    view, shared = block.value("x", 1)[5:], block.value("b", 0)
    gc.disable()
    try:
        del block
        assert all(root() is not None for root in roots)
        del view
        assert [root() is None for root in roots] == [True, False]
        del shared
        assert all(root() is None for root in roots)
    finally:
        gc.enable()


def test_tensors_keep_their_memory_without_a_copy(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    arena, reader = writer(tmp_path), ArenaReader(tmp_path)
    rows = [{"x": torch.full((40 + i,), i, dtype=torch.bfloat16), "y": torch.full((3, 50), i)} for i in range(4)]
    ((placed, _),) = arena.put_rows(rows)
    block = read(reader, placed)
    ragged, row, column = block.tensor("x", 2), block.tensor("y", 3), block.tensor("y")
    assert ragged.dtype == torch.bfloat16 and ragged.shape == (42,) and column.shape == (4, 3, 50)
    assert row.data_ptr() == block.value("y", 3).__array_interface__["data"][0]
    reader.close(), arena.close()
    del block, column
    gc.collect()
    assert (ragged == 2).all() and (row == 3).all() and mapped(tmp_path) == 1
    del ragged, row
    gc.collect()
    assert mapped(tmp_path) == 0


def test_writing_through_a_tensor_ends_the_process(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ((placed, _),) = writer(tmp_path).put_rows([numbers(5000, 1)])
    (tmp_path / "ref").write_bytes(msgspec.msgpack.encode(placed.block))
    program = (
        "import sys, pathlib, msgspec\n"
        "from relax_rt.transport.memory.arena import ArenaReader\n"
        "from relax_rt.transport.memory.refs import BlockRef\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "ref = msgspec.msgpack.decode((folder / 'ref').read_bytes(), type=BlockRef)\n"
        "tensor = ArenaReader(folder).block(ref).tensor('a', 0)\n"
        "clone = tensor.clone(); clone += 1\n"
        "tensor += 1\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert subprocess.run(command, timeout=120, check=False).returncode == -signal.SIGSEGV
    assert (read(ArenaReader(tmp_path), placed).value("a", 0) == 1).all()


# What a reader is told.


def test_readers_refuse_what_does_not_fit(tmp_path: Path) -> None:
    ((placed, _),) = writer(tmp_path).put_rows([{"a": np.arange(1000)}, {"a": np.arange(900)}])
    ref, reader = placed.block, ArenaReader(tmp_path)
    extent = ref.extent
    assert extent is not None
    (tmp_path / "rollout-0-9-1.slab").symlink_to(tmp_path / extent.slab)
    os.mkfifo(tmp_path / "rollout-0-9-2.slab")
    (tmp_path / "rollout-0-9-3.slab").touch()
    (tmp_path / "rollout-0-9-4.slab").mkdir()
    (tmp_path / "spill-1").write_bytes(b"x" * 100)
    changes: list[dict[str, Any]] = [
        {"slab": name}
        for name in ("../x-1-1.slab", "x/y-1-1.slab", "", "a", "spill-1", "spill-0-7-1.slab", "x-1-1.slab\n", "x" * 999)
    ]
    changes += [{"slab": f"rollout-0-9-{n}.slab"} for n in range(6)]
    changes += [{"offset": 1 << 20}, {"offset": -64}, {"offset": 64}, {"nbytes": -1}, {"nbytes": 2**63}, {"nbytes": 64}]
    for change in changes:
        with pytest.raises(Corrupt):
            reader.block(msgspec.structs.replace(ref, extent=msgspec.structs.replace(extent, **change)))
    announced: list[dict[str, Any]] = [{"rows": 3}, {"fields": ("b",)}, {"fields": ("a", "b")}]
    for change in announced:
        with pytest.raises(Corrupt, match="announced"):
            reader.block(msgspec.structs.replace(ref, **change))
    with pytest.raises(Corrupt, match="an inline block"):
        reader.block(BlockRef(None, 1, ("a",), b"abc"))


def test_spilled_blocks_are_read_from_their_folder(tmp_path: Path) -> None:
    ((placed, _),) = writer(tmp_path).put_rows([numbers(5000, 8)])
    reader = ArenaReader(tmp_path, tmp_path / "spill")
    (tmp_path / "spill").mkdir()
    assert placed.block.extent is not None
    (tmp_path / "spill" / "spill-17").write_bytes(bytes(100) + reader.memory(placed.block.extent).tobytes())
    extent = Extent("spill-17", 100, placed.block.extent.nbytes)
    block = reader.block(msgspec.structs.replace(placed.block, extent=extent))
    assert (block.value("a", 0) == 8).all()
    for name in ("spill-18", "spill-../x", "spill-", "/etc/passwd"):
        with pytest.raises(Corrupt):
            reader.memory(msgspec.structs.replace(extent, slab=name))


def _child(folder: Path, ref: BlockRef, pipe: Any) -> None:
    view = ArenaReader(folder).block(ref).value("a", 0)
    pipe.send((int(view.sum()), view.flags.writeable))


def test_another_process_sees_it(tmp_path: Path) -> None:
    ((placed, _),) = writer(tmp_path).put_rows([{"a": np.arange(5000)}])
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(tmp_path, placed.block, there))
    child.start()
    assert here.poll(60)
    assert here.recv() == (5000 * 4999 // 2, False)
    child.join(60)
    assert child.exitcode == 0
    here.close(), there.close(), child.close()


def test_threads_do_not_meet(tmp_path: Path) -> None:
    arena, reader = writer(tmp_path, slab_bytes=1 << 16, capacity_bytes=1 << 20), ArenaReader(tmp_path)
    failures: list[BaseException] = []

    def work(mark: int) -> None:
        try:
            rng = random.Random(mark)
            held: list[PlacedBlock] = []
            for _ in range(150):
                held.append(arena.put_rows([numbers(rng.randrange(1500, 8000), mark)])[0][0])
                if len(held) > 8:
                    placed = held.pop(rng.randrange(len(held)))
                    assert (read(reader, placed).value("a", 0) == mark).all()
                    free(arena, placed)
            for placed in held:
                assert (read(reader, placed).value("a", 0) == mark).all()
                free(arena, placed)
        except BaseException as error:  # noqa: BLE001 -- told by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == [] and arena.used_bytes == 0
    assert arena.statistics().puts == 600 and reader.statistics().blocks == 600


def test_statistics_add_up(tmp_path: Path) -> None:
    arena = writer(tmp_path, slab_bytes=4 * PAGE, capacity_bytes=8 * PAGE)
    held = [arena.put_rows([numbers(3000)])[0][0] for _ in range(4)]
    arena.put_rows([{"reward": 1.0}])
    free(arena, held[0]), free(arena, held[2])
    numbers_ = arena.statistics()
    extents = [extent for placed in (held[1], held[3]) for extent in placed.extents()]
    assert numbers_.used_bytes == sum(extent.nbytes for extent in extents) and numbers_.extents == 2
    assert numbers_.peak_used_bytes == 2 * numbers_.used_bytes
    assert (numbers_.puts, numbers_.rows, numbers_.blocks, numbers_.inline_blocks, numbers_.frees) == (5, 5, 5, 1, 2)
    assert (numbers_.capacity_bytes, numbers_.slab_bytes, numbers_.slabs) == (8 * PAGE, 4 * PAGE, 1)
    assert 12_000 < numbers_.copied_bytes < 14_000
    free_bytes = numbers_.slab_bytes - numbers_.used_bytes
    assert numbers_.fragmentation == pytest.approx(1 - numbers_.largest_free_bytes / free_bytes)
    assert numbers_.free_extents > 1
    assert msgspec.json.decode(msgspec.json.encode(numbers_)) == msgspec.to_builtins(numbers_)
