"""How roles divide their models over GPUs: each role's model, the sizes of gangs, and what does not divide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import RoleSettings
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.models.parallel import Group, Sizes, groups
from relax_rt.roles.models.settings import ShardedSettings
from relax_rt.roles.models.shape import ModelShape, read_shape
from relax_rt.roles.rewards.genrm.settings import GenrmSettings
from relax_rt.roles.rollout.engines.settings import EngineSettings
from relax_rt.roles.training.backend.settings import ReferenceSettings
from relax_rt.transport.rpc.errors import RelaxError


def own_model(table: RoleSettings | None) -> str | None:
    """Return a teacher's or judge's model as its table names it; None: the policy's."""
    return table.model if isinstance(table, ReferenceSettings | GenrmSettings) else None


def is_pool(table: ShardedSettings) -> bool:
    """Whether each slot has the whole model and no rank knows of another: references of the torch backend."""
    return isinstance(table, ReferenceSettings) and table.backend == "torch"


class Shapes:
    """The shape of each role's model.

    Args:
        policy: of model.path.

    Attributes:
        unknown: by role, why its shape is not known: its memory is not planned then.
    """

    def __init__(self, config: RLConfig, policy: ModelShape) -> None:
        self._policy = policy
        self._own: dict[str, ModelShape] = {}
        self.unknown: dict[str, str] = {}
        for kind, table in config.roles.items():
            if (path := own_model(table)) is None:
                continue
            folder = Path(path).expanduser()
            try:
                self._own[kind] = read_shape(folder if folder.is_absolute() else Path(config.config_dir) / folder)
            except RelaxError as error:
                self.unknown[kind] = f"{error.what}: {error.why}" if error.why else error.what
        if "critic" in config.roles:
            self._own["critic"] = msgspec.structs.replace(policy, value_head=True, tied=False)

    def of(self, kind: str) -> ModelShape | None:
        """Return the shape of a role's model; None if it is not known."""
        return None if kind in self.unknown else self._own.get(kind, self._policy)


def gang_sizes(table: ShardedSettings) -> Sizes:
    """Return the sizes of a gang by its settings; of a pool, those of one slot."""
    if is_pool(table):
        return Sizes(world=1)
    if table.backend == "torch":
        return Sizes(world=table.count)
    return Sizes(
        world=table.count,
        tensor=table.tensor_parallel,
        pipeline=table.pipeline_parallel,
        context=table.context_parallel,
        expert=table.expert_parallel,
        expert_tensor=table.expert_tensor_parallel,
    )


def gang_groups(table: ShardedSettings, shape: ModelShape) -> list[Group]:
    """Return the groups of ranks of a gang."""
    return groups(gang_sizes(table), tied=shape.tied, experts=bool(shape.experts))


def divisible(config: RLConfig) -> Iterator[Problem]:
    """Report sizes that do not divide each other, without reading the model."""
    for kind, table in config.roles.items():
        path = ("roles", kind)
        if isinstance(table, ShardedSettings):
            yield from _gang_division(table, path)
            yield from _device(table, path)
        elif isinstance(table, EngineSettings) and table.engine == "embedded":
            for key in ("tensor_parallel", "data_parallel", "expert_parallel"):
                if getattr(table, key) > 1:
                    message = f"{key} = {getattr(table, key)}: the embedded engine uses one GPU at most"
                    yield Problem((*path, key), message, 'engine = "sglang"')
        elif isinstance(table, EngineSettings) and table.tensor_parallel % table.expert_parallel:
            message = (
                f"expert_parallel = {table.expert_parallel} does not divide tensor_parallel = {table.tensor_parallel}"
            )
            yield Problem((*path, "expert_parallel"), message, "experts are dealt out over a replica's own GPUs")


def _device(table: ShardedSettings, path: KeyPath) -> Iterator[Problem]:
    """Report devices that do not fit the GPUs that the slots are given."""
    if 0 < table.gpus < 1 < table.count and not is_pool(table):
        message = f"gpus = {table.gpus:g}: {table.count} ranks of one gang that share a GPU; NCCL wants one for each"
        yield Problem((*path, "gpus"), message, "set gpus = 1, or count = 1")
    place = (*path, "device")
    if table.backend == "megatron":
        if table.device != "auto":
            message = f'device = "{table.device}": megatron takes a GPU where torch sees one, else the CPU'
            yield Problem(place, message, 'leave it out, or set backend = "torch"', at="key")
        return
    if table.device == "cuda" and not table.gpus:
        yield Problem(place, 'device = "cuda", and gpus gives its slots none', "set gpus = 1")
    if table.device == "cpu" and table.gpus:
        message = f'device = "cpu" leaves the GPU unused that gpus = {table.gpus:g} keeps from others'
        yield Problem(place, message, "leave one of them out")


