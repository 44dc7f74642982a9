"""NCCL communicators of a planned run, the links they cross, and the ports that are listened on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from relax_rt.config.inventory import Inventory
from relax_rt.config.problems import Problem
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.models.parallel import ParallelSizes, stage_layers
from relax_rt.roles.models.settings import ShardedSettings
from relax_rt.roles.models.shape import ModelShape
from relax_rt.roles.planning.division import gang_groups, gang_sizes, is_pool
from relax_rt.roles.planning.memory import WIDTH
from relax_rt.roles.planning.placement import PlacedSlot
from relax_rt.roles.rollout.engines.settings import EngineSettings

Device = tuple[str, int]
"""A GPU: the name of its node, and its index there."""


class Link(msgspec.Struct, frozen=True):
    """The slowest link between the members of a communicator.

    Attributes:
        gb_s: rated bandwidth in one direction, GB/s; None if the inventory does not say.
    """

    name: str
    gb_s: float | None


class PlannedCommunicator(msgspec.Struct, frozen=True, kw_only=True):
    """Processes that call NCCL collectives together.

    Attributes:
        kind: ``tensor`` … of a gang, ``engine`` within one engine, ``weights`` from the trainer to the engines,
            ``ipc`` for two processes that share a GPU and hand weights on by CUDA IPC, which is no NCCL.
        members: slot and GPU of each, ``trainer/3@node-0:3``; of a weights communicator the sender first.
        devices: the GPUs.
        bytes: of weights that pass through it at each publication.
    """

    kind: str
    name: str
    members: tuple[str, ...]
    devices: tuple[Device, ...]
    link: Link
    bytes: int = 0

    @property
    def seconds(self) -> float | None:
        """For one publication at the rated bandwidth."""
        return None if self.link.gb_s is None else self.bytes / (self.link.gb_s * 1e9)


class Port(msgspec.Struct, frozen=True):
    """A port that something listens on."""

    node: str
    port: int
    what: str


def slowest_link(inventory: Inventory, devices: Sequence[Device]) -> Link:
    """Return the slowest link between these GPUs; between nodes each node's fastest single interface counts."""
    nodes = {node.name: node for node in inventory.nodes}
    used = [nodes[name] for name in dict.fromkeys(name for name, _ in devices)]
    if len(used) > 1:
        rates = [max((interface.gbit_s / 8 for interface in node.interfaces), default=None) for node in used]
        known = [rate for rate in rates if rate is not None]
        return Link("network", min(known) if len(known) == len(rates) else None)
    (node,) = used
    kind = inventory.kind_of(node)
    reached = node.nvlink_group(devices[0][1])
    if all(gpu in reached for _, gpu in devices) and (len(reached) > 1 or len(set(devices)) == 1):
        return Link("NVLink", kind.nvlink_gb_s) if len(set(devices)) > 1 else Link("same GPU", None)
    return Link("PCIe", kind.pcie_gb_s)


def communicators(
    config: RLConfig, inventory: Inventory, shape: ModelShape, placed: Sequence[PlacedSlot]
) -> list[PlannedCommunicator]:
    """Return every NCCL communicator of the run."""
    found: list[PlannedCommunicator] = []
    for kind, table in config.roles.items():
        mine = [slot for slot in placed if slot.kind == kind and slot.gpus]
        if isinstance(table, ShardedSettings) and len(mine) == table.count:
            found += _gang(kind, table, inventory, shape, mine)
        elif isinstance(table, EngineSettings):
            found += _engines(table, inventory, mine)
    return [*found, *_weights(config, inventory, shape, placed)]


def _gang(
    kind: str, table: ShardedSettings, inventory: Inventory, shape: ModelShape, ranks: Sequence[PlacedSlot]
) -> Iterator[PlannedCommunicator]:
    for group in gang_groups(table, shape):
        slots = [ranks[rank] for rank in group.ranks]
        yield _communicator(inventory, group.kind, f"{kind} ranks {ranges(group.ranks)}", slots)


