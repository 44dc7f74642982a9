"""Values as columns of a block, and what was read back as a TensorDict.

Tensors are copied as they are; everything else is msgpack, with extensions for what it does not know. Never pickle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from relax_rt.transport.compat.store.client import FieldRun, RowReading
from relax_rt.transport.compat.transfer_queue.errors import NotOffered, ParserFailed
from relax_rt.transport.memory.values import BLOB, TEXT
from relax_rt.transport.rpc.errors import Corrupt

_TUPLE, _SET, _FROZENSET, _ITEMS, _INT, _ARRAY, _SCALAR, _TENSOR, _BYTEARRAY, _COMPLEX = range(1, 11)
_PLAIN_TYPES = frozenset((type(None), bool, float, str, bytes))
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

_encode = msgspec.msgpack.Encoder().encode


def encode_object(value: Any, what: str) -> bytes:
    """The value as bytes.

    Args:
        what: names it in errors.

    Raises:
        TypeError: it holds something that is neither plain data, nor an array, nor a tensor.
    """
    try:
        return _encode(_packable(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(
            f"{what} cannot be put: {error} (plain data, numpy arrays and torch tensors can; objects are not pickled)"
        ) from error


def decode_object(data: bytes | memoryview, what: str) -> Any:
    """The value that was encoded; arrays and tensors are its own copies.

    Raises:
        Corrupt: these bytes are not one.
    """
    try:
        return msgspec.msgpack.decode(data, ext_hook=_extension)
    except (msgspec.MsgspecError, TypeError, ValueError, KeyError, OverflowError, RuntimeError) as error:
        raise Corrupt(what, why=f"{len(data)} bytes do not decode: {error}") from error


def _packable(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else _ext(_INT, str(value))
    if kind is list:
        return [_packable(item) for item in value]
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: _packable(item) for key, item in value.items()}
        return _ext(_ITEMS, [[_packable(key), _packable(item)] for key, item in value.items()])
    known = _PACK.get(kind)
    if known is not None:
        return _ext(known[0], known[1](value))
    if isinstance(value, torch.Tensor):
        return _ext(_TENSOR, _tensor(value))
    if isinstance(value, np.generic):
        return str(value) if isinstance(value, np.str_) else _ext(_SCALAR, _array(np.asarray(value)))
    raise TypeError(f"it holds a {kind.__module__}.{kind.__qualname__}")


def _ext(code: int, content: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _encode(content))


def _items(value: Any) -> list[Any]:
    return [_packable(item) for item in value]


def _array(array: np.ndarray[Any, Any]) -> list[Any]:
    if array.dtype.hasobject:
        return ["O", list(array.shape), _items(array.ravel().tolist())]
    if array.dtype.fields is not None:
        raise TypeError("it holds a structured array")
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _tensor(tensor: torch.Tensor) -> list[Any]:
    if tensor.is_nested:
        raise TypeError("it holds a nested tensor")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data]


_PACK: dict[type, tuple[int, Callable[[Any], Any]]] = {
    tuple: (_TUPLE, _items),
    set: (_SET, _items),
    frozenset: (_FROZENSET, _items),
    bytearray: (_BYTEARRAY, bytes),
    complex: (_COMPLEX, lambda value: [value.real, value.imag]),
    np.ndarray: (_ARRAY, _array),
}


def _array_from(content: Any) -> np.ndarray[Any, Any]:
    dtype, shape, data = content
    if dtype == "O":
        array = np.empty(len(data), object)
        array[:] = data
        return array.reshape(shape)
    if np.dtype(dtype).hasobject:
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()


def _tensor_from(content: Any) -> torch.Tensor:
    name, shape, data = content
    dtype = _DTYPES[name]
    if not data:
        if math.prod(shape):
            raise ValueError(f"no bytes for a tensor of shape {shape}")
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


_UNPACK: dict[int, Callable[[Any], Any]] = {
    _TUPLE: tuple,
    _SET: set,
    _FROZENSET: frozenset,
    _ITEMS: dict,
    _INT: int,
    _ARRAY: _array_from,
    _SCALAR: lambda content: _array_from(content)[()],
    _TENSOR: _tensor_from,
    _BYTEARRAY: bytearray,
    _COMPLEX: lambda parts: complex(*parts),
}


def _extension(code: int, data: memoryview) -> Any:
    return _UNPACK[code](msgspec.msgpack.decode(data, ext_hook=_extension))


def row_of(fields: dict[str, Any]) -> TensorDict:
    """One sample given as a dict: tensors get a batch dimension, everything else is kept as it is.

    Raises:
        ValueError: a nested tensor, which is a batch.
    """
    batch: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                raise ValueError(f"field {name!r} is a nested tensor, which holds several samples: use kv_batch_put")
            batch[name] = value.unsqueeze(0)
        else:
            batch[name] = NonTensorStack(value)
    return TensorDict(batch, batch_size=[1])


def columns_of(fields: TensorDict) -> dict[str, Any]:
    """What goes into a block: dense tensors, lists of a tensor for each sample, lists of encoded objects.

    Raises:
        ValueError: a field has another number of samples than the batch.
        TypeError: an object that cannot be put.
        NotOffered: a TensorDict in the TensorDict.
    """
    rows = fields.batch_size[0]
    columns: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            columns[name] = [_dense(row) for row in value.unbind()] if value.is_nested else _dense(value)
        else:
            items = enumerate(_object_values(name, value, rows))
            columns[name] = [encode_object(item, f"field {name!r} of sample {i}") for i, item in items]
    for name, column in columns.items():
        if len(column) != rows:
            raise ValueError(f"field {name!r} has {len(column)} samples, the batch has {rows}")
    return columns


def parsed(fields: TensorDict, parser: Callable[[Any], Any]) -> dict[str, Any]:
    """The columns that a user's function makes of a batch, which it is given as tensors and lists by field.

    Raises:
        ParserFailed: it did not answer with a dict of the same fields, each with a value for each sample.
    """
    rows = fields.batch_size[0]
    given = {
        name: (list(value.unbind()) if value.is_nested else value)
        if isinstance(value, torch.Tensor)
        else _object_values(name, value, rows)
        for name, value in fields.items()
    }
    names = set(given)
    made = parser(given)
    if not isinstance(made, dict) or set(made) != names:
        what = sorted(made) if isinstance(made, dict) else type(made).__name__
        raise ParserFailed("data_parser", why=f"it made {what} of a dict with {sorted(names)}")
    columns: dict[str, Any] = {}
    for name, column in made.items():
        if len(column) != rows:
            raise ParserFailed(f"data_parser, field {name!r}", why=f"it made {len(column)} samples of {rows}")
        if isinstance(column, torch.Tensor):
            columns[name] = _dense(column)
        elif all(isinstance(item, torch.Tensor) for item in column):
            columns[name] = [_dense(item) for item in column]
        else:
            columns[name] = [encode_object(item, f"field {name!r} of sample {i}") for i, item in enumerate(column)]
    return columns


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        tensor = tensor.cpu() if tensor.layout == torch.strided else tensor.to_dense().cpu()
    return tensor


def _object_values(name: str, value: Any, rows: int) -> Sequence[Any]:
    if isinstance(value, NonTensorStack):
        return list(value.tolist())
    if isinstance(value, NonTensorData):
        data = value.data
        # Arrays of strings and of objects are kept whole; they hold one entry for each sample.
        return list(data) if isinstance(data, np.ndarray) and data.shape[:1] == (rows,) else [data] * rows
    raise NotOffered(
        f"field {name!r} of type {type(value).__name__}",
        why="a TensorDict in a TensorDict is not offered",
        hint="put its fields as fields of their own",
    )


def batch_of(reading: RowReading) -> TensorDict:
    """The rows that were read. Tensors are the caller's own: nobody else sees what is changed in them.

    Like every other number of rows in one batch, tensors of one and more dimensions come as jagged nested tensors,
    scalars as a dense one, and everything else as a NonTensorStack.
    """
    data = {name: _field(name, list(reading.pieces(name))) for name in reading.fields}
    return TensorDict(data, batch_size=reading.rows)


def _field(name: str, pieces: list[FieldRun]) -> torch.Tensor | NonTensorStack:
    if all(piece.block.dtype(name) not in (*TEXT, BLOB) for piece in pieces):
        parts = [_Part(name, piece) for piece in pieces]
        if all(part.joins(parts[0]) for part in parts):
            return _joined(parts)
        values: list[Any] = [row for part in parts for row in part.each()]
    else:
        values = [_value(name, piece, row) for piece in pieces for row in range(piece.first, piece.first + piece.rows)]
    if all(isinstance(value, torch.Tensor) for value in values):
        try:
            if all(value.dim() == 0 for value in values):
                return torch.stack(values)
            return torch.nested.as_nested_tensor(values, layout=torch.jagged)
        except (RuntimeError, TypeError):
            # Samples that no tensor holds together: of different dtypes or numbers of dimensions.
            pass
    return NonTensorStack(*values)


def _value(name: str, piece: FieldRun, row: int) -> Any:
    if piece.block.dtype(name) in TEXT:
        return decode_object(piece.block.value(name, row), f"field {name!r}")
    if piece.block.dtype(name) != BLOB:
        return piece.block.tensor(name, row).clone()
    value = piece.block.value(name, row)
    if isinstance(value, bytes | memoryview):
        return decode_object(value, f"field {name!r}")
    return piece.block.tensor(name, row).clone()


class _Part:
    """Rows of tensors that lie back to back.

    Attributes:
        flat: their elements.
        lengths: first dimension of each row; one number if all are alike; None for scalars.
        inner: the other dimensions; None if rows differ in them.
    """

    def __init__(self, name: str, piece: FieldRun) -> None:
        block, first, end = piece.block, piece.first, piece.first + piece.rows
        self._name, self._piece = name, piece
        self.own, self.rows = piece.own, piece.rows
        self.lengths: Sequence[int] | int | None
        self.inner: tuple[int, ...] | None
        if not block.ragged(name):
            column = block.tensor(name)[first:end]
            self.flat, shape = column.reshape(-1), column.shape[1:]
            self.lengths, self.inner = (shape[0], tuple(shape[1:])) if shape else (None, ())
            return
        flat, offsets = block.flat(name)
        self.flat = flat[offsets[first] : offsets[end]]
        shapes = [block.value(name, row).shape for row in range(first, end)]
        self.lengths = [shape[0] for shape in shapes]
        self.inner = shapes[0][1:] if all(shape[1:] == shapes[0][1:] for shape in shapes) else None

    def joins(self, other: _Part) -> bool:
        """Whether one tensor can hold the rows of both."""
        alike = self.inner is not None and self.inner == other.inner and self.flat.dtype == other.flat.dtype
        return alike and (self.lengths is None) == (other.lengths is None)

    def each(self) -> list[torch.Tensor]:
        """The rows, each a tensor of its own."""
        block, first = self._piece.block, self._piece.first
        return [block.tensor(self._name, row).clone() for row in range(first, first + self.rows)]


def _joined(parts: list[_Part]) -> torch.Tensor:
    first = parts[0]
    if len(parts) == 1:
        flat = first.flat if first.own else first.flat.clone()
    else:
        flat = torch.cat([part.flat for part in parts])
    if first.lengths is None:
        return flat
    if len(parts) == 1 and isinstance(first.lengths, int):
        length = first.lengths
        offsets = torch.arange(first.rows + 1) * length
        total, shortest, longest = first.rows * length, length, length
    else:
        lengths: list[int] = []
        for part in parts:
            lengths += [part.lengths] * part.rows if isinstance(part.lengths, int) else part.lengths or []
        offsets = torch.tensor(list(itertools.accumulate(lengths, initial=0)))
        total, shortest, longest = sum(lengths), min(lengths), max(lengths)
    assert first.inner is not None
    return torch.nested.nested_tensor_from_jagged(
        flat.view(total, *first.inner), offsets=offsets, min_seqlen=shortest, max_seqlen=longest
    )
