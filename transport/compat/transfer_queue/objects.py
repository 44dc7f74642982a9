"""Values that are not tensors, as bytes and back: msgpack, with extensions for what it does not know. Never pickle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from relax_rt.transport.rpc.errors import Corrupt

_TUPLE, _SET, _FROZENSET, _ITEMS, _INT, _ARRAY, _SCALAR, _TENSOR, _BYTEARRAY, _COMPLEX = range(1, 11)
_AS_THEY_ARE = frozenset((type(None), bool, float, str, bytes))
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

_encode = msgspec.msgpack.Encoder().encode


def encode(value: Any, what: str) -> bytes:
    """The value as bytes.

    Args:
        what: names it in errors.

    Raises:
        TypeError: it holds something that is neither plain data, nor an array, nor a tensor.
    """
    try:
        return _encode(_plain(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(
            f"{what} cannot be put: {error} (plain data, numpy arrays and torch tensors can; objects are not pickled)"
        ) from error


def decode(data: bytes | memoryview, what: str) -> Any:
    """The value that was encoded; arrays and tensors are its own copies.

    Raises:
        Corrupt: these bytes are not one.
    """
    try:
        return msgspec.msgpack.decode(data, ext_hook=_extension)
    except (msgspec.MsgspecError, TypeError, ValueError, KeyError, OverflowError, RuntimeError) as error:
        raise Corrupt(what, why=f"{len(data)} bytes do not decode: {error}") from error


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else _ext(_INT, str(value))
    if kind is list:
        return [_plain(item) for item in value]
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return _ext(_ITEMS, [[_plain(key), _plain(item)] for key, item in value.items()])
    known = _KINDS.get(kind)
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
    return [_plain(item) for item in value]


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


_KINDS: dict[type, tuple[int, Callable[[Any], Any]]] = {
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


_BUILD: dict[int, Callable[[Any], Any]] = {
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
    return _BUILD[code](msgspec.msgpack.decode(data, ext_hook=_extension))
