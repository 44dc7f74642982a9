"""Opens the trainer's backend from a run's config: torch or Megatron-Core, one process or a rank of a gang."""

from __future__ import annotations

import asyncio
import os

from relax_rt.cluster.nodes.api import HEAD
from relax_rt.cluster.nodes.links import Links
from relax_rt.config.schema import RunConfig
from relax_rt.hosting.gang import Gang
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import model_folder
from relax_rt.roles.models.device import open_device
from relax_rt.roles.models.resolve import refused_as_bad_input
from relax_rt.roles.rollout.engines.settings import EngineSettings, SamplingTable
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.backend.gang import Follower, Leader, RankBackend
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.backend.shares import LeaseReader
from relax_rt.roles.training.batch.budget import TokenBudget
from relax_rt.roles.training.checks import CANNOT_PACK, PACKS
from relax_rt.roles.training.megatron.backend import MegatronBackend
from relax_rt.roles.training.megatron.model import LayerChoice, choose_layers, sizes_of
from relax_rt.roles.training.megatron.ranks import MegatronRanks
from relax_rt.roles.training.torch.backend import TorchBackend
from relax_rt.roles.training.torch.sharding import TorchRanks
from relax_rt.transport.rpc.errors import Refused

TORCH_REMEDY = "set roles.trainer.lora, or divide the model over more ranks or machines (roles.trainer.count)"


def open_torch(
    ctx: RoleContext, objective: Objective, loop: asyncio.AbstractEventLoop
) -> TorchBackend | Leader | Follower:
    """Load the model, with count above 1 in the gang that the supervisor has started.

    Args:
        loop: of the role; this is called in a thread.

    Raises:
        BadInput: the model or the settings ask for what this backend cannot do.
    """
    assert isinstance(ctx.config, RunConfig) and isinstance(ctx.settings, TrainerSettings)
    table = ctx.settings
    device = open_device(ctx, table)
    gang = _join() if table.count > 1 else None
    ranks = TorchRanks(gang.store(), gang.rank, gang.world_size, device) if gang is not None else None
    folder, budget = model_folder(ctx), TokenBudget.of(ctx, table.tokens_per_micro_batch, TORCH_REMEDY)
    with refused_as_bad_input():
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
    return backend if gang is None else _member(ctx, gang, backend, loop)


def _cannot_pack(ctx: RoleContext, table: TrainerSettings) -> None:
    if table.packing == "required":
        raise Refused("roles.trainer.packing", why=CANNOT_PACK, hint=PACKS)
    ctx.log.warning(f"sequences are padded: {CANNOT_PACK}", setting="roles.trainer.packing")


def _join() -> Gang:
    gang = Gang.here()
    if gang.local_world_size == gang.world_size:
        # Nobody outside this machine has to reach the ranks.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return gang


def _member(ctx: RoleContext, gang: Gang, backend: RankBackend, loop: asyncio.AbstractEventLoop) -> Leader | Follower:
    """Make this rank the gang's leader or a follower; in a gang over several nodes each rank reads its own samples."""
    reader: LeaseReader | None = None
    if gang.local_world_size != gang.world_size:
        links = Links.from_environment()

        async def ask(owners: list[str]) -> dict[str, str]:
            return await (await ctx.queue()).payload_servers(owners)

        def locate(owners: list[str]) -> dict[str, str]:
            return asyncio.run_coroutine_threadsafe(ask(owners), loop).result()

        node = links.node if links is not None else HEAD
        reader = LeaseReader(node, locate, ctx.payload_dir, ctx.spill_dir, ctx.fetcher)
    if gang.rank == 0:
        return Leader(backend, reader)

    def doing(command: str) -> None:
        ctx.progress.waiting("" if command else "commands of rank 0")

    return Follower(backend, doing, ctx.progress.waiting, reader)


MEGATRON_REMEDY = (
    "cut the model over more ranks (roles.trainer.tensor_parallel, pipeline_parallel), or compute more of it again "
    '(roles.trainer.recompute = "full")'
)
LOCAL_COSTS = (
    "attention goes through a pack sequence by sequence, experts are computed one after another, rotary embeddings and "
    "activations are not fused"
)
LOCAL_REMEDY = 'install transformer-engine; roles.trainer.layers = "local" says that these are wanted'


def open_megatron(ctx: RoleContext, objective: Objective, loop: asyncio.AbstractEventLoop) -> Leader | Follower:
    """Join the gang that the supervisor has started, and load this rank's part of the model.

    Args:
        loop: of the role; this is called in a thread.

    Raises:
        BadInput: the model or the settings ask for what this backend cannot do.
    """
    assert isinstance(ctx.config, RunConfig) and isinstance(ctx.settings, TrainerSettings)
    gang = _join()
    ranks = MegatronRanks(
        sizes_of(ctx.settings), gang.store(), gang.rank, local_rank=gang.local_rank, seed=ctx.config.run.seed
    )
    folder, budget = model_folder(ctx), TokenBudget.of(ctx, ctx.settings.tokens_per_micro_batch, MEGATRON_REMEDY)
    with refused_as_bad_input():
        choice = choose_layers(ctx.settings.layers)
        if gang.local_rank == 0:
            tell_layers(ctx, choice)
        backend = MegatronBackend(
            folder,
            ctx.config.table(AlgorithmTable),
            ctx.settings,
            ranks,
            temperature=ctx.config.table(SamplingTable).temperature,
            objective=objective,
            stacked_experts=not serves_single_experts(ctx.config),
            layers=choice.layers,
            on_progress=ctx.progress.advance,
            budget=budget,
        )
    return _member(ctx, gang, backend, loop)


def tell_layers(ctx: RoleContext, choice: LayerChoice) -> None:
    """Say whose layers compute the model; loudly where they are not the device's default and nobody asked for them."""
    if not choice.fallback:
        ctx.log.info("layers of the model", layers=choice.layers)
        return
    facts = {"layers": choice.layers, "why": choice.fallback, "costs": LOCAL_COSTS, "hint": LOCAL_REMEDY}
    ctx.event("layers_fallback", **facts)
    ctx.log.warning("Megatron-Core's own layers stand in for TransformerEngine's", **facts)


def serves_single_experts(config: RunConfig) -> bool:
    """Whether an engine of the run takes each expert's weights on their own, as SGLang does."""
    engines = [table for table in config.roles.values() if isinstance(table, EngineSettings) and table.count]
    return any(table.engine == "sglang" for table in engines)
