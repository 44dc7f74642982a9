"""What a rank's optimizer holds: Adam's moments and master weights of the parts of parameters that it updates."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from relax_rt.roles.training.blocks import MASTER, MOMENTS, OptimizerFiles, Read, key_of
from relax_rt.roles.training.megatron.weights import Place, blocks_of, fill
from relax_rt.roles.training.resharding.layout import Local


class Owned(NamedTuple):
    """Elements [start, start + n) of a parameter, as this rank updates them.

    Attributes:
        master: what the optimizer updates, of n elements. state: Adam's; empty before the first update.
        separate: master is a float32 copy, and not the parameter itself.
    """

    place: Place
    start: int
    master: torch.Tensor
    state: dict[str, Any]
    separate: bool


class OptimizerState:
    """The state of a chain of Megatron's optimizers, by parameters.

    Args:
        optimizer: Megatron's ChainedOptimizer. parameters: this rank's, by place.
    """

    def __init__(self, optimizer: Any, parameters: Mapping[Place, torch.nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters.values())
        self._places = {id(parameter): place for place, parameter in parameters.items()}
        self._distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer

    def owned(self) -> Iterator[Owned]:
        """Everything that this rank updates."""
        for optimizer in self._optimizer.chained_optimizers:
            if getattr(optimizer, "is_stub_optimizer", False):
                continue
            parts = self._divided(optimizer) if isinstance(optimizer, self._distributed) else self._whole(optimizer)
            for parameter, start, master in parts:
                place = self._places[id(parameter)]
                separate = parameter.dtype != master.dtype
                yield Owned(place, start, master.detach(), optimizer.optimizer.state[master], separate)

    def _divided(self, optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int, torch.Tensor]]:
        """A distributed optimizer has a range of each parameter's elements, its replicas the others."""
        for parameter in optimizer.model_param_gbuf_map:
            group, number = optimizer.model_param_group_index_map[parameter]
            at = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, at.start, optimizer.optimizer.param_groups[group]["params"][number]

    def _whole(self, optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int, torch.Tensor]]:
        of = {id(getattr(p, "main_param", p)): p for p in self._parameters}
        for group in optimizer.optimizer.param_groups:
            for master in group["params"]:
                yield of[id(master)], 0, master

    @property
    def steps(self) -> int:
        """Updates that Adam's moments have seen."""
        counts = [int(part.state["step"]) for part in self.owned() if "step" in part.state]
        for optimizer in self._optimizer.chained_optimizers:
            counts += [int(group.get("step", 0)) for group in optimizer.optimizer.param_groups]
        return max(counts, default=0)

    def copy(self, held: Mapping[Place, Local], mine: frozenset[Place], into: dict[str, torch.Tensor]) -> None:
        """Copy the state aside as blocks of Hugging Face tensors, on the CPU.

        Args:
            mine: the places that this rank writes; others hold the same of the rest.
            into: by key; tensors that are there are written over, for fresh pages cost more than the copy.
        """
        for part in self.owned():
            if part.place not in mine:
                continue
            kinds = {kind: part.state[kind].view(-1) for kind in MOMENTS if kind in part.state}
            if part.separate:
                kinds[MASTER] = part.master.view(-1)
            for at, block in blocks_of(held[part.place], part.start, part.start + part.master.numel()):
                for kind, values in kinds.items():
                    key, end = key_of(kind, block), at + block.rows * block.columns
                    found = values[at:end].view(block.rows, block.columns)
                    if key in into:
                        into[key].copy_(found)
                    else:
                        into[key] = found.detach().to("cpu", copy=True)

    def masters(self, held: Mapping[Place, Local], read: Read) -> None:
        """Set the float32 copies of bfloat16 parameters."""
        for part in self.owned():
            if part.separate:
                fill(part.master.view(-1), held[part.place], read, part.start)

    def check(self, held: Mapping[Place, Local], files: OptimizerFiles) -> None:
        """See that a checkpoint has all that `masters` and `take` read of it. Changes nothing.

        Raises:
            Refused: it lacks some of it.
        """
        moments = [kind for kind in MOMENTS if files.has(kind)]
        for part in self.owned():
            kinds = [*moments, *([MASTER] if part.separate and files.has(MASTER) else [])]
            for _, block in blocks_of(held[part.place], part.start, part.start + part.master.numel()):
                for kind in kinds:
                    files.check(kind, block)

    def take(self, held: Mapping[Place, Local], files: OptimizerFiles) -> None:
        """Set moments and their count from a checkpoint; without any there, the state is as before the first update.

        Raises:
            Refused: the checkpoint lacks some of it.
        """
        moments = [kind for kind in MOMENTS if files.has(kind)]
        for part in self.owned():
            part.state.clear()
            for kind in moments:
                part.state[kind] = torch.zeros_like(part.master)
                fill(part.state[kind].view(-1), held[part.place], files.reader(kind), part.start)
            if moments and self._counts_by_parameter:
                # A count of its own for each: shared, it would be raised once for every parameter.
                part.state["step"] = torch.tensor(float(files.steps))
        for optimizer in self._optimizer.chained_optimizers:
            for group in optimizer.optimizer.param_groups:
                if "step" in group or (moments and not self._counts_by_parameter):
                    group["step"] = files.steps

    def forget(self) -> None:
        """No moments any more: the state is as before the first update."""
        for part in self.owned():
            part.state.clear()
        for optimizer in self._optimizer.chained_optimizers:
            for group in optimizer.optimizer.param_groups:
                if "step" in group:
                    group["step"] = 0

    @property
    def _counts_by_parameter(self) -> bool:
        """torch's Adam counts updates for each parameter, TransformerEngine's for each group of them."""
        return any(isinstance(o.optimizer, torch.optim.Adam) for o in self._optimizer.chained_optimizers)
