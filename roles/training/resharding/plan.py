"""Which rank gives which rows of its parameters for which bucket of the published weights. No tensors here."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from relax_rt.roles.models.parallel import coordinates
from relax_rt.roles.models.shape import ModelShape
from relax_rt.roles.training.resharding.layout import (
    HfTensor,
    LocalParameter,
    ModelDivision,
    RankParameters,
    RowRun,
    ShardPosition,
    hf_tensors,
)
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.weights.manifest import BUCKET_BYTES, Layout, TensorEntry, layout_of

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class RowSlice(NamedTuple):
    """Rows of a rank's parameter, all its columns, and the place in a Hugging Face tensor that they are.

    Attributes:
        chunk, source, source_row: of the parameter.
        tensor: number of the tensor in the layout. row, rows, column, columns: in it, as a matrix.
    """

    rank: int
    chunk: int
    source: str
    source_row: int
    tensor: int
    row: int
    rows: int
    column: int
    columns: int


class WeightBucket(NamedTuple):
    """Bytes [start, stop) of the flat buffer, whole rows of one or more tensors, and who gives what for them. Between
    two buckets lies at most what aligns a tensor."""

    number: int
    start: int
    stop: int
    slices: tuple[RowSlice, ...]

    def of(self, rank: int) -> list[RowSlice]:
        """What a rank gives, in the order in which it is to be sent."""
        return [part for part in self.slices if part.rank == rank]

    @property
    def ranks(self) -> list[int]:
        """Who gives something."""
        return sorted({part.rank for part in self.slices})


class ReshardPlan(msgspec.Struct, frozen=True):
    """How a gang's weights become those of one Hugging Face model.

    Attributes:
        layout: of the flat buffer; entries in the order of the model's parameters.
        buckets: all its rows, in order; each is at most as large as was asked.
    """

    shape: ModelShape
    division: ModelDivision
    stacked_experts: bool
    dtype: str
    layout: Layout
    buckets: tuple[WeightBucket, ...]

    def columns(self, tensor: int) -> int:
        """Columns of the layout's tensor of this number, as a matrix."""
        size = self.layout.entries[tensor].shape
        return size[-1] if len(size) > 1 else 1

    def held(self, rank: int) -> tuple[dict[tuple[int, str], LocalParameter], frozenset[str]]:
        """What a rank must hold, by (chunk, name), and what it may hold besides."""
        sizes = self.division.sizes
        if not 0 <= rank < sizes.world:
            raise Refused(f"rank {rank}", why=f"the gang has {sizes.world} ranks")
        held = RankParameters(self.shape, self.division, stacked_experts=self.stacked_experts)
        dense, experts = coordinates(rank, sizes.dense), coordinates(rank, sizes.experts)
        parts = [*held.dense(ShardPosition(dense["pipeline"], dense["tensor"]))]
        if self.shape.experts:
            parts += held.experts(
                ShardPosition(experts["pipeline"], expert=experts["expert"], expert_tensor=experts["tensor"])
            )
        return {(part.chunk, part.name): part for part in parts}, held.unused


class _HeldRun(NamedTuple):
    """A run of a local tensor, and all ranks that hold it."""

    local: LocalParameter
    run: RowRun
    ranks: tuple[int, ...]


def plan_buckets(
    shape: ModelShape,
    division: ModelDivision,
    *,
    dtype: str,
    bucket_bytes: int = BUCKET_BYTES,
    stacked_experts: bool = False,
) -> ReshardPlan:
    """Cut a model's flat buffer into buckets of at most bucket_bytes, and say who fills them.

    Of ranks that hold the same rows another one is asked for each bucket, so that the work is shared among replicas.

    Args:
        dtype: of the published weights, as torch names it.
        stacked_experts: see `hf_tensors`.

    Raises:
        Refused: the model cannot lie on ranks in this way, or a single row is larger than a bucket.
    """
    if dtype not in ITEM_BYTES:
        raise Refused(f"weights published as {dtype}", why=f"known are {', '.join(ITEM_BYTES)}")
    item = ITEM_BYTES[dtype]
    found = list(hf_tensors(shape, stacked_experts=stacked_experts))
    layout = layout_of([(t.name, dtype, t.shape, t.rows * t.columns * item) for t in found])
    parts = _parts(shape, division, stacked_experts)
    buckets = [
        WeightBucket(number, start, stop, tuple(_slices(number, pieces, found, parts)))
        for number, (start, stop, pieces) in enumerate(_cut(found, layout, item, bucket_bytes))
    ]
    return ReshardPlan(shape, division, stacked_experts, dtype, layout, tuple(buckets))


