from __future__ import annotations

import gc
import importlib.util
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from relax_rt.transport.memory.blocks import Block, BlockPlan, ColumnMeta, ColumnSource
from relax_rt.transport.memory.values import PLAIN, Bf16, Raw, encoded
from relax_rt.transport.rpc.errors import Corrupt, Refused

HEADER = "<4sHHIIQ"


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "fuzz_block", Path(__file__).parents[4] / "tools" / "soak" / "fuzz_block.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FUZZ = tool()


def written(columns: dict[str, list[Any]]) -> bytes:
    """A block of these columns, each given row by row."""
    sources = []
    for name, rows in columns.items():
        pairs = [encoded(name, value) for value in rows]
        sources.append(ColumnSource(name, pairs[0][0], [data for _, data in pairs]))
    return BlockPlan(sources).to_bytes()


def opened(data: bytes) -> Block:
    return Block(np.frombuffer(data, np.uint8))


def same(left: Any, right: Any) -> None:
    np.testing.assert_array_equal(left, right)
    assert left.shape == right.shape


class Turn(msgspec.Struct):
    role: str
    tokens: int


def test_the_layout_is_as_documented() -> None:
    tokens = [np.array([1, 2, 3], np.int32), np.array([4], np.int32)]
    data = written({"tokens": tokens, "score": [np.float32(0.5), np.float32(1.5)], "text": ["ä", ""]})
    magic, version, flags, rows, meta_nbytes, nbytes = struct.unpack_from(HEADER, data)
    assert (magic, version, flags, rows, nbytes) == (b"RLXB", 1, 0, 2, len(data))
    header = struct.calcsize(HEADER)
    ragged, fixed, text = msgspec.msgpack.decode(data[header : header + meta_nbytes])
    assert ragged[:5] == ["tokens", "<i4", 1, [], True] and ragged[6] == 16
    assert struct.unpack_from("<3q", data, ragged[7]) == (0, 3, 4)
    assert struct.unpack_from("<4i", data, ragged[5]) == (1, 2, 3, 4)
    assert fixed[:5] == ["score", "<f4", 0, [], False] and fixed[6:] == [8, 0]
    assert struct.unpack_from("<2f", data, fixed[5]) == (0.5, 1.5)
    assert text[:5] == ["text", "str", 0, [], True]
    assert struct.unpack_from("<3q", data, text[7]) == (0, 2, 2)
    assert data[text[5] : text[5] + text[6]] == "ä".encode()


def test_columns_of_large_blocks_are_aligned_and_without_padding() -> None:
    rows = [np.zeros(1 + i % 7, np.int32) for i in range(300)]
    data = written({"a": rows, "b": [b"x"] * 300, "c": [np.zeros((3, 5), np.uint8)] * 300})
    metas = msgspec.msgpack.decode(data[24 : 24 + struct.unpack_from("<I", data, 12)[0]], type=list[ColumnMeta])
    assert [meta.nbytes for meta in metas] == [4 * sum(map(len, rows)), 300, 4500]
    assert all(meta.offset % 64 == 0 and meta.table % 64 == 0 for meta in metas)
    assert len(data) < sum(meta.nbytes for meta in metas) + 2 * 301 * 8 + 7 * 64 + 300


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4)])
def test_every_dtype_round_trips(dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2, size=(3, *shape)) if dtype == "|b1" else rng.integers(0, 100, size=(3, *shape))
    stacked = bits.astype(dtype)
    for data in (
        written({"x": list(stacked)}),
        BlockPlan([ColumnSource("x", (dtype, len(shape)), stacked)]).to_bytes(),
    ):
        block = opened(data)
        assert block.dtype("x") == dtype and not block.ragged("x")
        same(block.column("x"), stacked)
        assert block.column("x").dtype == np.dtype(dtype) and not block.column("x").flags.writeable
        for row in range(3):
            same(block.value("x", row), stacked[row])
        flat, offsets = block.packed("x")
        same(flat[offsets[1] : offsets[2]], stacked[1].reshape(-1))


