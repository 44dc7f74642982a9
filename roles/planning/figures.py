"""Figures of a step: staleness and admission, tokens in flight, queue, publication, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from relax_rt.config.inventory import Inventory
from relax_rt.roles.config.checks import batch_samples, needed_bytes, retained_batches, sample_bytes
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.models.settings import ShardedSettings, TrainedSettings
from relax_rt.roles.models.shape import ModelShape
from relax_rt.roles.planning.communicators import PlannedCommunicator, loads_from_folder, published_width
from relax_rt.roles.planning.division import gang_sizes
from relax_rt.roles.planning.memory import MASTER, MIB, WIDTH, kv_bytes, kv_token_bytes, micro_batches
from relax_rt.roles.planning.placement import PlacedSlot
from relax_rt.roles.rollout.engines.settings import EngineSettings, RolloutSettings, longest_tokens

LAGS_SHOWN = 8


class Figure(msgspec.Struct, frozen=True):
    """One number of a plan.

    Attributes:
        section: heading it stands under.
        value: None if there is no bound, or it is not known.
        how: where it comes from.
    """

    section: str
    name: str
    value: float | None
    unit: Literal["", "samples", "tokens", "sequences", "bytes", "s", "ratio"]
    how: str = ""


def longest_sample(config: RLConfig) -> int:
    """Tokens of the longest sample that the config allows."""
    return longest_tokens(config)


def longest_trained(config: RLConfig) -> int:
    """Tokens of the longest sequence that the trainer computes at once: a cold start may have longer sequences than RL,
    and both completions of a preference are computed together."""
    cold = config.cold_start
    if not cold.wanted:
        return longest_sample(config)
    return max(longest_sample(config), cold.max_tokens * (2 if cold.kind == "dpo" else 1))


def cache_tokens(shape: ModelShape, table: EngineSettings, memory_bytes: int, longest: int) -> int:
    """Tokens that the KV caches of one engine hold, over all of its replicas."""
    token = kv_token_bytes(shape, table.tensor_parallel, WIDTH[table.dtype])
    return max(0, kv_bytes(shape, table, memory_bytes, longest)) // token * table.data_parallel


def figures(
    config: RLConfig,
    inventory: Inventory,
    shape: ModelShape,
    placed: Sequence[PlacedSlot],
    communicators: Sequence[PlannedCommunicator],
) -> list[Figure]:
    """Return every figure of a step."""
    return [
        *_staleness(config),
        *_generation(config, inventory, shape, placed),
        *_training(config),
        *_queue(config),
        *_publication(config, inventory, shape, placed, communicators),
        *_checkpoints(config, shape),
    ]


def bound_samples(config: RLConfig, lag: int = 0) -> float:
    """Samples that may be in flight while the generating engine lags so many versions behind."""
    return max(0.0, config.algorithm.max_staleness + 1 - lag) * batch_samples(config)


def _staleness(config: RLConfig) -> Iterator[Figure]:
    table, section, b = config.algorithm, "staleness and admission", batch_samples(config)
    yield Figure(
        section,
        "b, samples a step",
        b,
        "samples",
        f"{table.prompts_per_step} prompts x {table.group_size}; each step is published",
    )
    if math.isinf(table.max_staleness):
        yield Figure(section, "admitted", None, "samples", "max_staleness inf: until the queue is full")
        return
    staleness = int(table.max_staleness)
    for lag in range(min(staleness, LAGS_SHOWN) + 1):
        how = f"({staleness} + 1 - {lag}) x {b}"
        yield Figure(section, f"admitted at lag {lag}", bound_samples(config, lag), "samples", how)
    if table.over_provision:
        surplus = table.over_provision * table.group_size
        yield Figure(section, "surplus", surplus, "samples", f"over_provision {table.over_provision} groups")


def _generation(
    config: RLConfig, inventory: Inventory, shape: ModelShape, placed: Sequence[PlacedSlot]
) -> Iterator[Figure]:
    table, section, longest = config.roles["rollout"], "generation", longest_sample(config)
    assert isinstance(table, RolloutSettings)
    decoded = table.count * table.data_parallel * table.max_sequences
    groups = table.count * table.groups_in_flight * config.algorithm.group_size
    bound = bound_samples(config)
    flight = min(decoded, groups, bound)
    yield Figure(
        section,
        "sequences in flight at most",
        flight,
        "sequences",
        f"least of: decoded {decoded}, groups_in_flight {groups}, admitted "
        + ("without bound" if math.isinf(bound) else f"{bound:g}"),
    )
    yield Figure(section, "their tokens at most", flight * longest, "tokens", f"x {longest} (longest sample)")
    nodes = {node.name: node for node in inventory.nodes}
    engines = [slot for slot in placed if slot.kind == "rollout" and slot.gpus]
    if not engines:
        return
    cached = sum(
        cache_tokens(shape, table, gpu_bytes(inventory.kind_of(nodes[slot.node]).memory_gib), longest)
        for slot in engines
    )
    yield Figure(section, "KV cache of all engines", cached, "tokens", f"{len(engines)} engines")
    mean = cached / flight
    enough = "nothing is ever preempted" if mean >= longest else "above that mean length sequences are preempted"
    yield Figure(section, "cache by sequences in flight", mean, "tokens", f"a sample has {longest} at most: {enough}")


def gpu_bytes(memory_gib: float) -> int:
    """GiB of an inventory in bytes."""
    return int(memory_gib * (1 << 30))


def _training(config: RLConfig) -> Iterator[Figure]:
    table, section, longest = config.roles["trainer"], "training", longest_sample(config)
    if not isinstance(table, ShardedSettings):
        return
    sizes, tokens = gang_sizes(table), batch_samples(config) * longest
    yield Figure(section, "tokens a step at most", tokens, "tokens", f"{batch_samples(config)} samples x {longest}")
    batches = micro_batches(table, sizes, tokens, longest)
    each = max(table.tokens_per_micro_batch, longest)
    yield Figure(section, "micro-batches of a replica", batches, "", f"{sizes.data} replicas, {each} tokens each")
    if sizes.pipeline > 1:
        idle = (sizes.pipeline - 1) / (batches + sizes.pipeline - 1)
        how = f"(p - 1) / (m + p - 1), p = {sizes.pipeline}, m = {batches}"
        yield Figure(section, "pipeline idle", idle, "ratio", how)


def _queue(config: RLConfig) -> Iterator[Figure]:
    section, b = "queue", batch_samples(config)
    how = (
        f"checkpoint.every_steps {config.checkpoint.every_steps} + staleness + 1 = {retained_batches(config):g} batches"
    )
    yield Figure(
        section, "needed at most", needed_bytes(config), "bytes", f"{how} x {b} x {sample_bytes(config)} bytes"
    )
    have = config.queue.capacity_mib + config.queue.spill_mib
    yield Figure(section, "capacity", have * MIB, "bytes", "queue.capacity_mib + queue.spill_mib")


def _publication(
    config: RLConfig,
    inventory: Inventory,
    shape: ModelShape,
    placed: Sequence[PlacedSlot],
    communicators: Sequence[PlannedCommunicator],
) -> Iterator[Figure]:
    section, width = "publication, each step", published_width(config)
    total = shape.parameters * width
    yield Figure(section, "weights", total, "bytes", f"{shape.parameters:,} parameters x {width}")
    weights = [found for found in communicators if found.kind == "weights"]
    for found in weights:
        rated = "no rate given" if found.link.gb_s is None else f"{found.link.gb_s:g} GB/s"
        how = f"{found.bytes:,} bytes, slowest link {found.link.name} {rated}, {len(found.devices) - 1} receivers"
        yield Figure(section, f"broadcast of {found.name}", found.seconds, "s", how)
    folder = [kind for kind, table in config.roles.items() if loads_from_folder(table) and table.count]
    for kind in folder:
        how = "from safetensors files: SGLang takes broadcasts with data_parallel 1 only"
        yield Figure(section, f"loaded by {kind}", total, "bytes", how)
    times = [found.seconds for found in weights]
    if len(times) > 1:
        known = [time for time in times if time is not None]
        one = sum(known) if len(known) == len(times) else None
        yield Figure(section, "one stage after the other", one, "s", "all through one interface")
    for name, rate in _rates(inventory, placed).items():
        yield Figure(section, f"once over {name}", total / (rate * 1e9), "s", f"{rate:g} GB/s, rated")


def _rates(inventory: Inventory, placed: Sequence[PlacedSlot]) -> dict[str, float]:
    """Every kind of link of the nodes in use, GB/s in one direction."""
    used = {slot.node for slot in placed}
    found: dict[str, float] = {}
    for node in inventory.nodes:
        if node.name not in used:
            continue
        if node.gpus:
            kind = inventory.kind_of(node)
            if kind.nvlink_gb_s and node.nvlink:
                found[f"NVLink ({node.gpu})"] = kind.nvlink_gb_s
            found[f"PCIe ({node.gpu}), to host memory"] = kind.pcie_gb_s
        for interface in node.interfaces:
            found[f"one {interface.name}"] = interface.gbit_s / 8
    return found


def _checkpoints(config: RLConfig, shape: ModelShape) -> Iterator[Figure]:
    table, trainer = config.checkpoint, config.roles["trainer"]
    moment = WIDTH[trainer.optimizer_dtype] if isinstance(trainer, TrainedSettings) else MASTER
    each = MASTER + 2 * moment
    how = f"{shape.parameters:,} x {each} bytes (float32 weights, two moments of {moment})"
    how += f", every {table.every_steps} steps"
    yield Figure("checkpoints", "each", shape.parameters * each, "bytes", how)
    kept = table.keep + 1
    yield Figure(
        "checkpoints", "on disk", shape.parameters * each * kept, "bytes", f"{table.keep} kept, one being written"
    )
