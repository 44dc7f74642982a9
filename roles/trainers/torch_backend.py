"""Trainer backend for transformers models on one device with torch."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from relax_rt.roles.algorithms.objective import Objective
from relax_rt.roles.algorithms.tensors import Metrics, TokenTensors, merge
from relax_rt.roles.engines.weights import model_layout
from relax_rt.roles.models.forward import check_plain
from relax_rt.roles.numerics import denormals_flushed
from relax_rt.roles.sample import Sample
from relax_rt.roles.sections import AlgorithmTable
from relax_rt.roles.trainers.base import Partial, StepResult, step_result, thrown_away
from relax_rt.roles.trainers.logprobs import at_trained_tokens, predicted
from relax_rt.roles.trainers.memory import give_back
from relax_rt.roles.trainers.packing import MicroBatch, Row, collate, group_batches, micro_batches, shared_rows
from relax_rt.transport.errors import Refused
from relax_rt.transport.weights.manifest import Layout

OPTIMIZER_FILE = "optimizer.safetensors"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
)


class TorchBackend:
    """float32 master weights, optional bfloat16 autocast, AdamW.

    Gradients are accumulated as sums weighted by the aggregation and divided once by the batch's count, so that the
    result does not depend on how the batch was cut into micro-batches.

    Args:
        objective: unless given, that of the algorithm.
    """

    def __init__(
        self,
        model_dir: Path,
        algorithm: AlgorithmTable,
        *,
        dtype: str,
        threads: int,
        tokens_per_micro_batch: int,
        temperature: float,
        on_progress: Callable[[int], None],
        objective: Objective | None = None,
    ) -> None:
        torch.set_num_threads(threads)
        self.objective = objective if objective is not None else Objective.of(algorithm)
        self._source = model_dir
        self._algorithm, self._budget, self._on_progress = algorithm, tokens_per_micro_batch, on_progress
        self._temperature = temperature
        self._autocast = dtype == "bfloat16"
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
        check_plain(self._model, model_dir)
        self._model.train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=algorithm.learning_rate,
            betas=algorithm.adam_betas,
            weight_decay=algorithm.weight_decay,
            fused=True,
        )
        self._snapshot: dict[str, dict[str, torch.Tensor]] | None = None
        self._sums: Metrics = {}
        self._bad = ""

    def use(self, objective: Objective, table: AlgorithmTable, *, temperature: float | None = None) -> None:
        """See `TrainerBackend.use`."""
        self.objective, self._algorithm = objective, table
        self._temperature = self._temperature if temperature is None else temperature
        self._optimizer.state.clear()
        for group in self._optimizer.param_groups:
            group["betas"], group["weight_decay"] = table.adam_betas, table.weight_decay
        # Its buffers hold moments that are no more.
        self._snapshot = None

    def step(
        self, samples: Sequence[Sample], number: int, before_update: Callable[[], None] = lambda: None
    ) -> StepResult:
        """`accumulate` of a whole batch and `apply`."""
        return self.apply(self.accumulate(samples).count, number, before_update)

    def log_probabilities(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        return at_trained_tokens(lambda batch: self._predicted(batch)[0], samples, self._budget, self._on_progress)

    def accumulate(self, samples: Sequence[Sample]) -> Partial:
        if not self._sums:
            self._optimizer.zero_grad(set_to_none=False)
        added = Partial(self.objective.count(samples), sum(int(s.loss_mask.sum()) for s in samples))
        merge(self._sums, {"trained": float(added.tokens)})
        rows = shared_rows([s for s in samples if not self.objective.idle(s)], self._budget)
        with denormals_flushed():
            for chosen in self._batches(rows):
                if not self._bad:
                    self._micro_batch(chosen)
        return added

    def _batches(self, rows: list[Row]) -> list[list[Row]]:
        return group_batches(rows) if "pairs" in self.objective.needs else micro_batches(rows, self._budget)

    def _micro_batch(self, rows: list[Row]) -> None:
        """Add the gradients of one micro-batch; one whose loss is not finite spoils the step."""
        batch = collate(rows)
        logprobs, entropy = self._predicted(batch)
        loss, metrics = self.objective.loss(tokens_of(batch, logprobs, entropy))
        if not bool(torch.isfinite(loss)):
            self._bad = f"loss is {loss.item()}"
            return
        torch.autograd.backward(loss)
        computed = sum(row.length for row in rows)
        merge(self._sums, {**metrics, "loss": loss.item(), "computed": float(computed)})
        self._on_progress(computed)

    def apply(self, count: float, number: int, before_update: Callable[[], None] = lambda: None) -> StepResult:
        sums, self._sums, bad, self._bad = self._sums, {}, self._bad, ""
        rate, count, norm = self._learning_rate(number), count if count > 0 else 1.0, 0.0
        with denormals_flushed():
            if sums.get("tokens") and not bad:
                norm = self._divide(count)
                bad = "" if math.isfinite(norm) else f"gradient norm is {norm}"
            if bad:
                return thrown_away(f"{bad} in step {number}", sums, rate)
            if sums.get("tokens"):
                for group in self._optimizer.param_groups:
                    group["lr"] = rate
                before_update()
                self._optimizer.step()
        self.objective.after_step(sums)
        return step_result(sums, count=count, grad_norm=norm, learning_rate=rate)

    def _divide(self, count: float) -> float:
        """Divide the gradients by the count and clip them, in one go; their norm before the clip."""
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) / count
        if math.isfinite(norm):
            torch._foreach_mul_(gradients, min(self._algorithm.max_grad_norm / (norm + 1e-6), 1.0) / count)
        return norm

    def _predicted(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        entropy = "entropy" in self.objective.needs
        return predicted(self._model, batch, temperature=self._temperature, autocast=self._autocast, entropy=entropy)

    def _learning_rate(self, number: int) -> float:
        warmup = self._algorithm.warmup_steps
        return self._algorithm.learning_rate * (min(1.0, number / warmup) if warmup else 1.0)

    def layout(self, dtype: str) -> Layout:
        return model_layout(self._model, getattr(torch, dtype))

    def export(self, into: memoryview, dtype: str) -> None:
        flat = torch.frombuffer(into, dtype=torch.uint8)
        target: torch.dtype = getattr(torch, dtype)
        with torch.no_grad():
            for entry, parameter in zip(self.layout(dtype).entries, self._model.parameters(), strict=True):
                raw = flat[entry.offset : entry.offset + entry.nbytes]
                raw.view(target).view(entry.shape).copy_(parameter)

    def snapshot(self) -> None:
        state = self._optimizer.state
        names = {id(p): n for n, p in self._model.named_parameters()}
        optimizer: dict[str, torch.Tensor] = {}
        for parameter, values in state.items():
            for key, value in values.items():
                optimizer[f"{names[id(parameter)]}|{key}"] = value.detach()
        model = {n: p.detach() for n, p in self._model.named_parameters()}
        if self._snapshot is None:
            self._snapshot = {"model": {}, "optimizer": {}}
        for part, tensors in (("model", model), ("optimizer", optimizer)):
            kept = self._snapshot[part]
            for name, tensor in tensors.items():
                # Copied into the buffers of the last snapshot: fresh pages cost more than the copy.
                if name in kept:
                    kept[name].copy_(tensor)
                else:
                    kept[name] = tensor.clone()
        give_back()

    def write(self, folder: Path) -> None:
        if self._snapshot is None:
            raise Refused(f"write checkpoint {folder}", why="no snapshot was taken")
        save_file(self._snapshot["model"], folder / "model.safetensors", metadata={"format": "pt"})
        save_file(self._snapshot["optimizer"], folder / OPTIMIZER_FILE)
        self._model.config.save_pretrained(folder)
        if self._model.generation_config is not None:
            self._model.generation_config.save_pretrained(folder)
        for pattern in TOKENIZER_FILES:
            for path in self._source.glob(pattern):
                shutil.copyfile(path, folder / path.name)

    def restore(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        optimizer = load_file(folder / OPTIMIZER_FILE)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if name not in tensors or tensors[name].shape != parameter.shape:
                    raise Refused(f"checkpoint {folder}", why=f"it does not hold {name} {tuple(parameter.shape)}")
                parameter.copy_(tensors[name])
                state: dict[str, Any] = {}
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    value = optimizer.get(f"{name}|{key}")
                    if value is not None:
                        state[key] = value
                if state:
                    self._optimizer.state[parameter] = state

    def close(self) -> None:
        """Nothing of it outlives the process."""


def tokens_of(batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> TokenTensors:
    """A micro-batch's trained tokens as losses see them."""
    return TokenTensors(
        logprobs=logprobs,
        behaviour=batch.behaviour,
        advantages=batch.advantages,
        mask=torch.ones_like(batch.behaviour, dtype=torch.bool),
        sequence=batch.sample,
        proximal=batch.proximal,
        reference=batch.reference,
        group=batch.group,
        entropy=entropy,
    )
