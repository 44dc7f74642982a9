"""Values that are not tensors come back as they were, and what cannot is refused by name; no bytes run code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tensordict", reason="transport.compat needs tensordict: pip install 'relax-rt[transferqueue]'")

import torch

from relax_rt.transport.compat.transfer_queue import columns
from relax_rt.transport.compat.transfer_queue.columns import decode_object, encode_object
from relax_rt.transport.rpc.errors import Corrupt

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.binary().map(bytearray)
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(st.text() | st.integers(), max_size=4)
        | st.frozensets(st.integers(), max_size=4)
    ),
    max_leaves=20,
)


def typed(value: Any) -> Any:
    """The value with the types of all that is in it."""
    if isinstance(value, dict):
        return dict, [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    return type(value), value


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_plain_data_round_trips(value: Any) -> None:
    assert typed(decode_object(encode_object(value, "x"), "x")) == typed(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.array(2.5),
        np.zeros((0, 3), np.float16),
        np.array(["a", "bcd"]),
        np.array([None, {"a": 1}, (1, 2)], dtype=object),
        np.array(["2024-01-01"], dtype="datetime64[D]"),
    ],
)
def test_arrays_round_trip(array: np.ndarray[Any, Any]) -> None:
    back = decode_object(encode_object([array], "x"), "x")[0]
    assert back.dtype == array.dtype and back.shape == array.shape and back.tolist() == array.tolist()
    assert back.flags.writeable


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(-3), np.bool_(True)])
def test_scalars_of_numpy_keep_their_type(value: Any) -> None:
    back = decode_object(encode_object(value, "x"), "x")
    assert type(back) is type(value) and back == value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.bool, torch.complex64, torch.int64])
def test_tensors_in_objects_round_trip(dtype: torch.dtype) -> None:
    for tensor in (torch.tensor([[0, 1], [1, 0]]).to(dtype), torch.tensor(1).to(dtype), torch.empty(0, 2, dtype=dtype)):
        back = decode_object(encode_object({"t": tensor.t()}, "x"), "x")["t"]
        assert back.dtype == dtype and back.shape == tensor.t().shape
        assert back.to(torch.complex64).tolist() == tensor.t().to(torch.complex64).tolist()


class Mine:
    pass


@pytest.mark.parametrize("value", [Mine(), [Mine()], {"a": (1, Mine())}, lambda: 1, Mine, range(3), {1: object()}])
def test_what_cannot_be_put_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"field 'x' cannot be put: it holds a .*objects are not pickled"):
        encode_object(value, "field 'x'")


def test_what_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="field 'x' cannot be put"):
        encode_object(value, "field 'x'")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64) | st.tuples(st.integers(-128, 127), st.binary(max_size=32)).map(lambda x: _ext(*x)))
def test_bytes_of_others_are_a_value_or_a_typed_error(data: bytes) -> None:
    try:
        decode_object(data, "field 'x'")
    except Corrupt as error:
        assert "field 'x'" in str(error)


def _ext(code: int, content: bytes) -> bytes:
    return bytes([0xC7, len(content), code % 256]) + content


def test_a_length_beyond_the_bytes_allocates_nothing() -> None:
    hostile = columns._encode(columns._ext(columns._TENSOR, ["float32", [1 << 40, 1 << 10], b"\x00\x00\x00\x00"]))
    with pytest.raises(Corrupt):
        decode_object(hostile, "field 'x'")
    empty = columns._encode(columns._ext(columns._TENSOR, ["float32", [1 << 40, 1 << 10], b""]))
    with pytest.raises(Corrupt):
        decode_object(empty, "field 'x'")
