"""Checkpoints of models with experts: under the names of released models, so that Megatron's readers know them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_backend import torch_backend

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from megatron_sharder import Gang, shard  # noqa: E402
from packing_samples import SAMPLES  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from test_megatron_blocks import GANGS, divided, planned  # noqa: E402

from relax_rt.roles.models.shape import shape_of  # noqa: E402
from relax_rt.roles.training.checkpoints.optimizer_state import (  # noqa: E402
    MASTER,
    MOMENTS,
    OptimizerFiles,
    block_key,
    rank_file,
    whole_block,
    write_blocks,
)
from relax_rt.roles.training.megatron.state import HfModelFiles, fill_parameter, parameter_blocks  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402
from relax_rt.transport.rpc.errors import Refused  # noqa: E402

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
QWEN: dict[str, Any] = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", QWEN),
    "qwen2_moe": ("Qwen2Moe", {**QWEN, "shared_expert_intermediate_size": 40}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}


def model_of(kind: str, folder: Path) -> Path:
    name, values = KINDS[kind]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **values})
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of("qwen3_moe", tmp_path_factory.mktemp("sparse"))


def backend(folder: Path) -> TorchBackend:
    return torch_backend(folder, learning_rate=1e-2, max_grad_norm=1.0)


def trained(folder: Path, into: Path, steps: int = 2) -> TorchBackend:
    """A backend after some steps, and its checkpoint."""
    found = backend(folder)
    for number in range(1, steps + 1):
        assert found.step(SAMPLES, number).changed
    found.snapshot()
    into.mkdir()
    found.write(into)
    return found


def state_of(trainer: TorchBackend) -> dict[str, torch.Tensor]:
    """Weights and moments by the model's own names, each of any shape."""
    found = {piece.name: piece.values.detach().clone() for piece in trainer.weights.published}
    for piece in trainer.weights.trained:
        state = trainer._optimizer.state.get(piece.values, {})
        found |= {f"{piece.name}|{kind}": value.detach().clone() for kind, value in state.items()}
    return found


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def one_by_one(state: dict[str, torch.Tensor], suffix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of one kind by the names of released models, spelled out."""
    found = {}
    for key, value in state.items():
        name, _, kind = key.partition("|")
        if kind != suffix:
            continue
        prefix, _, last = name.rpartition(".")
        for expert in range(len(value)) if last in ("gate_up_proj", "down_proj") else ():
            gate, up = value[expert].chunk(2)
            parts = {"gate_proj": gate, "up_proj": up} if last == "gate_up_proj" else {"down_proj": value[expert]}
            found |= {f"{prefix}.{expert}.{piece}.weight": part for piece, part in parts.items()}
        if last not in ("gate_up_proj", "down_proj"):
            found[name] = value
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_loaded_and_gone_on_from(kind: str, tmp_path: Path) -> None:
    folder, into = model_of(kind, tmp_path / "model"), tmp_path / "checkpoint"
    first = trained(folder, into)
    kept = state_of(first)
    wanted = [first.step(SAMPLES, number) for number in (3, 4)]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32)
    assert_same(dict(loaded.named_parameters()), {name: value for name, value in kept.items() if "|" not in name})
    second = backend(folder)
    second.restore(into)
    assert_same(state_of(second), kept)
    assert [second.step(SAMPLES, number) for number in (3, 4)] == wanted
    # Its tensors are those that the released model has; Mixtral's have other names, which are not known here.
    found, released = load_file(into / "model.safetensors"), load_file(folder / "model.safetensors")
    if kind == "mixtral":
        assert "model.layers.0.mlp.experts.gate_up_proj" in found
    else:
        assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in released.items()}
        assert_same(found, one_by_one(kept))


def test_megatron_says_what_to_do_with_experts_in_one_tensor(sparse: Path, tmp_path: Path) -> None:
    into = tmp_path / "checkpoint"
    first = trained(sparse, into)
    kept = state_of(first)
    save_file({piece.name: kept[piece.name] for piece in first.weights.published}, into / "model.safetensors")
    with pytest.raises(Refused, match=r"experts.0.gate_proj.weight is missing: .* in one tensor.*save_pretrained"):
        HfModelFiles(into).check(shape_of({**COMMON, **QWEN, "model_type": "qwen3_moe"}))


@pytest.mark.parametrize("gang", GANGS[:4])
def test_megatron_s_ranks_read_it(gang: Gang, sparse: Path, tmp_path: Path) -> None:
    into = tmp_path / "checkpoint"
    kept = state_of(trained(sparse, into))
    config = {**COMMON, **QWEN, "model_type": "qwen3_moe"}
    files, state = HfModelFiles(into), OptimizerFiles(into)
    plan = planned(gang, shard(one_by_one(kept), config, gang), config)
    files.check(plan.shape)
    assert state.steps == 2
    for kind, read in (("", files), *((kind, state.reader(kind)) for kind in MOMENTS)):
        for rank, (wanted,) in enumerate(shard(one_by_one(kept, kind), config, gang)):
            for (_, name), local in plan.held(rank)[0].items():
                expected = wanted[name].reshape(-1).clone()
                expected[expected == -7.0] = 0.0  # padding
                for start, stop in divided(len(expected), 3):
                    found = torch.full((stop - start,), torch.nan)
                    fill_parameter(found, local, read, start)
                    assert torch.equal(found, expected[start:stop]), (kind, name)


@pytest.mark.parametrize("gang", GANGS[2:4])
@pytest.mark.parametrize("masters", [False, True])
def test_what_megatron_s_ranks_wrote_is_gone_on_from(gang: Gang, masters: bool, sparse: Path, tmp_path: Path) -> None:
    kept = state_of(trained(sparse, tmp_path / "ours"))
    config = {**COMMON, **QWEN, "model_type": "qwen3_moe"}
    weights = one_by_one(kept)
    kinds = {kind: shard(one_by_one(kept, kind), config, gang) for kind in MOMENTS}
    kinds |= {MASTER: shard(weights, config, gang)} if masters else {}
    plan = planned(gang, shard(weights, config, gang), config)
    into = tmp_path / "theirs"
    into.mkdir()
    written = {name: value.bfloat16() if masters else value for name, value in weights.items()}
    save_file({name: value.contiguous() for name, value in written.items()}, into / "model.safetensors")
    for rank in range(gang.world):
        blocks = {}
        for (_, name), local in plan.held(rank)[0].items():
            for kind, shards in kinds.items():
                flat = shards[rank][0][name].reshape(-1)
                for start, stop in divided(len(flat), 3):
                    for at, block in parameter_blocks(local, start, stop):
                        values = flat[start + at : start + at + block.rows * block.columns]
                        blocks[block_key(kind, block)] = values.view(block.rows, block.columns).clone()
        write_blocks(rank_file(into, rank, gang.world), blocks, steps=2)
    second = backend(sparse)
    second.restore(into)
    assert_same(state_of(second), kept)


def test_an_expert_that_is_missing_is_named_and_nothing_is_changed(sparse: Path, tmp_path: Path) -> None:
    into = tmp_path / "checkpoint"
    first = trained(sparse, into)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    model, moments = into / "model.safetensors", rank_file(into, 0, 1)
    saved, kept = load_file(model), load_file(moments)
    second = backend(sparse)
    before = state_of(second)
    save_file({key: value for key, value in saved.items() if key != name}, model)
    with pytest.raises(Refused, match=rf"{name} is missing"):
        second.restore(into)
    save_file({**saved, name: saved[name][:5].contiguous()}, model)
    with pytest.raises(Refused, match=rf"{name} has the shape \[5, 32\], not \[24, 32\]"):
        second.restore(into)
    save_file(saved, model)
    block = whole_block(name, (24, 32))
    lost = {key: value for key, value in kept.items() if key != block_key("exp_avg", block)}
    write_blocks(moments, lost, steps=2)
    with pytest.raises(Refused, match=rf"lacks exp_avg of 768 elements of {name}"):
        second.restore(into)
    assert_same(state_of(second), before)
    write_blocks(moments, kept, steps=2)
    second.restore(into)
    assert_same(state_of(second), state_of(first))
