"""Micro-batches as arrays, made when asked for: columns of several samples back to back, padded, or stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    import torch

    from relax_rt.transport.queue.batch import LeasedSample


class Packed(NamedTuple):
    """Rows of different lengths without padding: row i is values[offsets[i] : offsets[i + 1]].

    values: [total, …]. offsets: int64 [rows + 1].
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]


class MicroBatch:
    """Samples that go through the model together. Its arrays are copies: made while the lease is held, they outlive it.

    A rank with too few samples gets empty ones: it takes part in the step's collectives with arrays of no rows.

    Args:
        samples: in the order of the rows.
        lengths: tokens of each.
        like: any sample of the step, from which an empty micro-batch knows its dtypes.
    """

    def __init__(self, samples: Sequence[LeasedSample], lengths: Sequence[int], like: LeasedSample) -> None:
        self.samples, self.lengths = list(samples), list(lengths)
        self._like = like

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(self.lengths)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """int64 [samples + 1]: where each sample's tokens begin in a packed row, and where the last ends."""
        return _offsets(self.lengths)

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """`offsets` as int32, the form that variable-length attention kernels take."""
        if self.tokens > np.iinfo(np.int32).max:
            raise Refused("cu_seqlens", why=f"the micro-batch has {self.tokens} tokens, which int32 does not hold")
        return self.offsets.astype(np.int32)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sample; 0 if there is none."""
        return max(self.lengths, default=0)

    @property
    def position_ids(self) -> NDArray[np.int64]:
        """int64 [tokens]: the place of each token in its sample."""
        return np.arange(self.tokens, dtype=np.int64) - np.repeat(self.offsets[:-1], self.lengths)

    @property
    def sample_ids(self) -> NDArray[np.int64]:
        """int64 [tokens]: the row of each token."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.lengths)

    @property
    def within_bound(self) -> NDArray[np.bool_]:
        """bool [tokens]: False for tokens over the staleness bound, which are context only: their loss counts as 0."""
        mask = np.ones(self.tokens, np.bool_)
        for start, sample in zip(self.offsets[:-1].tolist(), self.samples, strict=True):
            for first, end in sample.masked:
                mask[start + first : start + end] = False
        return mask

    def values(self, name: str) -> list[Any]:
        """The column's value of each sample: views of shared memory, good while the lease is held."""
        return [sample[name] for sample in self.samples]

    def packed(self, name: str) -> Packed:
        """A column of arrays [length, …] back to back.

        Raises:
            Refused: the values are no arrays, or differ in dtype or inner shape.
        """
        rows, like = self._rows(name)
        offsets = _offsets([len(row) for row in rows])
        return Packed(np.concatenate(rows) if rows else np.empty((0, *like.shape[1:]), like.dtype), offsets)

    def padded(self, name: str, *, fill: Any = 0, length: int = 0, multiple_of: int = 1) -> NDArray[Any]:
        """A column of arrays [length, …] as one array [samples, L, …], filled up behind each row's end.

        Args:
            fill: what stands in the padding.
            length: L; 0: that of the longest row.
            multiple_of: L is rounded up to a multiple.

        Raises:
            Refused: a row is longer than `length`; or see `packed`.
        """
        rows, like = self._rows(name)
        longest = max((len(row) for row in rows), default=0)
        if length and longest > length:
            raise Refused(f"column '{name}' padded to {length}", why=f"a row has {longest} elements")
        columns = -(-(length or longest) // multiple_of) * multiple_of
        padded = np.full((len(rows), columns, *like.shape[1:]), fill, like.dtype)
        for place, row in zip(padded, rows, strict=True):
            place[: len(row)] = row
        return padded

    def stacked(self, name: str) -> NDArray[Any]:
        """A column of numbers, or of arrays of one shape, as one array [samples, …].

        Raises:
            Refused: the values are neither, or of different shapes.
        """
        values = self.values(name) or [self._like[name]]
        rows = [np.asarray(value) for value in values]
        kinds = {(row.dtype.str, row.shape) for row in rows}
        numbers = all(isinstance(value, bool | int | float) for value in values)
        if not numbers and (len(kinds) > 1 or rows[0].dtype.kind in "OUS"):
            raise Refused(f"column '{name}' stacked", why=f"its values are {_kinds(values)}", hint="see `packed`")
        return np.stack(rows)[: len(self)]

    def tensor(self, name: str) -> torch.Tensor:
        """`packed` values as a torch tensor [total, …] of the column's dtype, also one that numpy does not know."""
        import torch

        if not self.samples:
            return self._like.tensor(name)[:0].clone()
        return torch.cat([sample.tensor(name) for sample in self.samples])

    def _rows(self, name: str) -> tuple[list[NDArray[Any]], NDArray[Any]]:
        rows = self.values(name)
        like = rows[0] if rows else self._like[name]
        for row in [*rows, like]:
            if not isinstance(row, np.ndarray) or row.ndim < 1:
                raise Refused(f"column '{name}' packed", why=f"its values are {_kinds([row])}", hint="see `stacked`")
            if row.dtype != like.dtype or row.shape[1:] != like.shape[1:]:
                raise Refused(f"column '{name}' packed", why=f"its values are {_kinds([like, row])}")
        return rows, like


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _kinds(values: Sequence[Any]) -> str:
    """Dtypes and shapes, or types, of values: for an error."""
    names = [
        f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        for value in values
    ]
    return " and ".join(dict.fromkeys(names))