def test_values_of_odd_layout_are_written_as_they_read() -> None:
    base = np.arange(24, dtype=np.int64).reshape(4, 6)
    for rows in (
        [base.T, base.T + 1],
        [base[::2, ::-3], base[1::2, ::-3]],
        [base[0].astype(">i8"), base[1].astype(">i8")],
        [base.T, base[:2, :2].T],
        [base[0].astype(">i8"), base[1, :2].astype(">i8")],
        [np.array(7), np.int64(8)],
        [np.asfortranarray(base), base],
    ):
        block = opened(written({"x": rows}))
        for i, row in enumerate(rows):
            same(block.value("x", i), np.asarray(row))
    same(opened(written({"x": [base.T]})).column("x"), base.T[None])


def test_bits_strings_bytes_and_objects_round_trip() -> None:
    half = np.arange(6, dtype=np.uint16).reshape(2, 3)
    eight = np.arange(4, dtype=np.uint8)
    columns: dict[str, list[Any]] = {
        "half": [Bf16(half), Bf16(half[::-1])],
        "eight": [Raw("fp8_e4m3", eight), Raw("fp8_e4m3", eight[:2])],
        "other": [Raw("fp8_e5m2", eight[0])] * 2,
        "text": ["größer", np.str_("")],
        "raw": [bytearray(b"ab"), memoryview(np.arange(6, dtype=np.uint8).reshape(2, 3))[::2]],
        "meta": [Turn("user", 3), {"role": "tool", "tokens": 5}],
        "reward": [0.25, 1],
        "nothing": [None, None],
    }
    block = opened(written(columns))
    assert [block.dtype(name) for name in ("half", "eight", "other")] == ["bf16", "fp8_e4m3", "fp8_e5m2"]
    same(block.value("half", 1), half[::-1])
    same(block.value("eight", 1), eight[:2])
    assert block.value("other", 0) == eight[0]
    assert block.values("text") == ["größer", ""]
    assert block.values("raw") == [b"ab", bytes([0, 1, 2])]
    assert block.value("meta", 0) == {"role": "user", "tokens": 3}
    assert [block.decode("meta", i, Turn) for i in range(2)] == [Turn("user", 3), Turn("tool", 5)]
    same(block.column("reward"), np.array([0.25, 1.0]))
    assert block.values("nothing") == [None, None]


def test_a_single_row_needs_no_tables() -> None:
    block = opened(written({"text": ["hello"], "meta": [{"a": 1}], "tokens": [np.arange(3)]}))
    assert (block.value("text", 0), block.value("meta", 0)) == ("hello", {"a": 1})
    same(block.column("tokens"), np.arange(3)[None])
    assert len(written({"reward": [0.5]})) < 120


ROWS = st.integers(1, 4).flatmap(
    lambda ndim: st.lists(
        npst.arrays(
            st.sampled_from([np.dtype(code) for code in PLAIN]).filter(lambda dtype: dtype.kind in "iu"),
            npst.array_shapes(min_dims=ndim, max_dims=ndim, min_side=0, max_side=4),
        ),
        min_size=1,
        max_size=6,
    )
)


@settings(deadline=None)
@given(ROWS, st.lists(st.text(max_size=20), min_size=6, max_size=6))
def test_ragged_rows_round_trip(arrays: list[np.ndarray[Any, Any]], texts: list[str]) -> None:
    arrays = [array.astype(arrays[0].dtype) for array in arrays]
    block = opened(written({"x": arrays, "text": texts[: len(arrays)]}))
    for row, array in enumerate(arrays):
        same(block.value("x", row), array)
    assert block.values("text") == texts[: len(arrays)]
    flat, offsets = block.packed("x")
    same(flat, np.concatenate([array.reshape(-1) for array in arrays]))
    assert offsets[-1] == sum(array.size for array in arrays)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array(["a"]), "field 'x' of dtype <U1"),
        (np.array([object()]), "only plain numbers"),
        (np.zeros(2, np.longdouble), "only plain numbers"),
        (np.zeros(2, "M8[s]"), "only plain numbers"),
        (np.ma.masked_array([1, 2], [True, False]), "masked"),
        (Raw("bf16", np.zeros(3, np.float32)), "float32, not uint16"),
        (Raw("fp4", np.zeros(3, np.uint8)), "Raw holds one of bf16"),
        (Raw("bf16", [1, 2]), "its bits are list"),  # type: ignore[arg-type]
        (object(), "field 'x' of type object"),
        ({"a": np.zeros(2)}, "field 'x' of type dict"),
        (1 << 70, "field 'x' of type int"),
        ("\ud800", "surrogates"),
    ],
)
def test_what_cannot_be_put_is_refused_by_name(value: object, message: str) -> None:
    with pytest.raises(Refused, match=message):
        encoded("x", value)