def _engines(table: EngineSettings, inventory: Inventory, slots: Sequence[PlacedSlot]) -> Iterator[PlannedCommunicator]:
    size = table.tensor_parallel
    for slot in slots:
        for replica in range(len(slot.gpus) // size if size > 1 else 0):
            gpus = slot.gpus[replica * size : (replica + 1) * size]
            name = slot.slot + (f" replica {replica}" if table.data_parallel > 1 else "")
            yield _communicator(inventory, "engine", name, [msgspec.structs.replace(slot, gpus=gpus)])


def _weights(
    config: RLConfig, inventory: Inventory, shape: ModelShape, placed: Sequence[PlacedSlot]
) -> Iterator[PlannedCommunicator]:
    """One communicator a pipeline stage: the first rank of the stage gathers its layers' tensors in Hugging Face's
    names, bucket by bucket, and sends them to every GPU of every engine, which keep what they need."""
    table = config.roles.get("trainer")
    trainer = [slot for slot in placed if slot.kind == "trainer" and slot.gpus]
    engines = [slot for slot in placed if slot.gpus and _receives(config.roles[slot.kind])]
    if not isinstance(table, ShardedSettings) or len(trainer) != table.count or not engines:
        return
    width = published_width(config)
    for stage, rank in senders(gang_sizes(table)).items():
        sender = trainer[rank]
        holders = {(sender.node, sender.gpus[0]): sender}
        for engine in engines:
            if any((engine.node, gpu) in holders for gpu in engine.gpus):
                # NCCL takes each GPU once: who shares one gets the bucket from the process that has it.
                holder = holders[next((engine.node, gpu) for gpu in engine.gpus if (engine.node, gpu) in holders)]
                yield _communicator(inventory, "ipc", f"stage {stage}", [holder, engine])
            else:
                holders |= {(engine.node, gpu): engine for gpu in engine.gpus}
        members = list(dict.fromkeys(slot.slot for slot in holders.values()))
        if len(members) > 1:
            by_name = {slot.slot: slot for slot in holders.values()}
            nbytes = stage_elements(shape, table.pipeline_parallel, stage) * width
            yield _communicator(inventory, "weights", f"stage {stage}", [by_name[name] for name in members], nbytes)


def loads_from_folder(table: object) -> bool:
    """Whether an engine takes new weights from files only: SGLang's replicas within one engine do."""
    return isinstance(table, EngineSettings) and table.engine == "sglang" and table.data_parallel > 1


def _receives(table: object) -> bool:
    return isinstance(table, EngineSettings) and not loads_from_folder(table)


def published_width(config: RLConfig) -> int:
    """Bytes of an element as published: engines have one dtype."""
    table = config.roles.get("rollout")
    return WIDTH[table.dtype] if isinstance(table, EngineSettings) else WIDTH["bfloat16"]


def senders(sizes: ParallelSizes) -> dict[int, int]:
    """The rank that sends the weights of each pipeline stage: the first of the stage."""
    each = sizes.world // sizes.pipeline
    return {stage: stage * each for stage in range(sizes.pipeline)}


def stage_elements(shape: ModelShape, stages: int, stage: int) -> int:
    """Elements of a pipeline stage's tensors; a tied embedding is sent once, by the first stage."""
    parts = list(shape.input_weights()) if stage == 0 else []
    for layer in stage_layers(shape.layers, stages, stage):
        parts += shape.layer_weights(layer)
    if stage == stages - 1:
        parts += shape.output_weights()
    return sum(part.elements for part in parts)


def _communicator(
    inventory: Inventory, kind: str, name: str, slots: Sequence[PlacedSlot], nbytes: int = 0
) -> PlannedCommunicator:
    devices = [(slot.node, gpu) for slot in slots for gpu in slot.gpus]
    members = [f"{slot.slot}@{slot.node}:{gpu}" for slot in slots for gpu in slot.gpus]
    return PlannedCommunicator(
        kind=kind,
        name=name,
        members=tuple(members),
        devices=tuple(devices),
        link=slowest_link(inventory, devices),
        bytes=nbytes,
    )


def memberships(found: Iterable[PlannedCommunicator]) -> Counter[Device]:
    """Count the communicators that each GPU is a member of."""
    return Counter(device for one in found if one.kind != "ipc" for device in set(one.devices))


def ports(
    config: RLConfig, inventory: Inventory, placed: Sequence[PlacedSlot], found: Sequence[PlannedCommunicator]
) -> tuple[list[Port], list[Problem]]:
    """Assign ports, counted up from the inventory's first on each node; also return what finds none left."""
    taken: dict[str, int] = {}
    listed, problems = [], []
    for node, what in _listeners(config, inventory, placed, found):
        port = inventory.ports.first + taken.get(node, 0)
        taken[node] = taken.get(node, 0) + 1
        if port <= inventory.ports.last:
            listed.append(Port(node, port, what))
    room = inventory.ports.last - inventory.ports.first + 1
    for node, needed in taken.items():
        if needed > room:
            message = f"{needed} ports are needed on {node}, and the inventory's [ports] has {room}"
            problems.append(Problem(("roles",), message, "widen ports.first to ports.last in the inventory"))
    order = {node.name: n for n, node in enumerate(inventory.nodes)}
    return sorted(listed, key=lambda port: (order[port.node], port.port)), problems


def _listeners(
    config: RLConfig, inventory: Inventory, placed: Sequence[PlacedSlot], found: Sequence[PlannedCommunicator]
) -> Iterator[tuple[str, str]]:
    head = inventory.nodes[0].name
    for what in ("head (nodes join here)", "registry", "queue"):
        yield head, what
    used = {slot.node for slot in placed} | {head}
    for node in inventory.nodes:
        if node.name in used:
            yield node.name, "payload"
    for slot in placed:
        table = config.roles[slot.kind]
        if isinstance(table, ShardedSettings) and slot.index == 0 and not is_pool(table):
            yield slot.node, f"{slot.kind} rendezvous"
        elif isinstance(table, EngineSettings) and table.engine == "sglang":
            yield slot.node, f"{slot.slot} HTTP"
            yield slot.node, f"{slot.slot} torch.distributed"
    for communicator in found:
        if communicator.kind == "weights":
            yield communicator.devices[0][0], f"weights {communicator.name} bootstrap"


def ranges(numbers: Iterable[int]) -> str:
    """Write ascending numbers in short: ``0-3, 8``; with a common step ``0-6 by 2``."""
    listed = sorted(numbers)
    steps = {b - a for a, b in pairwise(listed)}
    if len(listed) > 2 and len(steps) == 1 and steps != {1}:
        return f"{listed[0]}-{listed[-1]} by {steps.pop()}"
    found: list[list[int]] = []
    for number in listed:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in found)
