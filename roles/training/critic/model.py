"""The critic's model: a transformer with a value head, and its optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.models.device import CPU, autocast_context, copy_to_host, denormals_flushed
from relax_rt.roles.models.forward import check_forward
from relax_rt.roles.training.algorithms.advantages import value_loss
from relax_rt.roles.training.algorithms.inputs import Metrics, merge
from relax_rt.roles.training.backend.settings import CriticSettings
from relax_rt.roles.training.batch.attention import packing_costs
from relax_rt.roles.training.batch.budget import MemoryRetry, TokenBudget
from relax_rt.roles.training.batch.collate import MicroBatch, collate, compute_at_trained_tokens, hidden_states
from relax_rt.roles.training.batch.rows import mini_batches, pick, plan_micro_batches, shared_rows
from relax_rt.roles.training.checkpoints.digests import digest_of, write_digest
from relax_rt.roles.training.checkpoints.store import is_transient
from relax_rt.roles.training.critic.client import CriticReport
from relax_rt.transport.rpc.errors import Refused

MODEL_FILE, OPTIMIZER_FILE = "critic.safetensors", "critic_optimizer.safetensors"
Values = NDArray[np.float32]


class ValueModel(torch.nn.Module):
    """The layers of a language model, and in place of its output layer one number a position, which begins as 0."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        check_forward(model, folder)
        self.body = model.base_model
        self.head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch, autocast: bool) -> torch.Tensor:
        """Values of the states before the batch's trained tokens; float32 [m]."""
        with autocast_context(batch.ids.device, autocast):
            hidden = hidden_states(self.body, batch)
        found: torch.Tensor = self.head(hidden.float())[:, 0]
        return found


