"""Attention of the embedded engine, over rows of a slot cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from relax_rt.roles.rollout.engines.segments import Segment
from relax_rt.transport.rpc.errors import Refused

NAME = "relax_rt_gqa"
"""What transformers' models find it by (attn_implementation)."""


def grouped_query_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: list[tuple[Segment, torch.Tensor]] | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention without repeating keys and values for the heads that share them.

    In decode the query heads of one key head become query positions of one attention over that head, which reads the
    cache once instead of heads/kv_heads times; rows of about one length are attended together (`segments`, with each
    one's mask), so that a long sequence does not make all others read as far as it.
    Shapes: query [b, heads, q, d], key and value [b, kv_heads, k, d].
    """
    if softcap is not None or s_aux is not None:
        raise Refused("attention of this model", why="scores that are capped, and sinks, are not computed")
    batch, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    if segments is not None:
        grouped = query.reshape(batch, key.shape[1], groups, dim)
        parts = [
            F.scaled_dot_product_attention(
                grouped[s.start : s.end],
                key[s.start : s.end, :, : s.upto],
                value[s.start : s.end, :, : s.upto],
                attn_mask=mask,
                scale=scaling,
            )
            for s, mask in segments
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.reshape(batch, 1, heads, dim), None
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = attention_mask is None
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=causal and length > 1, scale=scaling
    )
    return out.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_query_attention)
