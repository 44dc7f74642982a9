"""A slot-based key-value cache for the embedded engine, in the shape that transformers' models call."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

LENGTH_QUANTUM = 64
"""Slots grow by this many positions, so that a longer prompt seldom moves memory."""


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of up to `slots` sequences, one row a sequence; active rows are kept at the front.

    Each layer holds K and V as [slots, kv_heads, length, head_dim]. In prefill the model's new keys and values pass
    through and are kept aside until `adopt` copies them into rows (once a group member: the prompt is computed once).
    In decode each row's new key goes to its own position, and attention reads the rows' common prefix.
    """

    def __init__(self, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__(layers=[])
        self.slots, self.kv_heads, self.head_dim, self.dtype = slots, kv_heads, head_dim, dtype
        self.length = 0
        self._keys: list[torch.Tensor] = [torch.empty(0) for _ in range(layers)]
        self._values: list[torch.Tensor] = [torch.empty(0) for _ in range(layers)]
        self._fresh: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._prefill = False
        self._rows = torch.empty(0, dtype=torch.long)
        self._positions = torch.empty(0, dtype=torch.long)
        self._upto = 0

    def reserve(self, length: int) -> None:
        """Make every slot at least `length` positions long, keeping what it holds."""
        if length <= self.length:
            return
        grown = -(-length // LENGTH_QUANTUM) * LENGTH_QUANTUM
        for store in (self._keys, self._values):
            for layer, old in enumerate(store):
                new = torch.zeros(self.slots, self.kv_heads, grown, self.head_dim, dtype=self.dtype)
                if old.numel():
                    new[:, :, : self.length] = old
                store[layer] = new
        self.length = grown

    def begin_prefill(self) -> None:
        """The next forward pass is over whole prompts."""
        self._prefill, self._fresh = True, []

    def adopt(self, source: int, length: int, rows: slice) -> None:
        """Copy prompt `source` of the last prefill, `length` positions, into the slots `rows`."""
        for layer, (keys, values) in enumerate(self._fresh):
            self._keys[layer][rows, :, :length] = keys[source, :, :length]
            self._values[layer][rows, :, :length] = values[source, :, :length]

    def end_prefill(self) -> None:
        """Let go of the last prefill's keys and values."""
        self._prefill, self._fresh = False, []

    def begin_decode(self, positions: torch.Tensor) -> None:
        """The next forward pass adds one token at `positions` [rows] of the first rows."""
        self._rows = torch.arange(len(positions))
        self._positions = positions
        self._upto = int(positions.max()) + 1

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row, to keep the active ones at the front."""
        for store in (self._keys, self._values):
            for tensor in store:
                tensor[target, :, :length] = tensor[source, :, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's attention with [rows, kv_heads, new, head_dim]."""
        if self._prefill:
            self._fresh.append((key_states, value_states))
            return key_states, value_states
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._rows, :, self._positions] = key_states[:, :, 0]
        values[self._rows, :, self._positions] = value_states[:, :, 0]
        rows = len(self._rows)
        return keys[:rows, :, : self._upto], values[:rows, :, : self._upto]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always passed explicitly; the model needs no count from here."""
        return 0

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """The mask is passed explicitly as well."""
        return self._upto, 0

    @property
    def is_compileable(self) -> bool:
        """Shapes change from step to step."""
        return False
