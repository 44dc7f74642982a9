"""Makes the tensors of one micro-batch of rows.

In a row a suffix attends to the prefix and to itself, and its positions continue where the prefix ends. Loss and
gradients are those of n separate sequences; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.data.media.images import BatchImage
from relax_rt.roles.models.device import CPU
from relax_rt.roles.training.batch.attention import AttentionSegment, suffix_mask
from relax_rt.roles.training.batch.rows import Costs, EpisodeBranch, SampleRow


@dataclass(slots=True)
class MicroBatch:
    """Tensors of rows padded to one length L, or of one that has them all, and the places where sampled tokens are
    predicted.

    ids, positions: int64 [rows, L]. mask: bool [rows, 1, L, L], True where attention is allowed; None where segments
    say so, which have all tokens of the one row. predict_row, predict_at: int64 [m], the position whose hidden state
    predicts each trained token. targets: int64 [m]. behaviour, advantages: float32 [m]. sample: int64 [m], index of the
    sample that each token belongs to; token: int64 [m], its place in the sample; group: int64 [m], numbers of the
    groups from 0. proximal, reference: float32 [m], if every sample has them. images: in the rows.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None
    predict_row: torch.Tensor
    predict_at: torch.Tensor
    targets: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    sample: torch.Tensor
    token: torch.Tensor
    group: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    segments: list[AttentionSegment] | None = field(default=None, kw_only=True)
    images: list[BatchImage] = field(default_factory=list, kw_only=True)


def collate(rows: Sequence[SampleRow], device: torch.device = CPU, costs: Costs | None = None) -> MicroBatch:
    """Tensors of one micro-batch, on the device. A sample's advantages and behaviour log-probabilities are per
    token.

    Args:
        costs: the rows lie one behind the other, and attention is divided as it costs least; None: beside each other.
    """
    members = [member for row in rows for member in row.members]
    groups = {group: number for number, group in enumerate(dict.fromkeys(s.meta.group for _, s in members))}
    lengths = [row.length for row in rows]
    shape = (len(rows), max(lengths)) if costs is None else (1, sum(lengths))
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    # -1 is padding, 0 the prefix, k the k-th member.
    numbers = np.full(shape, -1, np.int64)
    picks: list[tuple[np.ndarray, ...]] = []
    images: list[BatchImage] = []
    at = 0
    for number, row in enumerate(rows):
        r, start = (number, 0) if costs is None else (0, at)
        at = start + row.prefix
        first = row.members[0][1]
        ids[r, start:at], numbers[r, start:at] = first.tokens[: row.prefix], 0
        positions[r, start:at] = np.arange(row.prefix)
        images += [BatchImage(r, span, 0, row.prefix, start) for span in first.media or () if span.start < row.prefix]
        for k, (index, sample) in enumerate(row.members, start=1):
            end = at + len(sample.tokens) - row.prefix
            ids[r, at:end] = sample.tokens[row.prefix :]
            positions[r, at:end] = np.arange(row.prefix, len(sample.tokens))
            numbers[r, at:end] = k
            behind = [span for span in sample.media or () if span.end > row.prefix]
            images += [BatchImage(r, span, row.prefix, len(sample.tokens), at - row.prefix) for span in behind]
            picks.append(_predictions((r, start, at), row.prefix, index, groups[sample.meta.group], sample))
            at = end
    samples = [sample for _, sample in members]

    def there(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    def trained(columns: Sequence[np.ndarray | None]) -> torch.Tensor | None:
        """A column at the trained tokens, float32 [m]; None if a sample lacks it."""
        parts = [
            c[_trained_positions(s)].astype(np.float32) for c, s in zip(columns, samples, strict=True) if c is not None
        ]
        return there(np.concatenate(parts)) if len(parts) == len(samples) else None

    columns = [there(np.concatenate(parts)) for parts in zip(*picks, strict=True)]
    # A mask is as large as the row is long, squared: it is made where it is used.
    mask = _attention_mask(there(numbers)) if costs is None else None
    batch = MicroBatch(there(ids), there(positions), mask, *columns)
    batch.segments = _segments(rows, there(numbers), costs) if costs is not None else None
    batch.proximal = trained([s.proximal_logprobs for s in samples])
    batch.reference = trained([s.reference_logprobs for s in samples])
    batch.images = images
    return batch


def _trained_positions(sample: Sample) -> np.ndarray:
    """Places of the trained tokens. Nothing predicts the first token."""
    trained = np.flatnonzero(sample.loss_mask)
    return trained[trained > 0]


def _predictions(
    place: tuple[int, int, int], prefix: int, index: int, group: int, sample: Sample
) -> tuple[np.ndarray, ...]:
    """Where each trained token of the sample is predicted, and what belongs to it.

    Args:
        place: a row, and where in it the prefix begins and the sample's own tokens do.
    """
    row, start, at = place
    trained = _trained_positions(sample)
    # Token t is predicted at t - 1; the first one after the prefix is predicted at the prefix's last position.
    before = trained - 1
    column = np.where(before < prefix, before + start, before - prefix + at)
    advantages = sample.advantages if sample.advantages is not None else np.zeros(len(sample.tokens), np.float32)
    return (
        np.full(len(trained), row, np.int64),
        column.astype(np.int64),
        sample.tokens[trained].astype(np.int64),
        sample.behaviour_logprobs[trained].astype(np.float32),
        advantages[trained].astype(np.float32),
        np.full(len(trained), index, np.int64),
        trained.astype(np.int64) + (sample.offset if isinstance(sample, EpisodeBranch) else 0),
        np.full(len(trained), group, np.int64),
    )


def _attention_mask(numbers: torch.Tensor) -> torch.Tensor:
    """bool [rows, 1, L, L] from members' numbers [rows, L]; padding sees itself, to keep its softmax finite."""
    length = numbers.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=numbers.device).tril()
    query, key = numbers[:, :, None], numbers[:, None, :]
    allowed = causal & ((key == 0) | (key == query)) & (key >= 0)
    return (allowed | torch.eye(length, dtype=torch.bool, device=numbers.device))[:, None]


def _segments(rows: Sequence[SampleRow], numbers: torch.Tensor, costs: Costs) -> list[AttentionSegment]:
    """What is read at once of rows one behind the other, with the numbers of their members, [1, L]."""
    found: list[AttentionSegment] = []
    at = 0
    for row in rows:
        own = [len(sample.tokens) - row.prefix for _, sample in row.members]
        if costs.apart(row):
            after = len(found) if row.prefix else -1
            found += [AttentionSegment(row.prefix)] if row.prefix else []
            for length in filter(None, own):
                mask = suffix_mask(row.prefix, length, numbers.device) if row.prefix else None
                found.append(AttentionSegment(length, after, mask))
        else:
            mask = _attention_mask(numbers[:, at : at + row.length]) if len(own) > 1 else None
            found.append(AttentionSegment(row.length, mask=mask))
        at += row.length
    return found
