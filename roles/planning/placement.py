"""Placement: which slot runs on which node and GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from relax_rt.config.inventory import Inventory, InventoryNode
from relax_rt.config.problems import KeyPath, Problem, did_you_mean
from relax_rt.config.schema import RoleSettings
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.models.settings import ShardedSettings
from relax_rt.roles.rollout.engines.settings import EngineSettings

GPU_ORDER = ("trainer", "critic", "reference", "rollout", "evaluator")
HEAD_ROLES = ("registry", "queue")
"""Roles that run on the head, the inventory's first node."""
AGENT_CORES = 1
"""Cores that each node keeps for its agent."""
SHARE = 1e-6
"""Shares of a GPU closer than this are the same."""


class PlacedSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A slot and where it runs.

    Attributes:
        gpus: indices on the node. share: of each of them, below 1 only for one GPU.
        cores: that its threads take.
    """

    slot: str
    kind: str
    index: int
    node: str
    gpus: tuple[int, ...]
    share: float
    cores: int


class GpuDemand(msgspec.Struct, frozen=True):
    """Slots that are placed together: `chunks` sets of `size` GPUs, each set within one NVLink group, all on one
    node. A tensor-parallel group of a gang is one such set; an engine has one a replica."""

    kind: str
    first: int
    slots: int
    chunks: int
    size: int
    share: float
    pin: str | None


def gpus_a_slot(table: RoleSettings) -> float:
    """GPUs of one slot of a role: as given, else as its parallelism says."""
    if "gpus" not in table.model_fields_set:
        if isinstance(table, EngineSettings) and table.engine == "sglang":
            return table.tensor_parallel * table.data_parallel
        if isinstance(table, ShardedSettings) and table.backend == "megatron":
            return 1
    return table.gpus


def check_gpus(config: RLConfig, inventory: Inventory) -> Iterator[Problem]:
    """Report impossible numbers of GPUs and unknown nodes."""
    names = [node.name for node in inventory.nodes]
    for kind, table in config.roles.items():
        path: KeyPath = ("roles", kind)
        if table.node is not None and table.node not in names:
            hint = did_you_mean(table.node, names) or f"nodes: {', '.join(names)}"
            yield Problem((*path, "node"), f'the inventory has no node "{table.node}"', hint)
        given = gpus_a_slot(table)
        if given > 1 and given != int(given):
            yield Problem((*path, "gpus"), f"gpus = {given:g}: above one, whole GPUs are given out")
        elif isinstance(table, ShardedSettings) and given > 1:
            yield Problem((*path, "gpus"), f"gpus = {given:g}: each slot of {kind} is one rank, with one GPU at most")
        elif isinstance(table, EngineSettings) and table.engine == "sglang":
            wanted = table.tensor_parallel * table.data_parallel
            if given not in (0, wanted) and not (wanted == 1 and given < 1):
                message = f"gpus = {given:g}, and tensor_parallel x data_parallel = {wanted}"
                yield Problem((*path, "gpus"), message, "leave gpus out")
        elif isinstance(table, EngineSettings) and given > 1:
            yield Problem((*path, "gpus"), f"gpus = {given:g}: the embedded engine uses one GPU at most")


def place(config: RLConfig, inventory: Inventory) -> tuple[list[PlacedSlot], list[Problem]]:
    """Place every slot on a node, and report what found no place. No GPU or core is given out twice."""
    demands = list(_demands(config))
    board = _FreeCapacity(inventory)
    placed, left = board.take_all(demands)
    if left:
        # The order of start is the order people expect; larger sets first leaves fewer gaps.
        other = _FreeCapacity(inventory)
        again, still = other.take_all(sorted(demands, key=lambda d: -d.size * d.chunks))
        if not still:
            board, placed, left = other, again, []
    problems = _no_room(config, inventory, board, demands, left)
    for slot in placed:
        board.cores[slot.node] -= config.roles[slot.kind].threads
    placed += _on_cores(config, board)
    problems += _cores(config, inventory, placed)
    order = {kind: n for n, kind in enumerate([*HEAD_ROLES, *GPU_ORDER])}
    placed.sort(key=lambda slot: (order.get(slot.kind, len(order)), slot.kind, slot.index))
    return placed, problems


def _demands(config: RLConfig) -> Iterator[GpuDemand]:
    kinds = [*GPU_ORDER, *(kind for kind in config.roles if kind not in GPU_ORDER)]
    for kind in kinds:
        table = config.roles.get(kind)
        if table is None or not table.count or not (each := gpus_a_slot(table)):
            continue
        if isinstance(table, ShardedSettings):
            together = math.lcm(table.tensor_parallel, table.expert_tensor_parallel)
            together = together if table.count % together == 0 else 1
            for first in range(0, table.count, together):
                yield GpuDemand(kind, first, together, 1, together, min(each, 1.0), table.node)
            continue
        chunks = table.data_parallel if isinstance(table, EngineSettings) and each > 1 else 1
        for index in range(table.count):
            yield GpuDemand(kind, index, 1, chunks, max(1, int(each) // chunks), min(each, 1.0), table.node)


class _FreeCapacity:
    """GPUs and cores that are still free."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.free = {(node.name, gpu): 1.0 for node in inventory.nodes for gpu in range(node.gpus)}
        self.cores = {node.name: node.cores - AGENT_CORES for node in inventory.nodes}

    def take_all(self, demands: Sequence[GpuDemand]) -> tuple[list[PlacedSlot], list[GpuDemand]]:
        placed: list[PlacedSlot] = []
        left = []
        for demand in demands:
            found = self._take(demand)
            if found is None:
                left.append(demand)
                continue
            node, gpus = found
            each = len(gpus) // demand.slots
            for n in range(demand.slots):
                mine = gpus[n * each : (n + 1) * each]
                index = demand.first + n
                placed.append(
                    PlacedSlot(
                        slot=f"{demand.kind}/{index}",
                        kind=demand.kind,
                        index=index,
                        node=node,
                        gpus=mine,
                        share=demand.share,
                        cores=0,
                    )
                )
        return placed, left

    def _take(self, demand: GpuDemand) -> tuple[str, tuple[int, ...]] | None:
        for node in self.inventory.nodes:
            if demand.pin not in (None, node.name):
                continue
            chosen = self._sets(node, demand)
            if chosen is None:
                continue
            for gpu in chosen:
                self.free[node.name, gpu] -= demand.share
            return node.name, chosen
        return None

    def _sets(self, node: InventoryNode, demand: GpuDemand) -> tuple[int, ...] | None:
        """GPUs of a node for every set of the demand; None if one of them finds no place."""
        taken: list[int] = []
        for _ in range(demand.chunks):
            found = next((s for group in _linked(node) if (s := self._set(node, group, demand, taken))), None)
            if found is None:
                return None
            taken += found
        return tuple(taken)

    def _set(
        self, node: InventoryNode, group: Sequence[int], demand: GpuDemand, taken: Sequence[int]
    ) -> list[int] | None:
        room = [gpu for gpu in group if gpu not in taken and self.free[node.name, gpu] >= demand.share - SHARE]
        if demand.share < 1:
            # A GPU that is already shared first, so that whole ones stay whole.
            room.sort(key=lambda gpu: (self.free[node.name, gpu], gpu))
        return room[: demand.size] if len(room) >= demand.size else None


