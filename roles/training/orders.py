"""What rank 0 tells the other ranks to do, and samples as they cross to them. Decoding builds plain values alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from relax_rt.roles.base.sample import Sample, SampleMeta

COLUMNS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "loss_mask": np.uint8,
    "behaviour_logprobs": np.float32,
    "advantages": np.float32,
    "proximal_logprobs": np.float32,
    "reference_logprobs": np.float32,
    "values": np.float32,
}
"""What forward and backward passes read of a sample."""


class SentSample(msgspec.Struct, array_like=True, frozen=True):
    """A sample's columns as bytes, by name, and its reward."""

    meta: SampleMeta
    columns: dict[str, bytes]
    reward: float | None = None


class Order(msgspec.Struct, array_like=True, frozen=True):
    """A call that every rank makes.

    Attributes:
        name: the method. samples: its batch. options: its other arguments.
        table: the keys of [algorithm], for `use`.
    """

    name: str
    samples: list[SentSample] = []
    options: dict[str, str | int | float] = {}
    table: dict[str, Any] = {}


def sent(samples: Sequence[Sample]) -> list[SentSample]:
    """Samples on their way to other ranks."""
    found = []
    for sample in samples:
        columns = {}
        for name, dtype in COLUMNS.items():
            values = getattr(sample, name)
            if values is not None:
                columns[name] = np.ascontiguousarray(values, dtype).tobytes()
        found.append(SentSample(sample.meta, columns, sample.reward))
    return found


def received(samples: Sequence[SentSample]) -> list[Sample]:
    """Samples as they were sent; what passes do not read is not with them."""
    found = []
    for sample in samples:
        columns: dict[str, Any] = {k: np.frombuffer(v, COLUMNS[k]) for k, v in sample.columns.items()}
        found.append(Sample(meta=sample.meta, versions=[], reward=sample.reward, **columns))
    return found


def give(order: Order, group: dist.ProcessGroup) -> None:
    """Rank 0's side: to all others of the group."""
    data = bytearray(msgspec.msgpack.encode(order))
    dist.broadcast(torch.tensor([len(data)]), 0, group=group)
    dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0, group=group)


def take(group: dist.ProcessGroup) -> Order:
    """The others' side: wait for the next order."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(size, 0, group=group)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, 0, group=group)
    return msgspec.msgpack.decode(data.numpy().data, type=Order)
