"""Attention of sequences that are packed one behind the other in one row.

Each is computed on its own, so that no pair of tokens of two sequences is ever computed. `supports_segments` finds out
whether a model's attention can do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from relax_rt.roles.models.forward import FORWARD_ERRORS
from relax_rt.roles.training.batch.rows import Costs
from relax_rt.transport.rpc.errors import Refused

NAME = "relax_rt_segments"
"""What transformers' models find it by (attn_implementation)."""
PROBE = (2, 3, 4, 5)
"""Tokens of a prefix, of two sequences behind it, and of one that has none."""
CLOSE = 1e-3
"""Of the largest value: both ways are the same operations on the same numbers."""


@dataclass(frozen=True)
class AttentionSegment:
    """Neighbouring tokens of a row.

    Attributes:
        after: number of the segment that all of its tokens see besides; -1: none.
        mask: bool, broadcast to [1, 1, length, keys], True where attention is allowed; None: each token sees those of
            its segment before it, and itself.
    """

    length: int
    after: int = -1
    mask: torch.Tensor | None = None


def attention_in_segments(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Sequence[AttentionSegment] | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Torch's attention, of each segment apart; without segments, as transformers calls it.

    Shapes: query [1, heads, T, d], key and value [1, kv_heads, T, d]; found: [1, T, heads, d].
    """
    if segments is None:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **given
        )
        return found
    if any(given.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise Refused("attention of this model", why="scores that are capped or biased, and sinks, are not computed")
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    # Split, not sliced: the gradient of each slice would be as large as the row.
    lengths = [one.length for one in segments]
    queries, keys, values = (torch.split(whole, lengths, 2) for whole in (query, key, value))
    parts = []
    for number, one in enumerate(segments):
        own = keys[number], values[number]
        if one.after >= 0:
            own = torch.cat((keys[one.after], own[0]), 2), torch.cat((values[one.after], own[1]), 2)
        found_here = F.scaled_dot_product_attention(
            queries[number], *own, attn_mask=one.mask, dropout_p=dropout, is_causal=one.mask is None, scale=scaling
        )
        parts.append(found_here.transpose(1, 2))
    return torch.cat(parts, 1), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention_in_segments)


def suffix_mask(prefix: int, length: int, device: torch.device) -> torch.Tensor:
    """Mask of a segment behind another: bool [length, prefix + length]."""
    return torch.ones(length, prefix + length, dtype=torch.bool, device=device).tril(prefix)


def supports_segments(layers: Any) -> bool:
    """Give a transformers model, without its output layer, attention in segments, if it computes by it what it computes
    of each sequence alone; else it stays as it was.

    A model hands segments on where its layers pass arguments that they do not know to their attention. It is tried,
    with random tokens, on the model itself.
    """
    config = layers.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    training = layers.training
    layers.eval()
    try:
        with torch.no_grad():
            same = _same(layers)
    except FORWARD_ERRORS:
        same = False
    finally:
        layers.train(training)
    if not same:
        config._attn_implementation = before
    return same


def _same(layers: Any) -> bool:
    """Whether the probe's sequences in one row have the hidden states that each has alone."""
    prefix, first, second, other = PROBE
    device = next(layers.parameters()).device
    ids = torch.arange(sum(PROBE), device=device) * 7 % int(layers.config.vocab_size)
    places = torch.arange(sum(PROBE), device=device)
    positions = places.clone()
    positions[prefix + first :] -= first
    positions[-other:] = torch.arange(other, device=device)
    segments = [
        AttentionSegment(prefix),
        AttentionSegment(first, 0, suffix_mask(prefix, first, device)),
        AttentionSegment(second, 0, suffix_mask(prefix, second, device)),
        AttentionSegment(other),
    ]
    row = layers(input_ids=ids[None], position_ids=positions[None], use_cache=False, segments=segments)
    together = row.last_hidden_state[0]
    common, after = places[:prefix], places[prefix:]
    behind = (after[:first], after[first : first + second])
    for where in (*(torch.cat((common, own)) for own in behind), after[-other:]):
        alone = layers(input_ids=ids[where][None], use_cache=False).last_hidden_state[0]
        if not float((together[where] - alone).abs().max()) <= CLOSE * float(alone.abs().max()):
            return False
    return True


PROBE_SIZES = {
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


def architecture_packs(folder: Path) -> bool | None:
    """Return what `supports_segments` finds of a small random model of the class that the folder's config.json names.

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
        except (*FORWARD_ERRORS, OSError, StrictDataclassError):
            return None
        return supports_segments(layers)


def _smaller(config: Any) -> Any:
    values = config.to_dict()
    changed: dict[str, Any] = {name: size for name, size in PROBE_SIZES.items() if type(values.get(name)) is int}
    if type(kv_heads := values.get("num_key_value_heads")) is int:
        heads = values.get("num_attention_heads")
        changed["num_key_value_heads"] = 4 if kv_heads == heads else min(2, kv_heads)
    if types := values.get("layer_types"):
        # One of each.
        changed["layer_types"] = list(dict.fromkeys(types))
        changed["num_hidden_layers"] = len(changed["layer_types"])
    tokens = {name: None for name in values if name.endswith("_token_id")}
    return type(config)(**{**values, **changed, **tokens})


def packing_costs(layers: Any, device: torch.device) -> Costs | None:
    """Return the packing costs of a transformers model, without its output layer.

    None: its attention cannot have several sequences in a row, or its layers differ in size.

    Args:
        device: that it will be on. It is tried where it is.
    """
    try:
        costs = Costs.of(layers.config, device)
    except (AttributeError, TypeError, ValueError):
        return None
    return costs if supports_segments(layers) else None
