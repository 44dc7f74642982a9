"""Memory of every GPU and host of a plan, and problems where it does not suffice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from relax_rt.config.inventory import Inventory
from relax_rt.config.problems import Problem
from relax_rt.config.schema import RoleSettings
from relax_rt.roles.config.checks import batch_samples
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.models.settings import ShardedSettings, TrainedSettings
from relax_rt.roles.models.shape import ModelShape
from relax_rt.roles.planning.communicators import (
    Device,
    PlannedCommunicator,
    memberships,
    published_width,
    ranges,
    senders,
)
from relax_rt.roles.planning.division import Shapes, gang_sizes
from relax_rt.roles.planning.estimate import (
    DELTA_PART,
    FOLLOWERS,
    RUNTIME_MIB,
    STAGE_BUFFERS,
    delta_parts,
    served_parts,
)
from relax_rt.roles.planning.figures import cache_tokens, gpu_bytes, longest_sample, longest_trained
from relax_rt.roles.planning.memory import (
    GIB,
    MASTER,
    MIB,
    WIDTH,
    MemoryPart,
    engine_memory,
    gang_memory,
    total_bytes,
)
from relax_rt.roles.planning.placement import PlacedSlot
from relax_rt.roles.rollout.engines.settings import EngineSettings, communicator_of

GPU_PROCESS_MIB = 6144
"""Resident memory of a process with a GPU: CUDA's libraries, torch, pinned buffers."""
ADVICE = {
    "weights": ("tensor_parallel", "more ranks over the model: tensor_parallel, pipeline_parallel or expert_parallel"),
    "gradients": ("tensor_parallel", 'more ranks over the model, or gradient_dtype = "bfloat16"'),
    "optimizer": ("count", 'more ranks for the distributed optimizer, or optimizer_dtype = "bfloat16"'),
    "activations": (
        "tokens_per_micro_batch",
        "lower tokens_per_micro_batch, raise recompute, or context_parallel for long samples",
    ),
    "logits": ("tokens_per_micro_batch", "lower tokens_per_micro_batch or raise tensor_parallel"),
    "gathered layers": ("count", 'use backend = "megatron" with tensor_parallel'),
    "KV cache": ("memory_fraction", "lower memory_fraction"),
}
"""For the largest component of a GPU that is too small: the key to show, and what to change."""


class SlotMemory(msgspec.Struct, frozen=True):
    """The memory of one slot on a GPU."""

    slot: str
    components: list[MemoryPart]


class GpuAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one GPU, bytes."""

    node: str
    gpu: int
    kind: str
    capacity: int
    shares: list[SlotMemory]
    total: int


class HostAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one node, bytes; shared memory is a part of it."""

    node: str
    capacity: int
    components: list[MemoryPart]
    total: int
    shared_capacity: int
    shared: int


def gpu_accounts(
    config: RLConfig,
    inventory: Inventory,
    shape: ModelShape,
    placed: Sequence[PlacedSlot],
    communicators: Sequence[PlannedCommunicator],
) -> list[GpuAccount]:
    """Return the memory of every GPU that is used."""
    member, shapes = memberships(communicators), Shapes(config, shape)
    shares: dict[Device, list[SlotMemory]] = {}
    kinds = {node.name: node for node in inventory.nodes}
    for slot in placed:
        for gpu in slot.gpus:
            mine = shares.setdefault((slot.node, gpu), [])
            memory_bytes = gpu_bytes(inventory.kind_of(kinds[slot.node]).memory_gib)
            mine.append(
                SlotMemory(slot.slot, _slot_memory(config, shapes, slot, gpu, memory_bytes, member[slot.node, gpu]))
            )
    order = {node.name: n for n, node in enumerate(inventory.nodes)}
    return [
        GpuAccount(
            node=node,
            gpu=gpu,
            kind=str(kinds[node].gpu),
            capacity=gpu_bytes(inventory.kind_of(kinds[node]).memory_gib),
            shares=found,
            total=sum(total_bytes(share.components) for share in found),
        )
        for (node, gpu), found in sorted(shares.items(), key=lambda item: (order[item[0][0]], item[0][1]))
    ]


