"""Layers that Megatron-Core's local specification lacks: attention over packed sequences, and a norm between
sequence-parallel layers. With TransformerEngine its own are used."""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from relax_rt.roles.training.megatron.packs import context_positions


class PackedAttention(torch.nn.Module):
    """Causal attention with torch's SDPA; sequences of one pack do not see each other.

    Context-parallel ranks bring keys and values of the whole pack together and attend with their own queries (Llama 3,
    arXiv 2407.21783, section 3.3.2): unlike in a ring, all keys and values of a layer are in memory at once.

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
        self.group: dist.ProcessGroup | None = None
        if config.context_parallel_size > 1:
            self.group = importlib.import_module("megatron.core.parallel_state").get_context_parallel_group()

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
        bounds = packed_seq_params.cu_seqlens_q
        if self.group is not None:
            return self._shared(query, key, value, bounds, self.group).flatten(1)
        parts = [
            self._attend(*(x[start:stop].transpose(0, 1) for x in (query, key, value))).transpose(0, 1)
            for start, stop in pairwise(bounds.tolist())
        ]
        return torch.cat(parts).flatten(1)

    def _shared(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bounds: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Attention of this rank's tokens [t / ranks, heads, head_dim] to those before them of all ranks."""
        ranks = dist.get_world_size(group)
        places = [context_positions(bounds, rank, ranks).to(query.device) for rank in range(ranks)]
        gather: Any = _Gathered.apply
        key, value = (gather(x, torch.cat(places), group) for x in (key, value))
        mine, parts, at = places[dist.get_rank(group)], [], 0
        for start, stop in pairwise(bounds.tolist()):
            end = at + (stop - start) // ranks
            seen = mine[at:end, None] >= torch.arange(start, stop, device=query.device)
            q, k, v = query[at:end], key[start:stop], value[start:stop]
            parts.append(self._attend(*(x.transpose(0, 1) for x in (q, k, v)), seen=seen).transpose(0, 1))
            at = end
        return torch.cat(parts)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=seen is None, scale=self.scale, enable_gqa=True
        )


class _Gathered(torch.autograd.Function):
    """Tokens of all ranks in the order of the pack, [t, ...] from [t / ranks, ...]; gradients of all ranks' uses of
    them go back to the rank that has them."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, places: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Args: places: int64 [t], of the tokens of rank 0, 1, …"""
        ctx.places, ctx.group, ctx.size = places, group, len(mine)
        parts = [
            torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, mine.detach().contiguous(), group=group)
        whole = torch.cat(parts)
        return torch.empty_like(whole).index_copy_(0, places, whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Add up what all ranks have, and take this one's."""
        by_rank = gradient[ctx.places]
        dist.all_reduce(by_rank, group=ctx.group)
        first = dist.get_rank(ctx.group) * ctx.size
        return by_rank[first : first + ctx.size], None, None


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
