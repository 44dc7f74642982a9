"""Lets Megatron-Core make the model of its TransformerEngine specification where TransformerEngine is not installed.

Which layers there are, how they are nested and cut is Megatron's own doing; the four modules of TransformerEngine that
it takes them from are stood in for, as far as their parameters go: names and shapes are those that
transformer_engine/pytorch/module/{linear,layernorm_linear,grouped_linear,rmsnorm}.py register. Nothing can be computed.

``python transformer_engine_stand_in.py CONFIG_FOLDER SIZES RANK…``: as tests/engines/megatron_gang/full_size.py, with
these layers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn import Module, Parameter

NAME, VERSION = "transformer_engine", "2.9.0"


def local_size(options: dict[str, Any]) -> tuple[int, int]:
    """Outputs and inputs of a rank's part of a linear layer."""
    inputs, outputs, ranks = options["in_features"], options["out_features"], options["tp_size"]
    mode = options["parallel_mode"]
    return outputs // (ranks if mode == "column" else 1), inputs // (ranks if mode == "row" else 1)


class Linear(Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        assert not options["bias"]
        self.weight = Parameter(torch.empty(*local_size(options)))


class LayerNormLinear(Linear):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        assert options["normalization"] == "RMSNorm"
        self.layer_norm_weight = Parameter(torch.empty(options["in_features"]))


class GroupedLinear(Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        assert not options["bias"]
        for number in range(options["num_gemms"]):
            self.register_parameter(f"weight{number}", Parameter(torch.empty(*local_size(options))))


class RMSNorm(Module):
    def __init__(self, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(hidden_size))


class Nothing(Module):
    """What Megatron takes from TransformerEngine besides; it has no parameters."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class Anything(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name) if name[0].islower() else type(name, (Nothing,), {})

    def __call__(self, *_: Any, **__: Any) -> tuple[None, None]:
        """As its context of offloading to the CPU, which is off."""
        return None, None


class Finder(MetaPathFinder, Loader):
    """Imports all of TransformerEngine's modules."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == NAME else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__version__"] = VERSION
        if module.__name__ == f"{NAME}.pytorch":
            for kind in (Linear, LayerNormLinear, GroupedLinear, RMSNorm):
                setattr(module, kind.__name__, kind)


def main() -> None:
    sys.meta_path.insert(0, Finder())
    sys.path.append(str(Path(__file__).parents[3] / "engines" / "megatron_gang"))
    full_size: Any = import_module("full_size")
    model: Any = import_module("relax_rt.roles.training.megatron.model")
    full_size.transformer_config = lambda of, table, _: model.transformer_config(of, table, NAME)
    full_size.build = lambda of, config, sizes, _: model.build(of, config, sizes, NAME)
    full_size.main()


if __name__ == "__main__":
    main()
