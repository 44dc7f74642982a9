"""The tables [roles.trainer], [roles.critic], [roles.reference] and [checkpoint] of roles.toml, and what the megatron
backend cannot do of them. Imports neither torch nor Megatron: validation reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from relax_rt.config.schema import Filled, Seconds, Table
from relax_rt.roles.models.settings import ShardedSettings, TrainedSettings


class LoraTable(Table):
    """Adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) that are trained in place of the model's own weights."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Columns of B and rows of A in W + (alpha / rank) B A."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The product counts alpha / rank times."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Ends of the names of linear layers, as ["q_proj", "v_proj"]; all-linear: every one but the output layer."""


class TrainerSettings(TrainedSettings):
    """The trainer."""

    count: Annotated[int, Field(ge=1, le=4096)] = 1
    """Ranks of the gang. megatron: tensor x pipeline x context parallel, times the replicas that work on data in
    parallel. torch: each has its share of every tensor and of every batch (FSDP2)."""
    lora: LoraTable | None = None
    """Train adapters and leave the model's own weights as they are: { rank = 16, alpha = 32 } (torch). The weights that
    are published have the adapters merged."""
    packing: Literal["auto", "required"] = "auto"
    """Sequences one behind the other in a row, where that costs less than padding them. required: a model whose
    attention cannot have several in a row is refused, and not padded (torch; megatron always packs)."""
    mismatch: Literal["trained", "all"] = "trained"
    """Tokens that the mismatch between trained and sampled policy is measured on: those with gradients, or the whole
    batch, which costs a forward pass over the samples without advantages (docs/reference/metrics.md)."""
    hang_after_s: Seconds = 300.0


class CriticSettings(TrainedSettings):
    """The critic: the policy's layers as they were before its first step, with a value head."""

    hang_after_s: Seconds = 300.0
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    value_clip: Annotated[float, Field(ge=0)] = 0.2
    """Value clipping: maximum change of a value within a step that the loss follows; 0: none. It bounds the updates of
    a step after the first (algorithm.updates_per_step)."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class ReferenceSettings(ShardedSettings):
    """The reference policy or teacher, for its log-probabilities. With the torch backend its slots are a pool: each has
    the whole model."""

    model: Filled | None = None
    """A model folder or package, as in model.path, with the policy's vocabulary: the teacher of `distillation`. Unset:
    the policy before its first step."""
    batch: Annotated[int, Field(ge=1, le=4096)] = 32
    """Samples leased at a time."""


class CheckpointTable(Table):
    """Checkpoints: complete or absent, in Hugging Face format plus optimizer and queue mark."""

    every_steps: Annotated[int, Field(ge=1)] = 20
    """Steps between checkpoints; samples trained since the last one stay in the queue."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Checkpoints to keep; older ones are removed. With 1 there is no other to resume from if the newest is damaged."""


def unsupported(table: ShardedSettings) -> Iterator[tuple[str, str]]:
    """Keys of a table that cannot be kept, and why not."""
    if table.attention == "unfused":
        yield "attention", "packed sequences have fused attention alone"
    if isinstance(table, TrainedSettings) and table.optimizer_dtype != "float32":
        yield "optimizer_dtype", "moments of other types than float32 are not in checkpoints"
