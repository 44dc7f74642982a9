"""Makes the tensors of one micro-batch of rows, and computes log-probabilities from them.

In a row a suffix attends to the prefix and to itself, and its positions continue where the prefix ends. Loss and
gradients are those of n separate sequences; a test compares the two. Trainer and reference compute log-probabilities
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.data.media.images import BatchImage
from relax_rt.roles.data.media.vision_tower import VisionTower
from relax_rt.roles.models.device import CPU, autocast_context, denormals_flushed
from relax_rt.roles.training.batch.attention import AttentionSegment, suffix_mask
from relax_rt.roles.training.batch.budget import TokenBudget
from relax_rt.roles.training.batch.rows import Costs, EpisodeBranch, SampleRow, plan_micro_batches, shared_rows


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


def hidden_states(model: Any, batch: MicroBatch, vision_tower: VisionTower | None = None) -> torch.Tensor:
    """Hidden states of the last layer at the positions that predict the batch's trained tokens; [m, hidden].

    Args:
        model: without its output layer. vision_tower: of a vision model.
    """
    if vision_tower is None:
        layers, given = model, {"input_ids": batch.ids}
    else:
        layers, given = vision_tower.layers, {"inputs_embeds": vision_tower.embed(batch.ids, batch.images)}
    # Models that cannot have several sequences in a row may not know the word.
    seen = {"attention_mask": batch.mask} if batch.segments is None else {"segments": batch.segments}
    every = layers(**given, **seen, position_ids=batch.positions, use_cache=False).last_hidden_state
    found: torch.Tensor = every[batch.predict_row, batch.predict_at]
    return found


def token_logprobs(
    model: Any,
    batch: MicroBatch,
    *,
    temperature: float,
    autocast: bool,
    entropy: bool = False,
    vision_tower: VisionTower | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of the batch's trained tokens, and the entropies there if they are wanted; float32 [m].

    They are of logits / temperature, like the behaviour log-probabilities. Only positions that predict a trained token
    go through the output layer.
    """
    with autocast_context(batch.ids.device, autocast):
        # In bfloat16 the output layer is computed in it here and in the engine. In float32 on both sides their mean
        # difference falls from 0.046 to 0.033 nats a token (SmolLM2-135M, AVX-512; the layers' own rounding is the
        # rest), for a sixth to a fifth more time a decoding step and a quarter more of forward and backward: not worth
        # it where corrections for such differences are at hand.
        logits = model.get_output_embeddings()(hidden_states(model.base_model, batch, vision_tower))
    every = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
    entropies = -(every.exp() * every).sum(-1) if entropy else None
    return every.gather(-1, batch.targets[:, None])[:, 0], entropies


def compute_at_trained_tokens(
    compute: Callable[[MicroBatch], torch.Tensor],
    samples: Sequence[Sample],
    budget: TokenBudget,
    on_progress: Callable[[int], object],
    *,
    device: torch.device = CPU,
    costs: Costs | None = None,
    passes: Callable[[int], int] = lambda count: count,
    idle: Callable[[], object] = lambda: None,
) -> list[NDArray[np.float32]]:
    """What `compute` finds for each trained token of a micro-batch, [m], at the tokens' places; float32 [T] each.

    No gradients are kept. Tokens that are not trained, and a sample's first token, which nothing predicts, have 0.

    Args:
        budget: tokens of a micro-batch; notes each. on_progress: called with the tokens that went through the model.
        device: on which `compute` gets its micro-batches. costs: by which they are arranged, see `plan_micro_batches`.
        passes: how many passes to make, given how many micro-batches there are. idle: makes one of those beyond them.
    """
    found = [np.zeros(len(sample.tokens), np.float32) for sample in samples]
    trained = [(index, sample) for index, sample in enumerate(samples) if sample.loss_mask[1:].any()]
    rows = shared_rows([sample for _, sample in trained], budget.tokens)
    with denormals_flushed(), torch.no_grad():
        batches = plan_micro_batches(rows, budget.tokens, costs)
        beyond = passes(len(batches)) - len(batches)
        for chosen in batches:
            budget.attempting(chosen.rows, chosen.tokens)
            batch = collate(chosen.rows, device, chosen.costs)
            values, sample, token = (one.cpu() for one in (compute(batch), batch.sample, batch.token))
            for own in {index for row in chosen.rows for index, _ in row.members}:
                mine = sample == own
                found[trained[own][0]][token[mine].numpy()] = values[mine].numpy()
            on_progress(chosen.tokens)
        for _ in range(beyond):
            idle()
    return found
