"""Divides samples into rows, rows into micro-batches, and batches over replicas and updates.

A row is [prefix][suffix 1] … [suffix n]: members of a group share one copy of their common prompt, which is computed
once instead of n times. The rows of a micro-batch lie beside each other, padded to the longest: one call of attention
over every pair of positions of the longest row. Or they are packed one behind the other: no padding, and a call of
attention for each sequence. What costs less is chosen (`plan_micro_batches`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.data.media.images import identity
from relax_rt.transport.queue.samplers.packing import pack_by_tokens


class EpisodeBranch(Sample, kw_only=True):
    """One branch of an episode, as a sample; `offset` is the place of its first token in the whole sample."""

    offset: int = 0


@dataclass(slots=True)
class SampleRow:
    """Members of one group that share a prefix, or the branches of one sample.

    `members` holds (index of the sample in the step's batch, sample); a suffix is the sample's tokens from the
    prefix's end on.
    """

    prefix: int
    members: list[tuple[int, Sample]]

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return self.prefix + sum(len(s.tokens) - self.prefix for _, s in self.members)


def shared_rows(samples: Sequence[Sample], budget: int) -> list[SampleRow]:
    """Rows of at most `budget` tokens: members of one group with the same prompt go together.

    A single sample longer than the budget becomes a row of its own, and so does one with branches.
    """
    rows: list[SampleRow] = []
    by_prompt: dict[tuple[int, bytes], SampleRow] = {}
    for index, sample in enumerate(samples):
        if sample.meta.branches:
            branches = _branches(sample)
            rows.append(
                SampleRow(
                    _common_prefix([_identifying_tokens(one) for one in branches]), [(index, one) for one in branches]
                )
            )
            continue
        prefix = sample.prompt_length
        key = (sample.meta.group, _identifying_tokens(sample)[:prefix].tobytes())
        row = by_prompt.get(key)
        if row is None or row.length + len(sample.tokens) - prefix > budget:
            row = by_prompt[key] = SampleRow(prefix, [])
            rows.append(row)
        row.members.append((index, sample))
    return rows


def _branches(sample: Sample) -> list[EpisodeBranch]:
    """Return the branches of a sample, as views of it."""
    columns = ("tokens", "loss_mask", "behaviour_logprobs", "advantages", "proximal_logprobs", "reference_logprobs")
    held = {name: column for name in columns if (column := getattr(sample, name)) is not None}
    return [
        EpisodeBranch(
            meta=sample.meta,
            versions=[],
            offset=start,
            media=[one.shifted(-start) for one in sample.media or () if start <= one.start < end],
            **{name: held[name][start:end] for name in held},
        )
        for start, end in sample.meta.branches
    ]


def _identifying_tokens(sample: Sample) -> np.ndarray:
    """The sample's tokens; those of images are equal only if the images are."""
    if not sample.media:
        return sample.tokens
    return np.array(identity(tuple(sample.tokens.tolist()), sample.media), np.int64)


def _common_prefix(sequences: Sequence[np.ndarray]) -> int:
    """Length of the common prefix; at least one token is left to each sequence."""
    shortest = min(len(sequence) for sequence in sequences)
    alike = np.ones(shortest, bool)
    for sequence in sequences[1:]:
        alike &= sequence[:shortest] == sequences[0][:shortest]
    return min(int(np.argmin(alike)) if not alike.all() else shortest, shortest - 1)


def micro_batches(rows: Sequence[SampleRow], budget: int) -> list[list[SampleRow]]:
    """Rows of similar length together, so that rows x longest stays within `budget` tokens."""
    batches: list[list[SampleRow]] = []
    for row in sorted(rows, key=lambda r: r.length):
        if batches and (len(batches[-1]) + 1) * row.length <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def group_batches(rows: Sequence[SampleRow], budget: int) -> list[list[SampleRow]]:
    """Whole groups together, for losses that compare a group's samples: as many of similar length as fit the budget,
    which divides none."""
    groups: dict[int, list[SampleRow]] = {}
    for row in rows:
        groups.setdefault(row.members[0][1].meta.group, []).append(row)
    batches: list[list[SampleRow]] = []
    for group in sorted(groups.values(), key=lambda g: max(r.length for r in g)):
        longest = max(row.length for row in group)
        if batches and (len(batches[-1]) + len(group)) * longest <= budget:
            batches[-1] += group
        else:
            batches.append(group)
    return batches


T = TypeVar("T")

PAIR_COST = 1.0
"""Time of an operation of attention, by that of one of the layers' matrices; seen on a CPU: 0.4 to 1.7 (SmolLM2)."""
CAUSAL_SHARE = 0.75
"""Of the pairs of a sequence that needs no mask, for which the kernel leaves out some keys behind the query."""
PACKING_THRESHOLD = 0.95
"""Of the estimate for padding: the estimates are not better than that."""
CALL_COST = {"cpu": 4.0, "cuda": 64.0}
"""Tokens whose time in the rest of a layer a call of attention takes whatever its size, forward and backward. Seen on a
CPU: 2 with SmolLM2, 4 with a layer of 64 columns; of a GPU estimated, by launches of 0.1 ms and layers of 8B models."""


@dataclass(frozen=True)
class Costs:
    """Costs of attention in a layer, in units of the time that a token takes in the rest of the layer.

    Attributes:
        pair: cost of a query and a key. call: fixed cost of a call.
    """

    pair: float
    call: float

    @classmethod
    def of(cls, config: Any, device: torch.device) -> Costs:
        """Estimate the costs of a model's text layers.

        Args:
            config: of transformers.
        """
        hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
        dim = int(getattr(config, "head_dim", None) or hidden // heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        chosen = int(getattr(config, "num_experts_per_tok", None) or 1)
        wide = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
        token = 2 * hidden * (2 * heads * dim + 2 * kv_heads * dim + 3 * chosen * int(wide or 4 * hidden))
        return cls(pair=PAIR_COST * 4 * heads * dim / token, call=CALL_COST.get(device.type, CALL_COST["cuda"]))

    def apart(self, row: SampleRow) -> bool:
        """Whether computing each member of a row behind its prefix is cheaper than all of them under one mask."""
        return len(row.members) > 1 and self._apart(row) < self._masked(row)

    def padded(self, rows: Sequence[SampleRow]) -> float:
        """Cost of rows beside each other, padded."""
        longest = max(row.length for row in rows)
        return len(rows) * longest * (1 + self.pair * longest) + self.call

    def packed(self, rows: Sequence[SampleRow]) -> float:
        """Cost of rows one behind the other."""
        return sum(row.length + min(self._apart(row), self._masked(row)) for row in rows)

    def _masked(self, row: SampleRow) -> float:
        share = CAUSAL_SHARE if len(row.members) == 1 else 1.0
        return self.pair * share * row.length**2 + self.call

    def _apart(self, row: SampleRow) -> float:
        if len(row.members) == 1:
            return self._masked(row)
        own = [len(sample.tokens) - row.prefix for _, sample in row.members]
        pairs = CAUSAL_SHARE * row.prefix**2 + sum(length * (row.prefix + length) for length in own)
        return self.pair * pairs + self.call * (1 + len(own))


class MicroBatchRows(NamedTuple):
    """The rows of a micro-batch. costs: set if they are packed one behind the other; None: padded to the longest."""

    rows: list[SampleRow]
    costs: Costs | None

    @property
    def tokens(self) -> int:
        """Tokens that go through the model, padding included."""
        if self.costs is not None:
            return sum(row.length for row in self.rows)
        return len(self.rows) * max(row.length for row in self.rows)


def plan_micro_batches(
    rows: Sequence[SampleRow], budget: int, costs: Costs | None, *, whole_groups: bool = False
) -> list[MicroBatchRows]:
    """Divide rows into micro-batches of at most `budget` tokens, padding included; a longer row or group goes alone.

    Args:
        costs: None: the model's attention cannot have several sequences in a row.
        whole_groups: the rows of a group stay together.
    """
    beside = (group_batches if whole_groups else micro_batches)(rows, budget)
    padded = [MicroBatchRows(one, None) for one in beside]
    if costs is None:
        return padded
    groups = [row.members[0][1].meta.group for row in rows] if whole_groups else ()
    behind = pack_by_tokens([row.length for row in rows], budget, groups=groups, oversize="alone")
    packed = [MicroBatchRows([rows[at] for at in one], costs) for one in behind]
    cheaper = sum(costs.packed(one.rows) for one in packed) < PACKING_THRESHOLD * sum(
        costs.padded(one) for one in beside
    )
    return packed if cheaper else padded


Numbered = tuple[int, Sample]
"""A sample and its place in the batch."""


def replica_share(
    samples: Sequence[Sample], place: int, replicas: int, *, whole_groups: bool = False
) -> list[Numbered]:
    """Return one replica's share of a batch: about as many tokens as the others have; perhaps none.

    Returns:
        Index in the batch, and the sample, in the batch's order.
    """
    loads = [0] * replicas
    mine: list[Numbered] = []
    for unit in indivisible_units(enumerate(samples), whole_groups):
        least = loads.index(min(loads))
        loads[least] += unit_tokens(unit)
        if least == place:
            mine += unit
    return sorted(mine, key=lambda item: item[0])


def indivisible_units(samples: Iterable[Numbered], whole_groups: bool) -> list[list[Numbered]]:
    """Return the units that must not be divided (samples, or groups), the longest first."""
    found: dict[int, list[Numbered]] = {}
    for index, sample in samples:
        found.setdefault(sample.meta.group if whole_groups else index, []).append((index, sample))
    return sorted(found.values(), key=lambda unit: (-unit_tokens(unit), unit[0][0]))


def unit_tokens(unit: Sequence[Numbered]) -> int:
    """Number of tokens of a unit."""
    return sum(len(sample.tokens) for _, sample in unit)


def mini_batches(groups: Sequence[int], updates: int) -> list[list[int]]:
    """Divide samples into mini-batches, as lists of indices: whole groups, dealt out round-robin as they appear, so
    that parts differ by one group at most and early groups are not together.

    Args:
        groups: of each sample. updates: so many parts, or as many as there are groups.
    """
    number = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    parts: list[list[int]] = [[] for _ in range(min(updates, len(number)))]
    for place, group in enumerate(groups):
        parts[number[group] % len(parts)].append(place)
    return parts


def pick(items: Sequence[T], places: Sequence[int]) -> list[T]:
    """Return the items at these places."""
    return [items[place] for place in places]
