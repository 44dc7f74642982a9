"""Weights into shards, and optimizer state through files, between divisions that have nothing in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_sharder import Gang, make_state, shard
from safetensors.torch import save_file

from relax_rt.roles.models.parallel import ParallelSizes
from relax_rt.roles.models.shape import shape_of
from relax_rt.roles.training.checkpoints.optimizer_state import (
    OptimizerFiles,
    block_key,
    rank_file,
    whole_block,
    write_blocks,
)
from relax_rt.roles.training.megatron.layout import ModelDivision, naming_of
from relax_rt.roles.training.megatron.resharding import ReshardPlan, plan_buckets
from relax_rt.roles.training.megatron.state import HfModelFiles, fill_parameter, parameter_blocks
from relax_rt.transport.rpc.errors import Refused

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 30,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}
DENSE = {**CONFIG, "model_type": "qwen2", "head_dim": 2}
GANGS = [
    Gang(),
    Gang(tp=2, pad_to=8),
    Gang(tp=2, pp=2, dp=2, ep=2, fused_norms=True, grouped=True),
    Gang(dp=4, ep=2, etp=2),
    Gang(tp=4, dp=2, ep=4, pad_to=4),
]


def planned(gang: Gang, shards: list[Any], config: dict[str, Any]) -> ReshardPlan:
    padded = -(-config["vocab_size"] // (gang.pad_to * gang.tp)) * gang.pad_to * gang.tp
    sizes = ParallelSizes(
        world=gang.world, tensor=gang.tp, pipeline=gang.pp, context=gang.cp, expert=gang.ep, expert_tensor=gang.etp
    )
    names = [name for rank in shards for chunk in rank for name in chunk]
    division = ModelDivision(sizes=sizes, naming=naming_of(names), padded_vocabulary=padded)
    return plan_buckets(shape_of(config), division, dtype="float32")


def divided(elements: int, parts: int) -> Iterator[tuple[int, int]]:
    """As a distributed optimizer cuts a parameter: anywhere, also within a row."""
    each = -(-elements // parts)
    for start in range(0, elements, each):
        yield start, min(elements, start + each)


@pytest.mark.parametrize(
    ("gang", "config"), [*((gang, CONFIG) for gang in GANGS), *((gang, DENSE) for gang in GANGS[:2])]
)
def test_shards_are_filled_from_hugging_face_files(gang: Gang, config: dict[str, Any], tmp_path: Path) -> None:
    state = make_state(config)
    save_file(state, tmp_path / "model.safetensors")
    shards = shard(state, config, gang)
    files, plan = HfModelFiles(tmp_path), planned(gang, shards, config)
    files.check(plan.shape)
    for rank, (wanted,) in enumerate(shards):
        held, _ = plan.held(rank)
        for (_, name), local in held.items():
            found = torch.full(local.shape, torch.nan)
            fill_parameter(found.view(-1), local, files)
            expected = wanted[name].clone()
            expected[expected == -7.0] = 0.0  # padding
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("old", GANGS)
@pytest.mark.parametrize("new", GANGS[:3])
def test_optimizer_state_is_read_by_any_other_division(old: Gang, new: Gang, tmp_path: Path) -> None:
    state = make_state(CONFIG)
    writers = shard(state, CONFIG, old)
    plan = planned(old, writers, CONFIG)
    for rank, (parameters,) in enumerate(writers):
        held, _ = plan.held(rank)
        blocks = {}
        for (_, name), local in held.items():
            flat = parameters[name].reshape(-1)
            for start, stop in divided(len(flat), 3):
                for at, block in parameter_blocks(local, start, stop):
                    values = flat[start + at : start + at + block.rows * block.columns]
                    blocks[block_key("exp_avg", block)] = values.view(block.rows, block.columns).clone()
        write_blocks(rank_file(tmp_path, rank, old.world), blocks, steps=5)

    files = OptimizerFiles(tmp_path)
    assert files.steps == 5 and files.has("exp_avg") and not files.has("exp_avg_sq")
    readers = shard(state, CONFIG, new)
    plan = planned(new, readers, CONFIG)
    for rank, (wanted,) in enumerate(readers):
        held, _ = plan.held(rank)
        for (_, name), local in held.items():
            expected = wanted[name].reshape(-1).clone()
            expected[expected == -7.0] = 0.0
            for start, stop in divided(len(expected), 2):
                found = torch.full((stop - start,), torch.nan)
                fill_parameter(found, local, files.reader("exp_avg"), start)
                assert torch.equal(found, expected[start:stop]), name


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    state = make_state(DENSE)
    gone = state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(Refused, match=r"model.layers.1.mlp.up_proj.weight is missing"):
        HfModelFiles(tmp_path).check(shape_of(DENSE))
    save_file({**state, "model.layers.1.mlp.up_proj.weight": gone.T.contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(Refused, match=r"has the shape \[8, 12\], not \[12, 8\]"):
        HfModelFiles(tmp_path).check(shape_of(DENSE))
    blocks = {block_key("exp_avg", whole_block(n, v.shape)): v.reshape(len(v), -1) for n, v in state.items()}
    write_blocks(rank_file(tmp_path, 0, 1), blocks, 5)
    files = OptimizerFiles(tmp_path)
    plan = planned(Gang(), shard(make_state(DENSE), DENSE, Gang()), DENSE)
    local = plan.held(0)[0][0, "decoder.layers.1.mlp.linear_fc1.weight"]
    with pytest.raises(Refused, match=r"lacks exp_avg of 96 elements of model.layers.1.mlp.up_proj.weight"):
        fill_parameter(torch.empty(local.shape).view(-1), local, files.reader("exp_avg"))
    with pytest.raises(Refused, match="no state of an optimizer"):
        OptimizerFiles(tmp_path / "elsewhere")
