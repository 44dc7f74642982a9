"""Moves the weights of all ranks to rank 0, bucket by bucket: rank 0 holds little more than the flat buffer."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

import torch

from relax_rt.roles.models.device import on_host
from relax_rt.roles.training.backend.channel import WeightChannel
from relax_rt.roles.training.resharding.plan import ReshardPlan, RowSlice, WeightBucket, entry_of
from relax_rt.transport.rpc.errors import Refused

Shards = Sequence[Mapping[str, torch.Tensor]]
"""A rank's parameters by Megatron's name, for each of its model chunks."""


def check_shards(plan: ReshardPlan, rank: int, shards: Shards) -> None:
    """Hold a rank's parameters against the plan, before the first bucket.

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
        _fits(rank, part, parameter, vector=len(entry.shape) == 1, for_=entry.name)
        rows = parameter.detach()[part.source_row : part.source_row + part.rows]
        size = part.rows * part.columns
        out[at : at + size].view(rows.shape).copy_(rows)
        at += size
    if out.is_cuda:
        on_host(out.view(torch.uint8), found)
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


def _fits(rank: int, part: RowSlice, parameter: torch.Tensor, *, vector: bool, for_: str) -> None:
    columns = 1 if parameter.ndim == 1 else int(parameter.shape[-1])
    wrong = parameter.ndim != (1 if vector else 2) or columns != part.columns
    if wrong or parameter.shape[0] < part.source_row + part.rows:
        raise Refused(
            f"parameter {part.source} of rank {rank}, for {for_}",
            why=f"its shape {list(parameter.shape)} does not have rows {part.source_row} to "
            f"{part.source_row + part.rows} of {part.columns} columns",
        )


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
