"""This rank's part of a Megatron-Core GPTModel, from a Hugging Face folder's config.json.

`PackedAttention` and `Norm` replace what Megatron-Core's local layer specification lacks; with TransformerEngine its
own layers are used.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from relax_rt.roles.models.parallel import ParallelSizes
from relax_rt.roles.models.settings import TrainedSettings
from relax_rt.roles.models.shape import ModelShape, read_shape
from relax_rt.roles.training.backend.settings import unsupported
from relax_rt.roles.training.megatron.passes import context_positions
from relax_rt.transport.rpc.errors import Refused


class PackedAttention(torch.nn.Module):
    """Causal attention with torch's SDPA; sequences of one pack do not see each other.

    Context-parallel ranks bring keys and values of the whole pack together and attend with their own queries (Llama 3,
    arXiv 2407.21783, section 3.3.2): unlike in a ring, all keys and values of a layer are in memory at once.

    Megatron's interface of a core attention. Dropout is not supported, nor is a mask other than the causal one.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.group: dist.ProcessGroup | None = None
        if config.context_parallel_size > 1:
            self.group = importlib.import_module("megatron.core.parallel_state").get_context_parallel_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attention of packed tokens [t, heads, head_dim], or of a batch [s, b, heads, head_dim].

        Returns:
            [t, heads * head_dim], or [s, b, heads * head_dim].
        """
        if packed_seq_params is None:
            out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out.permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q
        if self.group is not None:
            return self._shared(query, key, value, bounds, self.group).flatten(1)
        parts = [
            self._attend(*(x[start:stop].transpose(0, 1) for x in (query, key, value))).transpose(0, 1)
            for start, stop in pairwise(bounds.tolist())
        ]
        return torch.cat(parts).flatten(1)

    def _shared(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Attention of this rank's tokens [t / ranks, heads, head_dim] to those before them of all ranks."""
        ranks = dist.get_world_size(group)
        places = [context_positions(bounds, rank, ranks).to(query.device) for rank in range(ranks)]
        gather: Any = _Gathered.apply
        key, value = (gather(x, torch.cat(places), group) for x in (key, value))
        mine, parts, at = places[dist.get_rank(group)], [], 0
        for start, stop in pairwise(bounds.tolist()):
            end = at + (stop - start) // ranks
            seen = mine[at:end, None] >= torch.arange(start, stop, device=query.device)
            q, k, v = query[at:end], key[start:stop], value[start:stop]
            parts.append(self._attend(*(x.transpose(0, 1) for x in (q, k, v)), seen=seen).transpose(0, 1))
            at = end
        return torch.cat(parts)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=seen is None, scale=self.scale, enable_gqa=True
        )


