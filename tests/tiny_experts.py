"""A small mixture of experts with the tiny model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def build_sparse_model(folder: Path, **further: Any) -> None:
    """A random Qwen3-MoE of three layers, the middle one without experts; `further` of its config."""
    import torch
    import transformers

    from relax_rt.roles.models.tiny import CONTEXT, character_tokenizer

    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        **further,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