def test_limits_of_a_block_are_named() -> None:
    two, three = (
        ColumnSource("a", ("<i4", 0), np.zeros(2, np.int32)),
        ColumnSource("b", ("<i4", 0), np.zeros(3, np.int32)),
    )
    with pytest.raises(Refused, match="field 'b' of 3 rows: 'a' of the same put has 2"):
        BlockPlan([two, three])
    with pytest.raises(Refused, match="no columns"):
        BlockPlan([])
    with pytest.raises(Refused, match="0 rows"):
        BlockPlan([ColumnSource("a", ("<i4", 0), np.zeros(0, np.int32))])
    with pytest.raises(Refused, match="40 dimensions: the limit is 32"):
        BlockPlan([ColumnSource("a", ("<i4", 40), np.zeros((1,) * 41, np.int32))])
    with pytest.raises(Refused, match="the limit is 4096"):
        BlockPlan([ColumnSource(str(i), ("<i4", 0), np.zeros(1, np.int32)) for i in range(4097)])
    with pytest.raises(Refused, match="description"):
        BlockPlan([ColumnSource("x" * 2**20, ("<i4", 0), np.zeros(1, np.int32))])
    with pytest.raises(Refused, match="no name"):
        ColumnSource("\ud800", ("<i4", 0), np.zeros(1, np.int32))


@given(st.lists(st.text(max_size=400), min_size=1, max_size=30, unique=True))
def test_names_of_any_length_leave_room_for_the_data(names: list[str]) -> None:
    block = opened(written({name: [np.array([i])] for i, name in enumerate(names)}))
    assert block.names == tuple(names)
    assert [int(block.value(name, 0)[0]) for name in names] == list(range(len(names)))


def test_what_a_block_does_not_have_is_refused() -> None:
    block = opened(written({"tokens": [np.arange(2), np.arange(3)], "text": ["a", "b"]}))
    with pytest.raises(Refused, match="column 'reward' of a block: it has tokens, text"):
        block.value("reward", 0)
    for row in (-1, 2):
        with pytest.raises(Refused, match="it has 2"):
            block.value("tokens", row)
    with pytest.raises(Refused, match="of different shapes"):
        block.column("tokens")
    with pytest.raises(Refused, match="its rows are str"):
        block.column("text")
    with pytest.raises(Refused, match="its rows are str"):
        block.packed("text")
    with pytest.raises(Refused, match="it is <i8"):
        block.decode("tokens", 0, int)


def broken(column: ColumnMeta, rows: int = 2, size: int = 256) -> bytes:
    meta = msgspec.msgpack.encode([column])
    return (struct.pack(HEADER, b"RLXB", 1, 0, rows, len(meta), size) + meta).ljust(size, b"\0")


GOOD = ColumnMeta("x", "<i4", 1, (2,), False, 128, 16, 0)
RAGGED = ColumnMeta("x", "<i4", 1, (), True, 192, 0, 128)


