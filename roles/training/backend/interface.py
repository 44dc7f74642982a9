"""The narrow interface between the trainer role and what computes gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.transport.weights.manifest import Layout

if TYPE_CHECKING:
    from relax_rt.transport.weights.payloads import Lora


class GradientPart(msgspec.Struct, frozen=True):
    """What one call of `accumulate` added.

    Attributes:
        count: its part of what the gradients are divided by (`Objective.count`). tokens: its trained tokens.
    """

    count: float
    tokens: int


class StepResult(msgspec.Struct, frozen=True):
    """What one optimizer update did, or all those of a step.

    Attributes:
        applied: False when it was skipped (a loss or gradient that is not finite); `why` says which. Of several
            updates, when all were.
        changed: whether the weights are others than before (not when every group's rewards were equal).
        tokens: trained tokens of the batch. loss: the aggregated one; of several updates their mean.
        grad_norm: before clipping; of several updates the mean of those that changed the weights, `grad_norm_max` of
            `others` being the largest. learning_rate: that of the step.
        ratio_mean, ratio_max_deviation: of the trainer's to the behaviour probability; the largest |ratio - 1|. Of
            several updates with proximal log-probabilities these, and what else compares the two, are of the weights
            before the first.
        clip_fraction: share of tokens whose ratio was clipped. kl_behaviour: k3 estimate, nats a token.
        computed_tokens: tokens that went through the model, padding included; prompts that samples share once where
            they are computed once.
        difference_mean, difference_max: |log p of the trainer - log p recorded at sampling|, nats.
        drift_mean: |log p of the weights at an update - log p of those before the first|, nats, where the latter is
            computed, else None.
        measured_tokens: trained tokens that all these means and largest values are over.
        sampled_entropy: of the behaviour policy, estimated by the tokens it sampled, nats a token.
        entropy: of the trained policy, where the objective needs it, else None.
        kl_reference: mean of the KL term, nats a token, where there is one, else None.
        rejected_tokens: trained tokens that corrections gave weight 0, or that the loss masked (weight_cap).
        updates: those that changed the weights. updates_skipped: those that were skipped.
        others: sums (largest values under names ending in `_max`) of what the loss and corrections measured besides;
            `tokens` of the batch went through the model.
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
    difference_mean: float = 0.0
    difference_max: float = 0.0
    drift_mean: float | None = None
    sampled_entropy: float = 0.0
    entropy: float | None = None
    kl_reference: float | None = None
    rejected_tokens: int = 0
    measured_tokens: int = 0
    updates: int = 0
    updates_skipped: int = 0
    others: dict[str, float] = {}


REPORTED = frozenset(
    {
        "trained",
        "computed",
        "loss",
        "ratio",
        "ratio_deviation_max",
        "clipped",
        "kl",
        "difference",
        "difference_max",
        "drift",
        "sampled_entropy",
        "entropy",
        "kl_reference",
        "rejected",
    }
)
"""Names of sums that have a field of their own in StepResult."""


def step_result(sums: Mapping[str, float], *, count: float, grad_norm: float, learning_rate: float) -> StepResult:
    """The result of a step that was applied.

    Args:
        sums: over all micro-batches and ranks: the metrics of `Objective.loss`; `loss`, not divided; `trained`, tokens
            of the batch; `computed`, tokens through the model, with padding.
        count: what the gradients were divided by.
    """
    seen = sums.get("tokens", 0.0)

    def mean(name: str) -> float:
        return sums.get(name, 0.0) / max(seen, 1.0)

    return StepResult(
        applied=True,
        changed=seen > 0,
        why="" if seen else "no group has an advantage: all its rewards are equal",
        tokens=int(sums.get("trained", 0)),
        loss=sums.get("loss", 0.0) / count,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        ratio_mean=mean("ratio"),
        ratio_max_deviation=sums.get("ratio_deviation_max", 0.0),
        clip_fraction=mean("clipped"),
        kl_behaviour=mean("kl"),
        computed_tokens=int(sums.get("computed", 0)),
        difference_mean=mean("difference"),
        difference_max=sums.get("difference_max", 0.0),
        drift_mean=mean("drift") if "drift" in sums else None,
        sampled_entropy=mean("sampled_entropy"),
        entropy=mean("entropy") if "entropy" in sums else None,
        kl_reference=mean("kl_reference") if "kl_reference" in sums else None,
        rejected_tokens=int(sums.get("rejected", 0)),
        measured_tokens=int(seen),
        updates=int(seen > 0),
        others={name: value for name, value in sums.items() if name not in REPORTED},
    )


def skipped_result(why: str, sums: Mapping[str, float], learning_rate: float) -> StepResult:
    """The result of a step that left the weights as they were; what was measured before it went wrong is in it."""
    nan = float("nan")
    found = step_result(sums, count=1.0, grad_norm=nan, learning_rate=learning_rate)
    return msgspec.structs.replace(found, applied=False, changed=False, why=why, loss=nan, updates=0, updates_skipped=1)


class TrainerBackend(Protocol):
    """Trains, exports weights and keeps its state. All calls block: run them off the event loop. With several ranks,
    every rank makes the same calls in the same order."""

    def use(self, objective: Objective, table: AlgorithmTable, *, temperature: float | None = None) -> None:
        """From now on take steps of this objective, by this table's optimizer settings; the moments start anew.

        Not between `accumulate` and `apply`, nor while a snapshot is written.

        Args:
            temperature: log-probabilities are of logits / temperature; None: as before.
        """

    def log_probabilities(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Log-probabilities of each sample's tokens under the current weights, of logits / temperature: float32 [T].

        Those of trained tokens are there; others may be 0.
        """

    def accumulate(self, samples: Sequence[Sample]) -> GradientPart:
        """Forward and backward of a part of a batch, which may be empty; any number of calls a step.

        Samples have their advantages. Gradients are added up as the aggregation weights them, divided by nothing.
        """

    def apply(self, count: float, number: int, before_update: Callable[[], None] = ...) -> StepResult:
        """Divide the gradients by the batch's count, clip them, take the optimizer's step. The next `accumulate` begins
        another batch: of the next step, or of this one's next update.

        Args:
            count: sum of `GradientPart.count` over all parts of the batch.
            number: of the step, from 1: the learning rate follows from it.
            before_update: called, and may block, before the weights change.

        Returns:
            What the step did; it is skipped, and the weights stay, if a loss or gradient is not finite.
        """

    def layout(self, dtype: str) -> Layout:
        """Where `export` puts each tensor, by its Hugging Face name."""

    def export(self, into: memoryview, dtype: str, copied: Callable[[], None] = ...) -> None:
        """Write the weights, cast to dtype, into a buffer of the layout's size.

        Args:
            copied: may be called as soon as the weights may change; else they may when this returns.
        """

    def snapshot(self) -> None:
        """Copy the state aside; `write` saves the copy while training continues."""

    def write(self, folder: Path) -> None:
        """Write the last snapshot: model in Hugging Face format and the optimizer's state."""

    def restore(self, folder: Path) -> None:
        """Take model and optimizer state from a checkpoint folder."""

    def close(self) -> None:
        """No more calls will come."""


@runtime_checkable
class AdapterBackend(Protocol):
    """A `TrainerBackend` whose weights are the model's own and adapters to them."""

    def export_base(self, into: memoryview | None, dtype: str) -> None:
        """`export` without the adapters: what never changes."""

    @property
    def changes_kept(self) -> float | None:
        """Fraction (0 to 1) of the elements changed by adapters that differ from the base weights in the published
        dtype at the last export; None: no change yet, or no adapters."""

    def adapters(self) -> Lora:
        """A copy of the adapters as they are, whole; its base is ROOT, without a digest."""
