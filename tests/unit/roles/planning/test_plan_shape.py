"""Parameter counts from a config.json: against known totals, and against the models that transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_rt.roles.models.shape import ModelShape, read_shape, shape_of
from relax_rt.transport.rpc.errors import RelaxError

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
DENSE = EXAMPLES / "h100x8_qwen3_8b/model"
EXPERTS = EXAMPLES / "h100x16_qwen3_30b_a3b/model"


def test_known_totals_of_released_models() -> None:
    assert read_shape(DENSE).parameters == 8_190_735_360
    shape = read_shape(EXPERTS)
    assert shape.parameters == 30_532_122_624
    # "A3B": what one token passes through, embeddings included.
    assert shape.active_parameters == 3_353_032_704


def test_the_shape_of_the_released_dense_model() -> None:
    shape = read_shape(DENSE)
    assert (shape.layers, shape.query, shape.key, shape.qk_norm, shape.tied) == (36, 4096, 1024, True, False)
    # 36 layers x keys and values x 8 heads x 128.
    assert shape.kv_values_a_token == 73_728
    assert shape.largest_tensor == 151_936 * 4096


def small_configs() -> list[tuple[str, dict[str, Any]]]:
    wide = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    return [
        ("Llama", {**wide, "intermediate_size": 99, "num_hidden_layers": 3}),
        ("Llama", {**wide, "num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True, "intermediate_size": 99}),
        ("Llama", {**wide, "num_hidden_layers": 1, "tie_word_embeddings": True, "head_dim": 8}),
        ("Qwen2", {**wide, "intermediate_size": 99, "num_hidden_layers": 3, "tie_word_embeddings": True}),
        ("Qwen2", {**wide, "num_hidden_layers": 2, "num_key_value_heads": 4}),
        ("Qwen3", {**wide, "intermediate_size": 99, "num_hidden_layers": 3, "head_dim": 32}),
        ("Qwen3", {**wide, "num_hidden_layers": 2, "attention_bias": True}),
        ("Qwen3Moe", {**wide, "num_hidden_layers": 2, "num_experts": 6, "moe_intermediate_size": 40, "head_dim": 16}),
        ("Qwen3Moe", {**wide, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ]


@pytest.mark.parametrize(("family", "values"), small_configs())
def test_formulas_count_what_transformers_builds(family: str, values: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape_of(config.to_dict()).parameters == sum(p.numel() for p in model.parameters())


def test_every_tensor_of_the_large_models_has_the_elements_that_transformers_gives_it() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for folder in (DENSE, EXPERTS):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        shape = read_shape(folder)
        layer = dict(model.model.layers[5].named_parameters())
        assert sum(p.numel() for p in layer.values()) == sum(part.elements for part in shape.layer_weights(5))
        found = {part.name: part.elements for part in shape.layer_weights(5)}
        assert found["q_proj"] == layer["self_attn.q_proj.weight"].numel()
        assert found["k_proj+v_proj"] == 2 * layer["self_attn.k_proj.weight"].numel()
        assert found["q_norm+k_norm"] == 2 * layer["self_attn.q_norm.weight"].numel()
        rest = sum(p.numel() for name, p in layer.items() if name.startswith("mlp."))
        assert sum(found[name] for name in ("gate", "experts", "mlp") if name in found) == rest


def test_a_critic_has_one_output_a_token() -> None:
    shape = read_shape(DENSE)
    values = {**shape_fields(shape), "value_head": True}
    assert ModelShape(**values).parameters == shape.parameters - 151_936 * 4096 + 4096


def shape_fields(shape: ModelShape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in shape.__struct_fields__}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3' cannot be planned"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size is '4096', not a positive whole number"),
        ({"num_hidden_layers": 0}, "not a positive whole number"),
        ({"num_key_value_heads": 7}, "do not divide over 7"),
        ({"quantization_config": {}}, "quantized"),
    ],
)
def test_configs_that_cannot_be_planned(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**json.loads((DENSE / "config.json").read_text()), **change}))
    with pytest.raises(RelaxError, match=words):
        read_shape(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "\x00", '{"model_type": ["qwen3"]}'])
def test_what_is_no_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RelaxError):
        read_shape(tmp_path)
    with pytest.raises(RelaxError, match="cannot be read"):
        read_shape(tmp_path / "elsewhere")
