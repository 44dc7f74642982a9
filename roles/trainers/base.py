"""The narrow interface between the trainer role and what computes gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from relax_rt.roles.sample import Sample
from relax_rt.transport.weights.manifest import Layout


class StepResult(msgspec.Struct, frozen=True):
    """What one optimizer step did.

    Attributes:
        applied: False when the step was thrown away (a loss or gradient that is not finite); `why` says which.
        changed: whether the weights are others than before (not when every group's rewards were equal).
        tokens: trained tokens of the batch. loss: mean over them.
        grad_norm: before clipping. learning_rate: that of the step.
        ratio_max_deviation: largest |ratio - 1| between the trainer's and the behaviour probability.
        clip_fraction: share of tokens whose ratio was clipped. kl_behaviour: k3 estimate, nats a token.
        computed_tokens: tokens that went through the model, shared prompts once.
    """

    applied: bool
    changed: bool
    why: str
    tokens: int
    loss: float
    grad_norm: float
    learning_rate: float
    ratio_mean: float
    ratio_max_deviation: float
    clip_fraction: float
    kl_behaviour: float
    computed_tokens: int


class TrainerBackend(Protocol):
    """Trains, exports weights and keeps its state. All calls block: run them off the event loop."""

    def step(self, samples: Sequence[Sample], number: int, before_update: Callable[[], None] = ...) -> StepResult:
        """One optimizer step over samples whose advantages are set; one normalisation over all their tokens.

        `before_update` is called, and may block, before the weights change.
        """

    def layout(self, dtype: str) -> Layout:
        """Where `export` puts each tensor, by its Hugging Face name."""

    def export(self, into: memoryview, dtype: str) -> None:
        """Write the weights, cast to dtype, into a buffer of the layout's size."""

    def snapshot(self) -> None:
        """Copy the state aside; `write` saves the copy while training goes on."""

    def write(self, folder: Path) -> None:
        """Write the last snapshot: model in Hugging Face format and the optimizer's state."""

    def restore(self, folder: Path) -> None:
        """Take model and optimizer state from a checkpoint folder."""