@pytest.mark.parametrize(
    ("column", "changes", "message"),
    [
        (GOOD, {"offset": 2**63}, "outside its 256 bytes"),
        (GOOD, {"offset": -64}, "outside"),
        (GOOD, {"offset": 0}, "outside"),
        (GOOD, {"offset": 248}, "outside"),
        (GOOD, {"offset": 129}, "multiple of 8"),
        (GOOD, {"nbytes": 2**63}, "are not <i4"),
        (GOOD, {"shape": (2**62, 2**62), "ndim": 2}, "are not <i4"),
        (GOOD, {"shape": (-2,), "nbytes": -16}, "not one of 1 dimensions"),
        (GOOD, {"shape": (0, 2**63), "ndim": 2, "nbytes": 0}, "not of shape|are not"),
        (GOOD, {"shape": (1,) * 33, "ndim": 33}, "limit 32"),
        (GOOD, {"ndim": 2}, "not one of 2"),
        (GOOD, {"dtype": "O"}, "unknown dtype 'O'"),
        (GOOD, {"dtype": "<i7"}, "unknown dtype"),
        (GOOD, {"dtype": "str"}, "one value for 2 rows"),
        (GOOD, {"dtype": "blob"}, "not 2 digests"),
        (RAGGED, {"nbytes": 3}, "no whole number"),
        (RAGGED, {"nbytes": 16}, "do not rise from 0 to 4"),
        (RAGGED, {"table": 2**40}, "outside"),
        (RAGGED, {"table": 240}, "outside"),
        (RAGGED, {"ndim": 0}, "of 0 dimensions"),
        (RAGGED, {"ndim": 2**60}, "dimensions"),
        (RAGGED, {"ndim": 9, "table": 152}, "outside"),
    ],
)
def test_broken_columns_are_found(column: ColumnMeta, changes: dict[str, Any], message: str) -> None:
    assert len(opened(broken(column)).values("x")) == 2
    with pytest.raises(Corrupt, match=f"column 'x' of a block.*({message})"):
        opened(broken(msgspec.structs.replace(column, **changes))).values("x")


def test_tables_that_run_back_or_lie_are_found() -> None:
    data = bytearray(written({"x": [np.zeros((2, 3)), np.zeros((1, 3))], "s": ["ab", "c"]}))
    table = msgspec.msgpack.decode(data[24 : 24 + struct.unpack_from("<I", data, 12)[0]])[0][7]
    for at, values, message in (
        (0, (0, 12, 9), "do not rise"),
        (0, (0, 2**62, 9), "do not rise"),
        (0, (1, 6, 9), "do not rise"),
        (3, (-1, -6, 1, 3), "negative"),
        (3, (2**62, 4, 1, 3), "not of shape"),
        (3, (3, 3, 1, 3), "not of shape"),
    ):
        changed = bytearray(data)
        struct.pack_into(f"<{len(values)}q", changed, table + 8 * at, *values)
        with pytest.raises(Corrupt, match=message):
            opened(bytes(changed)).values("x")
        assert opened(bytes(changed)).values("s") == ["ab", "c"]


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"RLXC"},
        {"version": 2},
        {"flags": 1},
        {"rows": 0},
        {"rows": 2**32 - 1},
        {"meta": 2**32 - 1},
        {"meta": 233},
        {"nbytes": 257},
        {"nbytes": 2**63},
        {"nbytes": 23},
    ],
)
def test_broken_headers_are_found(changes: dict[str, Any]) -> None:
    data = broken(GOOD)
    fields = dict(
        zip(("magic", "version", "flags", "rows", "meta", "nbytes"), struct.unpack_from(HEADER, data), strict=True)
    )
    with pytest.raises(Corrupt):
        opened(struct.pack(HEADER, *(fields | changes).values()) + data[24:])
    for end in (0, 1, 23, 24, 100, 255):
        with pytest.raises(Corrupt):
            opened(data[:end])