def _linked(node: InventoryNode) -> list[list[int]]:
    """The GPUs of a node by NVLink group; all together if it has none."""
    if not node.nvlink:
        return [list(range(node.gpus))]
    grouped = {gpu for group in node.nvlink for gpu in group}
    return [*(sorted(group) for group in node.nvlink), *([gpu] for gpu in range(node.gpus) if gpu not in grouped)]


def _no_room(
    config: RLConfig,
    inventory: Inventory,
    board: _FreeCapacity,
    demands: Sequence[GpuDemand],
    left: Sequence[GpuDemand],
) -> list[Problem]:
    if not left:
        return []
    wanted: dict[str, float] = {}
    for demand in demands:
        wanted[demand.kind] = wanted.get(demand.kind, 0) + demand.chunks * demand.size * demand.share
    total = sum(wanted.values())
    parts = ", ".join(f"{kind} {amount:g}" for kind, amount in wanted.items())
    have = ", ".join(f"{node.name} {node.gpus}" for node in inventory.nodes)
    problems = []
    if total > inventory.gpus:
        message = f"the run needs {total:g} GPUs ({parts}), the inventory has {inventory.gpus} ({have})"
        kind = left[0].kind
        problems.append(Problem(("roles", kind, "count"), message, "lower count or the parallelism of a role"))
    for kind in dict.fromkeys(demand.kind for demand in left):
        demand = next(demand for demand in left if demand.kind == kind)
        pinned = next((node for node in inventory.nodes if node.name == demand.pin), None)
        nodes = [pinned] if pinned else inventory.nodes
        largest = max((len(group) for node in nodes for group in _linked(node)), default=0)
        where = f"node {demand.pin}" if demand.pin else "one node"
        if demand.size > largest:
            key = "tensor_parallel" if isinstance(config.roles[kind], ShardedSettings | EngineSettings) else "gpus"
            message = f"{kind} cuts its layers over {demand.size} GPUs, and no NVLink group has more than {largest}"
            problems.append(Problem(("roles", kind, key), message, f"lower {key} to {largest} or less"))
        elif total <= inventory.gpus or demand.pin:
            sets = f"{demand.chunks} sets of {demand.size} GPUs" if demand.chunks > 1 else f"{demand.size} GPUs"
            free = "; ".join(f"{node.name} {_free(board, node)}" for node in nodes)
            message = f"{kind}/{demand.first} needs {sets} of one NVLink group on {where}; free are: {free}"
            hint = "lower its parallelism, or that of the role that splits the node"
            problems.append(Problem(("roles", kind, "count"), message, hint))
    return problems


