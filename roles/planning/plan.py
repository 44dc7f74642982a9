"""`relax-rt plan --inventory`: placement, groups, ports, memory and figures of a run, or why it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import msgspec

from relax_rt.config.inventory import Inventory
from relax_rt.config.problems import Problem
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.models.parallel import ORDER, ParallelSizes, RankGroup, coordinates
from relax_rt.roles.models.settings import ShardedSettings
from relax_rt.roles.models.shape import ModelShape, read_shape
from relax_rt.roles.planning.communicators import PlannedCommunicator, Port, communicators, ports, ranges
from relax_rt.roles.planning.division import divides_model, divisible, gang_groups, gang_sizes, is_pool
from relax_rt.roles.planning.figures import Figure, figures, longest_sample
from relax_rt.roles.planning.fit import (
    GpuAccount,
    HostAccount,
    engine_problems,
    gpu_accounts,
    gpu_problems,
    host_accounts,
    host_problems,
)
from relax_rt.roles.planning.memory import FRAGMENTATION, GIB, LOGIT_BYTES, MIB, MemoryPart
from relax_rt.roles.planning.placement import PlacedSlot, check_gpus, place
from relax_rt.transport.rpc.errors import RelaxError

HEADING = "planned, not run on this hardware"
ASSUMPTIONS = (
    "activations after Korthikanti et al. 2022 (arXiv 2205.05198), counted for grouped queries, gated MLPs and "
    "experts, without dropout; every micro-batch full, every sample at its longest",
    f"allocator: {FRAGMENTATION:.0%} of activations and logits lost; CUDA contexts, NCCL buffers and graphs as listed",
    f"logits of the trainer: {LOGIT_BYTES['megatron']} bytes an entry (megatron), {LOGIT_BYTES['torch']} (torch)",
    "bandwidths are rated ones, in one direction, used by one transfer at a time",
)
T = TypeVar("T")
K = TypeVar("K")
GAP = "  "
LISTED = 6
"""Members of a communicator that are named one by one; of more, the slots only."""


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a plan."""

    path: str
    parameters: int
    active_parameters: int
    shape: ModelShape


class PlannedRank(msgspec.Struct, frozen=True):
    """One rank of a gang and its place along each kind of parallelism."""

    rank: int
    slot: str
    dense: dict[str, int]
    experts: dict[str, int] | None


class GangPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A gang: its sizes, ranks and groups."""

    kind: str
    backend: str
    sizes: ParallelSizes
    data: int
    expert_data: int
    order: tuple[str, ...]
    ranks: list[PlannedRank]
    groups: list[RankGroup]


class HardwarePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a run on the machines of an inventory."""

    heading: str
    run: str
    model: PlannedModel
    inventory: list[dict[str, object]]
    slots: list[PlacedSlot]
    gangs: list[GangPlan]
    communicators: list[PlannedCommunicator]
    ports: list[Port]
    gpus: list[GpuAccount]
    hosts: list[HostAccount]
    figures: list[Figure]
    assumptions: list[str]

    def render(self) -> str:
        """Render the plan for people."""
        return render(self)