def _slot_memory(
    config: RLConfig, shapes: Shapes, slot: PlacedSlot, gpu: int, memory_bytes: int, communicators: int
) -> list[MemoryPart]:
    table, shape = config.roles[slot.kind], shapes.of(slot.kind)
    if shape is None:
        return [MemoryPart("model", 0, f"unknown: {shapes.unknown[slot.kind]}")]
    if isinstance(table, EngineSettings):
        return engine_memory(
            shape,
            table,
            memory_bytes,
            longest=longest_sample(config),
            communicators=communicators,
            received=_received(config, shape, slot) if gpu == slot.gpus[0] else 0,
        )
    if isinstance(table, ShardedSettings):
        trains = slot.kind == "trainer"
        longest, sizes = (longest_trained if trains else longest_sample)(config), gang_sizes(table)
        return gang_memory(
            shape,
            table,
            sizes,
            slot.index,
            longest=longest,
            tokens_a_step=batch_samples(config) * longest,
            communicators=communicators,
            sends=trains and slot.index in senders(sizes).values(),
            held_versions=_published_bytes(config, shape) if trains and slot.index == 0 else 0,
        )
    return [MemoryPart("unknown", 0, "a role of your own: nothing is known of its memory")]


def _received(config: RLConfig, shape: ModelShape, slot: PlacedSlot) -> int:
    """Bytes of device memory that a rollout keeps for broadcasts."""
    over_nccl = config.publication.carrier == "collective" and communicator_of(config) == "nccl"
    return shape.parameters * published_width(config) if over_nccl and slot.kind == "rollout" else 0


def _published_bytes(config: RLConfig, shape: ModelShape) -> int:
    """Bytes of device memory in which rank 0 of the trainer has versions: with cuda_ipc the committed one and the one
    that is written, with broadcasts over NCCL the latter."""
    copies = {"cuda_ipc": 2, "collective": int(communicator_of(config) == "nccl")}.get(config.publication.carrier, 0)
    return copies * shape.parameters * published_width(config)


def gpu_problems(config: RLConfig, accounts: Sequence[GpuAccount]) -> list[Problem]:
    """Report GPUs that are too small; those with the same contents as one problem."""
    alike: dict[tuple[object, ...], list[GpuAccount]] = {}
    for account in accounts:
        if account.total > account.capacity:
            key = tuple(
                (share.slot.partition("/")[0], *((part.name, part.bytes) for part in share.components))
                for share in account.shares
            )
            alike.setdefault(key, []).append(account)
    return [_too_small(config, found) for found in alike.values()]


def _too_small(config: RLConfig, found: Sequence[GpuAccount]) -> Problem:
    account = found[0]
    where: dict[str, list[int]] = {}
    for one in found:
        where.setdefault(one.node, []).append(one.gpu)
    places = ", ".join(f"{node} GPU {ranges(gpus)}" for node, gpus in where.items())
    slots = ", ".join(dict.fromkeys(share.slot for one in found for share in one.shares))
    parts = [(part, share) for share in account.shares for part in share.components]
    shown = ", ".join(f"{part.name} {_gib(part.bytes)}" for part, _ in parts)
    message = (
        f"{places} ({slots}): {_gib(account.total)} GiB are needed and {_gib(account.capacity)} GiB there: {shown}"
    )
    changeable = [(part, share) for part, share in parts if part.name in ADVICE] or parts
    largest, share = max(changeable, key=lambda item: item[0].bytes)
    kind = share.slot.partition("/")[0]
    key, advice = ADVICE.get(largest.name, ("gpus", "give it a larger GPU"))
    table = config.roles[kind]
    if isinstance(table, EngineSettings):
        embedded = table.engine == "embedded"
        if largest.name == "weights":
            advice = 'use engine = "sglang" with tensor_parallel' if embedded else "raise tensor_parallel"
            key = "engine" if embedded else "tensor_parallel"
        elif embedded:
            key, advice = "max_sequences", "lower max_sequences"
    short = f"{_gib(account.total - account.capacity)} GiB too much"
    return Problem(("roles", kind, key), message, f"{short}, the most is {largest.name}: {advice}")


