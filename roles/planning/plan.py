"""A whole plan: from a config and an inventory to placement, groups, ports, memory and figures, or all reasons not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from relax_rt.config.inventory import Inventory
from relax_rt.config.problems import Problem
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.models.parallel import ORDER, Group, Sizes, coordinates
from relax_rt.roles.models.settings import ShardedSettings
from relax_rt.roles.models.shape import ModelShape, read_shape
from relax_rt.roles.planning.division import divides_model, divisible
from relax_rt.roles.planning.fit import (
    GpuAccount,
    HostAccount,
    engine_problems,
    gpu_accounts,
    gpu_problems,
    host_accounts,
    host_problems,
)
from relax_rt.roles.planning.flow import Figure, figures, longest_sample
from relax_rt.roles.planning.links import Communicator, Port, communicators, gang_groups, gang_sizes, ports
from relax_rt.roles.planning.memory import FRAGMENTATION, LOGIT_BYTES
from relax_rt.roles.planning.models import is_pool
from relax_rt.roles.planning.placement import Placed, check_gpus, place
from relax_rt.transport.rpc.errors import RelaxError

HEADING = "planned, not run on this hardware"
ASSUMPTIONS = (
    "activations after Korthikanti et al. 2022 (arXiv 2205.05198), counted for grouped queries, gated MLPs and "
    "experts, without dropout; every micro-batch full, every sample at its longest",
    f"allocator: {FRAGMENTATION:.0%} of activations and logits lost; CUDA contexts, NCCL buffers and graphs as listed",
    f"logits of the trainer: {LOGIT_BYTES['megatron']} bytes an entry (megatron), {LOGIT_BYTES['torch']} (torch)",
    "bandwidths are rated ones, in one direction, used by one transfer at a time",
)


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a plan."""

    path: str
    parameters: int
    active_parameters: int
    shape: ModelShape


class Rank(msgspec.Struct, frozen=True):
    """One rank of a gang and its place along each kind of parallelism."""

    rank: int
    slot: str
    dense: dict[str, int]
    experts: dict[str, int] | None


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """A gang: its sizes, ranks and groups."""

    kind: str
    backend: str
    sizes: Sizes
    data: int
    expert_data: int
    order: tuple[str, ...]
    ranks: list[Rank]
    groups: list[Group]


class HardwarePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A run on machines that need not be here."""

    heading: str
    run: str
    model: Model
    inventory: list[dict[str, object]]
    slots: list[Placed]
    gangs: list[Gang]
    communicators: list[Communicator]
    ports: list[Port]
    gpus: list[GpuAccount]
    hosts: list[HostAccount]
    figures: list[Figure]
    assumptions: list[str]

    def render(self) -> str:
        """The plan for people."""
        from relax_rt.roles.planning.render import render

        return render(self)


def plan_on(config: RLConfig, inventory: Inventory) -> HardwarePlan | list[Problem]:
    """The plan, or everything that keeps the run from fitting on these nodes."""
    folder = Path(config.model.path).expanduser()
    try:
        shape = read_shape(folder if folder.is_absolute() else Path(config.config_dir) / folder)
    except RelaxError as error:
        why = f"{error.what}: {error.why}" if error.why else error.what
        return [Problem(("model", "path"), why, error.hint), *divisible(config)]
    problems = [*divisible(config), *divides_model(config, shape), *check_gpus(config, inventory)]
    problems += _context(config, shape)
    wrong = {str(problem.path[1]) for problem in problems if problem.path[0] == "roles"}
    placed, unplaced = place(config, inventory)
    sound = config.model_copy(update={"roles": {k: t for k, t in config.roles.items() if k not in wrong}})
    known = [slot for slot in placed if slot.kind not in wrong]
    problems += [*unplaced, *_replicas(sound)]
    found = communicators(sound, inventory, shape, known)
    listening, no_port = ports(sound, inventory, known, found)
    accounts = gpu_accounts(sound, inventory, shape, known, found)
    hosts = host_accounts(sound, inventory, shape, known)
    problems += [*no_port, *gpu_problems(sound, accounts), *host_problems(sound, hosts)]
    problems += engine_problems(sound, inventory, shape, known)
    if problems:
        return problems
    return HardwarePlan(
        heading=HEADING,
        run=config.run.name,
        model=Model(
            path=config.model.path,
            parameters=shape.parameters,
            active_parameters=shape.active_parameters,
            shape=shape,
        ),
        inventory=[node.model_dump(mode="json") for node in inventory.nodes],
        slots=placed,
        gangs=_gangs(config, shape, placed),
        communicators=found,
        ports=listening,
        gpus=accounts,
        hosts=hosts,
        figures=figures(config, inventory, shape, placed, found),
        assumptions=list(ASSUMPTIONS),
    )


def _context(config: RLConfig, shape: ModelShape) -> list[Problem]:
    longest = longest_sample(config)
    if longest <= shape.context:
        return []
    message = (
        f"data.max_prompt_tokens {config.data.max_prompt_tokens} + max_new_tokens {config.sampling.max_new_tokens} = "
        f"{longest}, and the model's context is {shape.context}"
    )
    return [Problem(("sampling", "max_new_tokens"), message, "lower it, or data.max_prompt_tokens")]


def _replicas(config: RLConfig) -> list[Problem]:
    """An update with fewer samples than the trainer has replicas."""
    table, algorithm = config.roles.get("trainer"), config.algorithm
    fewest = max(1, algorithm.prompts_per_step // algorithm.updates_per_step) * algorithm.group_size
    if not isinstance(table, ShardedSettings) or (replicas := gang_sizes(table).data) <= fewest:
        return []
    what = "a step" if algorithm.updates_per_step == 1 else "an update"
    message = f"{what} has {fewest} samples for {replicas} data-parallel replicas of the trainer"
    return [Problem(("algorithm", "prompts_per_step"), message, "raise it, or lower roles.trainer.count")]


def _gangs(config: RLConfig, shape: ModelShape, placed: Sequence[Placed]) -> list[Gang]:
    found = []
    for kind, table in config.roles.items():
        if not isinstance(table, ShardedSettings) or not table.count or is_pool(table):
            continue
        sizes = gang_sizes(table)
        ranks = [
            Rank(
                slot.index,
                slot.slot,
                coordinates(slot.index, sizes.dense),
                coordinates(slot.index, sizes.experts) if shape.experts else None,
            )
            for slot in placed
            if slot.kind == kind
        ]
        found.append(
            Gang(
                kind=kind,
                backend=table.backend,
                sizes=sizes,
                data=sizes.data,
                expert_data=sizes.expert_data,
                order=ORDER,
                ranks=ranks,
                groups=gang_groups(table, shape),
            )
        )
    return found
