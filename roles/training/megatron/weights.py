"""A rank's parameters from Hugging Face tensors: the inverse of what `resharding` does for publication."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from relax_rt.roles.planning.shape import ModelShape
from relax_rt.roles.training.blocks import Block, Read, TensorFiles
from relax_rt.roles.training.resharding import targets
from relax_rt.roles.training.resharding.layout import Local, Run
from relax_rt.transport.rpc.errors import Refused

Place = tuple[int, str]
"""Number of a rank's model chunk, and Megatron's name of a parameter in it."""


def with_tied_copy(
    shape: ModelShape, held: Mapping[Place, Local], parameters: Mapping[Place, torch.Tensor], tensor_rank: int
) -> dict[Place, Local]:
    """What a rank holds, the last stage's copy of a tied embedding included: it is read, though never published."""
    found = dict(held)
    for place, parameter in parameters.items():
        if shape.tied and place[1] == "output_layer.weight":
            rows = int(parameter.shape[0])
            first = tensor_rank * rows
            real = max(0, min(rows, shape.vocabulary - first))
            runs = (Run(0, "model.embed_tokens.weight", first, real),) if real else ()
            found[place] = Local(place[0], place[1], (rows, shape.hidden), 0, runs)
    return found


def blocks_of(local: Local, start: int, stop: int) -> list[tuple[int, Block]]:
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
                block = Block(run.name, run.row + first - run.local, last - first, local.column + column, end - column)
                found.append((at - start + (first - row) * width, block))
        at += rows * (end - column)
    return found


def fill(values: torch.Tensor, local: Local, read: Read, start: int = 0) -> None:
    """Copy into the elements of a parameter from `start` on what Hugging Face tensors have there; padding is zero.

    Args:
        values: [n], contiguous.

    Raises:
        Refused: from `read`: a tensor is missing or of another shape.
    """
    blocks = blocks_of(local, start, start + values.numel())
    if sum(block.rows * block.columns for _, block in blocks) < values.numel():
        values.zero_()
    for at, block in blocks:
        values[at : at + block.rows * block.columns].view(block.rows, block.columns).copy_(read(block))


class Files(TensorFiles):
    """The weights of a model folder, under a checkpoint's names (each expert's alone)."""

    def check(self, shape: ModelShape) -> None:
        """Hold the tensors against what config.json describes.

        Raises:
            Refused: one is missing or of another shape; it is named.
        """
        for target in targets(shape):
            size = self.shape(target.name)
            if size != target.shape:
                what = "is missing" if size is None else f"has the shape {list(size)}, not {list(target.shape)}"
                hint = "config.json and weights must be of one model"
                layer, experts, _ = target.name.partition(".mlp.experts.")
                if size is None and experts and self.shape(f"{layer}{experts}down_proj") is not None:
                    what += ": the layer's experts are in one tensor, as transformers has them in memory"
                    hint = "have the torch backend write another checkpoint of it, or transformers (save_pretrained)"
                raise Refused(f"weights in {self.folder}", why=f"{target.name} {what}", hint=hint)
