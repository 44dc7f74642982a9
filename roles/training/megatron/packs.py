"""Micro-batches of packed sequences: samples one after the other in one row, each attending to itself alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.training.batch.rows import Numbered, indivisible_units, unit_tokens


class ContextShare(NamedTuple):
    """What one of several context-parallel ranks computes of a pack.

    Attributes:
        places: int64 [t / ranks], the tokens. rows: int64 [k], which of these predict tokens wanted. wanted: int64 [k],
            which of the m wanted these are.
    """

    places: torch.Tensor
    rows: torch.Tensor
    wanted: torch.Tensor


@dataclass(slots=True)
class Pack:
    """Whole sequences in one row of t tokens.

    Attributes:
        members: index of each sample in the batch, and the sample.
        ids, positions: int64 [1, t]; a sequence of padding at the end makes t a multiple.
        bounds: int32 [sequences + 1], where each begins and the last one ends.
        longest: tokens of the longest sequence.
        rows: int64 [m], the positions whose hidden states predict the tokens wanted. targets: int64 [m], these tokens.
        at: int64 [m], where in its sample each of them stands. sequence: int64 [m], its member.
    """

    members: list[tuple[int, Sample]]
    ids: torch.Tensor
    positions: torch.Tensor
    bounds: torch.Tensor
    longest: int
    rows: torch.Tensor
    targets: torch.Tensor
    at: torch.Tensor
    sequence: torch.Tensor

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return int(self.ids.shape[1])

    def share(self, rank: int, ranks: int) -> ContextShare:
        """Return a rank's share of a pack whose sequences are multiples of 2 x ranks."""
        places = context_positions(self.bounds, rank, ranks)
        local = torch.full((self.tokens,), -1)
        local[places] = torch.arange(len(places))
        rows = local[self.rows]
        wanted = (rows >= 0).nonzero()[:, 0]
        return ContextShare(places, rows[wanted], wanted)


def context_positions(bounds: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Tokens of a pack that a context-parallel rank has: of each sequence, cut into 2 x ranks chunks, the one of the
    rank's number and the one as far from the end. So all have as much to attend to (Llama 3, arXiv 2407.21783, section
    3.3.2; TransformerEngine cuts alike). int64 [t / ranks]

    Args:
        bounds: [sequences + 1], where each begins; multiples of 2 x ranks.
    """
    found = []
    for start, stop in pairwise(bounds.tolist()):
        size = (stop - start) // (2 * ranks)
        for chunk in (rank, 2 * ranks - 1 - rank):
            found.append(torch.arange(start + chunk * size, start + (chunk + 1) * size))
    return torch.cat(found)


def fill_packs(samples: Iterable[Numbered], budget: int, *, whole_groups: bool = False) -> list[list[Numbered]]:
    """Samples in packs of at most `budget` tokens, the longest first into the first that has room.

    A sample longer than the budget goes alone. The division depends on the samples alone.

    Args:
        whole_groups: the samples of a group stay together.
    """
    packs: list[list[Numbered]] = []
    room: list[int] = []
    for unit in indivisible_units(samples, whole_groups):
        length = unit_tokens(unit)
        at = next((n for n, left in enumerate(room) if left >= length), -1)
        if at < 0:
            packs.append([])
            room.append(max(budget, length))
        packs[at] += unit
        room[at] -= length
    return packs


def pack(
    members: Sequence[tuple[int, Sample]], *, multiple: int, trained_only: bool, sequence_multiple: int = 1
) -> Pack:
    """The row of these samples.

    Args:
        multiple: t is made a multiple of it, by a sequence of padding.
        trained_only: of each sample only the tokens of loss mask 1 are predicted, else all but the first.
        sequence_multiple: each sequence is made a multiple of it, by padding at its end, which no token sees.
    """
    sizes = [-(-len(sample.tokens) // sequence_multiple) * sequence_multiple for _, sample in members]
    padding = -sum(sizes) % multiple
    ids = np.zeros(sum(sizes) + padding, np.int64)
    positions = np.zeros_like(ids)
    wanted: list[tuple[np.ndarray, ...]] = []
    start = 0
    for number, ((_, sample), size) in enumerate(zip(members, sizes, strict=True)):
        length = len(sample.tokens)
        ids[start : start + length] = sample.tokens
        positions[start : start + size] = np.arange(size)
        at = np.flatnonzero(sample.loss_mask) if trained_only else np.arange(length)
        at = at[at > 0]
        wanted.append((start + at - 1, sample.tokens[at].astype(np.int64), at, np.full(len(at), number)))
        start += size
    positions[start:] = np.arange(padding)
    sizes += [padding] if padding else []
    columns = [torch.from_numpy(np.concatenate(parts)) for parts in zip(*wanted, strict=True)]
    return Pack(
        list(members),
        torch.from_numpy(ids)[None],
        torch.from_numpy(positions)[None],
        torch.from_numpy(np.cumsum([0, *sizes]).astype(np.int32)),
        max(sizes),
        *columns,
    )


def at_wanted_tokens(pack: Pack, values: Sequence[np.ndarray]) -> torch.Tensor:
    """Per-token values of the members, each [T], at the tokens wanted: float32 [m]."""
    parts = [value[pack.at[pack.sequence == number].numpy()] for number, value in enumerate(values)]
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))
