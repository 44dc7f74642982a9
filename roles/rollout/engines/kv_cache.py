"""Key-value cache of the embedded engine: slots of running sequences, and prefixes of recent prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from transformers.cache_utils import Cache

LENGTH_QUANTUM = 64
"""Slots grow by this many positions, so that a longer prompt seldom moves memory."""


class Fill(NamedTuple):
    """Tokens to compute into a row, from position `start` on; the positions before it are in the cache."""

    row: int
    start: int
    tokens: Sequence[int]


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of up to `slots` sequences, one row a sequence; active rows are kept at the front.

    Each layer has K and V as [slots, kv_heads, length, head_dim]. A forward pass is either a fill (several new tokens
    of some rows, padded on the right) or a decode step (one new token of each of the first rows).
    """

    def __init__(
        self, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers=[])
        self.slots, self.kv_heads, self.head_dim, self.dtype, self.device = slots, kv_heads, head_dim, dtype, device
        self.length = 0
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._layers_count = layers
        self._fills: list[Fill] = []
        self._upto = 0
        self._rows = self._positions = torch.empty(0, dtype=torch.long)
        self.release()

    def reserve(self, length: int) -> None:
        """Make every slot at least `length` positions long, content kept."""
        if length <= self.length:
            return
        grown = -(-length // LENGTH_QUANTUM) * LENGTH_QUANTUM
        shape = (self.slots, self.kv_heads, grown, self.head_dim)
        for store in (self._keys, self._values):
            for layer, old in enumerate(store):
                new = torch.zeros(shape, dtype=self.dtype, device=self.device)
                if old.numel():
                    new[:, :, : self.length] = old
                store[layer] = new
        self.length = grown

    def release(self) -> None:
        """Free all memory; the content is lost."""
        self.length = 0
        self._keys = [torch.empty(0) for _ in range(self._layers_count)]
        self._values = [torch.empty(0) for _ in range(self._layers_count)]

    def begin_fill(self, fills: list[Fill]) -> None:
        """Prepare for a forward pass over these rows, in this order, padded on the right to the longest."""
        self._fills = fills
        self._upto = max(f.start + len(f.tokens) for f in fills)

    def begin_decode(self, positions: torch.Tensor) -> None:
        """Prepare for a forward pass that adds one token at `positions` [rows] of the first rows."""
        self._fills = []
        self._rows = torch.arange(len(positions), device=self.device)
        self._positions = positions

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's first positions to another."""
        for store in (self._keys, self._values):
            for tensor in store:
                tensor[target, :, :length] = tensor[source, :, :length]

    def share(self, source: int, targets: slice, length: int) -> None:
        """Copy a row's first positions to several others."""
        for store in (self._keys, self._values):
            for tensor in store:
                tensor[targets, :, :length] = tensor[source, :, :length]

    def exchange(self, one: int, other: int, length: int) -> None:
        """Exchange two rows; `length` is that of the longer one."""
        for store in (self._keys, self._values):
            for tensor in store:
                kept = tensor[one, :, :length].clone()
                tensor[one, :, :length] = tensor[other, :, :length]
                tensor[other, :, :length] = kept

    def copy_out(self, row: int, length: int) -> torch.Tensor:
        """Return a copy of a row's first positions, [2, layers, kv_heads, length, head_dim]."""
        return torch.stack([torch.stack([t[row, :, :length] for t in store]) for store in (self._keys, self._values)])

    def copy_in(self, row: int, held: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of a result of copy_out into a row."""
        for store, kept in zip((self._keys, self._values), held, strict=True):
            for tensor, layer in zip(store, kept, strict=True):
                tensor[row, :, :length] = layer[:, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's attention with [rows, kv_heads, new, head_dim]."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if not self._fills:
            keys[self._rows, :, self._positions] = key_states[:, :, 0]
            values[self._rows, :, self._positions] = value_states[:, :, 0]
            rows = len(self._rows)
            return keys[:rows], values[:rows]
        for at, (row, start, tokens) in enumerate(self._fills):
            keys[row, :, start : start + len(tokens)] = key_states[at, :, : len(tokens)]
            values[row, :, start : start + len(tokens)] = value_states[at, :, : len(tokens)]
        if not any(f.start for f in self._fills):
            return key_states, value_states  # nothing lies before them
        rows_of = [f.row for f in self._fills]
        return keys[rows_of, :, : self._upto], values[rows_of, :, : self._upto]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not used: positions are always passed explicitly."""
        return 0

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Not used: the mask is passed explicitly."""
        return self._upto, 0

    @property
    def is_compileable(self) -> bool:
        """Shapes change from step to step."""
        return False


T = TypeVar("T")


class PrefixStore(Generic[T]):
    """Values of recent prompts, such as their KV, for one policy version: results of older weights are never found.

    An LRU cache, bounded by `capacity` positions in all.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._prompts: OrderedDict[tuple[int, ...], T] = OrderedDict()
        self._version = -1
        self.positions = 0

    def find(self, version: int, prompt: tuple[int, ...]) -> tuple[int, T | None]:
        """Return the length of the longest common prefix with a prompt of this version, and the value of that one; (0,
        None) if there is none."""
        if version != self._version:
            return 0, None
        exact = self._prompts.get(prompt)
        best, length = (prompt, len(prompt)) if exact is not None else ((), 0)
        if exact is None:
            for other in self._prompts:
                common = common_prefix(prompt, other)
                if common > length:
                    best, length = other, common
        if not length:
            return 0, None
        self._prompts.move_to_end(best)
        return length, self._prompts[best]

    def put(self, version: int, prompt: tuple[int, ...], copy: Callable[[], T]) -> None:
        """Store a prompt with the result of `copy`, if it is not there yet."""
        if version != self._version:
            self.clear()
            self._version = version
        if prompt in self._prompts or len(prompt) > self._capacity:
            return
        self._prompts[prompt] = copy()
        self.positions += len(prompt)
        while self.positions > self._capacity:
            oldest, _ = self._prompts.popitem(last=False)
            self.positions -= len(oldest)

    def clear(self) -> None:
        """Remove all prompts."""
        self._prompts.clear()
        self.positions = 0


def common_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    least, most = 0, min(len(one), len(other))
    while least < most:  # by bisection: slices are compared in C
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
