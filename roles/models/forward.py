"""Refuse models whose forward pass is more than trainer and embedded engine compute. Those two run the layers, then the
output layer, with every earlier position visible; anything else that a model does would be silently left out."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    pass


NEUTRAL_SETTINGS = {
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
}
"""Settings of known models, and the values with which they have no effect."""
REQUIRED_SETTINGS = ("max_position_embeddings", "num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
"""Settings that the engine needs of a config; models without positions, as with ALiBi, have no context length."""
PROBE_TOKENS = 8
OTHER_MODELS = (
    "use a model of full attention and plain logits (Qwen3, Llama, SmolLM2), or lower max_position_embeddings to its "
    "window where sequences are that short"
)
LOGITS_TOLERANCE = 1e-3
"""Both ways are the same operations on the same numbers; a scale or a cap changes more."""
FORWARD_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError, Refused)
"""What a model with another interface raises for an unknown argument or form of attention."""


def check_forward(model: Any, folder: Path) -> None:
    """Refuse a model with parts that are not computed; it is in evaluation mode.

    Raises:
        Refused: with what would be left out.
    """
    text = model.config.get_text_config()
    if why := unsupported_reason(text):
        raise _unsupported(folder, why)
    device = next(model.parameters()).device
    ids = torch.arange(PROBE_TOKENS, device=device)[None] % int(text.vocab_size)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        ours = model.get_output_embeddings()(hidden)
    gap, most = float((whole - ours).abs().max()), float(whole.abs().max())
    if not gap <= LOGITS_TOLERANCE * most:
        raise _unsupported(
            folder, f"its logits differ by {gap:.3g} (of {most:.3g}) from those of its layers and its head"
        )


def cache_keyword(layers: Any) -> str:
    """Return the keyword by which a model's layers take the cache: `past_key_values` until transformers 5.23."""
    return "cache" if "cache" in inspect.signature(layers.forward).parameters else "past_key_values"


def unsupported_reason(text: Any) -> str:
    """Return why a text model's settings are not supported; empty if they are."""
    for key, neutral in NEUTRAL_SETTINGS.items():
        if (value := getattr(text, key, neutral)) not in (neutral, None):
            return f"{key} = {value} is not computed"
    if lacking := [name for name in REQUIRED_SETTINGS if not isinstance(getattr(text, name, None), int)]:
        return f"its config has no {', '.join(lacking)}, by which it is computed"
    context = int(text.max_position_embeddings)
    types = set(getattr(text, "layer_types", None) or ())
    if other := types - {"full_attention", "sliding_attention", "chunked_attention"}:
        return f"layers of type {', '.join(sorted(other))} are not computed"
    for key, kind in (("sliding_window", "sliding_attention"), ("attention_chunk_size", "chunked_attention")):
        window = getattr(text, key, None)
        used = kind in types if types else getattr(text, "use_sliding_window", True)
        if window is not None and used and int(window) < context:
            return f"{key} = {window} is below the context of {context} tokens, and attention sees all of it"
    return ""


def _unsupported(folder: Path, why: str) -> Refused:
    return Refused(
        f"the model in {folder}",
        why=why,
        hint=OTHER_MODELS,
    )
