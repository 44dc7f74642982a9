"""Checkpoints of the torch backend: a Hugging Face folder, the adapters, and each rank's part of the optimizer's state.

The moments are blocks of Hugging Face tensors (`checkpoints/optimizer_state.py`), so that any number of ranks, and the
Megatron backend, can resume from them. Beside them each rank keeps the states of its random generators: nothing here
draws from them, a loss of the user's may.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

from relax_rt.roles.models.device import CPU, copy_to_host, generator_states, set_generator_states
from relax_rt.roles.models.experts import ExpertStack, released_one_by_one
from relax_rt.roles.models.heap import trim_heap
from relax_rt.roles.training.backend.settings import LoraTable
from relax_rt.roles.training.checkpoints.optimizer_state import (
    MASTER,
    MOMENTS,
    OptimizerFiles,
    ReadBlock,
    TensorBlock,
    TensorFiles,
    await_files,
    block_key,
    rank_file,
    whole_block,
    write_blocks,
)
from relax_rt.roles.training.checkpoints.store import TOKENIZER_FILES
from relax_rt.roles.training.torch.sharding import TensorShard
from relax_rt.roles.training.torch.weights import (
    ADAPTER_FILE,
    ADAPTER_FOLDER,
    ADAPTER_PREFIX,
    ModelWeights,
    write_adapter_config,
)
from relax_rt.transport.rpc.errors import Refused, RelaxError

K = TypeVar("K")

GENERATOR = "generator_"
"""Before the kind of a device, in the name of a random generator's state."""
DTYPE = "float32"
"""Of the weights in a checkpoint: what the optimizer resumes with."""


