from __future__ import annotations

import multiprocessing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_rt.transport.arena import ALIGNMENT, Bf16, Reader, Writer
from relax_rt.transport.errors import Corrupt, OutOfSpace, Refused
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.ledger.extents import extents_of
from relax_rt.transport.queue.api import Column

WHO = Incarnation("rollout/0", 7)


def writer(tmp_path: Path, slab_bytes: int = 1 << 16, capacity_bytes: int = 1 << 18) -> Writer:
    return Writer(tmp_path, WHO, slab_bytes=slab_bytes, capacity_bytes=capacity_bytes)


class Meta(msgspec.Struct):
    item: str
    size: int


def test_values_come_back(tmp_path: Path) -> None:
    values = {
        "tokens": np.arange(1000, dtype=np.int32),
        "mask": np.ones(3, dtype=np.uint8),
        "matrix": np.random.default_rng(0).normal(size=(7, 13, 5)),
        "turned": np.arange(200, dtype=np.int64).reshape(20, 10).T,
        "big_endian": np.arange(100, dtype=">i4"),
        "half": Bf16(np.arange(300, dtype=np.uint16).reshape(30, 10)),
        "flags": np.array([True, False]),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "scalar": np.float32(1.5),
        "text": "größer " * 100,
        "short": "ß",
        "raw": b"\0\1" * 500,
        "meta": Meta("x" * 400, 3),
        "reward": 0.25,
    }
    columns = {column.name: column for column in writer(tmp_path).put(values)}
    reader = Reader(tmp_path)
    for name in ("tokens", "mask", "matrix", "turned", "big_endian", "flags", "empty", "scalar"):
        view = reader.view(columns[name])
        np.testing.assert_array_equal(view, values[name])
        assert view.dtype.kind == values[name].dtype.kind  # type: ignore[attr-defined]
        assert view.shape == values[name].shape  # type: ignore[attr-defined]
        assert not view.flags.writeable
    assert columns["half"].dtype == "bf16"
    np.testing.assert_array_equal(reader.view(columns["half"]), np.arange(300, dtype=np.uint16).reshape(30, 10))
    assert reader.view(columns["text"]) == values["text"]
    assert reader.view(columns["short"]) == "ß"
    assert reader.view(columns["raw"]) == values["raw"]
    assert reader.decode(columns["meta"], Meta) == values["meta"]
    assert reader.view(columns["reward"]) == 0.25
    assert columns["mask"].slab == "" and columns["tokens"].slab == "rollout-0-7-1.slab"


def test_a_put_is_one_aligned_extent_and_a_view_is_no_copy(tmp_path: Path) -> None:
    arena = writer(tmp_path)
    columns = arena.put({"a": np.zeros(101, dtype=np.float64), "b": np.ones(77, dtype=np.float64), "c": 1})
    (extent,) = extents_of(columns)
    assert arena.used_bytes >= extent.nbytes > 0
    assert all(column.offset % ALIGNMENT == 0 for column in columns)
    first, second = Reader(tmp_path), Reader(tmp_path)
    view = first.view(columns[0])
    arena.free(extent)
    arena.put({"a": np.full(101, 5.0)})
    assert view[0] == 5.0  # the same memory, used again
    assert second.view(columns[0])[0] == 5.0
    assert (tmp_path / columns[0].slab).stat().st_mode & 0o777 == 0o600


def test_full_arena_says_so_and_frees_make_room(tmp_path: Path) -> None:
    arena = writer(tmp_path, slab_bytes=4096, capacity_bytes=8192)
    held = [arena.put({"a": np.zeros(2048, dtype=np.uint8)}) for _ in range(4)]
    with pytest.raises(OutOfSpace, match="8192 of 8192 bytes"):
        arena.put({"a": np.zeros(2048, dtype=np.uint8)})
    arena.free(extents_of(held[0])[0])
    arena.free(extents_of(held[1])[0])
    arena.put({"a": np.zeros(4096, dtype=np.uint8)})  # needs the two merged
    with pytest.raises(Corrupt, match="no such extent"):
        arena.free(extents_of(held[1])[0])


