"""TensorDicts to columns of a block, and what was read back to a TensorDict."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from relax_rt.transport.compat.store.client import FieldRun, RowReading
from relax_rt.transport.compat.transfer_queue import objects
from relax_rt.transport.compat.transfer_queue.errors import NotOffered, ParserFailed
from relax_rt.transport.memory.values import BLOB, TEXT


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
            items = enumerate(_objects(name, value, rows))
            columns[name] = [objects.encode(item, f"field {name!r} of sample {i}") for i, item in items]
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
        else _objects(name, value, rows)
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
            columns[name] = [objects.encode(item, f"field {name!r} of sample {i}") for i, item in enumerate(column)]
    return columns


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        tensor = tensor.cpu() if tensor.layout == torch.strided else tensor.to_dense().cpu()
    return tensor


def _objects(name: str, value: Any, rows: int) -> Sequence[Any]:
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
        return objects.decode(piece.block.value(name, row), f"field {name!r}")
    if piece.block.dtype(name) != BLOB:
        return piece.block.tensor(name, row).clone()
    value = piece.block.value(name, row)
    if isinstance(value, bytes | memoryview):
        return objects.decode(value, f"field {name!r}")
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
