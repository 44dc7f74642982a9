"""Trainer backend for transformers models with torch: in one process, or sharded over the ranks of a gang (FSDP2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from relax_rt.roles.base.sample import Sample, bare_meta
from relax_rt.roles.data.media.image_processor import has_vision
from relax_rt.roles.data.media.vision_tower import VisionTower, load_vision_model
from relax_rt.roles.models.device import CPU, denormals_flushed
from relax_rt.roles.models.forward import check_forward
from relax_rt.roles.models.heap import HeapTrimmer
from relax_rt.roles.training.algorithms.inputs import Metrics, TokenTensors, merge
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable, learning_rate
from relax_rt.roles.training.backend.interface import GradientPart, StepResult, skipped_result, step_result
from relax_rt.roles.training.backend.settings import LoraTable
from relax_rt.roles.training.batch.attention import packing_costs
from relax_rt.roles.training.batch.budget import GradientAccumulation, MemoryRetry, TokenBudget
from relax_rt.roles.training.batch.collate import MicroBatch, collate, compute_at_trained_tokens
from relax_rt.roles.training.batch.rows import MicroBatchRows, SampleRow, plan_micro_batches, shared_rows
from relax_rt.roles.training.torch.sharding import LogprobModule, TorchRanks, shard_model
from relax_rt.roles.training.torch.snapshot import StateSnapshots
from relax_rt.roles.training.torch.weights import ModelWeights, add_adapters
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.weights.manifest import Layout
from relax_rt.transport.weights.payloads import Lora


class TorchBackend:
    """float32 master weights, optional bfloat16 autocast, AdamW.

    Gradients are accumulated as sums weighted by the aggregation and divided once by the batch's count, so that the
    result does not depend on how the batch was cut into micro-batches, nor over how many ranks. With ranks, all of
    them make the same calls, and the same number of passes through the model: those with fewer micro-batches than
    others make up for it with passes that count for nothing.

    Args:
        tokens_per_micro_batch: a number, or a `TokenBudget` that remembers and reports reductions.
        device: where weights, gradients and moments are. Snapshots and what is exported are in ordinary memory.
        objective: unless given, that of the algorithm.
        ranks: the gang that shares the model; None: this process has all of it.
        lora: train adapters instead of the weights. seed: of their first values.

    Attributes:
        costs: by which micro-batches are laid out; None: the model's attention cannot have several sequences in a row,
            and they are padded.

    Raises:
        Refused: the model or the settings ask for what this backend cannot do.
    """

    takes_branches = True

    def __init__(
        self,
        model_dir: Path,
        algorithm: AlgorithmTable,
        *,
        dtype: str,
        threads: int,
        tokens_per_micro_batch: int | TokenBudget,
        temperature: float,
        on_progress: Callable[[int], None],
        device: torch.device = CPU,
        objective: Objective | None = None,
        ranks: TorchRanks | None = None,
        lora: LoraTable | None = None,
        seed: int = 0,
    ) -> None:
        torch.set_num_threads(threads)
        self.objective = objective if objective is not None else Objective.of(algorithm)
        budget = tokens_per_micro_batch
        self._budget = budget if isinstance(budget, TokenBudget) else TokenBudget(budget)
        rank = f"rank {ranks.rank} of the trainer" if ranks is not None else ""
        self._fitting = MemoryRetry(self._budget, device, rank=rank)
        self._accumulation: GradientAccumulation[Sequence[Sample]] = GradientAccumulation(
            self._fitting, self._begin, self._add
        )
        self._algorithm, self._temperature, self._on_progress = algorithm, temperature, on_progress
        self._autocast = dtype == "bfloat16"
        self._ranks, self._device = ranks, device
        vision_tower: VisionTower | None = None
        if has_vision(model_dir):
            if ranks is not None or lora is not None:
                what = "adapters" if ranks is None else "a gang that shares it"
                hint = "train all of it in one process: roles.trainer.count = 1, no roles.trainer.lora"
                raise Refused(f"the model in {model_dir}", why=f"a model that sees is not trained by {what}", hint=hint)
            self._model, vision_tower = load_vision_model(model_dir, dtype=torch.float32, attention="sdpa")
            vision_tower.freeze()
        else:
            self._model = AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=torch.float32, attn_implementation="sdpa"
            )
            check_forward(self._model, model_dir)
        # Without dropout: log-probabilities are the policy's, and nothing here draws random numbers.
        self._model.eval()
        self.costs = packing_costs(self._model.get_decoder(), device)
        if lora is not None:
            add_adapters(self._model, lora, seed=seed)
        self._logprobs = LogprobModule(self._model, vision_tower)
        if ranks is not None:
            # Layer by layer: the whole model is never on the device.
            shard_model(self._logprobs, ranks)
        else:
            self._model.to(device)
        self.weights = ModelWeights(self._model, ranks)
        self._trained = [piece for piece in self.weights.trained if piece.rows]
        self._optimizer = torch.optim.AdamW(
            [piece.values for piece in self._trained],
            lr=algorithm.learning_rate,
            betas=algorithm.adam_betas,
            weight_decay=algorithm.weight_decay,
            fused=True,
        )
        self._snapshots = StateSnapshots(self._model, self.weights, model_dir, lora)
        self._growth = HeapTrimmer()
        self._begin()

    @property
    def ranks(self) -> TorchRanks:
        """The gang that this is a rank of."""
        assert self._ranks is not None
        return self._ranks

    def keeps_groups_together(self, samples: Sequence[Sample]) -> bool:
        """Whether the samples of a group go to one rank: where the loss compares them, and where there are groups for
        all ranks, for samples of one group share their prompt."""
        groups = len({sample.meta.group for sample in samples})
        return "pairs" in self.objective.needs or groups >= self.ranks.world

    def use(self, objective: Objective, table: AlgorithmTable, *, temperature: float | None = None) -> None:
        """Take steps of another objective from now on; the moments start anew."""
        self.objective, self._algorithm = objective, table
        self._temperature = self._temperature if temperature is None else temperature
        self._optimizer.state.clear()
        for group in self._optimizer.param_groups:
            group["betas"], group["weight_decay"] = table.adam_betas, table.weight_decay
        # Its buffers hold moments that are no more.
        self._snapshots.forget()

    # Passes.

    def step(
        self, samples: Sequence[Sample], number: int, before_update: Callable[[], None] = lambda: None
    ) -> StepResult:
        """`accumulate` of a whole batch and `apply`."""
        return self.apply(self.accumulate(samples).count, number, before_update)

    def log_probabilities(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Compute the log-probabilities of each sample's tokens, of logits / temperature; float32 [T]."""

        def computed(batch: MicroBatch) -> torch.Tensor:
            return self._predicted(batch, entropy=False)[0]

        def work() -> list[NDArray[np.float32]]:
            return compute_at_trained_tokens(
                computed,
                samples,
                self._budget,
                self._on_progress,
                device=self._device,
                costs=self.costs,
                passes=self._passes,
                idle=self._empty_pass,
            )

        found = self._fitting(work)
        if self._ranks is not None:
            # What the last pass left gathered would outlive the next change of the weights.
            scored: Any = self._logprobs
            scored.reshard()
        return found

    def accumulate(self, samples: Sequence[Sample]) -> GradientPart:
        """Add the gradients of a part of a batch."""
        self._accumulation(samples)
        return GradientPart(self.objective.count(samples), sum(int(s.loss_mask.sum()) for s in samples))

    def _begin(self) -> None:
        """Clear gradients and metrics."""
        self._sums: Metrics = {}
        self._bad = ""
        for piece in self._trained:
            if piece.parameter.grad is not None:
                piece.parameter.grad.zero_()

    def _add(self, samples: Sequence[Sample]) -> None:
        """Add the gradients of these samples."""
        merge(self._sums, {"trained": float(sum(int(s.loss_mask.sum()) for s in samples))})
        rows = shared_rows([s for s in samples if not self.objective.idle(s)], self._budget.tokens)
        pairs = "pairs" in self.objective.needs
        batches = plan_micro_batches(rows, self._budget.tokens, self.costs, whole_groups=pairs)
        beyond = self._passes(len(batches)) - len(batches)
        with denormals_flushed():
            for chosen in batches:
                if not self._bad:
                    self._micro_batch(chosen)
                elif self._ranks is not None:
                    self._empty_pass()
            for _ in range(beyond):
                self._empty_pass()

    def _micro_batch(self, chosen: MicroBatchRows) -> None:
        """Add the gradients of one micro-batch; one whose loss is not finite spoils the step."""
        self._budget.attempting(chosen.rows, chosen.tokens, whole_groups="pairs" in self.objective.needs)
        batch = collate(chosen.rows, self._device, chosen.costs)
        logprobs, entropy = self._predicted(batch, entropy="entropy" in self.objective.needs)
        loss, metrics = self.objective.loss(tokens_of(batch, logprobs, entropy))
        if not bool(torch.isfinite(loss)):
            self._bad = f"loss is {loss.item()}"
            if self._ranks is None:
                return
        torch.autograd.backward(loss)
        merge(self._sums, {**metrics, "loss": loss.item(), "computed": float(chosen.tokens)})
        self._on_progress(chosen.tokens)

    def _passes(self, mine: int) -> int:
        """Return the number of passes of the rank that has most: all ranks gather each layer at the same time."""
        return mine if self._ranks is None else max(self._ranks.gather(mine))

    def _empty_pass(self) -> None:
        """Make a pass whose gradients are 0, to keep step with other ranks."""
        logprobs, _ = self._predicted(collate([_EMPTY_ROW], self._device), entropy=False)
        if torch.is_grad_enabled():
            torch.autograd.backward(0.0 * logprobs.sum())

    def _predicted(self, batch: MicroBatch, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        found: tuple[torch.Tensor, torch.Tensor | None]
        found = self._logprobs(batch, self._temperature, self._autocast, entropy)
        return found

    # The step.

    def apply(self, count: float, number: int, before_update: Callable[[], None] = lambda: None) -> StepResult:
        """Divide and clip the gradients, and take the optimizer's step. All ranks return the same."""
        sums, bad = self._found()
        self._accumulation.forget()
        self._sums, self._bad = {}, ""
        rate = learning_rate(self._algorithm, number, self._algorithm.steps)
        count, norm = count if count > 0 else 1.0, 0.0
        with denormals_flushed():
            if sums.get("tokens") and not bad:
                norm = self._divide(count)
                bad = "" if math.isfinite(norm) else f"gradient norm is {norm}"
            if bad:
                return skipped_result(f"{bad} in step {number}", sums, rate)
            if sums.get("tokens"):
                for group in self._optimizer.param_groups:
                    group["lr"] = rate
                before_update()
                self._optimizer.step()
        self.objective.after_step(sums)
        self._growth.after_step()
        return step_result(sums, count=count, grad_norm=norm, learning_rate=rate)

    def _found(self) -> tuple[Metrics, str]:
        """Return the metrics of all ranks, and what was wrong with the step."""
        merge(self._sums, self._fitting.taken())
        if self._ranks is None:
            return self._sums, self._bad
        sums: Metrics = {}
        for part in self._ranks.gather(self._sums):
            merge(sums, part)
        return sums, next((bad for bad in self._ranks.gather(self._bad) if bad), "")

    def _divide(self, count: float) -> float:
        """Divide the gradients by the count and clip them, in one go; their norm before the clip, over all ranks."""
        gradients = []
        for piece in self._trained:
            if (gradient := piece.gradient()) is not None:
                gradients.append(gradient)
                if piece.values is not piece.parameter:
                    piece.values.grad = gradient
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if self._ranks is not None:
            norm = math.sqrt(self._ranks.total(norm * norm))
        norm /= count
        if math.isfinite(norm) and gradients:
            torch._foreach_mul_(gradients, min(self._algorithm.max_grad_norm / (norm + 1e-6), 1.0) / count)
        return norm

    # Weights and checkpoints.

    def layout(self, dtype: str) -> Layout:
        """Return where `export` puts each tensor."""
        return self.weights.layout(dtype)

    def export(self, into: memoryview | None, dtype: str, copied: Callable[[], None] = lambda: None) -> None:
        """Write the weights, adapters merged, into (rank 0's) buffer."""
        if self._ranks is None:
            self.weights.export(into, dtype)
        else:
            self.weights.publish(into, dtype, copied)

    def export_base(self, into: memoryview | None, dtype: str) -> None:
        """Write the model's own weights, without the adapters."""
        self.weights.export(into, dtype, merged=False)

    @property
    def changes_kept(self) -> float | None:
        """Fraction of the elements changed by adapters that survived rounding at the last export."""
        return self.weights.changes_kept

    def adapters(self) -> Lora:
        """Return a copy of the adapters, whole."""
        return self.weights.lora()

    def snapshot(self) -> None:
        """Copy the state aside."""
        self._snapshots.take(self._optimizer)

    def write(self, folder: Path) -> None:
        """Write the last snapshot."""
        self._snapshots.write(folder)

    def restore(self, folder: Path) -> None:
        """Take model and optimizer state from a checkpoint folder; see `StateSnapshots.restore`."""
        self._snapshots.restore(folder, self._optimizer)
        self._accumulation.forget()

    def close(self) -> None:
        """Nothing to close: the process owns all of it."""


def tokens_of(batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> TokenTensors:
    """A micro-batch's trained tokens as losses see them, in the dtype of the log-probabilities."""

    def like(column: torch.Tensor | None) -> torch.Tensor | None:
        return None if column is None else column.to(logprobs.dtype)

    return TokenTensors(
        logprobs=logprobs,
        behaviour=batch.behaviour.to(logprobs.dtype),
        advantages=batch.advantages.to(logprobs.dtype),
        mask=torch.ones_like(batch.behaviour, dtype=torch.bool),
        sequence=batch.sample,
        proximal=like(batch.proximal),
        reference=like(batch.reference),
        group=batch.group,
        entropy=entropy,
    )


_EMPTY_SAMPLE = Sample(
    meta=bare_meta(0, 0),
    tokens=np.zeros(2, np.int32),
    loss_mask=np.array([0, 1], np.uint8),
    behaviour_logprobs=np.zeros(2, np.float32),
    versions=[],
)
_EMPTY_ROW = SampleRow(1, [(0, _EMPTY_SAMPLE)])
"""A row of two tokens that stands for no sample."""
