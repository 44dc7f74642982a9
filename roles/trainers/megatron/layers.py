"""Layers that Megatron-Core's local specification lacks: attention over packed sequences, and a norm between
sequence-parallel layers. With TransformerEngine its own are used."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention


class PackedAttention(torch.nn.Module):
    """Causal attention with torch's SDPA; sequences of one pack do not see each other.

    Megatron's interface of a core attention. Dropout is not supported, nor is a mask other than the causal one.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attention of packed tokens [t, heads, head_dim], or of a batch [s, b, heads, head_dim].

        Returns:
            [t, heads * head_dim], or [s, b, heads * head_dim].
        """
        if packed_seq_params is None:
            out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out.permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        parts = [
            self._attend(*(x[start:stop].transpose(0, 1) for x in (query, key, value))).transpose(0, 1)
            for start, stop in pairwise(bounds)
        ]
        return torch.cat(parts).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=True)


class Norm(torch.nn.Module):
    """RMS norm that may stand between sequence-parallel layers: each rank sees a part of the tokens, so its weight's
    gradients are added up over the tensor-parallel ranks, which Megatron does for parameters so marked."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension."""
        return rms_norm(x, (x.shape[-1],), self.weight, self.eps)
