"""Ranks of a training gang and the groups they form, in the order of Megatron-Core ("tp-cp-ep-dp-pp")."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

ORDER = ("tensor", "context", "expert", "data", "pipeline")
"""Fastest varying first: neighbouring ranks share a tensor-parallel group, pipeline stages lie farthest apart."""


class ParallelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """How a gang of `world` ranks is divided. Dense layers are cut by tensor x context x data x pipeline, experts by
    expert_tensor x expert x expert data x pipeline: the same ranks, divided a second way."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def model_ranks(self) -> int:
        """Ranks that hold the dense layers of one replica: the world must be a multiple."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold the experts of one replica: the world must be a multiple."""
        return self.expert_tensor * self.expert * self.pipeline

    @property
    def data(self) -> int:
        """Replicas of the dense layers, each with samples of its own."""
        return self.world // self.model_ranks

    @property
    def expert_data(self) -> int:
        """Replicas of the experts."""
        return self.world // self.expert_ranks

    @property
    def dense(self) -> dict[str, int]:
        """Sizes by kind for the dense layers, fastest varying first."""
        return {"tensor": self.tensor, "context": self.context, "data": self.data, "pipeline": self.pipeline}

    @property
    def experts(self) -> dict[str, int]:
        """Sizes by kind for the experts, fastest varying first."""
        return {
            "tensor": self.expert_tensor,
            "expert": self.expert,
            "data": self.expert_data,
            "pipeline": self.pipeline,
        }

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return coordinates(rank, self.dense)["pipeline"]


class RankGroup(msgspec.Struct, frozen=True):
    """Ranks that call collectives together."""

    kind: str
    ranks: tuple[int, ...]


def coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the rank as a number in mixed radix: its place along each kind, the first kind varying fastest."""
    found = {}
    for kind, size in sizes.items():
        rank, found[kind] = divmod(rank, size)
    return found


def rank_groups(sizes: Mapping[str, int], *kinds: str) -> list[tuple[int, ...]]:
    """Return groups of ranks that differ only along `kinds`, ascending; together they hold every rank exactly once."""
    together: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        place = coordinates(rank, sizes)
        shared = tuple(at for kind, at in place.items() if kind not in kinds)
        together.setdefault(shared, []).append(rank)
    return sorted(tuple(ranks) for ranks in together.values())


def groups(sizes: ParallelSizes, *, tied: bool = False, experts: bool = False) -> list[RankGroup]:
    """Return the groups of a gang with more than one member each, in the kinds that training calls collectives in.

    Args:
        tied: input and output embedding are one tensor, whose gradients the first and last stage add up.
        experts: the model has experts.
    """
    dense = sizes.dense
    kinds: list[tuple[str, list[tuple[int, ...]]]] = [
        ("tensor", rank_groups(dense, "tensor")),
        ("context", rank_groups(dense, "context")),
        ("data", rank_groups(dense, "data")),
        ("data+context", rank_groups(dense, "data", "context") if sizes.context > 1 else []),
        ("pipeline", rank_groups(dense, "pipeline")),
    ]
    if tied and sizes.pipeline > 1:
        kinds.append(("embedding", [(ranks[0], ranks[-1]) for ranks in rank_groups(dense, "pipeline")]))
    if experts:
        kinds += [
            ("expert", rank_groups(sizes.experts, "expert")),
            ("expert tensor", rank_groups(sizes.experts, "tensor")),
            ("expert data", rank_groups(sizes.experts, "data")),
        ]
    kinds.append(("world", [tuple(range(sizes.world))]))
    return [RankGroup(kind, ranks) for kind, found in kinds for ranks in found if len(ranks) > 1]


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """Return the layers of a pipeline stage; all stages have the same number."""
    each = layers // stages
    return range(stage * each, (stage + 1) * each)
