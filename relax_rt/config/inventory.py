"""nodes.toml: the machines that a run is planned for, whether or not they are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from relax_rt.config.problems import ConfigErrors, KeyPath, Problem, did_you_mean
from relax_rt.config.schema import Table
from relax_rt.config.source import read_source
from relax_rt.config.validation import validate

Gib = Annotated[float, Field(gt=0, le=1 << 20)]
Rate = Annotated[float, Field(gt=0, le=1e6)]
FIRST_PORT, LAST_PORT = 1024, 65_535


class GpuTable(Table):
    """A kind of GPU."""

    memory_gib: Gib
    """Memory that a process sees, as `nvidia-smi` reports it (an H100 sold with 80 GB: 79.6)."""
    nvlink_gb_s: Rate | None = None
    """Bandwidth of one GPU to the others of its nvlink group, one direction, GB/s."""
    pcie_gb_s: Rate = 25.0
    """Bandwidth between one GPU and the host, one direction, GB/s."""


class InterfaceTable(Table):
    """Network interfaces of one kind on a node."""

    name: str
    """As the system names it, `ib0` or `eth0`."""
    gbit_s: Rate
    """Bandwidth of each, one direction, Gbit/s."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """How many of them the node has."""
    rdma: bool = False
    """Whether NCCL moves data over it without the host's memory (InfiniBand, RoCE)."""


class InventoryNode(Table):
    """One machine."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """What plans and `roles.*.node` call it."""
    address: Annotated[str, Field(min_length=1, max_length=255)]
    """Host name or IP address at which the other nodes reach it."""
    cores: Annotated[int, Field(ge=1, le=4096)]
    """Cores that roles may use."""
    memory_gib: Gib
    """Memory of the host, GiB."""
    shm_gib: Gib | None = None
    """Size of /dev/shm; unset: half of the memory, as Linux has it."""
    gpu: str | None = None
    """Kind of its GPUs, a table of [gpu]."""
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of its GPUs."""
    nvlink: list[list[Annotated[int, Field(ge=0)]]] = Field(default_factory=list)
    """Groups of GPUs that reach each other over NVLink, by index."""
    interfaces: list[InterfaceTable] = Field(default_factory=list)
    """Its network."""

    @property
    def shared_memory_gib(self) -> float:
        """Size of /dev/shm, GiB."""
        return self.memory_gib / 2 if self.shm_gib is None else self.shm_gib

    def nvlink_group(self, gpu: int) -> frozenset[int]:
        """Return the GPUs that this one reaches over NVLink, itself included."""
        return next((frozenset(group) for group in self.nvlink if gpu in group), frozenset({gpu}))


class PortsTable(Table):
    """Ports that the run may listen on, on every node."""

    first: Annotated[int, Field(ge=FIRST_PORT, le=LAST_PORT)] = 29_400
    last: Annotated[int, Field(ge=FIRST_PORT, le=LAST_PORT)] = 29_999


class Inventory(BaseModel):
    """A whole nodes.toml. The first node is the head: registry and queue run there."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    nodes: Annotated[list[InventoryNode], Field(min_length=1, max_length=4096)]
    gpu: dict[str, GpuTable] = Field(default_factory=dict)
    ports: PortsTable = PortsTable()

    def kind_of(self, node: InventoryNode) -> GpuTable:
        """The kind of a node's GPUs; the node must have some."""
        assert node.gpu is not None
        return self.gpu[node.gpu]

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(node.gpus for node in self.nodes)


def load_inventory(path: Path) -> Inventory:
    """Read a nodes.toml and check it as a whole.

    Raises:
        ConfigErrors: everything that is wrong with it, each with its place.
        BadInput: the file cannot be read.
    """
    source, problems = read_source(path, ())
    found = validate(Inventory, source.data)
    problems += found if isinstance(found, list) else _check(found)
    if problems or isinstance(found, list):
        raise ConfigErrors(str(path), [source.locate(problem) for problem in problems])
    return found


def _check(inventory: Inventory) -> list[Problem]:
    problems = [*_same("name", inventory), *_same("address", inventory)]
    for index, node in enumerate(inventory.nodes):
        problems += _check_node(inventory, node, ("nodes", index))
    if inventory.ports.first >= inventory.ports.last:
        message = f"ports.first = {inventory.ports.first} is not below ports.last = {inventory.ports.last}"
        problems.append(Problem(("ports", "first"), message))
    return problems


def _same(key: str, inventory: Inventory) -> Iterator[Problem]:
    seen: dict[str, int] = {}
    for index, node in enumerate(inventory.nodes):
        value = str(getattr(node, key))
        first = seen.setdefault(value, index)
        if first != index:
            yield Problem(("nodes", index, key), f'nodes[{first}] has the same {key}, "{value}"')


def _check_node(inventory: Inventory, node: InventoryNode, path: KeyPath) -> Iterator[Problem]:
    if node.gpus and node.gpu is None:
        message = f"{node.name} has {node.gpus} GPUs, of what kind is not said"
        yield Problem((*path, "gpus"), message, 'gpu = "h100", with a table [gpu.h100] and its memory_gib')
    elif node.gpu is not None and node.gpu not in inventory.gpu:
        known = sorted(inventory.gpu)
        hint = did_you_mean(node.gpu, known) or f"add a table [gpu.{node.gpu}] with its memory_gib"
        yield Problem((*path, "gpu"), f'there is no table [gpu.{node.gpu}] for the kind "{node.gpu}"', hint)
    elif node.gpu is not None and node.nvlink and inventory.gpu[node.gpu].nvlink_gb_s is None:
        message = f"{node.name} has NVLink groups, and [gpu.{node.gpu}] no nvlink_gb_s"
        yield Problem((*path, "nvlink"), message, "give the bandwidth of one GPU in one direction")
    if node.shm_gib is not None and node.shm_gib > node.memory_gib:
        message = f"shm_gib = {node.shm_gib:g} is more than memory_gib = {node.memory_gib:g}"
        yield Problem((*path, "shm_gib"), message)
    yield from _check_nvlink(node, (*path, "nvlink"))
    names = [interface.name for interface in node.interfaces]
    for at, name in enumerate(names):
        if name in names[:at]:
            yield Problem((*path, "interfaces", at, "name"), f'{node.name} has another interface "{name}"')


def _check_nvlink(node: InventoryNode, path: KeyPath) -> Iterator[Problem]:
    seen: set[int] = set()
    for at, group in enumerate(node.nvlink):
        for within, gpu in enumerate(group):
            if gpu >= node.gpus:
                message = f"{node.name} has GPUs 0 to {node.gpus - 1}" if node.gpus else f"{node.name} has no GPU"
                yield Problem((*path, at, within), f"{message}, not {gpu}")
            elif gpu in seen:
                yield Problem((*path, at, within), f"GPU {gpu} stands in the NVLink groups twice")
            seen.add(gpu)