def _parts(shape: ModelShape, division: ModelDivision, stacked: bool) -> dict[str, list[_HeldRun]]:
    """For each Hugging Face tensor the parts that it consists of, by their first row."""
    sizes = division.sizes
    held = RankParameters(shape, division, stacked_experts=stacked)
    found: dict[str, list[_HeldRun]] = {}
    dense: dict[tuple[int, int], list[int]] = {}
    experts: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(sizes.world):
        at = coordinates(rank, sizes.dense)
        dense.setdefault((at["pipeline"], at["tensor"]), []).append(rank)
        if shape.experts:
            at = coordinates(rank, sizes.experts)
            experts.setdefault((at["pipeline"], at["expert"], at["tensor"]), []).append(rank)
    stages = {
        s: [rank for (stage, _), ranks in sorted(dense.items()) if stage == s for rank in ranks] for s, _ in dense
    }
    for (stage, tensor), ranks in dense.items():
        for local in held.dense(ShardPosition(stage, tensor)):
            if not local.whole:
                _add(found, local, ranks)
            elif tensor == 0:
                _add(found, local, stages[stage])
    for (stage, expert, expert_tensor), ranks in experts.items():
        for local in held.experts(ShardPosition(stage, expert=expert, expert_tensor=expert_tensor)):
            _add(found, local, ranks)
    for parts in found.values():
        parts.sort(key=lambda part: (part.run.row, part.local.column))
    _check_whole(found, hf_tensors(shape, stacked_experts=stacked))
    return found


def _add(found: dict[str, list[_HeldRun]], local: LocalParameter, ranks: list[int]) -> None:
    for run in local.runs:
        found.setdefault(run.name, []).append(_HeldRun(local, run, tuple(ranks)))


def _check_whole(found: Mapping[str, list[_HeldRun]], wanted: Iterator[HfTensor]) -> None:
    for target in wanted:
        have = sum(part.run.rows * part.local.columns for part in found.get(target.name, ()))
        if have != target.rows * target.columns:
            raise Refused(f"tensor {target.name}", why=f"the ranks hold {have} of its elements once, not all")


_Piece = tuple[int, int, int]
"""Number of a tensor, first row, row behind the last."""


def _cut(
    found: list[HfTensor], layout: Layout, item: int, bucket_bytes: int
) -> Iterator[tuple[int, int, list[_Piece]]]:
    """Byte ranges and what lies in them: as many whole rows as go into a bucket."""
    start, pieces = 0, list[_Piece]()
    stop = 0
    for number, (target, entry) in enumerate(zip(found, layout.entries, strict=True)):
        row_bytes = target.columns * item
        if row_bytes > bucket_bytes:
            raise Refused(
                f"buckets of {bucket_bytes} bytes",
                why=f"a row of {target.name} has {row_bytes}",
                hint="make the buckets larger",
            )
        row = 0
        while row < target.rows:
            at = entry.offset + row * row_bytes
            room = (start + bucket_bytes - at) // row_bytes
            if room <= 0:
                yield start, min(at, start + bucket_bytes), pieces
                start, pieces = at, []
                continue
            rows = min(room, target.rows - row)
            pieces.append((number, row, row + rows))
            row += rows
            stop = entry.offset + row * row_bytes
    if pieces:
        yield start, stop, pieces


def _slices(
    number: int, pieces: list[_Piece], found: list[HfTensor], parts: Mapping[str, list[_HeldRun]]
) -> Iterator[RowSlice]:
    for tensor, start, stop in pieces:
        candidates = parts[found[tensor].name]
        # Runs of one tensor have at most the rows of the longest: none that ends before `start` is examined in vain.
        for part in candidates[: bisect.bisect_left(candidates, stop, key=lambda part: part.run.row)]:
            run = part.run
            first, last = max(start, run.row), min(stop, run.row + run.rows)
            if first < last:
                yield RowSlice(
                    rank=part.ranks[number % len(part.ranks)],
                    chunk=part.local.chunk,
                    source=part.local.name,
                    source_row=run.local + first - run.row,
                    tensor=tensor,
                    row=first,
                    rows=last - first,
                    column=part.local.column,
                    columns=part.local.columns,
                )


def entry_of(plan: ReshardPlan, part: RowSlice) -> TensorEntry:
    """The layout's entry that a slice belongs to."""
    return plan.layout.entries[part.tensor]
