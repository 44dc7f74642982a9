"""Declared columns: ``int32[*]`` is a vector of any length, ``uint8[*,*,3]`` an image, ``float32`` a number."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from relax_rt.transport.memory.values import Raw, Shared
from relax_rt.transport.rpc.errors import Refused

TEXTS = ("str", "bytes", "any")
NUMBERS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bf16", "fp8_e4m3", "fp8_e5m2"),
)
_NUMPY = tuple(name for name in NUMBERS if not name.startswith(("bf", "fp")))
_SPEC = re.compile(r"(?P<dtype>\w+)(?:\[(?P<shape>[^\]]*)\])?")
_RANGES = {
    f"{sign}int{bits}": (0, (1 << bits) - 1) if sign else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    for bits in (8, 16, 32, 64)
    for sign in ("", "u")
}
_ALIASES = {"bfloat16": "bf16", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


class Field(msgspec.Struct, frozen=True):
    """One declared column.

    Attributes:
        dtype: one of NUMBERS, or `str`, `bytes`, `any` (anything that msgspec can encode).
        shape: sizes of its dimensions, None where any size will do.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()

    def check(self, value: Any) -> None:
        """Raises:
        Refused: the value is not of this dtype and shape.
        """
        if isinstance(value, Shared):
            value = value.value
        if self.dtype == "any":
            return
        if self.dtype in TEXTS:
            wanted: tuple[type, ...] = (str,) if self.dtype == "str" else (bytes, bytearray, memoryview)
            if not isinstance(value, wanted):
                raise Refused(f"field '{self.name}'", why=f"it is declared {self.dtype}, not {type(value).__name__}")
            return
        if type(value) in (bool, int, float) and not self.shape:
            self._check_number(value)
            return
        dtype, shape = _kind(value)
        if dtype != self.dtype:
            raise Refused(f"field '{self.name}'", why=f"it is declared {self}, its value is {dtype}{list(shape)}")
        fits = len(shape) == len(self.shape)
        if not fits or any(want not in (None, have) for want, have in zip(self.shape, shape, strict=True)):
            raise Refused(f"field '{self.name}'", why=f"it is declared {self}, its value has shape {list(shape)}")

    def _check_number(self, value: bool | int | float) -> None:
        """A Python number has no dtype of its own: it has to be of the field's kind, and within its range."""
        if self.dtype == "bool" or isinstance(value, bool):
            fits = self.dtype == "bool" and isinstance(value, bool)
        elif self.dtype in _RANGES:
            low, high = _RANGES[self.dtype]
            fits = isinstance(value, int)
            if fits and not low <= value <= high:
                raise Refused(f"field '{self.name}'", why=f"{value} is not from {low} to {high}, as {self.dtype} is")
        else:
            fits = True
            limit = float(np.finfo(self.dtype).max) if self.dtype in _NUMPY else math.inf
            if math.isfinite(value) and abs(value) > limit:
                raise Refused(f"field '{self.name}'", why=f"{value} is beyond {limit:g}, the largest {self.dtype}")
        if not fits:
            raise Refused(f"field '{self.name}'", why=f"it is declared {self}, its value is the {_python(value)}")

    def fitted(self, value: Any) -> Any:
        """A Python number as the field's dtype; anything else as it is."""
        if type(value) not in (bool, int, float) or self.dtype in TEXTS or self.dtype not in _NUMPY:
            return value
        return np.dtype(self.dtype).type(value)

    def check_rows(self, values: Any) -> None:
        """The same for a whole column: an array [rows, …], a list of values, or one Shared value for all."""
        if isinstance(values, Shared) or self.dtype == "any":
            self.check(values)
            return
        if isinstance(values, list | tuple):
            for value in values:
                self.check(value)
            return
        if self.dtype in TEXTS:
            raise Refused(f"field '{self.name}'", why=f"it is declared {self.dtype}, its values are a stacked array")
        Field(self.name, self.dtype, (None, *self.shape)).check(values)

    def __str__(self) -> str:
        sizes = ",".join("*" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{sizes}]" if self.shape else self.dtype