class _Gathered(torch.autograd.Function):
    """Tokens of all ranks in the order of the pack, [t, ...] from [t / ranks, ...]; gradients of all ranks' uses of
    them go back to the rank that has them."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, places: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Args: places: int64 [t], of the tokens of rank 0, 1, …"""
        ctx.places, ctx.group, ctx.size = places, group, len(mine)
        parts = [
            torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, mine.detach().contiguous(), group=group)
        whole = torch.cat(parts)
        return torch.empty_like(whole).index_copy_(0, places, whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Add up what all ranks have, and take this one's."""
        by_rank = gradient[ctx.places]
        dist.all_reduce(by_rank, group=ctx.group)
        first = dist.get_rank(ctx.group) * ctx.size
        return by_rank[first : first + ctx.size], None, None


class Norm(torch.nn.Module):
    """RMS norm that may stand between sequence-parallel layers: each rank sees a part of the tokens, so its weight's
    gradients are added up over the tensor-parallel ranks, which Megatron does for parameters so marked."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension."""
        return rms_norm(x, (x.shape[-1],), self.weight, self.eps)


LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's scaling of rotary frequencies has fixed; only the factor can be chosen."""
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Megatron's settings for each value of `recompute`."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Layers = Literal["transformer_engine", "local"]
Wanted = Literal["auto", "transformer_engine", "local"]


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder computes, besides the sizes of its tensors.

    Attributes:
        rope_factor: of Llama 3's scaling; 0: none. renormalise: the probabilities of the chosen experts sum to one.
    """

    shape: ModelShape
    epsilon: float
    rope_base: float
    rope_factor: float = 0.0
    renormalise: bool = True


def read_architecture(folder: Path) -> Architecture:
    """From a folder's config.json.

    Raises:
        RelaxError: it cannot be read, or is of a family that is not known.
        Refused: it asks for something that this backend does not compute.
    """
    shape = read_shape(folder)
    values = json.loads((folder / "config.json").read_text())
    if (activation := values.get("hidden_act", "silu")) != "silu":
        raise Refused(f"{folder}: hidden_act {activation!r}", why="the megatron backend computes silu alone")
    window = values.get("sliding_window")
    slides = values.get("use_sliding_window") or "sliding_attention" in (values.get("layer_types") or ())
    if slides and window is not None and window < shape.context:
        raise Refused(f"{folder}: sliding-window attention", why="the megatron backend computes full attention alone")
    if shape.out_bias != shape.mlp_bias and (shape.out_bias or shape.mlp_bias):
        raise Refused(f"{folder}: a bias in some output projections", why="Megatron has it in all or in none")
    base, factor = _rope(values, folder)
    return Architecture(
        shape=shape,
        epsilon=float(values.get("rms_norm_eps", 1e-6)),
        rope_base=base,
        rope_factor=factor,
        # transformers: Qwen3-MoE does not renormalise unless its config says so.
        renormalise=bool(values.get("norm_topk_prob", False)),
    )


def _rope(values: Mapping[str, Any], folder: Path) -> tuple[float, float]:
    """Base and scaling factor, from transformers' older keys or the newer `rope_parameters`."""
    found = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    base = float(found.get("rope_theta", values.get("rope_theta", 10_000.0)))
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return base, 0.0
    fixed = {key: found.get(key) for key in LLAMA3_SCALING}
    if kind == "llama3" and all(fixed[key] == value for key, value in LLAMA3_SCALING.items()):
        return base, float(found["factor"])
    raise Refused(
        f"{folder}: rotary embeddings of type {kind!r} with {fixed}",
        why=f"the megatron backend computes the default ones, and llama3 with {LLAMA3_SCALING}",
    )


class LayerChoice(msgspec.Struct, frozen=True):
    """Whose layers a rank computes with.

    Attributes:
        fallback: why they are not TransformerEngine's, on a device where those are the default; empty: they are the
            ones that are asked for.
    """

    layers: Layers
    fallback: str = ""


def decide_layers(wanted: Wanted, *, cuda: bool, installed: bool) -> LayerChoice:
    """TransformerEngine's layers are the default on CUDA, Megatron's own elsewhere.

    Args:
        installed: TransformerEngine is.

    Raises:
        Refused: TransformerEngine is asked for by name and cannot be used here.
    """
    if wanted == "local" or (wanted == "auto" and not cuda):
        return LayerChoice("local")
    if cuda and installed:
        return LayerChoice("transformer_engine")
    if wanted == "auto":
        return LayerChoice("local", fallback="transformer_engine is not installed")
    why = "it is not installed" if cuda else "there is no CUDA device"
    raise Refused("layers of TransformerEngine", why=why, hint='use layers = "auto" or "local"')


def choose_layers(wanted: Wanted) -> LayerChoice:
    """`decide_layers` for this process.

    Raises:
        Refused: see there.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None
    return decide_layers(wanted, cuda=torch.cuda.is_available(), installed=installed)


def sizes_of(table: TrainedSettings) -> ParallelSizes:
    """How the ranks of a gang divide the model."""
    return ParallelSizes(
        world=table.count,
        tensor=table.tensor_parallel,
        pipeline=table.pipeline_parallel,
        context=table.context_parallel,
        expert=table.expert_parallel,
        expert_tensor=table.expert_tensor_parallel,
    )


def padded_vocabulary(shape: ModelShape, sizes: ParallelSizes) -> int:
    """Rows of the embedding over all ranks: the vocabulary, made a multiple of the tensor-parallel ranks."""
    return -(-shape.vocabulary // sizes.tensor) * sizes.tensor


def transformer_config(model: Architecture, table: TrainedSettings, layers: Layers) -> Any:
    """Megatron's configuration.

    Losses and gradients are left as sums: with `calculate_per_token_loss` Megatron divides neither by micro-batches nor
    by replicas.

    Raises:
        Refused: the settings cannot be kept with these layers.
    """
    TransformerConfig = importlib.import_module("megatron.core.transformer").TransformerConfig
    shape, fused = model.shape, layers == "transformer_engine"
    check_settings(table)
    dtype = DTYPES[table.dtype]
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=model.epsilon,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=shape.mlp_bias,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Weights are read from a checkpoint; what they are before does not matter.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=fused and not shape.mlp_bias,
        masked_softmax_fusion=fused,
        apply_rope_fusion=fused,
        persist_layer_norm=fused,
        tensor_model_parallel_size=table.tensor_parallel,
        pipeline_model_parallel_size=table.pipeline_parallel,
        context_parallel_size=table.context_parallel,
        expert_model_parallel_size=table.expert_parallel,
        expert_tensor_parallel_size=table.expert_tensor_parallel,
        sequence_parallel=sequence_parallel(table),
        # Packs differ in length, and stages learn of it from each other.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        deallocate_pipeline_outputs=table.pipeline_parallel > 1,
        calculate_per_token_loss=True,
        **RECOMPUTE[table.recompute],
        **(_experts(model, fused) if shape.experts else {}),
    )


def sequence_parallel(table: TrainedSettings) -> bool:
    """Whether what lies between tensor-parallel layers is cut too; unset: with tensor parallelism."""
    return table.tensor_parallel > 1 if table.sequence_parallel is None else table.sequence_parallel


def check_settings(table: TrainedSettings) -> None:
    """Raises:
    Refused: a setting asks for what can be planned alone.
    """
    for key, why in unsupported(table):
        raise Refused(f"{key} = {getattr(table, key)!r}", why=why, hint="leave it out")


def _experts(model: Architecture, fused: bool) -> dict[str, Any]:
    shape = model.shape
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_layer_freq": [int(sparse) for sparse in shape.sparse],
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # Softmax over the chosen ones is softmax over all, renormalised over the chosen.
        "moe_router_pre_softmax": not model.renormalise,
        "moe_grouped_gemm": fused,
    }


def build(model: Architecture, config: Any, sizes: ParallelSizes, layers: Layers) -> Any:
    """This rank's part of the model, its weights not yet filled. The process' parallel state must be set up."""
    GPTModel = importlib.import_module("megatron.core.models.gpt").GPTModel
    state = importlib.import_module("megatron.core.parallel_state")
    shape = model.shape
    built = GPTModel(
        config,
        _specification(config, layers),
        vocab_size=padded_vocabulary(shape, sizes),
        max_sequence_length=shape.context,
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=model.rope_base,
        rope_scaling=model.rope_factor > 0,
        rope_scaling_factor=model.rope_factor or 8.0,
    )
    if torch.cuda.is_available():
        built.cuda(torch.cuda.current_device())
    return built


def _specification(config: Any, layers: Layers) -> Any:
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    if layers == "transformer_engine":
        return specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm")
    block = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    block.layer_norm = Norm
    for spec in block.layer_specs:
        parts = spec.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
    return block
