"""The parts of all ranks at rank 0, bucket by bucket: it holds little more than the flat buffer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from relax_rt.roles.training.channel import Channel
from relax_rt.roles.training.resharding.assemble import Shards, assemble, contribute, part_bytes
from relax_rt.roles.training.resharding.plan import Bucket, Plan


def publish(
    plan: Plan, channel: Channel, shards: Shards, into: memoryview | None, copied: Callable[[], None] = lambda: None
) -> None:
    """The weights of all ranks, as they are until `copied` is called, into rank 0's buffer; the others give None.

    The other ranks hold their parts in the published dtype meanwhile, and keep the memory for the next time; rank 0
    puts its own into the buffer at once.

    Raises:
        Refused: a parameter is missing or of another shape. Unreachable, RelaxError: see `Channel`.
    """
    aside: dict[int, torch.Tensor] = {}
    with channel.copying(copied):
        if channel.rank == 0:
            _own(plan, shards, into)
        else:
            aside = _aside(plan, channel, shards)
    _others(plan, channel, lambda bucket: aside[bucket.number], into)


def gather(plan: Plan, channel: Channel, shards: Shards, into: memoryview | None) -> None:
    """`publish` without a copy aside: nothing may change the weights until it returns."""
    if channel.rank == 0:
        _own(plan, shards, into)
    _others(plan, channel, lambda bucket: contribute(plan, bucket, channel.rank, shards), into)


def _own(plan: Plan, shards: Shards, into: memoryview | None) -> None:
    assert into is not None, "rank 0 has the buffer"
    for bucket in plan.buckets:
        if 0 in bucket.ranks:
            assemble(plan, bucket, 0, contribute(plan, bucket, 0, shards), into)


def _aside(plan: Plan, channel: Channel, shards: Shards) -> dict[int, torch.Tensor]:
    """This rank's parts, by number of the bucket."""
    mine = [bucket for bucket in plan.buckets if channel.rank in bucket.ranks]
    sizes = [part_bytes(plan, bucket, channel.rank) for bucket in mine]
    memory = torch.split(channel.memory(sum(sizes)), sizes)
    return {
        bucket.number: contribute(plan, bucket, channel.rank, shards, part)
        for bucket, part in zip(mine, memory, strict=True)
    }


def _others(plan: Plan, channel: Channel, part_of: Callable[[Bucket], torch.Tensor], into: memoryview | None) -> None:
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
                assemble(plan, bucket, rank, part, into)
