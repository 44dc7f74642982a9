"""From the shards of a gang's ranks to the tensors of a Hugging Face model, in buckets of bounded size.

`plan_buckets` decides which rank gives which rows of its parameters for which bucket of the published weights; the rest
moves the rows to rank 0, bucket by bucket, so that rank 0 holds little more than the flat buffer.
"""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from relax_rt.roles.models.device import copy_to_host
from relax_rt.roles.models.parallel import coordinates
from relax_rt.roles.models.shape import ModelShape
from relax_rt.roles.training.backend.channel import WeightChannel
from relax_rt.roles.training.megatron.layout import (
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

    def add(local: LocalParameter, ranks: list[int]) -> None:
        for run in local.runs:
            found.setdefault(run.name, []).append(_HeldRun(local, run, tuple(ranks)))

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
                add(local, ranks)
            elif tensor == 0:
                add(local, stages[stage])
    for (stage, expert, expert_tensor), ranks in experts.items():
        for local in held.experts(ShardPosition(stage, expert=expert, expert_tensor=expert_tensor)):
            add(local, ranks)
    for parts in found.values():
        parts.sort(key=lambda part: (part.run.row, part.local.column))
    for target in hf_tensors(shape, stacked_experts=stacked):
        have = sum(part.run.rows * part.local.columns for part in found.get(target.name, ()))
        if have != target.rows * target.columns:
            raise Refused(f"tensor {target.name}", why=f"the ranks hold {have} of its elements once, not all")
    return found


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


Shards = Sequence[Mapping[str, torch.Tensor]]
"""A rank's parameters by Megatron's name, for each of its model chunks."""


def check_shards(plan: ReshardPlan, rank: int, shards: Shards) -> None:
    """Check a rank's parameters against the plan, before the first bucket.

    Raises:
        Refused: one is missing, of another shape, or not known; it is named.
    """
    wanted, unused = plan.held(rank)
    if len(shards) != plan.division.virtual:
        raise Refused(f"rank {rank}", why=f"it has {len(shards)} model chunks, the plan {plan.division.virtual}")
    for (chunk, name), local in wanted.items():
        _parameter(rank, shards, chunk, name, local.shape, for_=local.runs[0].name if local.runs else "padding")
    for chunk, parameters in enumerate(shards):
        for name in parameters:
            if (chunk, name) not in wanted and name not in unused and not name.endswith("_extra_state"):
                raise Refused(
                    f"parameter {name} of rank {rank}",
                    why="it has no place in the Hugging Face model",
                    hint=f"the model is planned as {plan.shape.family}",
                )


def part_bytes(plan: ReshardPlan, bucket: WeightBucket, rank: int) -> int:
    """Size of a rank's part of a bucket."""
    dtype: torch.dtype = getattr(torch, plan.dtype)
    return sum(part.rows * part.columns for part in bucket.of(rank)) * dtype.itemsize


def extract_part(
    plan: ReshardPlan, bucket: WeightBucket, rank: int, shards: Shards, into: torch.Tensor | None = None
) -> torch.Tensor:
    """A rank's part of a bucket: its rows one after the other, in the published dtype, as bytes uint8 [n] in ordinary
    memory.

    Args:
        into: where to, of so many bytes; None: memory of its own.

    Raises:
        Refused: a parameter is missing or of another shape.
    """
    mine = bucket.of(rank)
    dtype: torch.dtype = getattr(torch, plan.dtype)
    found = torch.empty(part_bytes(plan, bucket, rank), dtype=torch.uint8) if into is None else into
    device = next((parameter.device for chunk in shards for parameter in chunk.values()), found.device)
    # From a GPU a bucket leaves as a whole: many small copies would cost more.
    out = (torch.empty_like(found, device=device) if device.type == "cuda" else found).view(dtype)
    at = 0
    for part in mine:
        entry = entry_of(plan, part)
        parameter = shards[part.chunk].get(part.source) if part.chunk < len(shards) else None
        if parameter is None:
            raise _missing(rank, shards, part.chunk, part.source, entry.name)
        vector = len(entry.shape) == 1
        columns = 1 if parameter.ndim == 1 else int(parameter.shape[-1])
        wrong = parameter.ndim != (1 if vector else 2) or columns != part.columns
        if wrong or parameter.shape[0] < part.source_row + part.rows:
            raise Refused(
                f"parameter {part.source} of rank {rank}, for {entry.name}",
                why=f"its shape {list(parameter.shape)} does not have rows {part.source_row} to "
                f"{part.source_row + part.rows} of {part.columns} columns",
            )
        rows = parameter.detach()[part.source_row : part.source_row + part.rows]
        size = part.rows * part.columns
        out[at : at + size].view(rows.shape).copy_(rows)
        at += size
    if out.is_cuda:
        copy_to_host(out.view(torch.uint8), found)
    return found


def place_part(plan: ReshardPlan, bucket: WeightBucket, rank: int, part: torch.Tensor, into: memoryview) -> None:
    """Put a rank's part of a bucket where it belongs in the flat buffer.

    Args:
        part: from `extract_part`.
        into: the whole buffer, of plan.layout.nbytes.

    Raises:
        Refused: the part is of another size; the tensors that it has rows of are named.
    """
    if len(into) != plan.layout.nbytes:
        raise Refused(f"a buffer of {len(into)} bytes for weights", why=f"they have {plan.layout.nbytes}")
    mine, want = bucket.of(rank), part_bytes(plan, bucket, rank)
    if part.numel() != want:
        names = ", ".join(dict.fromkeys(entry_of(plan, one).name for one in mine))
        why = f"rank {rank} gave {part.numel()} of {want} bytes for bucket {bucket.number}"
        raise Refused(f"rows of {names}", why=why)
    _place(plan, mine, part.view(getattr(torch, plan.dtype)), torch.frombuffer(into, dtype=torch.uint8))


def _place(plan: ReshardPlan, mine: list[RowSlice], values: torch.Tensor, flat: torch.Tensor) -> None:
    at = 0
    for part in mine:
        entry = entry_of(plan, part)
        size = part.rows * part.columns
        whole = flat[entry.offset : entry.offset + entry.nbytes].view(values.dtype).view(-1, plan.columns(part.tensor))
        block = whole[part.row : part.row + part.rows, part.column : part.column + part.columns]
        block.copy_(values[at : at + size].view(part.rows, part.columns))
        at += size


def _parameter(rank: int, shards: Shards, chunk: int, name: str, shape: tuple[int, ...], for_: str) -> torch.Tensor:
    found = shards[chunk].get(name)
    if found is None:
        raise _missing(rank, shards, chunk, name, for_)
    if tuple(found.shape) != shape:
        raise Refused(
            f"parameter {name} of rank {rank}, for {for_}",
            why=f"its shape is {list(found.shape)}, the plan wants {list(shape)}",
            hint="are parallel sizes, padding and model those of the gang?",
        )
    return found


def _missing(rank: int, shards: Shards, chunk: int, name: str, for_: str) -> Refused:
    have = list(shards[chunk]) if chunk < len(shards) else []
    near = difflib.get_close_matches(name, have, 1, cutoff=0.8)
    return Refused(
        f"parameter {name} of rank {rank}, for {for_}",
        why="it is missing" + (f"; there is {near[0]}" if near else ""),
    )


def publish_weights(
    plan: ReshardPlan,
    channel: WeightChannel,
    shards: Shards,
    into: memoryview | None,
    copied: Callable[[], None] = lambda: None,
) -> None:
    """The weights of all ranks, as they are until `copied` is called, into rank 0's buffer; the others give None.

    The other ranks hold their parts in the published dtype meanwhile, and keep the memory for the next time; rank 0
    puts its own into the buffer at once.

    Raises:
        Refused: a parameter is missing or of another shape. Unreachable, RelaxError: see `WeightChannel`.
    """
    aside: dict[int, torch.Tensor] = {}
    with channel.copying(copied):
        if channel.rank == 0:
            _own(plan, shards, into)
        else:
            aside = _aside(plan, channel, shards)
    _others(plan, channel, lambda bucket: aside[bucket.number], into)


def gather_weights(plan: ReshardPlan, channel: WeightChannel, shards: Shards, into: memoryview | None) -> None:
    """`publish_weights` without a copy aside: nothing may change the weights until it returns."""
    if channel.rank == 0:
        _own(plan, shards, into)
    _others(plan, channel, lambda bucket: extract_part(plan, bucket, channel.rank, shards), into)


def _own(plan: ReshardPlan, shards: Shards, into: memoryview | None) -> None:
    assert into is not None, "rank 0 has the buffer"
    for bucket in plan.buckets:
        if 0 in bucket.ranks:
            place_part(plan, bucket, 0, extract_part(plan, bucket, 0, shards), into)


def _aside(plan: ReshardPlan, channel: WeightChannel, shards: Shards) -> dict[int, torch.Tensor]:
    """This rank's parts, by number of the bucket."""
    mine = [bucket for bucket in plan.buckets if channel.rank in bucket.ranks]
    sizes = [part_bytes(plan, bucket, channel.rank) for bucket in mine]
    memory = torch.split(channel.memory(sum(sizes)), sizes)
    return {
        bucket.number: extract_part(plan, bucket, channel.rank, shards, part)
        for bucket, part in zip(mine, memory, strict=True)
    }


def _others(
    plan: ReshardPlan, channel: WeightChannel, part_of: Callable[[WeightBucket], torch.Tensor], into: memoryview | None
) -> None:
    """The parts of all ranks but the first."""
    for bucket in plan.buckets:
        what = f"bucket {bucket.number + 1} of {len(plan.buckets)}"
        if channel.rank != 0:
            if channel.rank in bucket.ranks:
                channel.send(part_of(bucket), what)
            continue
        assert into is not None
        for rank in bucket.ranks:
            if rank != 0:
                part = torch.empty(part_bytes(plan, bucket, rank), dtype=torch.uint8)
                channel.receive(part, rank, what)
                place_part(plan, bucket, rank, part, into)
