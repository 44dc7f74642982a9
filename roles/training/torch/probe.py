"""Whether a model's attention can have several sequences in a row, tried on a small model of its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from relax_rt.roles.training.attention import UNLIKE, takes_segments

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}
"""Of the small model, where its kind has them. They do not matter to what layers do with their arguments."""


def kind_packs(folder: Path) -> bool | None:
    """What `takes_segments` finds of a small model of random weights, of the class that this folder's config.json says.

    Returns:
        None: no such small model can be made.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            config = _smaller(AutoConfig.from_pretrained(folder).get_text_config())
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
            layers = model.get_decoder()
            with torch.no_grad():
                layers(input_ids=torch.arange(4)[None], use_cache=False)
        except (*UNLIKE, OSError, StrictDataclassError):
            return None
        return takes_segments(layers)


def _smaller(config: Any) -> Any:
    values = config.to_dict()
    changed: dict[str, Any] = {name: size for name, size in SIZES.items() if type(values.get(name)) is int}
    if type(kv_heads := values.get("num_key_value_heads")) is int:
        heads = values.get("num_attention_heads")
        changed["num_key_value_heads"] = 4 if kv_heads == heads else min(2, kv_heads)
    if types := values.get("layer_types"):
        # One of each.
        changed["layer_types"] = list(dict.fromkeys(types))
        changed["num_hidden_layers"] = len(changed["layer_types"])
    tokens = {name: None for name in values if name.endswith("_token_id")}
    return type(config)(**{**values, **changed, **tokens})
