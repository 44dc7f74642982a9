"""The optimizer's state in files that any other division of the model can read.

Each rank writes what it owns as blocks of Hugging Face tensors, keyed ``name|kind|row:rows|column:columns``; nothing in
them depends on how the ranks were divided. Kinds are Adam's ``exp_avg`` and ``exp_avg_sq``, and ``master``, the float32
weights, where the trained ones are bfloat16. Whole tensors under ``name|kind`` are states of random generators.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from relax_rt.roles.training.checkpoints.digests import digest_of, write_digest
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, RelaxError


class TensorBlock(NamedTuple):
    """Rows and columns of a Hugging Face tensor, as a matrix: one of more dimensions as its first one by all others."""

    name: str
    row: int
    rows: int
    column: int
    columns: int


ReadBlock = Callable[[TensorBlock], torch.Tensor]
"""Gives a block's values [rows, columns]."""
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
STEPS = "steps"
FILES_WAIT_S = 600.0
"""For the other ranks' files of a checkpoint."""


def block_key(kind: str, block: TensorBlock) -> str:
    """Return the name under which a block is written."""
    return f"{block.name}|{kind}|{block.row}:{block.rows}|{block.column}:{block.columns}"


def rank_file(folder: Path, rank: int, world: int) -> Path:
    """Return the path of a rank's file."""
    return folder / f"optimizer-{rank + 1:05d}-of-{world:05d}.safetensors"


def failure_file(folder: Path, rank: int) -> Path:
    """Return the path where a rank writes why its file will not come."""
    return folder / f"rank-{rank}.failed"


def write_blocks(path: Path, blocks: Mapping[str, torch.Tensor], steps: int) -> None:
    """Write a rank's blocks, and their digest beside them; the file is there when both are complete.

    Args:
        steps: updates that Adam's moments have seen.
    """
    partial = path.with_suffix(".partial")
    save_file(dict(blocks), partial, metadata={STEPS: str(steps)})
    write_digest(path, digest_of(partial))
    partial.rename(path)


class _BlockPart(NamedTuple):
    """Where in a wanted block the tensor `inner` of a file belongs."""

    rows: slice
    columns: slice
    file: Any
    inner: TensorBlock


class OptimizerFiles:
    """The blocks of all ranks' files in a checkpoint.

    Raises:
        Refused: a file is missing, or there is none. SafetensorError: one is truncated.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        paths = sorted(folder.glob("optimizer-*-of-*.safetensors"))
        if not paths:
            raise Refused(f"checkpoint {folder}", why="it has no state of an optimizer")
        if len(paths) != (world := int(paths[0].stem.rpartition("-")[2])):
            raise Refused(f"checkpoint {folder}", why=f"it has {len(paths)} of the {world} ranks' files")
        self._found: dict[tuple[str, str], list[tuple[TensorBlock, Any, str]]] = {}
        self.steps = 0
        for path in paths:
            file: Any = safe_open(path, framework="pt")
            self.steps = max(self.steps, int((file.metadata() or {}).get(STEPS, 0)))
            for key in file.keys():  # noqa: SIM118
                name, kind, *place = key.split("|")
                if place:
                    rows, columns = (tuple(map(int, part.split(":"))) for part in place)
                    block = TensorBlock(name, *rows, *columns)
                else:
                    block = whole_block(name, file.get_slice(key).get_shape())
                self._found.setdefault((name, kind), []).append((block, file, key))

    def has(self, kind: str) -> bool:
        """Whether any tensor has state of this kind."""
        return any(found == kind for _, found in self._found)

    def tensor(self, name: str, kind: str) -> torch.Tensor | None:
        """Return the tensor that was written whole under this name and kind, if there is one."""
        found = self._found.get((name, kind))
        if not found:
            return None
        _, file, key = found[0]
        values: torch.Tensor = file.get_tensor(key)
        return values

    def reader(self, kind: str) -> ReadBlock:
        """Return a reader of blocks of one kind of state."""
        return lambda wanted: self._read(kind, wanted)

    def check(self, kind: str, wanted: TensorBlock) -> None:
        """Check that a block of this kind of state is there, without reading it.

        Raises:
            Refused: some of it is not.
        """
        seen = torch.zeros(wanted.rows, wanted.columns, dtype=torch.bool)
        for part in self._parts(kind, wanted):
            seen[part.rows, part.columns] = True
        if not bool(seen.all()):
            raise Refused(
                f"checkpoint {self._folder}",
                why=f"it lacks {kind} of {int((~seen).sum())} elements of {wanted.name}",
                hint="it is of another model, or incomplete",
            )

    def _read(self, kind: str, wanted: TensorBlock) -> torch.Tensor:
        self.check(kind, wanted)
        out = torch.empty(wanted.rows, wanted.columns)
        for part in self._parts(kind, wanted):
            out[part.rows, part.columns] = read_block(part.file, part.inner)
        return out

    def _parts(self, kind: str, wanted: TensorBlock) -> Iterator[_BlockPart]:
        """Yield the parts of a block that the files have."""
        for block, file, key in self._found.get((wanted.name, kind), ()):
            top, bottom = max(wanted.row, block.row), min(wanted.row + wanted.rows, block.row + block.rows)
            left = max(wanted.column, block.column)
            right = min(wanted.column + wanted.columns, block.column + block.columns)
            if top < bottom and left < right:
                inner = TensorBlock(key, top - block.row, bottom - top, left - block.column, right - left)
                rows = slice(top - wanted.row, bottom - wanted.row)
                columns = slice(left - wanted.column, right - wanted.column)
                yield _BlockPart(rows, columns, file, inner)


def whole_block(name: str, shape: Sequence[int]) -> TensorBlock:
    """Return the block that is all of a tensor of this shape."""
    return TensorBlock(name, 0, shape[0] if shape else 1, 0, math.prod(shape[1:]))


def read_block(file: Any, block: TensorBlock) -> torch.Tensor:
    """A block [rows, columns] of a tensor in an opened safetensors file; nothing else of it is read."""
    part = file.get_slice(block.name)
    dimensions = len(part.get_shape())
    rows = slice(block.row, block.row + block.rows)
    columns = slice(block.column, block.column + block.columns)
    if dimensions == 2:
        matrix: torch.Tensor = part[rows, columns]
        return matrix
    found: torch.Tensor = part[rows] if dimensions else file.get_tensor(block.name)
    return found.reshape(block.rows, -1)[:, columns]


class TensorFiles:
    """The tensors of a folder's safetensors files, read by blocks.

    Raises:
        Refused: there is no such file. SafetensorError: one is truncated.
    """

    def __init__(self, folder: Path, pattern: str = "model*.safetensors") -> None:
        self.folder = folder
        self._files: list[Any] = [safe_open(path, framework="pt") for path in sorted(folder.glob(pattern))]
        if not self._files:
            raise Refused(f"weights in {folder}", why=f"there is no {pattern}")
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape; None if it is not there."""
        file = self._where.get(name)
        return None if file is None else tuple(file.get_slice(name).get_shape())

    def __call__(self, block: TensorBlock) -> torch.Tensor:
        """The block's values [rows, columns], in the file's dtype. What is read must have been checked."""
        return read_block(self._where[block.name], block)


def await_files(folder: Path, world: int) -> None:
    """Wait until all ranks have written their parts of a checkpoint.

    Raises:
        RelaxError: a rank could not. DeadlineExceeded: one does not come.
    """
    deadline = time.monotonic() + FILES_WAIT_S
    while lacking := [r for r in range(world) if not rank_file(folder, r, world).exists()]:
        for rank in lacking:
            if (failure := failure_file(folder, rank)).exists():
                raise RelaxError(f"checkpoint {folder}", why=f"rank {rank}: {failure.read_text()}")
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"checkpoint {folder}",
                why=f"rank {lacking[0]} of {world} has not written its part within {FILES_WAIT_S:g} s",
                hint="all ranks must see the run directory: on several nodes it lies on a shared file system",
            )
        time.sleep(0.02)
