"""The ranks that share a model, and what each rank holds of its tensors: all of each in one process, else rows of each.

FSDP2 (Zhao et al. 2023, arXiv 2304.11277; torch's `fully_shard`) cuts every parameter along its first dimension, as
`torch.chunk` does: the first ranks have equally many rows, the last ones fewer or none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from relax_rt.roles.data.media.vision_tower import VisionTower
from relax_rt.roles.models.device import CPU, copy_to_host
from relax_rt.roles.training.backend.channel import COLLECTIVE_S, GATHER_S, GangRanks, WeightChannel
from relax_rt.roles.training.batch.collate import MicroBatch, token_logprobs
from relax_rt.roles.training.checkpoints.optimizer_state import TensorBlock
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.weights.manifest import BUCKET_BYTES

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What ranks on such devices talk over."""


class TorchRanks(GangRanks):
    """The process groups of a gang over which one model is sharded. One a process.

    Args:
        store: torch's, where the ranks meet. rank, world: this one's number, and how many there are.
        device: that this rank computes on: GPUs talk over NCCL, CPUs over gloo. All ranks have one kind.
        gather_s: deadline of each message of a publication that rank 0 receives, seconds.

    Attributes:
        mesh: of all ranks.
    """

    def __init__(
        self, store: Any, rank: int, world: int, device: torch.device = CPU, *, gather_s: float = GATHER_S
    ) -> None:
        self.world = world
        dist.init_process_group(
            BACKENDS[device.type],
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
        self.mesh: DeviceMesh = init_device_mesh(device.type, (world,))
        super().__init__(rank, device, gather_s)
        # Every rank has samples of its own, and no other one computes its losses.
        self.replica, self.replicas, self.reports_loss = rank, world, True

    def total(self, value: float) -> float:
        """The sum over all ranks, in float64."""
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, group=self.control)
        return float(found)


class LogprobModule(torch.nn.Module):
    """A model whose forward pass is all that the backend asks of it: sharded parameters are whole only within it."""

    def __init__(self, model: Any, vision_tower: VisionTower | None = None) -> None:
        super().__init__()
        self.model, self._vision_tower = model, vision_tower

    def forward(
        self, batch: MicroBatch, temperature: float, autocast: bool, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `token_logprobs` of the model."""
        found, entropies = token_logprobs(
            self.model,
            batch,
            temperature=temperature,
            autocast=autocast,
            entropy=entropy,
            vision_tower=self._vision_tower,
        )
        # FSDP2 hangs its hook on what is returned, and warns of views.
        return found.clone(), entropies


def shard_model(scored: LogprobModule, ranks: TorchRanks) -> None:
    """Cut the model over the ranks: each layer is gathered when it is computed, forward and backward, and freed
    after it. Gradients are added up over the ranks, divided by nothing.

    Raises:
        Refused: the model has no list of layers.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in (*layers_of(scored.model), scored):
        fully_shard(module, mesh=ranks.mesh)
    for module in scored.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo only adds.
            module.set_force_sum_reduction_for_comms(True)
            # An expert that no token of this rank chose has no gradient here, and may have one elsewhere.
            module.set_reduce_scatter_unused_params(True, recurse=False)


def layers_of(model: Any) -> Sequence[torch.nn.Module]:
    """The decoder layers of a transformers model."""
    count = int(model.config.get_text_config().num_hidden_layers)
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise Refused(f"the model {type(model).__name__}", why=f"it has no list of {count} layers to cut it by")


@dataclass(frozen=True)
class TensorShard:
    """Rows [row, row + rows) of a tensor.

    Attributes:
        name: of the tensor. shape: of all of it.
        parameter: as the model has it. values: float32 [rows, ...], of this rank; shares the parameter's memory.
    """

    name: str
    shape: tuple[int, ...]
    parameter: torch.nn.Parameter
    values: torch.nn.Parameter
    row: int
    rows: int

    @property
    def block(self) -> TensorBlock:
        """Where it lies in the tensor as a matrix."""
        return TensorBlock(self.name, self.row, self.rows, 0, math.prod(self.shape[1:]))

    @property
    def matrix(self) -> torch.Tensor:
        """Its values as the block, [rows, columns]."""
        return self.values.detach().view(self.block.rows, self.block.columns)

    def gradient(self) -> torch.Tensor | None:
        """Return the gradient of this rank's rows."""
        if self.values is self.parameter:
            return self.parameter.grad
        sharded: Any = self.parameter.grad
        with torch.no_grad():
            return None if sharded is None else cast(torch.Tensor, sharded.to_local())


def shard_rows(rows: int, rank: int, world: int) -> tuple[int, int]:
    """The first of a rank's rows, and how many it has."""
    each = -(-rows // world)
    first = min(rank * each, rows)
    return first, min(each, rows - first)


def shard_of(name: str, parameter: torch.nn.Parameter, ranks: TorchRanks | None) -> TensorShard:
    """What this rank holds of a parameter.

    Raises:
        Refused: it is cut in another way than along its first dimension in equal parts.
    """
    shape = tuple(parameter.shape)
    if ranks is None:
        return TensorShard(name, shape, parameter, parameter, 0, shape[0] if shape else 1)
    sharded: Any = parameter
    with torch.no_grad():
        local = torch.nn.Parameter(sharded.to_local(), requires_grad=parameter.requires_grad)
    row, rows = shard_rows(shape[0], ranks.rank, ranks.world)
    if local.shape[0] != rows:
        raise Refused(f"parameter {name}", why=f"rank {ranks.rank} holds {local.shape[0]} of its rows, not {rows}")
    return TensorShard(name, shape, parameter, local, row, rows)


def send_to_rank_0(
    piece: TensorShard, mine: torch.Tensor, into: torch.Tensor | None, row_bytes: int, channel: WeightChannel
) -> None:
    """The rows of a tensor that all ranks but the first have, into its memory, in messages of bounded size and without
    a further copy there.

    Args:
        mine: this rank's rows, uint8 [bytes], on any device. into: uint8 [bytes of the whole], on rank 0, on the CPU.
    """
    for rank in range(1, channel.world):
        first, rows = shard_rows(piece.shape[0], rank, channel.world)
        for at, end in _messages(rows * row_bytes):
            if channel.rank == 0:
                assert into is not None
                channel.receive(into[first * row_bytes + at : first * row_bytes + end], rank, piece.name)
            elif channel.rank == rank:
                message = mine[at:end]
                channel.send(message if message.is_cpu else copy_to_host(message), piece.name)


def _messages(nbytes: int) -> Iterator[tuple[int, int]]:
    for at in range(0, nbytes, BUCKET_BYTES):
        yield at, min(at + BUCKET_BYTES, nbytes)
