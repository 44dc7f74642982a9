"""Reads the golden tables: what each rank of a Megatron-Core gang holds, written down apart from the mapping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

FOLDER = Path(__file__).parent / "golden"
Layers = Literal["local", "transformer_engine"]
Names = Mapping[str, int]
"""Numbers for the places in a name."""


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The local shape, and the checkpoint's tensors it has rows of, in the order of the rows."""

    shape: tuple[int, ...]
    holds: tuple[str, ...]


class Naming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters by Megatron's name, by where they are."""

    first_stage: dict[str, Parameter]
    layer: dict[str, Parameter]
    expert: dict[str, Parameter]
    last_stage: dict[str, Parameter]


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Its ranks, its first and its last layer."""

    ranks: tuple[int, ...]
    layers: tuple[int, int]


class Golden(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model over one gang. Attributes: experts: the first and last one of each rank; none without experts."""

    about: str
    config: dict[str, Any]
    division: dict[str, int]
    stages: tuple[Stage, ...]
    experts: tuple[tuple[int, int], ...]
    tensors: dict[str, tuple[int, ...]]
    local: Naming
    transformer_engine: Naming

    def held(self, layers: Layers, rank: int) -> dict[str, Parameter]:
        """All that a rank holds."""
        naming = self.local if layers == "local" else self.transformer_engine
        stage = next(stage for stage in self.stages if rank in stage.ranks)
        first, last = stage.layers
        found = dict(naming.first_stage) if stage is self.stages[0] else {}
        for layer in range(first, last + 1):
            at = {"layer": layer, "here": layer - first}
            found |= _numbered(naming.layer, at)
            for expert in self._experts(rank):
                found |= _numbered(naming.expert, {**at, "expert": expert, "mine": expert - self.experts[rank][0]})
        return found | naming.last_stage if stage is self.stages[-1] else found

    def checkpoint(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor of the checkpoint and its shape."""
        layers = range(self.stages[0].layers[0], self.stages[-1].layers[1] + 1)
        experts = range(self.experts[0][0], self.experts[-1][1] + 1) if self.experts else range(0)
        for name, shape in self.tensors.items():
            for layer in layers if "{layer}" in name else (0,):
                for expert in experts if "{expert}" in name else (0,):
                    yield _at(name, {"layer": layer, "expert": expert}), shape

    def _experts(self, rank: int) -> range:
        return range(self.experts[rank][0], self.experts[rank][1] + 1) if self.experts else range(0)


def read(name: str) -> Golden:
    """Raises: msgspec.ValidationError: the file is not such a table."""
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=Golden)


def _at(name: str, numbers: Names) -> str:
    return name.format(**numbers)


def _numbered(parameters: Mapping[str, Parameter], numbers: Names) -> dict[str, Parameter]:
    return {
        _at(name, numbers): Parameter(one.shape, tuple(_at(held, numbers) for held in one.holds))
        for name, one in parameters.items()
    }