def engine_problems(
    config: RLConfig, inventory: Inventory, shape: ModelShape, placed: Sequence[PlacedSlot]
) -> Iterator[Problem]:
    """Report KV caches that do not hold one sample."""
    longest, nodes = longest_sample(config), {node.name: node for node in inventory.nodes}
    shapes = Shapes(config, shape)
    for kind, table in config.roles.items():
        own = shapes.of(kind)
        if not isinstance(table, EngineSettings) or table.engine != "sglang" or own is None:
            continue
        tokens: dict[int, list[str]] = {}
        for slot in placed:
            if slot.kind == kind and slot.gpus:
                memory_bytes = gpu_bytes(inventory.kind_of(nodes[slot.node]).memory_gib)
                each = cache_tokens(own, table, memory_bytes, longest) // table.data_parallel
                tokens.setdefault(each, []).append(slot.slot)
        for each, slots in tokens.items():
            if each >= longest:
                continue
            where = f"{', '.join(slots)}: memory_fraction {table.memory_fraction:g} "
            left = f"leaves a KV cache of {each:,} tokens" if each else "does not even hold the weights"
            message = f"{where}{left}, and one sample may have {longest:,}"
            yield Problem(("roles", kind, "memory_fraction"), message, "raise it, or tensor_parallel")


def host_accounts(
    config: RLConfig, inventory: Inventory, shape: ModelShape, placed: Sequence[PlacedSlot]
) -> list[HostAccount]:
    """Return the memory of every node that runs something."""
    found = []
    for number, node in enumerate(inventory.nodes):
        here = [slot for slot in placed if slot.node == node.name]
        if not here and number:
            continue
        shared = list(_shared(config, shape, here, head=number == 0))
        components = [
            *_processes(config, shape, here),
            *_fetched_deltas(config, shape, here, head=number == 0),
            *shared,
        ]
        found.append(
            HostAccount(
                node=node.name,
                capacity=gpu_bytes(node.memory_gib),
                components=components,
                total=total_bytes(components),
                shared_capacity=gpu_bytes(node.shared_memory_gib),
                shared=total_bytes(shared),
            )
        )
    return found


