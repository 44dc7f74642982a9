"""This process among the ranks that share a model."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from relax_rt.roles.models.device import CPU
from relax_rt.roles.training.channel import GATHER_S, Channel, gathered

T = TypeVar("T")

TIMEOUT_S = 1800.0
"""For one collective: after that a rank is taken for hung. Ranks wait for the next order without it."""
IDLE = timedelta(days=365)
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What ranks on such devices talk over."""


class TorchRanks:
    """The process groups of a gang over which one model is sharded. One a process.

    Args:
        store: torch's, where the ranks meet. rank, world: this one's number, and how many there are.
        device: that this rank computes on: GPUs talk over NCCL, CPUs over gloo. All ranks have one kind.
        gather_s: deadline of each message of a publication that rank 0 receives, seconds.

    Attributes:
        mesh: of all ranks. control: between their processors; waits as long as it takes.
        publication: to rank 0's processor, beside all else.
    """

    def __init__(
        self, store: Any, rank: int, world: int, device: torch.device = CPU, *, gather_s: float = GATHER_S
    ) -> None:
        self.rank, self.world = rank, world
        dist.init_process_group(
            BACKENDS[device.type],
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        self.mesh: DeviceMesh = init_device_mesh(device.type, (world,))
        self.control: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=IDLE)
        self.publication = Channel.beside_training(device, gather_s)

    @property
    def replica(self) -> int:
        """Every rank has samples of its own."""
        return self.rank

    @property
    def replicas(self) -> int:
        """How many have."""
        return self.world

    @property
    def speaks(self) -> bool:
        """Its losses are counted: no other rank computes the same ones."""
        return True

    def gather(self, value: T) -> list[T]:
        """A small plain value of each rank, by rank, on all of them."""
        return gathered(value, self.control)

    def total(self, value: float) -> float:
        """The sum over all ranks, in float64."""
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, group=self.control)
        return float(found)

    def close(self) -> None:
        """Leave all groups; the process can join others, in another store."""
        dist.destroy_process_group()
