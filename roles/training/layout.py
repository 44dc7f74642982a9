"""How the rows of a step lie in micro-batches: beside each other, padded to the longest, or one behind the other.

One behind the other there is no padding, and attention is computed of each sequence apart, one call after the other;
beside each other it is one call, over every pair of positions of the longest row. What costs less is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from relax_rt.roles.training.attention import takes_segments
from relax_rt.roles.training.packing import Row, group_batches, micro_batches
from relax_rt.transport.queue.samplers.packing import pack_by_tokens

PAIR = 1.0
"""Time of an operation of attention, by that of one of the layers' matrices; seen on a CPU: 0.4 to 1.7 (SmolLM2)."""
CAUSAL = 0.75
"""Of the pairs of a sequence that needs no mask, for which the kernel leaves out some keys behind the query."""
WORTH = 0.95
"""Of the estimate for padding: the estimates are not better than that."""
CALL = {"cpu": 4.0, "cuda": 64.0}
"""Tokens whose time in the rest of a layer a call of attention takes whatever its size, forward and backward. Seen on a
CPU: 2 with SmolLM2, 4 with a layer of 64 columns; of a GPU estimated, by launches of 0.1 ms and layers of 8B models."""


@dataclass(frozen=True)
class Costs:
    """Of attention in a layer, by the time that a token takes in the rest of it.

    Attributes:
        pair: of a query and a key. call: of a call, besides.
    """

    pair: float
    call: float

    @classmethod
    def of(cls, config: Any, device: torch.device) -> Costs:
        """Those of a model's text layers.

        Args:
            config: of transformers.
        """
        hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
        dim = int(getattr(config, "head_dim", None) or hidden // heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        chosen = int(getattr(config, "num_experts_per_tok", None) or 1)
        wide = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
        token = 2 * hidden * (2 * heads * dim + 2 * kv_heads * dim + 3 * chosen * int(wide or 4 * hidden))
        return cls(pair=PAIR * 4 * heads * dim / token, call=CALL.get(device.type, CALL["cuda"]))

    def apart(self, row: Row) -> bool:
        """Whether the members of a row are rather read each apart, behind their prefix, than all under one mask."""
        return len(row.members) > 1 and self._apart(row) < self._masked(row)

    def padded(self, rows: Sequence[Row]) -> float:
        """Of rows beside each other."""
        longest = max(row.length for row in rows)
        return len(rows) * longest * (1 + self.pair * longest) + self.call

    def packed(self, rows: Sequence[Row]) -> float:
        """Of rows one behind the other."""
        return sum(row.length + min(self._apart(row), self._masked(row)) for row in rows)

    def _masked(self, row: Row) -> float:
        share = CAUSAL if len(row.members) == 1 else 1.0
        return self.pair * share * row.length**2 + self.call

    def _apart(self, row: Row) -> float:
        if len(row.members) == 1:
            return self._masked(row)
        own = [len(sample.tokens) - row.prefix for _, sample in row.members]
        pairs = CAUSAL * row.prefix**2 + sum(length * (row.prefix + length) for length in own)
        return self.pair * pairs + self.call * (1 + len(own))


class Laid(NamedTuple):
    """Rows of a micro-batch. costs: given where they lie one behind the other; None: padded to the longest."""

    rows: list[Row]
    costs: Costs | None

    @property
    def tokens(self) -> int:
        """That go through the model, padding included."""
        if self.costs is not None:
            return sum(row.length for row in self.rows)
        return len(self.rows) * max(row.length for row in self.rows)


def packing_costs(layers: Any, device: torch.device) -> Costs | None:
    """Of a transformers model, without its output layer; None: its attention cannot have several sequences in a row, or
    the layers differ in size, which is no case for one estimate.

    Args:
        device: that it will be on. It is tried where it is.
    """
    try:
        costs = Costs.of(layers.config, device)
    except (AttributeError, TypeError, ValueError):
        return None
    return costs if takes_segments(layers) else None


def lay_out(rows: Sequence[Row], budget: int, costs: Costs | None, *, whole_groups: bool = False) -> list[Laid]:
    """Micro-batches of at most `budget` tokens, padding included; longer is only a row, or group, that goes alone.

    Args:
        costs: None: the model's attention cannot have several sequences in a row.
        whole_groups: the rows of a group stay together.
    """
    beside = (group_batches if whole_groups else micro_batches)(rows, budget)
    padded = [Laid(one, None) for one in beside]
    if costs is None:
        return padded
    groups = [row.members[0][1].meta.group for row in rows] if whole_groups else ()
    behind = pack_by_tokens([row.length for row in rows], budget, groups=groups, oversize="alone")
    packed = [Laid([rows[at] for at in one], costs) for one in behind]
    cheaper = sum(costs.packed(one.rows) for one in packed) < WORTH * sum(costs.padded(one) for one in beside)
    return packed if cheaper else padded