def _processes(config: RLConfig, shape: ModelShape, here: Sequence[PlacedSlot]) -> Iterator[MemoryPart]:
    on_gpus = sum(max(1, len(slot.gpus)) for slot in here if slot.gpus)
    if on_gpus:
        yield MemoryPart("processes with a GPU", on_gpus * GPU_PROCESS_MIB * MIB, f"{on_gpus} x {GPU_PROCESS_MIB} MiB")
    without = [slot for slot in here if not slot.gpus]
    models = [slot for slot in without if isinstance(config.roles[slot.kind], EngineSettings | ShardedSettings)]
    others = len(without) - len(models) + 1
    each = RUNTIME_MIB["transformers"]
    yield MemoryPart("processes without", others * each * MIB, f"{others} x {each} MiB, the agent among them")
    if models:
        shapes = Shapes(config, shape)
        known = [(config.roles[slot.kind], own) for slot in models if (own := shapes.of(slot.kind)) is not None]
        needed = sum(_cpu_model(config, own, table) for table, own in known)
        how = f"{len(known)} processes: weights, caches, optimizer state"
        unknown = sorted({slot.slot for slot in models if slot.kind in shapes.unknown})
        how += f"; not counted, of models that are not known: {', '.join(unknown)}" if unknown else ""
        yield MemoryPart("models on cores", needed, how)
    trained = [slot for slot in here if slot.gpus and isinstance(config.roles[slot.kind], TrainedSettings)]
    if trained:
        copies: Mapping[str, int] = {
            slot.kind: shape.parameters * (MASTER + 2 * WIDTH[config.roles[slot.kind].optimizer_dtype])
            for slot in trained
        }
        nbytes = sum(copies[slot.kind] // config.roles[slot.kind].count for slot in trained)
        yield MemoryPart("checkpoint copies", nbytes, f"of {len(trained)} ranks, while they are written")
    yield from _publication_copies(config, shape, here)


def _publication_copies(config: RLConfig, shape: ModelShape, here: Sequence[PlacedSlot]) -> Iterator[MemoryPart]:
    """Yield what the trainer's other ranks keep of the published weights until rank 0 has gathered them."""
    copying = sum(slot.kind == "trainer" and slot.index > 0 for slot in here)
    trainer = config.roles.get("trainer")
    if copying and isinstance(trainer, ShardedSettings):
        nbytes = shape.parameters * published_width(config) * copying // gang_sizes(trainer).world
        yield MemoryPart("publication copies", nbytes, f"of {copying} ranks, kept from one version to the next")


def _cpu_model(config: RLConfig, shape: ModelShape, table: RoleSettings) -> int:
    """Bytes of a role that computes on cores; of an engine with a version that is fetched beside the one in use."""
    base = RUNTIME_MIB["torch"] * MIB
    if isinstance(table, EngineSettings):
        width = WIDTH[table.dtype]
        cache = table.max_sequences * longest_sample(config) * shape.kv_values_a_token * width
        return base + 2 * shape.parameters * width + cache
    assert isinstance(table, ShardedSettings)
    state = 28 if isinstance(table, TrainedSettings) else MASTER
    return base + math.ceil(shape.parameters * state / gang_sizes(table).world)


def _shared(config: RLConfig, shape: ModelShape, here: Sequence[PlacedSlot], *, head: bool) -> Iterator[MemoryPart]:
    """Arenas and weight stage of a node, in /dev/shm."""
    produces = any(slot.kind == "rollout" for slot in here)
    if head or produces:
        mib = config.queue.capacity_mib
        yield MemoryPart("queue", mib * MIB, f"queue.capacity_mib {mib}, at most on one node")
    engines = [slot for slot in here if isinstance(config.roles[slot.kind], EngineSettings)]
    if engines or head:  # the trainer's own stage is there
        buffer = shape.parameters * published_width(config)
        how = f"up to {STAGE_BUFFERS} buffers of {_gib(buffer)} GiB: committed, being written, slow readers"
        deltas = int(delta_parts(config) * buffer) if head else 0
        how += f"; {_gib(deltas)} GiB for deltas" if deltas else ""
        parts = 1 + 2 * DELTA_PART + (served_parts(config) if head else 0)
        base = int(parts * buffer) if config.publication.adapters else 0
        how += f"; {_gib(base)} GiB for adapters and their base" if base else ""
        yield MemoryPart("weight stage", STAGE_BUFFERS * buffer + deltas + base, how)
        yield from _engines_copies(config, engines, buffer)


def _fetched_deltas(
    config: RLConfig, shape: ModelShape, here: Sequence[PlacedSlot], *, head: bool
) -> Iterator[MemoryPart]:
    """Deltas in processes' own memory before they are applied."""
    engines = sum(slot.kind in FOLLOWERS for slot in here)
    if config.publication.delta and engines:
        readers = engines if head else 1
        nbytes = readers * int(DELTA_PART * shape.parameters * published_width(config))
        where = f"at each of {engines} engines" if head else "at the one process that fetches"
        yield MemoryPart("deltas as they come", nbytes, f"{where}, half a version at most")


def _engines_copies(config: RLConfig, engines: Sequence[PlacedSlot], buffer: int) -> Iterator[MemoryPart]:
    """Versions in shared memory that are an engine's own, beside those of the stage."""
    servers = sum(getattr(config.roles[slot.kind], "engine", "") == "sglang" for slot in engines)
    if servers:
        how = f"a version for each of {servers}, to load from while it is swapped"
        yield MemoryPart("servers' copies", servers * buffer, how)
    receivers = sum(slot.kind == "rollout" for slot in engines)
    if receivers and config.publication.carrier == "collective" and communicator_of(config) == "gloo":
        yield MemoryPart("broadcast memory", receivers * buffer, f"a version for each of {receivers}, as it comes")


def host_problems(config: RLConfig, accounts: Sequence[HostAccount]) -> Iterator[Problem]:
    """Report nodes whose memory or shared memory does not suffice."""
    for account in accounts:
        if account.total > account.capacity:
            parts = ", ".join(f"{part.name} {_gib(part.bytes)}" for part in account.components)
            message = (
                f"node {account.node}: {_gib(account.total)} GiB of memory are needed and "
                f"{_gib(account.capacity)} GiB there: {parts}"
            )
            yield Problem(("roles",), message, "spread the roles over more nodes")
        if account.shared > account.shared_capacity:
            message = (
                f"node {account.node}: {_gib(account.shared)} GiB of shared memory are needed and "
                f"/dev/shm has {_gib(account.shared_capacity)} GiB"
            )
            hint = "lower queue.capacity_mib, or mount a larger /dev/shm and say so with shm_gib"
            yield Problem(("queue", "capacity_mib"), message, hint)


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}"
