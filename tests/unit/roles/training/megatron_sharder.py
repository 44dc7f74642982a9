"""Cuts a Hugging Face state dict the way Megatron-Core lays it on ranks, with tensor operations alone.

Written from what Megatron's layers do with their weights, apart from the code that it tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

State = dict[str, torch.Tensor]


@dataclasses.dataclass
class Gang:
    """Parallel sizes; ranks count tensor fastest, then context, data, pipeline (experts: etp, ep, data, pipeline)."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    pad_to: int = 1
    fused_norms: bool = False
    grouped: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp


def make_state(config: dict[str, Any]) -> State:
    """Every element of the model another number, all exact in float32."""
    h, d = config["hidden_size"], config["head_dim"]
    q, kv, f = config["num_attention_heads"] * d, config["num_key_value_heads"] * d, config["intermediate_size"]
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], h)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            sizes[f"{p}self_attn.{name}_proj.weight"] = (rows, h)
            if config["model_type"] == "qwen2":
                sizes[f"{p}self_attn.{name}_proj.bias"] = (rows,)
        sizes[f"{p}self_attn.o_proj.weight"] = (h, q)
        if config["model_type"].startswith("qwen3"):
            sizes[f"{p}self_attn.q_norm.weight"] = sizes[f"{p}self_attn.k_norm.weight"] = (d,)
        if config["model_type"] == "qwen3_moe":
            m = config["moe_intermediate_size"]
            sizes[f"{p}mlp.gate.weight"] = (config["num_experts"], h)
            for e in range(config["num_experts"]):
                sizes[f"{p}mlp.experts.{e}.gate_proj.weight"] = sizes[f"{p}mlp.experts.{e}.up_proj.weight"] = (m, h)
                sizes[f"{p}mlp.experts.{e}.down_proj.weight"] = (h, m)
        else:
            sizes[f"{p}mlp.gate_proj.weight"] = sizes[f"{p}mlp.up_proj.weight"] = (f, h)
            sizes[f"{p}mlp.down_proj.weight"] = (h, f)
        sizes[f"{p}input_layernorm.weight"] = sizes[f"{p}post_attention_layernorm.weight"] = (h,)
    sizes["model.norm.weight"] = (h,)
    if not config["tie_word_embeddings"]:
        sizes["lm_head.weight"] = (config["vocab_size"], h)
    state: State = {}
    at = 0
    for name, size in sizes.items():
        n = int(torch.Size(size).numel())
        state[name] = torch.arange(at, at + n, dtype=torch.float32).view(size)
        at += n
    assert at < 1 << 24
    return state


def shard(state: State, config: dict[str, Any], gang: Gang) -> list[list[State]]:
    """For each rank the parameters of each of its model chunks."""
    ranks: list[list[State]] = []
    for rank in range(gang.world):
        tp = rank % gang.tp
        pp = rank // (gang.tp * gang.cp * gang.dp)
        within = rank % (gang.tp * gang.cp * gang.dp)
        etp, ep = within % gang.etp, within // gang.etp % gang.ep
        ranks.append([_chunk(state, config, gang, tp, pp, ep, etp, chunk) for chunk in range(gang.vpp)])
    return ranks


def _chunk(state: State, config: dict[str, Any], gang: Gang, tp: int, pp: int, ep: int, etp: int, chunk: int) -> State:
    out: State = {}
    each = config["num_hidden_layers"] // (gang.pp * gang.vpp)
    # Chunks are dealt to the stages in turn.
    first = (chunk * gang.pp + pp) * each
    if pp == 0 and chunk == 0:
        out["embedding.word_embeddings.weight"] = _vocabulary(state["model.embed_tokens.weight"], gang, tp)
    for local in range(each):
        layer = {
            name.removeprefix(f"model.layers.{first + local}."): value
            for name, value in state.items()
            if name.startswith(f"model.layers.{first + local}.")
        }
        for name, value in _layer(layer, config, gang, tp, ep, etp).items():
            out[f"decoder.layers.{local}.{name}"] = value
    if pp == gang.pp - 1 and chunk == gang.vpp - 1:
        out["decoder.final_layernorm.weight"] = state["model.norm.weight"]
        if "lm_head.weight" in state:
            out["output_layer.weight"] = _vocabulary(state["lm_head.weight"], gang, tp)
        elif gang.pp > 1:
            out["output_layer.weight"] = _vocabulary(state["model.embed_tokens.weight"], gang, tp)
    return out


def _vocabulary(weight: torch.Tensor, gang: Gang, tp: int) -> torch.Tensor:
    multiple = gang.pad_to * gang.tp
    extra = -weight.shape[0] % multiple
    return torch.cat([weight, torch.full((extra, weight.shape[1]), -7.0)]).chunk(gang.tp)[tp]


def _layer(layer: State, config: dict[str, Any], gang: Gang, tp: int, ep: int, etp: int) -> State:
    out: State = {}
    moe = "mlp.gate.weight" in layer
    groups = config["num_key_value_heads"]
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in layer:
            q, k, v = (layer[f"self_attn.{n}_proj.{kind}"] for n in "qkv")
            rest = q.shape[1:]
            stacked = torch.cat([t.reshape(groups, -1, *rest) for t in (q, k, v)], 1).reshape(-1, *rest)
            out[f"self_attention.linear_qkv.{kind}"] = stacked.tensor_split(gang.tp)[tp]
    out["self_attention.linear_proj.weight"] = layer["self_attn.o_proj.weight"].chunk(gang.tp, 1)[tp]
    for n in "qk":
        if f"self_attn.{n}_norm.weight" in layer:
            out[f"self_attention.{n}_layernorm.weight"] = layer[f"self_attn.{n}_norm.weight"]
    first = "self_attention.linear_qkv.layer_norm_weight" if gang.fused_norms else "input_layernorm.weight"
    second = "mlp.linear_fc1.layer_norm_weight" if gang.fused_norms and not moe else "pre_mlp_layernorm.weight"
    out[first], out[second] = layer["input_layernorm.weight"], layer["post_attention_layernorm.weight"]
    if not moe:
        gate, up = (layer[f"mlp.{n}_proj.weight"].chunk(gang.tp)[tp] for n in ("gate", "up"))
        out["mlp.linear_fc1.weight"] = torch.cat([gate, up])
        out["mlp.linear_fc2.weight"] = layer["mlp.down_proj.weight"].chunk(gang.tp, 1)[tp]
        return out
    out["mlp.router.weight"] = layer["mlp.gate.weight"]
    mine = config["num_experts"] // gang.ep
    for local in range(mine):
        expert = f"mlp.experts.{ep * mine + local}."
        gate, up = (layer[f"{expert}{n}_proj.weight"].chunk(gang.etp)[etp] for n in ("gate", "up"))
        down = layer[f"{expert}down_proj.weight"].chunk(gang.etp, 1)[etp]
        for n, value in ((1, torch.cat([gate, up])), (2, down)):
            name = f"linear_fc{n}.weight{local}" if gang.grouped else f"local_experts.{local}.linear_fc{n}.weight"
            out[f"mlp.experts.{name}"] = value
    return out
