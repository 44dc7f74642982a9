"""The table [roles.trainer] of roles.toml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_rt.config.schema import Seconds, Table
from relax_rt.roles.models.settings import TrainedSettings


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
