"""The torch backend from a run's config: in one process, or a rank of a gang that shares the model."""

from __future__ import annotations

import os

import torch

from relax_rt.config.schema import RunConfig
from relax_rt.hosting.gang import Gang
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.role import model_folder
from relax_rt.roles.models.device import open_device
from relax_rt.roles.models.opening import refused_for_good
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.budget import Budget
from relax_rt.roles.training.gang import Follower, Leader
from relax_rt.roles.training.torch.checks import CANNOT_PACK, PACKS
from relax_rt.roles.training.torch.ranks import TorchRanks
from relax_rt.roles.training.torch_backend import TorchBackend
from relax_rt.transport.rpc.errors import Refused

REMEDY = "set roles.trainer.lora, or divide the model over more ranks or machines (roles.trainer.count)"


def open_torch(ctx: RoleContext, objective: Objective) -> TorchBackend | Leader | Follower:
    """Load the model, with count above 1 in the gang that the supervisor has started.

    Raises:
        BadInput: the model or the settings ask for what this backend cannot do.
    """
    assert isinstance(ctx.config, RunConfig) and isinstance(ctx.settings, TrainerSettings)
    table = ctx.settings
    device = open_device(ctx, table)
    ranks = _join(device) if table.count > 1 else None

    folder, budget = model_folder(ctx), Budget.of(ctx, table.tokens_per_micro_batch, REMEDY)
    with refused_for_good():
        backend = TorchBackend(
            folder,
            ctx.config.table(AlgorithmTable),
            dtype=table.dtype,
            threads=table.threads,
            tokens_per_micro_batch=budget,
            temperature=ctx.config.table(SamplingTable).temperature,
            on_progress=ctx.progress.advance,
            device=device,
            objective=objective,
            ranks=ranks,
            lora=table.lora,
            seed=ctx.config.run.seed,
        )
        if backend.costs is None:
            _cannot_pack(ctx, table)
    if ranks is None:
        return backend
    if ranks.rank == 0:
        return Leader(backend)

    def doing(order: str) -> None:
        ctx.progress.waiting("" if order else "orders of rank 0")

    return Follower(backend, doing, ctx.progress.waiting)


def _cannot_pack(ctx: RoleContext, table: TrainerSettings) -> None:
    if table.packing == "required":
        raise Refused("roles.trainer.packing", why=CANNOT_PACK, hint=PACKS)
    ctx.log.warning(f"sequences are padded: {CANNOT_PACK}", setting="roles.trainer.packing")


def _join(device: torch.device) -> TorchRanks:
    gang = Gang.here()
    if gang.local_world_size == gang.world_size:
        # Nobody outside this machine has to reach the ranks.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return TorchRanks(gang.store(), gang.rank, gang.world_size, device)
