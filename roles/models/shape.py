"""The shape of a model from its config.json alone: which tensors it has, and how each is split over ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from relax_rt.transport.rpc.errors import RelaxError

Split = Literal["tensor", "kv", "vocabulary", "expert", "none"]
"""How a tensor lies on ranks: cut by tensor parallelism (`kv`: by key-value heads, `vocabulary`: by rows of the
vocabulary), by experts, or whole on each."""
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
MAX_BYTES = 1 << 20


class WeightGroup(msgspec.Struct, frozen=True):
    """A group of like tensors: their name in a Hugging Face checkpoint, elements together, how they are split, and
    the elements of the largest single one."""

    name: str
    elements: int
    split: Split
    largest: int = 0


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder of the Llama, Qwen2, Qwen3 or Qwen3-MoE family.

    Attributes:
        ffn: inner width of a dense layer's MLP. expert_ffn: that of one expert.
        qkv_bias, out_bias, mlp_bias: which linear layers have a bias. qk_norm: norms of the heads of query and key.
        tied: input and output embedding are one tensor.
        sparse: for each layer, whether its MLP is a mixture of experts.
        context: positions that the model was made for.
        value_head: one output a token instead of the vocabulary's, as a critic has.
    """

    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    context: int
    sparse: tuple[bool, ...]
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    value_head: bool = False

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.sparse)

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads together; values have the same."""
        return self.kv_heads * self.head_dim

    @property
    def kv_values_a_token(self) -> int:
        """Elements that one token takes in the KV cache, over all layers."""
        return self.layers * 2 * self.key

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        return sum(part.elements for part in self.all_weights())

    @property
    def active_parameters(self) -> int:
        """Parameters that take part in one token: of the experts only those chosen."""
        share = self.experts_per_token / self.experts if self.experts else 0.0
        return sum(
            round(part.elements * share) if part.split == "expert" else part.elements for part in self.all_weights()
        )

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest tensor of a checkpoint: what a bucket of the weight transfer must hold."""
        return max(part.largest or part.elements for part in self.all_weights())

    def all_weights(self) -> Iterator[WeightGroup]:
        """Yield every weight of the model, once."""
        yield from self.input_weights()
        for layer in range(self.layers):
            yield from self.layer_weights(layer)
        yield from self.output_weights()

    def input_weights(self) -> Iterator[WeightGroup]:
        """Yield the weights before the first layer."""
        yield WeightGroup("embed_tokens", self.vocabulary * self.hidden, "vocabulary")

    def output_weights(self, *, separate: bool = False) -> Iterator[WeightGroup]:
        """Yield the weights after the last layer.

        Args:
            separate: the last layer lies elsewhere than the input embedding, so that a tied one is there as a copy.
        """
        yield WeightGroup("norm", self.hidden, "none")
        if self.value_head:
            yield WeightGroup("score", self.hidden, "none")
        elif not self.tied or separate:
            yield WeightGroup("lm_head", self.vocabulary * self.hidden, "vocabulary")

    def layer_weights(self, layer: int) -> Iterator[WeightGroup]:
        """Yield the weights of one layer."""
        hidden, query, key = self.hidden, self.query, self.key
        yield WeightGroup("q_proj", hidden * query, "tensor")
        yield WeightGroup("k_proj+v_proj", 2 * hidden * key, "kv", hidden * key)
        yield WeightGroup("o_proj", query * hidden, "tensor")
        if self.qkv_bias:
            yield WeightGroup("q_proj.bias", query, "tensor")
            yield WeightGroup("k_proj+v_proj.bias", 2 * key, "kv", key)
        if self.out_bias:
            yield WeightGroup("o_proj.bias", hidden, "none")
        if self.qk_norm:
            yield WeightGroup("q_norm+k_norm", 2 * self.head_dim, "none", self.head_dim)
        yield WeightGroup("layernorms", 2 * hidden, "none", hidden)
        if self.sparse[layer]:
            yield WeightGroup("gate", self.experts * hidden, "none")
            each = hidden * self.expert_ffn
            yield WeightGroup("experts", self.experts * 3 * each, "expert", each)
        else:
            yield WeightGroup("mlp", 3 * hidden * self.ffn, "tensor", hidden * self.ffn)
            if self.mlp_bias:
                yield WeightGroup("mlp.bias", 2 * self.ffn, "tensor", self.ffn)
                yield WeightGroup("down_proj.bias", hidden, "none")