def test_bad_text_and_names_that_repeat_are_found() -> None:
    data = written({"text": ["aaaa"], "meta": [[1, 2]]})
    with pytest.raises(Corrupt, match="column 'text' of a block: 4 bytes of str do not decode"):
        opened(data.replace(b"aaaa", b"aa\xffa")).value("text", 0)
    with pytest.raises(Corrupt, match="column 'meta'"):
        opened(data.replace(b"\x92\x01\x02", b"\xdd\xff\xff")).value("meta", 0)
    with pytest.raises(Corrupt, match="column 'meta'"):
        opened(data).decode("meta", 0, str)
    with pytest.raises(Corrupt, match="2 columns with 1 names"):
        opened(data.replace(b"\xa4meta", b"\xa4text"))
    deep = written({"meta": [msgspec.Raw(b"\x91" * 50_000 + b"\xc0")]})
    with pytest.raises(Corrupt, match="recursion"):
        opened(deep).value("meta", 0)


SEEDS = st.sampled_from(FUZZ.examples())


MUTATED = st.tuples(SEEDS, st.randoms(use_true_random=False)).map(lambda seed: FUZZ.mutated(*seed))


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=400), MUTATED))
def test_broken_blocks_raise_only_corrupt(data: bytes) -> None:
    tracemalloc.start()
    try:
        FUZZ.look_at_all(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("example", range(len(FUZZ.examples())))
def test_the_fuzzer_would_see_a_whole_block(example: int) -> None:
    data = FUZZ.examples()[example]
    # A blob column without blobs is whole in itself, and cannot be read.
    assert FUZZ.look_at_all(data) == (b"shared" not in data)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


NUMBERS = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64")


@pytest.mark.parametrize("dtype", [*NUMBERS, "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_tensors_of_every_dtype_round_trip(torch: Any, dtype: str) -> None:
    rows = [torch.arange(6).reshape(2, 3).to(getattr(torch, dtype)), torch.ones(1, 3).to(getattr(torch, dtype))]
    for given_rows in (rows, [rows[0].T, rows[1].T], rows[:1] * 2, [rows[0][1, 2]], [rows[0][:0]]):
        block = opened(written({"x": given_rows}))
        for i, row in enumerate(given_rows):
            tensor = block.tensor("x", i)
            assert tensor.dtype == row.dtype and tensor.shape == row.shape
            assert (tensor.to(torch.complex64) == row.to(torch.complex64)).all()
    assert opened(written({"x": rows[:1] * 2})).tensor("x").shape == (2, 2, 3)


def test_tensors_that_cannot_be_put_are_refused(torch: Any) -> None:
    for tensor in (torch.zeros(2, device="meta"), torch.eye(2).to_sparse(), torch.ones(2).to(torch.float8_e4m3fnuz)):
        with pytest.raises(Refused, match="field 'x'"):
            encoded("x", tensor)
    (kind, data) = encoded("x", torch.ones(2, requires_grad=True))
    assert kind == ("<f4", 1) and data.tolist() == [1, 1]
    (_, data) = encoded("x", torch.tensor([1 + 2j]).conj())
    assert data.tolist() == [1 - 2j]


def test_text_is_no_tensor(torch: Any) -> None:
    block = opened(written({"text": ["a", "b"], "x": [np.arange(1), np.arange(2)]}))
    with pytest.raises(Refused, match="of str as a tensor"):
        block.tensor("text", 0)
    with pytest.raises(Refused, match="differ in shape"):
        block.tensor("x")


def test_ml_dtypes_are_known_by_name() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name, code in (("bfloat16", "bf16"), ("float8_e4m3fn", "fp8_e4m3"), ("float8_e5m2", "fp8_e5m2")):
        array = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name))
        block = opened(written({"x": [array, array.T[:2]], "one": [array[0, 1], array[1, 1]]}))
        assert block.dtype("x") == code == block.dtype("one")
        same(block.value("x", 0).view(array.dtype), array)


def test_torch_is_not_needed() -> None:
    program = "import sys, relax_rt.transport.memory.arena; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0


def test_views_of_inline_blocks_keep_their_bytes() -> None:
    view = opened(written({"x": [np.arange(5)]})).value("x", 0)
    gc.collect()
    assert view.tolist() == [0, 1, 2, 3, 4]
