"""Trainer backend for transformers models on one device with torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from relax_rt.roles.algorithms.grpo import clipped_policy_loss
from relax_rt.roles.engines.weights import model_layout
from relax_rt.roles.models.forward import check_plain
from relax_rt.roles.numerics import denormals_flushed
from relax_rt.roles.sample import Sample
from relax_rt.roles.sections import AlgorithmTable
from relax_rt.roles.trainers.base import StepResult
from relax_rt.roles.trainers.memory import give_back
from relax_rt.roles.trainers.packing import MicroBatch, Row, collate, micro_batches, shared_rows
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
    """float32 master weights, optional bfloat16 autocast, AdamW, clipped policy loss.

    Gradients are accumulated as plain sums over tokens and divided once by the batch's token count, so that the result
    does not depend on how the batch was cut into micro-batches.
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
    ) -> None:
        torch.set_num_threads(threads)
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

    def step(
        self, samples: Sequence[Sample], number: int, before_update: Callable[[], None] = lambda: None
    ) -> StepResult:
        with denormals_flushed():
            return self._step(samples, number, before_update)

    def _step(self, samples: Sequence[Sample], number: int, before_update: Callable[[], None]) -> StepResult:
        trainable = [s for s in samples if s.advantages is not None and bool(s.advantages.any())]
        tokens = sum(int(s.loss_mask.sum()) for s in samples)
        rate = self._learning_rate(number)
        sums = {"loss": 0.0, "ratio": 0.0, "clipped": 0.0, "kl": 0.0}
        deviation, seen, computed = 0.0, 0, 0
        self._optimizer.zero_grad(set_to_none=False)
        for rows in micro_batches(shared_rows(trainable, self._budget), self._budget):
            loss, metrics = self._micro_batch(rows)
            if not bool(torch.isfinite(loss)):
                self._optimizer.zero_grad(set_to_none=False)
                return _thrown_away(f"loss is {loss.item()} in step {number}", tokens, rate)
            torch.autograd.backward(loss / max(tokens, 1))
            sums["loss"] += loss.item()
            for name in ("ratio", "clipped", "kl"):
                sums[name] += metrics[f"{name}_sum"]
            seen += int(metrics["tokens"])
            deviation = max(deviation, metrics["ratio_max_deviation"])
            computed += sum(r.length for r in rows)
            self._on_progress(sum(r.length for r in rows))
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._algorithm.max_grad_norm)
        if not bool(torch.isfinite(norm)):
            self._optimizer.zero_grad(set_to_none=False)
            return _thrown_away(f"gradient norm is {norm.item()} in step {number}", tokens, rate)
        if trainable:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            before_update()
            self._optimizer.step()
        return StepResult(
            applied=True,
            changed=bool(trainable),
            why="" if trainable else "no group has an advantage: all its rewards are equal",
            tokens=tokens,
            loss=sums["loss"] / max(tokens, 1),
            grad_norm=float(norm),
            learning_rate=rate,
            ratio_mean=sums["ratio"] / max(seen, 1),
            ratio_max_deviation=deviation,
            clip_fraction=sums["clipped"] / max(seen, 1),
            kl_behaviour=sums["kl"] / max(seen, 1),
            computed_tokens=computed,
        )

    def _micro_batch(self, rows: list[Row]) -> tuple[torch.Tensor, dict[str, float]]:
        batch = collate(rows)
        logprobs = self.logprobs(batch)
        return clipped_policy_loss(
            logprobs,
            batch.behaviour,
            batch.advantages,
            torch.ones_like(batch.behaviour),
            clip_low=self._algorithm.clip_low,
            clip_high=self._algorithm.clip_high,
        )

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities float32 [m] of the batch's trained tokens under the current weights.

        They are of logits / temperature, like the behaviour log-probabilities. Only positions that predict a
        trained token go through the output layer.
        """
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            hidden = self._model.base_model(
                input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
            ).last_hidden_state
            logits = self._model.get_output_embeddings()(hidden[batch.predict_row, batch.predict_at])
        logits = logits.float() / self._temperature
        picked: torch.Tensor = torch.log_softmax(logits, -1).gather(-1, batch.targets[:, None])[:, 0]
        return picked

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


def _thrown_away(why: str, tokens: int, rate: float) -> StepResult:
    return StepResult(False, False, why, tokens, float("nan"), float("nan"), rate, 0.0, 0.0, 0.0, 0.0, 0)