def _free(board: _FreeCapacity, node: InventoryNode) -> str:
    free = [gpu for gpu in range(node.gpus) if board.free[node.name, gpu] > SHARE]
    return f"GPU {', '.join(map(str, free))}" if free else "none"


def _on_cores(config: RLConfig, board: _FreeCapacity) -> Iterator[PlacedSlot]:
    """Place roles without a GPU: the head's own on the head, the others where most cores are free."""
    nodes = board.inventory.nodes
    for kind, table in config.roles.items():
        if gpus_a_slot(table) or not table.count:
            continue
        for index in range(table.count):
            node = nodes[0].name if kind in HEAD_ROLES else table.node
            if node is None or node not in board.cores:
                node = max(nodes, key=lambda found: board.cores[found.name]).name
            board.cores[node] -= table.threads
            yield PlacedSlot(
                slot=f"{kind}/{index}", kind=kind, index=index, node=node, gpus=(), share=0.0, cores=table.threads
            )


def _cores(config: RLConfig, inventory: Inventory, placed: list[PlacedSlot]) -> list[Problem]:
    """Fill in the cores of slots with GPUs, and report nodes without enough cores."""
    problems = []
    for at, slot in enumerate(placed):
        placed[at] = msgspec.structs.replace(slot, cores=config.roles[slot.kind].threads)
    for node in inventory.nodes:
        here = [slot for slot in placed if slot.node == node.name]
        needed = AGENT_CORES + sum(slot.cores for slot in here)
        if needed <= node.cores:
            continue
        by_kind: dict[str, int] = {}
        for slot in here:
            by_kind[slot.kind] = by_kind.get(slot.kind, 0) + slot.cores
        most = max(by_kind, key=lambda kind: by_kind[kind])
        parts = ", ".join(f"{kind} {cores}" for kind, cores in by_kind.items())
        message = f"{node.name} has {node.cores} cores, and {needed} are needed: agent {AGENT_CORES}, {parts}"
        problems.append(Problem(("roles", most, "threads"), message, "lower threads or count"))
    return problems
