"""Attention of the embedded engine over rows of the slot cache, with rows of similar length computed together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from relax_rt.transport.rpc.errors import Refused

QUANTUM = 64
"""Lengths up to this are one class; each further class is twice as long."""
CALL_COST = 2048
"""Cost of a further attention call, in key positions read in the same time (measured with tools/bench/engine.py)."""


class Segment(NamedTuple):
    """Rows [start, end), all of them at most `upto` positions long."""

    start: int
    end: int
    upto: int


def length_class(length: int) -> int:
    """Return 0 up to QUANTUM positions, and one more for each doubling."""
    return max(0, (length - 1) // QUANTUM).bit_length()


def segments(lengths: Sequence[int]) -> list[Segment]:
    """Split rows, in their order, into runs, so that reading each run up to its longest row wastes little.

    Short runs are merged with their neighbour if that costs less than a call of their own, and all runs if splitting
    does not pay. Rows ordered by length_class give the best runs; any order gives a correct result.
    """
    found: list[Segment] = []
    start = 0
    for row in range(1, len(lengths) + 1):
        if row < len(lengths) and length_class(lengths[row]) == length_class(lengths[start]):
            continue
        found.append(Segment(start, row, max(lengths[start:row])))
        start = row
        while len(found) > 1 and _merged_cost(found[-2], found[-1]) <= CALL_COST:
            last, before = found.pop(), found.pop()
            found.append(Segment(before.start, last.end, max(before.upto, last.upto)))
    longest = max(lengths, default=0)
    cut = sum((s.end - s.start) * s.upto + CALL_COST for s in found)
    if len(found) > 1 and len(lengths) * longest + CALL_COST <= cut:
        return [Segment(0, len(lengths), longest)]
    return found


def _merged_cost(one: Segment, other: Segment) -> int:
    """Return the positions read in vain if both are read up to the longer one."""
    upto = max(one.upto, other.upto)
    return (one.end - one.start) * (upto - one.upto) + (other.end - other.start) * (upto - other.upto)


NAME = "relax_rt_gqa"
"""Its name for transformers' models (attn_implementation)."""


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
    cache once instead of heads/kv_heads times. Rows of similar length are computed together (`segments`, each with its
    mask), so that the others are not read up to the length of the longest sequence.
    Shapes: query [b, heads, q, d], key and value [b, kv_heads, k, d].
    """
    if softcap is not None or s_aux is not None:
        raise Refused("attention of this model", why="capped scores and attention sinks are not computed")
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
