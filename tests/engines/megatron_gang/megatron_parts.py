"""The models that Megatron's gangs train in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gang_harness import VOCABULARY, Gang, near, samples

__all__ = ["VOCABULARY", "Gang", "near", "samples", "save_model"]

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def save_model(folder: Path, family: str) -> Path:
    """A small random model in Hugging Face format, float32; norms and biases are not what they start from."""
    import transformers

    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
    made: dict[str, Any] = {
        "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
        "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
        "llama": ("Llama", {"tie_word_embeddings": True, "attention_bias": False}),
        "qwen3_moe": (
            "Qwen3Moe",
            {
                "head_dim": 16,
                "tie_word_embeddings": False,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [0],
            },
        ),
    }
    name, rest = made[family]
    config = getattr(transformers, f"{name}Config")(**COMMON, **rope, **rest)
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder
