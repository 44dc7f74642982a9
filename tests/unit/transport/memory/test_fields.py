from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from relax_rt.transport.memory.fields import NUMBERS, check_columns, check_row, parse_fields
from relax_rt.transport.memory.values import Bf16, Raw, Shared
from relax_rt.transport.rpc.errors import Refused

BITS = {"bf16": np.uint16, "fp8_e4m3": np.uint8, "fp8_e5m2": np.uint8}


def array(dtype: str, *shape: int) -> Any:
    """Zeros of any dtype that a field may have."""
    bits = BITS.get(dtype)
    return np.zeros(shape, dtype) if bits is None else Raw(dtype, np.zeros(shape, bits))


@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_dtype_is_distinguished(dtype: str) -> None:
    fields = parse_fields({"x": f"{dtype}[*]"})
    for other in NUMBERS:
        if other == dtype:
            check_row(fields, {"x": array(other, 3)})
            check_columns(fields, {"x": array(other, 2, 3)})
            check_columns(fields, {"x": [array(other, 3), array(other, 0)]})
        else:
            with pytest.raises(Refused, match=rf"field 'x': it is declared {dtype}\[\*\], its value is {other}\[3\]"):
                check_row(fields, {"x": array(other, 3)})
            with pytest.raises(Refused, match="field 'x'"):
                check_columns(fields, {"x": array(other, 2, 3)})
            with pytest.raises(Refused, match="field 'x'"):
                check_columns(fields, {"x": [array(dtype, 3), array(other, 3)]})


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        ("float32", [()], [(1,), (0,), (1, 1)]),
        ("float32[*]", [(0,), (7,)], [(), (1, 1)]),
        ("uint8[*,*,3]", [(4, 5, 3), (0, 0, 3)], [(4, 5, 4), (5, 3), (4, 5, 3, 1)]),
        ("int64[ 2, 3 ]", [(2, 3)], [(3, 2), (6,)]),
        ("bool[]", [()], [(1,)]),
    ],
)
def test_shapes(spec: str, good: list[tuple[int, ...]], bad: list[tuple[int, ...]]) -> None:
    fields = parse_fields({"x": spec})
    dtype = fields["x"].dtype
    for shape in good:
        check_row(fields, {"x": np.zeros(shape, dtype)})
        check_columns(fields, {"x": np.zeros((4, *shape), dtype)})
    for shape in bad:
        with pytest.raises(
            Refused, match=f"field 'x': it is declared .* its value has shape {re.escape(str([*shape]))}"
        ):
            check_row(fields, {"x": np.zeros(shape, dtype)})
        with pytest.raises(Refused, match="its value has shape"):
            check_columns(fields, {"x": np.zeros((4, *shape), dtype)})


