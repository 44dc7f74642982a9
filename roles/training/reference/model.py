"""A model that is not trained, and which one it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.models.device import CPU
from relax_rt.roles.models.forward import check_forward
from relax_rt.roles.training.batch.attention import packing_costs
from relax_rt.roles.training.batch.budget import MemoryRetry, TokenBudget
from relax_rt.roles.training.batch.collate import MicroBatch, compute_at_trained_tokens, token_logprobs


class FrozenModel:
    """float32 weights, bfloat16 autocast if so asked: the numerics of the torch trainer, so that a policy that has not
    moved yet has no distance to it.

    Args:
        budget: tokens of a micro-batch, or a `TokenBudget` that remembers and reports reductions.
        temperature: log-probabilities are of logits / temperature.

    Attributes:
        vocabulary: tokens it knows have ids below this.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        threads: int,
        budget: int | TokenBudget,
        temperature: float,
        device: torch.device = CPU,
    ) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        check_forward(self._model, folder)
        self._model.eval()
        self._costs = packing_costs(self._model.get_decoder(), device)
        self._device = device
        self._model.to(device)
        self._budget = budget if isinstance(budget, TokenBudget) else TokenBudget(budget)
        self._fitting = MemoryRetry(self._budget, device)
        self._temperature, self._autocast = temperature, dtype == "bfloat16"
        self.vocabulary = int(self._model.get_input_embeddings().weight.shape[0])

    def log_probabilities(
        self, samples: Sequence[Sample], on_progress: Callable[[int], object] = lambda _: None
    ) -> list[NDArray[np.float32]]:
        """Log-probabilities of each sample's trained tokens, 0 at others; float32 [T]. Their ids are in the
        vocabulary."""
        return self._fitting(
            lambda: compute_at_trained_tokens(
                self._compute, samples, self._budget, on_progress, device=self._device, costs=self._costs
            )
        )

    def _compute(self, batch: MicroBatch) -> torch.Tensor:
        return token_logprobs(self._model, batch, temperature=self._temperature, autocast=self._autocast)[0]