def _kind(value: Any) -> tuple[str, tuple[int, ...]]:
    """dtype and shape of an array, tensor, scalar or wrapped bits."""
    if isinstance(value, Raw):
        return value.dtype, tuple(np.shape(value.bits))
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return type(value).__name__, tuple(np.shape(value)) if isinstance(value, list | tuple) else ()
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    return _ALIASES.get(name, name), tuple(value.shape)


def _python(value: bool | int | float) -> str:
    return f"{type(value).__name__} {value}"


def parse_fields(specs: Mapping[str, str]) -> dict[str, Field]:
    """Fields by name.

    Raises:
        Refused: a spec cannot be read.
    """
    return {name: _parse(name, spec) for name, spec in specs.items()}


def _parse(name: str, spec: str) -> Field:
    what = f"field '{name}' declared '{spec}'"
    match = _SPEC.fullmatch(spec.replace(" ", ""))
    if match is None:
        raise Refused(what, why="it cannot be read", hint="write dtype[sizes], as int32[*], uint8[*,*,3], float32, str")
    dtype = _ALIASES.get(match["dtype"], match["dtype"])
    if dtype not in NUMBERS + TEXTS:
        near = difflib.get_close_matches(dtype, NUMBERS + TEXTS, 1)
        raise Refused(
            what,
            why=f"'{dtype}' is not a dtype" + (f"; did you mean {near[0]}?" if near else ""),
            hint=f"dtypes are {', '.join(NUMBERS + TEXTS)}",
        )
    sizes = match["shape"]
    if dtype in TEXTS and sizes is not None:
        raise Refused(what, why=f"{dtype} has no dimensions")
    shape: list[int | None] = []
    for size in sizes.split(",") if sizes else []:
        if size != "*" and not size.isdecimal():
            raise Refused(what, why=f"'{size}' is not a size", hint="a number, or * for any")
        shape.append(None if size == "*" else int(size))
    return Field(name, dtype, tuple(shape))


def check_row(fields: Mapping[str, Field], row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with Python's numbers as what their fields are declared.

    Raises:
        Refused: a value is not of a declared field, or not of its dtype or shape.
    """
    fitted: dict[str, Any] = {}
    for name, value in row.items():
        field = _known(fields, name)
        field.check(value)
        fitted[name] = field.fitted(value)
    return fitted


def check_columns(fields: Mapping[str, Field], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The same for whole columns."""
    fitted: dict[str, Any] = {}
    for name, values in columns.items():
        field = _known(fields, name)
        field.check_rows(values)
        fitted[name] = [field.fitted(value) for value in values] if isinstance(values, list | tuple) else values
    return fitted


def _known(fields: Mapping[str, Field], name: str) -> Field:
    field = fields.get(name)
    if field is None:
        near = difflib.get_close_matches(name, fields, 1)
        raise Refused(
            f"field '{name}'",
            why="it is not declared" + (f"; did you mean '{near[0]}'?" if near else ""),
            hint=f"declared are {', '.join(sorted(fields))}",
        )
    return field


Sizes = dict[str, int]
"""Bytes of a sample's values, by field."""


def row_sizes(rows: Iterable[Mapping[str, Any]]) -> Iterator[Sizes]:
    """Sizes of samples; objects that are still to be encoded count as nothing."""
    for row in rows:
        yield {name: _nbytes(value) for name, value in row.items()}


def column_sizes(columns: Mapping[str, Any], rows: int) -> Iterator[Sizes]:
    """The same for samples that are put column by column."""
    for row in range(rows):
        yield {
            name: _nbytes(values[row]) if isinstance(values, list | tuple) else _nbytes(values) // rows
            for name, values in columns.items()
        }


def check_sizes(samples: Iterable[Sizes], limit: int) -> None:
    """Raises:
    Refused: a sample has more bytes than the limit; its largest field is named.
    """
    for sizes in samples:
        total = sum(sizes.values())
        if total > limit:
            name = max(sizes, key=sizes.__getitem__)
            raise Refused(
                f"field '{name}' of {sizes[name]} bytes",
                why=f"its sample has {total} bytes in all, max_sample_bytes is {limit}",
            )


def _nbytes(value: Any) -> int:
    if isinstance(value, Shared):
        value = value.value
    if isinstance(value, Raw):
        value = value.bits
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    return int(getattr(value, "nbytes", 0))
