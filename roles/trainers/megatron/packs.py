"""Micro-batches of packed sequences: samples one after the other in one row, each attending to itself alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from relax_rt.roles.sample import Sample
from relax_rt.roles.trainers.sharing import Numbered, tokens_of, units


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


def fill(samples: Iterable[Numbered], budget: int, *, whole_groups: bool = False) -> list[list[Numbered]]:
    """Samples in packs of at most `budget` tokens, the longest first into the first that has room.

    A sample longer than the budget goes alone. The division depends on the samples alone.

    Args:
        whole_groups: the samples of a group stay together.
    """
    packs: list[list[Numbered]] = []
    room: list[int] = []
    for unit in units(samples, whole_groups):
        length = tokens_of(unit)
        at = next((n for n, left in enumerate(room) if left >= length), -1)
        if at < 0:
            packs.append([])
            room.append(max(budget, length))
        packs[at] += unit
        room[at] -= length
    return packs


def pack(members: Sequence[tuple[int, Sample]], *, multiple: int, trained_only: bool) -> Pack:
    """The row of these samples.

    Args:
        multiple: t is made a multiple of it, by a sequence of padding.
        trained_only: of each sample only the tokens of loss mask 1 are predicted, else all but the first.
    """
    lengths = [len(sample.tokens) for _, sample in members]
    padding = -sum(lengths) % multiple
    ids = np.zeros(sum(lengths) + padding, np.int64)
    positions = np.zeros_like(ids)
    wanted: list[tuple[np.ndarray, ...]] = []
    start = 0
    for number, ((_, sample), length) in enumerate(zip(members, lengths, strict=True)):
        ids[start : start + length] = sample.tokens
        positions[start : start + length] = np.arange(length)
        at = np.flatnonzero(sample.loss_mask) if trained_only else np.arange(length)
        at = at[at > 0]
        wanted.append((start + at - 1, sample.tokens[at].astype(np.int64), at, np.full(len(at), number)))
        start += length
    positions[start:] = np.arange(padding)
    sizes = [*lengths, padding] if padding else lengths
    columns = [torch.from_numpy(np.concatenate(parts)) for parts in zip(*wanted, strict=True)]
    return Pack(
        list(members),
        torch.from_numpy(ids)[None],
        torch.from_numpy(positions)[None],
        torch.from_numpy(np.cumsum([0, *sizes]).astype(np.int32)),
        max(sizes),
        *columns,
    )


def column(pack: Pack, values: Sequence[np.ndarray]) -> torch.Tensor:
    """Per-token values of the members, each [T], at the tokens wanted: float32 [m]."""
    parts = [value[pack.at[pack.sequence == number].numpy()] for number, value in enumerate(values)]
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))
