"""Experts in checkpoints of the torch backend: under the names of released models, as Megatron's have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from relax_rt.roles.models.experts import Stack, released_one_by_one
from relax_rt.roles.training.blocks import Block, Read
from relax_rt.roles.training.torch.pieces import Piece


class Experts:
    """Which of a model's tensors are stacks of experts that a checkpoint has one by one.

    Args:
        config: of the model. pieces: its tensors.
    """

    def __init__(self, config: Any, pieces: Sequence[Piece]) -> None:
        found = {piece.name: Stack.of(piece.name, piece.shape) for piece in pieces}
        apart = any(found.values()) and released_one_by_one(config)
        self._stacks = {name: stack for name, stack in found.items() if stack is not None and apart}

    def shapes(self, piece: Piece) -> dict[str, tuple[int, ...]]:
        """The tensors that a checkpoint has of this one."""
        stack = self._stacks.get(piece.name)
        if stack is None:
            return {piece.name: piece.shape}
        return dict.fromkeys(stack.names(), (stack.rows, stack.columns))

    def blocks(self, block: Block) -> list[Block]:
        """What whole rows of a tensor are of a checkpoint's, in the order of their elements."""
        stack = self._stacks.get(block.name)
        if stack is None:
            return [block]
        return [Block(name, 0, stack.rows, 0, stack.columns) for name in stack.names(block.row, block.rows)]

    def apart(self, block: Block, values: torch.Tensor) -> Iterator[tuple[Block, torch.Tensor]]:
        """The values of whole rows of a tensor by a checkpoint's blocks; views, each [rows, columns]."""
        parts = self.blocks(block)
        sizes = [part.rows * part.columns for part in parts]
        for part, own in zip(parts, torch.split(values.reshape(-1), sizes), strict=True):
            yield part, own.view(part.rows, part.columns)

    def reader(self, read: Read, stacked: Callable[[str], bool]) -> Read:
        """Gives whole rows of the model's tensors from files of a checkpoint.

        Args:
            stacked: whether the files have a stack as it is, as those of earlier versions do.
        """

        def found(block: Block) -> torch.Tensor:
            if block.name not in self._stacks or stacked(block.name):
                return read(block)
            parts = [read(part).reshape(-1) for part in self.blocks(block)]
            return torch.cat(parts).view(block.rows, block.columns)

        return found