class CriticModel:
    """float32 weights, optional bfloat16 autocast, AdamW.

    Args:
        folder: of the model whose layers it begins with.
        on_progress: called with the tokens that went through the model.
        budget: of micro-batches; unless given, the settings'.
        device: where weights, gradients and moments are; snapshots are in ordinary memory.
        updates: of a step; its groups are dealt out over them.
    """

    def __init__(
        self,
        folder: Path,
        settings: CriticSettings,
        on_progress: Callable[[int], object],
        device: torch.device = CPU,
        budget: TokenBudget | None = None,
        *,
        updates: int = 1,
    ) -> None:
        torch.set_num_threads(settings.threads)
        self._folder, self._settings, self._on_progress, self._device = folder, settings, on_progress, device
        self._budget = budget if budget is not None else TokenBudget(settings.tokens_per_micro_batch)
        self._fitting = MemoryRetry(self._budget, device)
        self._updates = updates
        self._snapshot: dict[str, dict[str, torch.Tensor]] = {}
        self.reset()

    def reset(self) -> None:
        """Reset the weights to those before the first step."""
        self._model = ValueModel(self._folder)
        self._costs = packing_costs(self._model.body, self._device)
        self._model.to(self._device)
        # Dropout is off, as everywhere in training: `learn` clips against what `values` has found.
        self._model.eval()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=self._settings.learning_rate, weight_decay=0.0, fused=True
        )

    def values(self, samples: Sequence[Sample]) -> list[Values]:
        """Compute the values of each sample's trained tokens, 0 at others; float32 [T]."""
        return self._fitting(
            lambda: compute_at_trained_tokens(
                self._values, samples, self._budget, self._on_progress, device=self._device, costs=self._costs
            )
        )

    def _values(self, batch: MicroBatch) -> torch.Tensor:
        found: torch.Tensor = self._model(batch, self._settings.dtype == "bfloat16")
        return found

    def learn(self, samples: Sequence[Sample], old: Sequence[Values], returns: Sequence[Values]) -> CriticReport:
        """Take the updates of a step, each on the mean of `value_loss` over the trained tokens of its part of the
        groups.

        Args:
            old: values before the step. returns: what they should have been; float32 [T] each.

        Returns:
            What they did; one is skipped, and the weights stay, if a loss or gradient is not finite.
        """
        parts = mini_batches([sample.meta.group for sample in samples], self._updates) or [[]]
        found = [self._update(pick(samples, at), pick(old, at), pick(returns, at)) for at in parts]
        taken = [(sums, norm) for applied, sums, norm in found if applied]
        counted = taken or [(measured, norm) for _, measured, norm in found]
        sums: Metrics = {}
        for measured, _ in counted:
            merge(sums, measured)
        before, wanted = _trained(samples, old), _trained(samples, returns)
        return CriticReport(
            applied=bool(taken),
            tokens=len(before),
            loss=sums.get("loss", 0.0) / max(sums.get("tokens", 0.0), 1.0),
            grad_norm=float(np.mean([norm for _, norm in counted])),
            value=float(before.mean()) if len(before) else 0.0,
            returned=float(wanted.mean()) if len(before) else 0.0,
            clipped=sums.get("clipped", 0.0) / max(sums.get("tokens", 0.0), 1.0),
            explained=_explained(before, wanted),
            updates_skipped=sum(bool(measured) and not applied for applied, measured, _ in found),
        )

    def _update(
        self, samples: Sequence[Sample], old: Sequence[Values], returns: Sequence[Values]
    ) -> tuple[bool, Metrics, float]:
        """One update; whether it was taken, what was measured, as sums, and the gradients' norm before clipping."""
        count = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
        trained = [place for place, sample in enumerate(samples) if sample.loss_mask[1:].any()]
        columns = _Columns(pick(old, trained), pick(returns, trained), self._device)
        with denormals_flushed():
            sums = self._fitting(lambda: self._gradients(pick(samples, trained), columns, count))
            norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.max_grad_norm))
            applied = count > 0 and math.isfinite(norm) and math.isfinite(sums["loss"])
            if applied:
                self._optimizer.step()
        return applied, sums, norm

    def _gradients(self, samples: Sequence[Sample], columns: _Columns, count: int) -> Metrics:
        """Compute the gradients of a whole batch; returns metrics as sums."""
        sums: Metrics = {}
        self._optimizer.zero_grad(set_to_none=False)
        for laid in plan_micro_batches(shared_rows(samples, self._budget.tokens), self._budget.tokens, self._costs):
            self._budget.attempting(laid.rows, laid.tokens)
            merge(sums, self._micro_batch(collate(laid.rows, self._device, laid.costs), columns, count))
            self._on_progress(laid.tokens)
        return sums

    def _micro_batch(self, batch: MicroBatch, columns: _Columns, count: int) -> Metrics:
        values = self._values(batch)
        old, returns = columns.of(batch)
        clip = self._settings.value_clip or None
        loss, metrics = value_loss(values, old, returns, torch.ones_like(batch.targets), clip=clip)
        torch.autograd.backward(loss.sum() / count)
        return {**metrics, "loss": float(loss.detach().sum())}

    def snapshot(self) -> None:
        """Copy the state aside; `write` saves the copy."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        self._snapshot = {
            MODEL_FILE: {name: copy_to_host(p) for name, p in self._model.named_parameters()},
            OPTIMIZER_FILE: {
                f"{names[id(parameter)]}|{key}": copy_to_host(value)
                for parameter, state in self._optimizer.state.items()
                for key, value in state.items()
            },
        }

    def write(self, folder: Path) -> None:
        """Write the last snapshot, and beside each file its digest."""
        for name, tensors in self._snapshot.items():
            save_file(tensors, folder / name)
            write_digest(folder / name, digest_of(folder / name))

    def restore(self, folder: Path) -> None:
        """Restore what `write` wrote.

        Raises:
            OSError: the file system refused it: another try may read it.
            Refused: it is not there, cannot be read, or is of another model; the weights may be of both then.
        """
        try:
            tensors, optimizer = load_file(folder / MODEL_FILE), load_file(folder / OPTIMIZER_FILE)
        except (OSError, SafetensorError) as error:
            if is_transient(error):
                raise
            raise Refused(f"critic of checkpoint {folder}", why=str(error)) from error
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if name not in tensors or tensors[name].shape != parameter.shape:
                    why = f"it does not hold {name} {tuple(parameter.shape)}"
                    raise Refused(f"critic of checkpoint {folder}", why=why)
                parameter.copy_(tensors[name])
                state: dict[str, Any] = {}
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    if (value := optimizer.get(f"{name}|{key}")) is not None:
                        state[key] = value.to(self._device)
                if state:
                    self._optimizer.state[parameter] = state


class _Columns:
    """Values and returns of the samples, to be picked for the tokens of a micro-batch."""

    def __init__(self, old: Sequence[Values], returns: Sequence[Values], device: torch.device) -> None:
        lengths = [len(values) for values in old]
        self._starts = torch.tensor([0, *np.cumsum(lengths)[:-1]] if lengths else [0]).to(device)
        self._flat = [
            torch.from_numpy(np.concatenate(parts)).to(device) if len(parts) else None for parts in (old, returns)
        ]

    def of(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """At the trained tokens of a micro-batch; float32 [m] each."""
        places = self._starts[batch.sample] + batch.token
        old, returns = self._flat
        assert old is not None and returns is not None
        return old[places], returns[places]


def _trained(samples: Sequence[Sample], values: Sequence[Values]) -> NDArray[np.float64]:
    """Select the values of all trained tokens of the samples."""
    picked = (one[1:][sample.loss_mask[1:] != 0] for sample, one in zip(samples, values, strict=True))
    return np.concatenate([np.zeros(0), *picked])


def _explained(values: NDArray[np.float64], returns: NDArray[np.float64]) -> float:
    """1 - var(return - value) / var(return); 0 where returns do not vary."""
    spread = float(returns.var()) if len(returns) else 0.0
    return 1.0 - float((returns - values).var()) / spread if spread > 0 else 0.0