def _gang_division(table: ShardedSettings, path: KeyPath) -> Iterator[Problem]:
    sizes = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "expert_tensor_parallel")
    if table.backend == "torch":
        for key in sizes:
            if getattr(table, key) > 1:
                message = f"{key} = {getattr(table, key)}: the torch backend divides parameters over data only"
                yield Problem((*path, key), message, 'backend = "megatron"')
        return
    for over, keys in (("the model", sizes[:3]), ("the experts", (*sizes[3:], "pipeline_parallel"))):
        ranks = math.prod(getattr(table, key) for key in keys)
        if table.count % ranks:
            shown = " x ".join(f"{key} {getattr(table, key)}" for key in keys)
            message = f"count = {table.count} ranks do not divide into replicas of {over}: {shown} = {ranks}"
            nearest = max(1, round(table.count / ranks)) * ranks
            yield Problem((*path, "count"), message, f"set count to a multiple of {ranks}, as {nearest}")
    if table.sequence_parallel and table.tensor_parallel == 1:
        message = "sequence_parallel cuts what lies between tensor-parallel layers, and tensor_parallel is 1"
        yield Problem((*path, "sequence_parallel"), message, "leave it out")


def divides_model(config: RLConfig, shape: ModelShape) -> Iterator[Problem]:
    """Report sizes that do not divide the model's heads, layers, widths or experts."""
    shapes = Shapes(config, shape)
    for kind, table in config.roles.items():
        path, own = ("roles", kind), shapes.of(kind)
        if own is None:
            continue
        if isinstance(table, ShardedSettings) and table.backend == "megatron":
            yield from _gang_model(table, own, path)
        elif isinstance(table, EngineSettings):
            yield from _engine_model(table, own, path)


def _gang_model(table: ShardedSettings, shape: ModelShape, path: KeyPath) -> Iterator[Problem]:
    tensor = table.tensor_parallel
    wanted = [
        ("tensor_parallel", tensor, "attention heads", shape.heads),
        ("tensor_parallel", tensor, "key-value heads", shape.kv_heads),
        ("pipeline_parallel", table.pipeline_parallel, "layers", shape.layers),
    ]
    if not all(shape.sparse):
        wanted.append(("tensor_parallel", tensor, "columns of an MLP", shape.ffn))
    if shape.experts:
        wanted.append(("expert_parallel", table.expert_parallel, "experts", shape.experts))
        wanted.append(
            ("expert_tensor_parallel", table.expert_tensor_parallel, "columns of an expert", shape.expert_ffn)
        )
    yield from _indivisible(wanted, path)
    for key in () if shape.experts else ("expert_parallel", "expert_tensor_parallel"):
        if getattr(table, key) > 1:
            yield Problem((*path, key), f"{key} = {getattr(table, key)}, and the model has no experts", "leave it out")
    if shape.experts and tensor > 1 and table.sequence_parallel is False:
        message = "sequence_parallel = false with experts and tensor_parallel: each rank would deal out every token"
        yield Problem((*path, "sequence_parallel"), message, "leave it out")


def _engine_model(table: EngineSettings, shape: ModelShape, path: KeyPath) -> Iterator[Problem]:
    tensor = table.tensor_parallel
    yield from _indivisible([("tensor_parallel", tensor, "attention heads", shape.heads)], path)
    if tensor % shape.kv_heads and shape.kv_heads % tensor:
        message = (
            f"tensor_parallel = {tensor} and the model's {shape.kv_heads} key-value heads do not divide each other"
        )
        yield Problem((*path, "tensor_parallel"), message, f"use one of: {_divisors(shape.heads)}")
    expert = table.expert_parallel
    if expert > 1 and not shape.experts:
        yield Problem(
            (*path, "expert_parallel"), f"expert_parallel = {expert}, and the model has no experts", "leave it out"
        )
    elif shape.experts and tensor % expert == 0:
        inner = tensor // expert
        wanted = [("expert_parallel", expert, "experts", shape.experts)]
        if inner > 1:
            wanted.append(("tensor_parallel", inner, "columns of an expert", shape.expert_ffn))
        yield from _indivisible(wanted, path)


def _indivisible(wanted: list[tuple[str, int, str, int]], path: KeyPath) -> Iterator[Problem]:
    for key, size, what, count in wanted:
        if count % size:
            message = f"{key} = {size} does not divide the model's {count} {what}"
            yield Problem((*path, key), message, f"use one of: {_divisors(count)}")


def _divisors(count: int) -> str:
    found = [n for n in range(1, count + 1) if count % n == 0]
    return ", ".join(map(str, found[:8])) + (", …" if len(found) > 8 else "")
