"""What of a Hugging Face config the Megatron backend takes, and what it refuses by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.megatron.model import (
    LayerChoice,
    check_settings,
    choose_layers,
    padded_vocabulary,
    read_architecture,
    sizes_of,
)
from relax_rt.transport.rpc.errors import Refused

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
SCALED = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def folder(tmp_path: Path, **rest: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **rest}))
    return tmp_path


@pytest.mark.parametrize(
    ("rope", "base", "factor"),
    [
        ({}, 1e4, 0.0),
        ({"rope_theta": 5e5}, 5e5, 0.0),
        ({"rope_theta": 5e5, "rope_scaling": SCALED}, 5e5, 32.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, 0.0),
        ({"rope_parameters": {**SCALED, "rope_theta": 1e6}}, 1e6, 32.0),
    ],
)
def test_rotary_embeddings_are_read_in_both_spellings(
    rope: dict[str, Any], base: float, factor: float, tmp_path: Path
) -> None:
    found = read_architecture(folder(tmp_path, **rope))
    assert (found.rope_base, found.rope_factor, found.epsilon) == (base, factor, 1e-5)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary embeddings of type 'yarn'"),
        ({"rope_scaling": {**SCALED, "low_freq_factor": 2.0}}, "low_freq_factor': 2.0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 32}, "sliding-window attention"),
        ({"attention_bias": True}, "a bias in some output projections"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(odd: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        read_architecture(folder(tmp_path, **odd))
    assert why in str(caught.value)


def test_a_window_as_long_as_the_context_is_full_attention(tmp_path: Path) -> None:
    read_architecture(folder(tmp_path, use_sliding_window=True, sliding_window=64))


def test_vocabulary_is_padded_to_the_ranks_that_cut_it(tmp_path: Path) -> None:
    shape = read_architecture(folder(tmp_path)).shape
    for ranks, rows in ((1, 131), (2, 132), (4, 132), (8, 136)):
        table = TrainerSettings(backend="megatron", dtype="bfloat16", count=ranks, tensor_parallel=ranks)
        assert padded_vocabulary(shape, sizes_of(table)) == rows


def test_transformer_engine_is_not_promised_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_layers("auto") == choose_layers("local") == LayerChoice("local")
    with pytest.raises(Refused, match="there is no CUDA device"):
        choose_layers("transformer_engine")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert choose_layers("auto") == LayerChoice("transformer_engine")


@pytest.mark.parametrize("setting", [{"attention": "unfused"}, {"optimizer_dtype": "bfloat16"}])
def test_settings_that_can_only_be_planned_are_refused(setting: dict[str, Any]) -> None:
    table = TrainerSettings(**{"backend": "megatron", "dtype": "bfloat16", "count": 2, **setting})
    with pytest.raises(Refused, match=f"{next(iter(setting))} = "):
        check_settings(table)
    check_settings(TrainerSettings(backend="megatron", dtype="bfloat16", count=2))