def test_a_large_put_gets_its_own_slab(tmp_path: Path) -> None:
    arena = writer(tmp_path, slab_bytes=4096, capacity_bytes=1 << 20)
    arena.warm()
    (column,) = arena.put({"a": np.arange(10_000)})
    np.testing.assert_array_equal(Reader(tmp_path).view(column), np.arange(10_000))
    assert arena.total_bytes >= 4096 + 80_000


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([object()]), Bf16(np.zeros(3, dtype=np.float32))])  # type: ignore[arg-type]
def test_only_plain_numbers_are_arrays(tmp_path: Path, value: object) -> None:
    with pytest.raises(Refused):
        writer(tmp_path).put({"a": value})


def test_readers_refuse_what_does_not_fit(tmp_path: Path) -> None:
    (column,) = writer(tmp_path).put({"a": np.arange(1000)})
    reader = Reader(tmp_path)
    for changes in (
        {"offset": 1 << 20},
        {"offset": -64},
        {"shape": (999,)},
        {"dtype": "<i7"},
        {"dtype": "O"},
        {"dtype": "msgpack"},
        {"slab": "../rollout-0-7-1.slab"},
        {"slab": "rollout-0-9-1.slab"},
    ):
        with pytest.raises(Corrupt):
            reader.view(msgspec.structs.replace(column, **changes))
    with pytest.raises(Corrupt):
        reader.view(Column("t", "str", (1,), inline=b"\xff"))


def test_views_outlive_the_cache(tmp_path: Path) -> None:
    arena = writer(tmp_path, slab_bytes=4096, capacity_bytes=1 << 20)
    columns = [arena.put({"a": np.full(4096, i, dtype=np.uint8)})[0] for i in range(8)]
    reader = Reader(tmp_path, max_slabs=2)
    views = [reader.view(column) for column in columns]
    assert [int(view[17]) for view in views] == list(range(8))
    reader.close()
    assert [int(view[17]) for view in views] == list(range(8))


def _child(shm_dir: Path, columns: list[Column], pipe: multiprocessing.connection.Connection) -> None:
    view = Reader(shm_dir).view(columns[0])
    pipe.send((int(view.sum()), view.flags.writeable))


def test_another_process_sees_it(tmp_path: Path) -> None:
    columns = writer(tmp_path).put({"a": np.arange(5000)})
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(tmp_path, columns, there))
    child.start()
    assert here.poll(60)
    assert here.recv() == (5000 * 4999 // 2, False)
    child.join(60)
    assert child.exitcode == 0
    here.close(), there.close(), child.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 3000), st.integers(-20, -1)), max_size=60))
def test_extents_never_overlap(tmp_path_factory: pytest.TempPathFactory, steps: list[int]) -> None:
    shm_dir = tmp_path_factory.mktemp("shm")
    arena = writer(shm_dir, slab_bytes=8192, capacity_bytes=3 * 8192)
    reader = Reader(shm_dir)
    held: list[tuple[int, Column]] = []
    for i, step in enumerate(steps):
        if step < 0 and held:
            _, column = held.pop(step % len(held))
            arena.free(extents_of([column])[0])
        elif step > 0:
            try:
                (column,) = arena.put({"a": np.full(step + 200, i, dtype=np.uint8)})
            except OutOfSpace:
                continue
            held.append((i, column))
        for mark, column in held:
            assert (reader.view(column) == mark).all()
    for _, column in held:
        arena.free(extents_of([column])[0])
    assert arena.used_bytes == 0
    for name in list({column.slab for _, column in held}):
        assert (shm_dir / name).exists()
    if arena.total_bytes:
        arena.put({"a": np.zeros(8192, dtype=np.uint8)})  # everything merged again
