"""A rank's parameters and optimizer state (Adam's moments, master weights) as blocks of Hugging Face tensors."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from relax_rt.roles.models.shape import ModelShape
from relax_rt.roles.training.checkpoints.optimizer_state import (
    MASTER,
    MOMENTS,
    OptimizerFiles,
    ReadBlock,
    TensorBlock,
    TensorFiles,
    block_key,
)
from relax_rt.roles.training.megatron.layout import LocalParameter, RowRun, hf_tensors
from relax_rt.transport.rpc.errors import Refused


class OwnedElements(NamedTuple):
    """Elements [start, start + n) of a parameter, as this rank updates them.

    Attributes:
        master: what the optimizer updates, of n elements. state: Adam's; empty before the first update.
        separate: master is a float32 copy, and not the parameter itself.
    """

    place: ParameterKey
    start: int
    master: torch.Tensor
    state: dict[str, Any]
    separate: bool


class OptimizerState:
    """The state of a chain of Megatron's optimizers, by parameters.

    Args:
        optimizer: Megatron's ChainedOptimizer. parameters: this rank's, by place.
    """

    def __init__(self, optimizer: Any, parameters: Mapping[ParameterKey, torch.nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters.values())
        self._places = {id(parameter): place for place, parameter in parameters.items()}
        self._distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer

    def owned(self) -> Iterator[OwnedElements]:
        """Everything that this rank updates."""
        for optimizer in self._optimizer.chained_optimizers:
            if getattr(optimizer, "is_stub_optimizer", False):
                continue
            parts = self._divided(optimizer) if isinstance(optimizer, self._distributed) else self._whole(optimizer)
            for parameter, start, master in parts:
                place = self._places[id(parameter)]
                separate = parameter.dtype != master.dtype
                yield OwnedElements(place, start, master.detach(), optimizer.optimizer.state[master], separate)

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

    def copy(
        self, held: Mapping[ParameterKey, LocalParameter], mine: frozenset[ParameterKey], into: dict[str, torch.Tensor]
    ) -> None:
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
            for at, block in parameter_blocks(held[part.place], part.start, part.start + part.master.numel()):
                for kind, values in kinds.items():
                    key, end = block_key(kind, block), at + block.rows * block.columns
                    found = values[at:end].view(block.rows, block.columns)
                    if key in into:
                        into[key].copy_(found)
                    else:
                        into[key] = found.detach().to("cpu", copy=True)

    def masters(self, held: Mapping[ParameterKey, LocalParameter], read: ReadBlock) -> None:
        """Set the float32 copies of bfloat16 parameters."""
        for part in self.owned():
            if part.separate:
                fill_parameter(part.master.view(-1), held[part.place], read, part.start)

    def check(self, held: Mapping[ParameterKey, LocalParameter], files: OptimizerFiles) -> None:
        """Check that a checkpoint has all that `masters` and `take` read of it. Changes nothing.

        Raises:
            Refused: it lacks some of it.
        """
        moments = [kind for kind in MOMENTS if files.has(kind)]
        for part in self.owned():
            kinds = [*moments, *([MASTER] if part.separate and files.has(MASTER) else [])]
            for _, block in parameter_blocks(held[part.place], part.start, part.start + part.master.numel()):
                for kind in kinds:
                    files.check(kind, block)

    def take(self, held: Mapping[ParameterKey, LocalParameter], files: OptimizerFiles) -> None:
        """Set moments and their count from a checkpoint; without any there, the state is as before the first update.

        Raises:
            Refused: the checkpoint lacks some of it.
        """
        moments = [kind for kind in MOMENTS if files.has(kind)]
        for part in self.owned():
            part.state.clear()
            for kind in moments:
                part.state[kind] = torch.zeros_like(part.master)
                fill_parameter(part.state[kind].view(-1), held[part.place], files.reader(kind), part.start)
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


ParameterKey = tuple[int, str]
"""Number of a rank's model chunk, and Megatron's name of a parameter in it."""


def with_tied_copy(
    shape: ModelShape,
    held: Mapping[ParameterKey, LocalParameter],
    parameters: Mapping[ParameterKey, torch.Tensor],
    tensor_rank: int,
) -> dict[ParameterKey, LocalParameter]:
    """What a rank holds, the last stage's copy of a tied embedding included: it is read, though never published."""
    found = dict(held)
    for place, parameter in parameters.items():
        if shape.tied and place[1] == "output_layer.weight":
            rows = int(parameter.shape[0])
            first = tensor_rank * rows
            real = max(0, min(rows, shape.vocabulary - first))
            runs = (RowRun(0, "model.embed_tokens.weight", first, real),) if real else ()
            found[place] = LocalParameter(place[0], place[1], (rows, shape.hidden), 0, runs)
    return found


def parameter_blocks(local: LocalParameter, start: int, stop: int) -> list[tuple[int, TensorBlock]]:
    """Which blocks of Hugging Face tensors the elements [start, stop) of a parameter are, row by row.

    Rows of padding are in none of them.

    Returns:
        For each block where it begins, counted from `start`; its elements follow each other.
    """
    width, found = local.columns, []
    at = start
    while at < stop:
        row, column = divmod(at, width)
        rows = max(1, (stop - at) // width) if column == 0 else 1
        end = min(width, column + stop - at) if rows == 1 else width
        for run in local.runs:
            first, last = max(row, run.local), min(row + rows, run.local + run.rows)
            if first < last:
                block = TensorBlock(
                    run.name, run.row + first - run.local, last - first, local.column + column, end - column
                )
                found.append((at - start + (first - row) * width, block))
        at += rows * (end - column)
    return found


def fill_parameter(values: torch.Tensor, local: LocalParameter, read: ReadBlock, start: int = 0) -> None:
    """Copy into the elements of a parameter from `start` on what Hugging Face tensors have there; padding is zero.

    Args:
        values: [n], contiguous.

    Raises:
        Refused: from `read`: a tensor is missing or of another shape.
    """
    blocks = parameter_blocks(local, start, start + values.numel())
    if sum(block.rows * block.columns for _, block in blocks) < values.numel():
        values.zero_()
    for at, block in blocks:
        values[at : at + block.rows * block.columns].view(block.rows, block.columns).copy_(read(block))


class HfModelFiles(TensorFiles):
    """The weights of a model folder, under a checkpoint's names (each expert's alone)."""

    def check(self, shape: ModelShape) -> None:
        """Check the tensors against config.json.

        Raises:
            Refused: one is missing or of another shape; it is named.
        """
        for target in hf_tensors(shape):
            size = self.shape(target.name)
            if size != target.shape:
                what = "is missing" if size is None else f"has the shape {list(size)}, not {list(target.shape)}"
                hint = "config.json and weights must be of one model"
                layer, experts, _ = target.name.partition(".mlp.experts.")
                if size is None and experts and self.shape(f"{layer}{experts}down_proj") is not None:
                    what += ": the layer's experts are in one tensor, as transformers has them in memory"
                    hint = "have the torch backend write another checkpoint of it, or transformers (save_pretrained)"
                raise Refused(f"weights in {self.folder}", why=f"{target.name} {what}", hint=hint)