def plan_on(config: RLConfig, inventory: Inventory) -> HardwarePlan | list[Problem]:
    """Return the plan, or everything that keeps the run from fitting on these nodes."""
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
        model=PlannedModel(
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
    """Report an update with fewer samples than the trainer has replicas."""
    table, algorithm = config.roles.get("trainer"), config.algorithm
    fewest = max(1, algorithm.prompts_per_step // algorithm.updates_per_step) * algorithm.group_size
    if not isinstance(table, ShardedSettings) or (replicas := gang_sizes(table).data) <= fewest:
        return []
    what = "a step" if algorithm.updates_per_step == 1 else "an update"
    message = f"{what} has {fewest} samples for {replicas} data-parallel replicas of the trainer"
    return [Problem(("algorithm", "prompts_per_step"), message, "raise it, or lower roles.trainer.count")]


def _gangs(config: RLConfig, shape: ModelShape, placed: Sequence[PlacedSlot]) -> list[GangPlan]:
    found = []
    for kind, table in config.roles.items():
        if not isinstance(table, ShardedSettings) or not table.count or is_pool(table):
            continue
        sizes = gang_sizes(table)
        ranks = [
            PlannedRank(
                slot.index,
                slot.slot,
                coordinates(slot.index, sizes.dense),
                coordinates(slot.index, sizes.experts) if shape.experts else None,
            )
            for slot in placed
            if slot.kind == kind
        ]
        found.append(
            GangPlan(
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


def render(plan: HardwarePlan) -> str:
    """Render the plan as plain text, the same on every terminal, so that it can be kept and compared."""
    blocks = [
        [f"{plan.run}: {plan.heading}"],
        _model_lines(plan),
        _node_lines(plan),
        _placement_lines(plan),
        *(_gang_lines(gang, plan) for gang in plan.gangs),
        _communicator_lines(plan),
        _weight_lines(plan),
        ["ports", *_aligned([(port.node, str(port.port), port.what) for port in plan.ports])],
        _gpu_lines(plan),
        _host_lines(plan),
        *_figure_lines(plan.figures),
        ["assumed", *(f"  {line}" for line in plan.assumptions)],
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks if block)


def _aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Align the columns of rows; those numbered in `right` to the right."""
    if not rows:
        return []
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.rjust(widths[at]) if at in right else c.ljust(widths[at]) for at, c in enumerate(row)]
        lines.append("  " + GAP.join(cells).rstrip())
    return lines


def _model_lines(plan: HardwarePlan) -> list[str]:
    shape, model = plan.model.shape, plan.model
    active = f", {model.active_parameters:,} for one token" if shape.experts else ""
    rows = [
        ("parameters", f"{model.parameters:,}{active}"),
        ("layers", f"{shape.layers}, hidden {shape.hidden}, vocabulary {shape.vocabulary}, context {shape.context}"),
        ("heads", f"{shape.heads} of {shape.head_dim}, {shape.kv_heads} of keys and values"),
    ]
    if shape.experts:
        experts = f"{shape.experts} of width {shape.expert_ffn}, {shape.experts_per_token} a token"
        rows.append(("experts", f"{experts}, in {sum(shape.sparse)} of {shape.layers} layers"))
    return [f"model  {model.path} ({shape.family})", *_aligned(rows)]


def _node_lines(plan: HardwarePlan) -> list[str]:
    rows = []
    for node in plan.inventory:
        gpus = f"{node['gpus']} x {node['gpu']}" if node["gpus"] else "no GPU"
        rows.append(
            (str(node["name"]), str(node["address"]), gpus, f"{node['cores']} cores", f"{node['memory_gib']:g} GiB")
        )
    return ["nodes, the head first", *_aligned(rows)]


def _placement_lines(plan: HardwarePlan) -> list[str]:
    rows = []
    for node in plan.inventory:
        here = [slot for slot in plan.slots if slot.node == node["name"]]
        by_gpu: dict[int, list[PlacedSlot]] = {}
        for slot in here:
            for gpu in slot.gpus:
                by_gpu.setdefault(gpu, []).append(slot)
        for gpu, slots in sorted(by_gpu.items()):
            names = [_shared(slot) + _rank(plan, slot) for slot in slots]
            rows.append((str(node["name"]), f"GPU {gpu}", ", ".join(names)))
        without = [slot for slot in here if not slot.gpus]
        if without:
            rows.append((str(node["name"]), "cores", ", ".join(_shared(slot) for slot in without)))
        unused = [gpu for gpu in range(int(str(node["gpus"]))) if gpu not in by_gpu]
        if unused:
            rows.append((str(node["name"]), "unused", f"GPU {ranges(unused)}"))
    return ["placement", *_aligned(rows)]


def _shared(slot: PlacedSlot) -> str:
    return f"{slot.slot} ({slot.share:g} of it)" if 0 < slot.share < 1 else slot.slot


def _rank(plan: HardwarePlan, slot: PlacedSlot) -> str:
    """The rank's place along each kind of parallelism that has more than one."""
    gang = next((gang for gang in plan.gangs if gang.kind == slot.kind), None)
    if gang is None:
        return ""
    rank = gang.ranks[slot.index]
    parts = [f"{kind} {at}" for kind, at in rank.dense.items() if gang.sizes.dense[kind] > 1]
    if rank.experts is not None and gang.sizes.expert > 1:
        parts.append(f"expert {rank.experts['expert']}")
    return f": {', '.join(parts)}" if parts else ""


def _gang_lines(gang: GangPlan, plan: HardwarePlan) -> list[str]:
    sizes = gang.sizes
    shown = f"tensor {sizes.tensor}, context {sizes.context}, pipeline {sizes.pipeline}, data {gang.data}"
    if plan.model.shape.experts and gang.backend == "megatron":
        shown += f"; experts: expert {sizes.expert}, tensor {sizes.expert_tensor}, data {gang.expert_data}"
    order = "-".join(gang.order)
    rows = [
        (kind, "; ".join(ranges(group.ranks) for group in members))
        for kind, members in _runs(gang.groups, lambda group: group.kind)
    ]
    head = f"groups of {gang.kind} ({gang.backend}, {sizes.world} rank{'s' if sizes.world > 1 else ''}: {shown})"
    return [head, *_aligned([("order", order), *rows])] if rows else []


def _communicator_lines(plan: HardwarePlan) -> list[str]:
    rows = []
    inner = [found for found in plan.communicators if found.kind not in ("weights", "ipc")]
    for (kind, link, rate), members in _runs(inner, lambda c: (c.kind, c.link.name, c.link.gb_s)):
        speed = f"{link} {rate:g} GB/s" if rate is not None else link
        rows.append((kind, str(len(members)), speed, "; ".join(found.name for found in members)))
    return ["NCCL communicators: kind, how many, slowest link, members", *_aligned(rows, right=(1,))] if rows else []


def _weight_lines(plan: HardwarePlan) -> list[str]:
    rows = []
    for found in (found for found in plan.communicators if found.kind == "weights"):
        receivers = found.members[1:]
        if len(receivers) > LISTED:
            receivers = tuple(_whole_slots(receivers))
        rows.append((found.name, f"{found.members[0]} -> {', '.join(receivers)}"))
    for found in (found for found in plan.communicators if found.kind == "ipc"):
        rows.append((found.name, f"{found.members[0]} -> {', '.join(found.members[1:])} by CUDA IPC"))
    return ["weight broadcast: sender -> receivers", *_aligned(rows)] if rows else []


def _whole_slots(members: Iterable[str]) -> Iterator[str]:
    """``rollout/0@node-1:0-3`` for all GPUs of a slot together."""
    for prefix, found in _runs(list(members), lambda member: member.rpartition(":")[0]):
        yield f"{prefix}:{ranges(int(member.rpartition(':')[2]) for member in found)}"


def _gpu_lines(plan: HardwarePlan) -> list[str]:
    """List every GPU; those with the same contents once."""
    lines = ["memory of each GPU, estimated, GiB"]
    alike: dict[object, list[GpuAccount]] = {}
    for account in plan.gpus:
        key = tuple((share.slot.partition("/")[0], tuple(share.components)) for share in account.shares)
        alike.setdefault((account.capacity, key), []).append(account)
    for accounts in alike.values():
        first = accounts[0]
        slots = ", ".join(dict.fromkeys(share.slot for account in accounts for share in account.shares))
        where = "; ".join(f"{node} GPU {ranges(a.gpu for a in on)}" for node, on in _runs(accounts, lambda a: a.node))
        used = first.total / first.capacity
        lines.append(f"  {slots} on {where}: {_gib(first.total)} of {_gib(first.capacity)}, {used:.0%}")
        lines += [f"  {line}" for share in first.shares for line in _components(share.components)]
    return lines if plan.gpus else []


def _components(components: Sequence[MemoryPart]) -> list[str]:
    return _aligned([(part.name, _gib(part.bytes), part.how) for part in components], right=(1,))


def _host_lines(plan: HardwarePlan) -> list[str]:
    lines = ["memory of each node, estimated, GiB"]
    for host in plan.hosts:
        shared = f"/dev/shm {_gib(host.shared)} of {_gib(host.shared_capacity)}"
        lines.append(f"  {host.node}: {_gib(host.total)} of {_gib(host.capacity)}; of these {shared}")
        lines += [f"  {line}" for line in _components(host.components)]
    return lines


def _figure_lines(found: Sequence[Figure]) -> Iterator[list[str]]:
    for section, members in _runs(found, lambda figure: figure.section):
        yield [section, *_aligned([(figure.name, amount(figure), figure.how) for figure in members], right=(1,))]


def amount(figure: Figure) -> str:
    """A figure's value with its unit."""
    value = figure.value
    if value is None:
        return "no bound" if figure.unit == "samples" else "unknown"
    if figure.unit == "bytes":
        return f"{value / GIB:.1f} GiB" if value >= GIB else f"{value / MIB:.0f} MiB"
    if figure.unit == "s":
        return f"{value:.3f} s"
    if figure.unit == "ratio":
        return f"{value:.1%}"
    return f"{value:,.0f}" + (f" {figure.unit}" if figure.unit else "")


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}"


def _runs(items: Sequence[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    return [(found, list(members)) for found, members in groupby(items, key)]