def test_names_of_the_same_dtypes() -> None:
    fields = parse_fields({"a": "bfloat16[*]", "b": "float8_e4m3fn[2]", "c": "float8_e5m2"})
    assert [field.dtype for field in fields.values()] == ["bf16", "fp8_e4m3", "fp8_e5m2"]
    check_row(fields, {"a": Bf16(np.zeros(3, np.uint16)), "b": Raw("fp8_e4m3", np.zeros(2, np.uint8))})


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    fields = parse_fields({"a": "bf16[*]", "b": "fp8_e5m2[*]", "c": "int32[*]", "d": "bool"})
    check_row(fields, {"a": torch.zeros(3, dtype=torch.bfloat16), "c": torch.zeros(3, dtype=torch.int32)})
    check_row(fields, {"b": torch.zeros(3, dtype=torch.float8_e5m2), "d": torch.tensor(True)})
    with pytest.raises(Refused, match=r"field 'c': it is declared int32\[\*\], its value is int64\[3\]"):
        check_row(fields, {"c": torch.zeros(3, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        ("int8", [-128, 0, 127], [128, -129, 1.0, True, "1"]),
        ("uint64", [0, 2**64 - 1], [-1, 2**64, 0.5]),
        ("float32", [1, 1.5, float("nan")], [True, "1.0", None]),
        ("bf16", [1.0], [False]),
        ("bool", [True, False], [0, 1, 1.0]),
        ("int32[*]", [], [1, 1.0]),
    ],
)
def test_python_numbers(spec: str, good: list[Any], bad: list[Any]) -> None:
    fields = parse_fields({"x": spec})
    for value in good:
        check_row(fields, {"x": value})
        check_columns(fields, {"x": [value, value]})
    for value in bad:
        with pytest.raises(Refused, match="field 'x'"):
            check_row(fields, {"x": value})


def test_numpy_numbers_have_a_dtype_of_their_own() -> None:
    fields = parse_fields({"x": "float32"})
    check_row(fields, {"x": np.float32(1)})
    with pytest.raises(Refused, match=r"field 'x': it is declared float32, its value is float64\[\]"):
        # It is a Python float as well.
        check_row(fields, {"x": np.float64(1)})


def test_texts_and_objects() -> None:
    fields = parse_fields({"s": "str", "b": "bytes", "o": "any"})
    check_row(fields, {"s": "text", "b": b"data", "o": {"any": ["thing", 1, np.float32(0.5)]}})
    check_row(fields, {"b": memoryview(b"data"), "o": np.zeros(3)})
    check_columns(fields, {"s": ["a", "b"], "b": (b"a", bytearray(b"b")), "o": np.zeros((2, 3))})
    for name, value in [("s", b"data"), ("b", "text"), ("s", 1), ("b", np.zeros(3, np.uint8))]:
        with pytest.raises(Refused, match=f"field '{name}': it is declared (str|bytes), not {type(value).__name__}"):
            check_row(fields, {name: value})
    with pytest.raises(Refused, match="field 's': it is declared str, its values are a stacked array"):
        check_columns(fields, {"s": np.array(["a", "b"])})


def test_shared_values_count_as_what_they_hold() -> None:
    fields = parse_fields({"image": "uint8[*,*,3]", "prompt": "str"})
    image = np.zeros((4, 4, 3), np.uint8)
    check_row(fields, {"image": Shared(image), "prompt": Shared("text")})
    check_columns(fields, {"image": Shared(image), "prompt": [Shared("text"), "other"]})
    with pytest.raises(Refused, match="field 'prompt': it is declared str, not bytes"):
        check_row(fields, {"prompt": Shared(b"text")})
    with pytest.raises(Refused, match=r"field 'image': .* its value has shape \[2, 4, 4, 3\]"):
        check_columns(fields, {"image": Shared(np.zeros((2, 4, 4, 3), np.uint8))})


def test_an_unknown_field_is_named_with_its_nearest() -> None:
    fields = parse_fields({"tokens": "int32[*]", "reward": "float32"})
    with pytest.raises(Refused, match=r"field 'token': it is not declared; did you mean 'tokens'\? .*reward, tokens"):
        check_row(fields, {"token": np.zeros(3, np.int32)})
    with pytest.raises(Refused, match=r"field 'zzz': it is not declared \(declared are reward, tokens\)"):
        check_columns(fields, {"zzz": [1.0]})


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("", "it cannot be read"),
        ("int32[", "it cannot be read"),
        ("int32[3", "it cannot be read"),
        ("int32[3]]", "it cannot be read"),
        ("int23[*]", "'int23' is not a dtype; did you mean int32"),
        ("object", "'object' is not a dtype"),
        ("int32[-1]", "'-1' is not a size"),
        ("int32[²]", "'²' is not a size"),
        ("int32[*,]", "'' is not a size"),
        ("str[3]", "str has no dimensions"),
    ],
)
def test_a_spec_that_cannot_be_read(spec: str, why: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_fields({"x": spec})
    assert caught.value.what == f"field 'x' declared '{spec}'" and why in caught.value.why