def read_shape(folder: Path) -> ModelShape:
    """Return the shape that a folder's config.json describes.

    Raises:
        RelaxError: there is none, it cannot be read, or it is of a family whose formulas are not known.
    """
    file = folder / "config.json"
    try:
        raw = file.read_bytes()
        if len(raw) > MAX_BYTES:
            raise RelaxError(f"{file} has {len(raw)} bytes", why=f"at most {MAX_BYTES} are read")
        values = json.loads(raw)
    except OSError as error:
        hint = "a plan needs the model's config.json, not its weights"
        raise RelaxError(f"{file} cannot be read", why=error.strerror or str(error), hint=hint) from error
    except ValueError as error:
        raise RelaxError(f"{file} is not JSON", why=str(error)) from error
    if not isinstance(values, dict):
        raise RelaxError(f"{file} holds no JSON object")
    return shape_of(values, str(file))


def shape_of(values: Mapping[str, Any], name: str = "config.json") -> ModelShape:
    """Return the shape that a config's values describe, defaults as transformers has them.

    Raises:
        RelaxError: a value is missing or impossible, or the family is not known.
    """
    family = values.get("model_type")
    if family not in FAMILIES:
        raise RelaxError(
            f"{name}: model_type {family!r} cannot be planned", hint=f"formulas are known for {', '.join(FAMILIES)}"
        )
    if "quantization_config" in values:
        raise RelaxError(f"{name} is of a quantized model", why="what is trained is not quantized")
    read = _ConfigReader(values, name)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", heads)
    # transformers: Qwen3 has heads of 128 by default, the others divide the hidden width.
    head_dim = read.size("head_dim", 128 if family == "qwen3" else hidden // heads)
    if heads % kv_heads:
        raise RelaxError(f"{name}: {heads} attention heads do not divide over {kv_heads} key-value heads")
    bias = family == "qwen2" or bool(values.get("attention_bias"))
    moe = family == "qwen3_moe"
    layers = read.size("num_hidden_layers")
    # Which layers have experts, by the rule of Qwen3-MoE.
    step, dense = read.size("decoder_sparse_step", 1) if moe else 1, values.get("mlp_only_layers") or []
    return ModelShape(
        family=family,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=read.size("intermediate_size"),
        vocabulary=read.size("vocab_size"),
        context=read.size("max_position_embeddings", 32_768),
        sparse=tuple(moe and layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
        tied=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=bias,
        out_bias=bias and family != "qwen2",
        mlp_bias=family == "llama" and bool(values.get("mlp_bias")),
        qk_norm=family.startswith("qwen3"),
        # Released configs say num_experts; transformers 5 writes the same value as num_local_experts.
        experts=read.size("num_experts", values.get("num_local_experts")) if moe else 0,
        experts_per_token=read.size("num_experts_per_tok") if moe else 0,
        expert_ffn=read.size("moe_intermediate_size") if moe else 0,
    )


class _ConfigReader:
    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values, self.name = values, name

    def size(self, key: str, default: int | None = None) -> int:
        """Return a count of at least one."""
        value = self.values.get(key)
        if value is None:
            value = default
        if type(value) is not int or not 1 <= value < 1 << 40:
            what = "is missing" if value is None else f"is {value!r}, not a positive whole number"
            raise RelaxError(f"{self.name}: {key} {what}")
        return value