class StateSnapshots:
    """Copies of a backend's state, and what is made of them.

    Args:
        source: the folder that the model was loaded from; its tokenizer goes along.
        lora: of the adapters, if only those are trained.
    """

    def __init__(self, model: Any, weights: ModelWeights, source: Path, lora: LoraTable | None) -> None:
        self._model, self._weights, self._source, self._lora = model, weights, source, lora
        self._rank, self._world = (0, 1) if weights.ranks is None else (weights.ranks.rank, weights.ranks.world)
        self._device = weights.published[0].parameter.device
        self._experts = ExpertStacks(model.config, weights.published)
        self.forget()

    def forget(self) -> None:
        """There is no snapshot, and no memory is kept for one."""
        self._moments: dict[tuple[str, TensorBlock], torch.Tensor] = {}
        self._generators: dict[str, torch.Tensor] = {}
        self._adapters: dict[str, torch.Tensor] = {}
        self._merged = bytearray()
        self._steps = -1

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the state aside: on rank 0 the whole model, on each rank its own moments. All ranks at the same time."""
        steps = 0
        for piece in self._weights.trained:
            state = optimizer.state.get(piece.values, {})
            steps = max(steps, int(state.get("step", 0)))
            for kind in MOMENTS:
                if kind in state:
                    block = piece.block
                    _copy_into_buffer(self._moments, (kind, block), state[kind].view(block.rows, block.columns))
        for adapter in self._weights.adapters.values():
            for piece in (adapter.a, adapter.b):
                _copy_into_buffer(self._adapters, ADAPTER_PREFIX + piece.name, self._weights.whole(piece))
        if self._rank == 0 and not self._merged:
            self._merged = bytearray(self._weights.layout(DTYPE).nbytes)
        self._weights.export(memoryview(self._merged) if self._rank == 0 else None, DTYPE)
        states = generator_states(self._device)
        self._generators = {f"{self._name}|{GENERATOR}{kind}": state for kind, state in states.items()}
        self._steps = steps
        trim_heap()

    def write(self, folder: Path) -> None:
        """Write the last snapshot: each rank its moments, rank 0 the rest; it returns when all files are there. No
        collectives: training may continue.

        Raises:
            Refused: no snapshot was taken. DeadlineExceeded: another rank's file does not come.
        """
        if self._steps < 0:
            raise Refused(f"write checkpoint {folder}", why="no snapshot was taken")
        moments = {
            block_key(kind, part): values
            for (kind, block), found in self._moments.items()
            for part, values in self._experts.apart(block, found)
        }
        write_blocks(rank_file(folder, self._rank, self._world), {**moments, **self._generators}, self._steps)
        if self._rank != 0:
            return
        save_file(self._tensors(), folder / "model.safetensors", metadata={"format": "pt"})
        self._model.config.save_pretrained(folder)
        if self._model.generation_config is not None:
            self._model.generation_config.save_pretrained(folder)
        for pattern in TOKENIZER_FILES:
            for path in self._source.glob(pattern):
                shutil.copyfile(path, folder / path.name)
        if self._lora is not None:
            inner = folder / ADAPTER_FOLDER
            inner.mkdir()
            save_file(self._adapters, inner / ADAPTER_FILE, metadata={"format": "pt"})
            write_adapter_config(inner, self._lora, self._source)
        await_files(folder, self._world)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The model of the last snapshot, under a checkpoint's names; views."""
        flat, found = torch.frombuffer(self._merged, dtype=torch.uint8), {}
        for entry, piece in zip(self._weights.layout(DTYPE).entries, self._weights.published, strict=True):
            values = flat[entry.offset : entry.offset + entry.nbytes].view(torch.float32)
            shapes = self._experts.shapes(piece)
            for part, own in self._experts.apart(whole_block(piece.name, piece.shape), values):
                found[part.name] = own.view(shapes[part.name])
        return found

    def restore(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Take weights and moments from a checkpoint, however many ranks wrote it. Nothing is changed before all of it
        was found good.

        Raises:
            Refused: it is of another model, or lacks something. SafetensorError, OSError: a file cannot be read.
            RelaxError: it is good, and of a training with other adapters; to pass over it would lose that.
        """
        weights, state = self._weights, OptimizerFiles(folder)
        files, experts = TensorFiles(folder), self._experts
        _check(files, [experts.shapes(piece) for piece in weights.published])
        read: ReadBlock = experts.reader(files)
        pieces, prefix = list(weights.published), ""
        if self._lora is not None:
            pieces, prefix = weights.trained, ADAPTER_PREFIX
            inner = folder / ADAPTER_FOLDER
            if not inner.is_dir():
                raise _adapter_mismatch(folder, "it is of a training of all weights")
            read = adapters = TensorFiles(inner, ADAPTER_FILE)
            try:
                _check(adapters, [{ADAPTER_PREFIX + piece.name: piece.shape} for piece in weights.trained])
            except Refused as error:
                raise _adapter_mismatch(folder, error.why) from error
        elif (folder / ADAPTER_FOLDER).is_dir():
            raise _adapter_mismatch(folder, "it is of a training of adapters")
        elif state.has(MASTER):
            read = experts.reader(state.reader(MASTER))
        # The moments of this rank's rows, by tensor; none before the first step.
        reads = {kind: experts.reader(state.reader(kind)) for kind in MOMENTS if state.has(kind)}
        moments = {
            piece.name: {
                kind: read_kind(piece.block).view(piece.values.shape).to(self._device)
                for kind, read_kind in reads.items()
            }
            for piece in weights.trained
            if piece.rows and len(reads) == len(MOMENTS)
        }
        with torch.no_grad():
            for piece in pieces:
                if piece.rows:
                    block = piece.block._replace(name=prefix + piece.name)
                    piece.matrix.copy_(read(block))
        optimizer.state.clear()
        self.forget()
        for piece in weights.trained:
            if piece.name in moments:
                step = torch.tensor(float(state.steps)).to(self._device)
                optimizer.state[piece.values] = {**moments[piece.name], "step": step}
        found = {kind: state.tensor(self._name, f"{GENERATOR}{kind}") for kind in (CPU.type, self._device.type)}
        set_generator_states({kind: values for kind, values in found.items() if values is not None}, self._device)

    @property
    def _name(self) -> str:
        """This rank's name in a checkpoint, where a tensor has its name."""
        return f"rank-{self._rank}"


def _adapter_mismatch(folder: Path, why: str) -> RelaxError:
    hint = "set roles.trainer.lora as it was, or give this training a run of its own (run.name)"
    return RelaxError(f"checkpoint {folder}", why=why, hint=hint)


def _copy_into_buffer(kept: dict[K, torch.Tensor], name: K, values: torch.Tensor) -> None:
    """Copied into the buffers of the last snapshot: fresh pages cost more than the copy."""
    kept[name] = copy_to_host(values.contiguous(), kept.get(name))


def _check(files: TensorFiles, wanted: Iterable[Mapping[str, tuple[int, ...]]]) -> None:
    """Check that files hold every one of these tensors.

    Raises:
        Refused: one is missing or of another shape; it is named.
    """
    for name, shape in (one for tensors in wanted for one in tensors.items()):
        found = files.shape(name)
        if found != shape:
            what = "is missing" if found is None else f"has the shape {list(found)}, not {list(shape)}"
            raise Refused(f"checkpoint {files.folder}", why=f"{name} {what}")


class ExpertStacks:
    """Which of a model's tensors are stacks of experts that a checkpoint has one by one.

    Args:
        config: of the model. pieces: its tensors.
    """

    def __init__(self, config: Any, pieces: Sequence[TensorShard]) -> None:
        found = {piece.name: ExpertStack.of(piece.name, piece.shape) for piece in pieces}
        apart = any(found.values()) and released_one_by_one(config)
        self._stacks = {name: stack for name, stack in found.items() if stack is not None and apart}

    def shapes(self, piece: TensorShard) -> dict[str, tuple[int, ...]]:
        """The tensors that a checkpoint has of this one."""
        stack = self._stacks.get(piece.name)
        if stack is None:
            return {piece.name: piece.shape}
        return dict.fromkeys(stack.names(), (stack.rows, stack.columns))

    def blocks(self, block: TensorBlock) -> list[TensorBlock]:
        """What whole rows of a tensor are of a checkpoint's, in the order of their elements."""
        stack = self._stacks.get(block.name)
        if stack is None:
            return [block]
        return [TensorBlock(name, 0, stack.rows, 0, stack.columns) for name in stack.names(block.row, block.rows)]

    def apart(self, block: TensorBlock, values: torch.Tensor) -> Iterator[tuple[TensorBlock, torch.Tensor]]:
        """The values of whole rows of a tensor by a checkpoint's blocks; views, each [rows, columns]."""
        parts = self.blocks(block)
        sizes = [part.rows * part.columns for part in parts]
        for part, own in zip(parts, torch.split(values.reshape(-1), sizes), strict=True):
            yield part, own.view(part.rows, part.columns)

    def reader(self, read: ReadBlock) -> ReadBlock:
        """Gives whole rows of the model's tensors from files of a checkpoint."""

        def found(block: TensorBlock) -> torch.Tensor:
            if block.name not in self._stacks:
                return read(block)
            parts = [read(part).reshape(-1) for part in self.blocks(block)]
            return torch.cat(parts).view(block.rows, block.columns)

        return found
