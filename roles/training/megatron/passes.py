"""Packed micro-batches and their way through the pipeline: log-probabilities, or forward and backward for gradients.

A pack has samples one after the other in one row, each attending to itself alone. Context-parallel ranks compute a
share of its tokens, tensor-parallel ranks a slice of the vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.training.batch.rows import Numbered, indivisible_units, unit_tokens
from relax_rt.roles.training.megatron.ranks import MegatronRanks


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


class VocabularySlice:
    """The part of the vocabulary that this rank's logits are of.

    Args:
        first: number of the first token. rows: logits of this rank, padding included. vocabulary: tokens of the model;
            logits from there on are padding and have no probability. group: the ranks that hold the other parts, or
            None where there are none.
    """

    def __init__(self, first: int, rows: int, vocabulary: int, group: dist.ProcessGroup | None) -> None:
        self.first, self.rows, self.real = first, rows, max(0, min(rows, vocabulary - first))
        self.group = group

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Over all parts, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Over all parts, in place."""
        if self.group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values


def log_probabilities(
    logits: torch.Tensor, targets: torch.Tensor, part: VocabularySlice, *, entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax at the targets, and the entropy of the distribution, both differentiable.

    With p = softmax(z) over all parts: d log p_t / d z_j = [j = t] - p_j, and for H = -sum p log p
    d H / d z_j = -p_j (log p_j + H). Only p is kept for the backward pass.

    Args:
        logits: float [m, part.rows], at temperature 1 or divided by it. It is overwritten.
        targets: int64 [m], numbers in the whole vocabulary.
        entropy: unless it is wanted it is not computed, and is 0.

    Returns:
        log-probabilities [m] and entropies [m] in nats, the same on all ranks of the group, in the logits' dtype but at
        least float32.
    """
    apply: Any = _VocabularyParallel.apply
    found: tuple[torch.Tensor, torch.Tensor] = apply(logits, targets, part, entropy)
    return found


class _VocabularyParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, part: VocabularySlice, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        z = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        z[:, part.real :] = -torch.inf
        z = z - part.max(z.amax(-1))[:, None]
        here = (targets >= part.first) & (targets < part.first + part.real)
        local = torch.where(here, targets - part.first, 0)
        at_target = z.gather(-1, local[:, None])[:, 0].masked_fill(~here, 0.0)
        weight = z.exp()
        # What has no weight counts for nothing, also at minus infinity.
        mean = (weight * z.masked_fill(weight == 0, 0.0)).sum(-1) if with_entropy else torch.zeros_like(at_target)
        sums = part.sum(torch.stack([weight.sum(-1), mean, at_target]))
        log_total = sums[0].log()
        p = weight / sums[0][:, None]
        entropy = log_total - sums[1] / sums[0] if with_entropy else torch.zeros_like(log_total)
        ctx.save_for_backward(p, entropy, local, here)
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return sums[2] - log_total, entropy

    @staticmethod
    def backward(
        ctx: Any, of_logprob: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        p, entropy, local, here = ctx.saved_tensors
        gradient = torch.zeros_like(p)
        if of_logprob is not None:
            gradient = p * -of_logprob[:, None]
            gradient.scatter_add_(-1, local[:, None], (of_logprob * here)[:, None])
        if of_entropy is not None:
            gradient = gradient - of_entropy[:, None] * (torch.special.xlogy(p, p) + p * entropy[:, None])
        return gradient.to(ctx.dtype), None, None, None


class GatherContext(torch.autograd.Function):
    """Values of all ranks of a group, of which each has some: float [m] from float [k] and their places, int64 [k].

    Every rank computes the same loss of the whole, so that a rank's own values get their whole gradient from its own
    loss; those of parameters are added up over the ranks afterwards.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, places: torch.Tensor, size: int, group: dist.ProcessGroup) -> Any:
        """Add up vectors that are 0 at the others' places."""
        ctx.save_for_backward(places)
        whole = values.detach().new_zeros(size)
        whole[places] = values.detach()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """That of this rank's places."""
        (places,) = ctx.saved_tensors
        return gradient[places], None, None, None


class PredictedRows:
    """Keeps the output layer from computing logits of positions that predict nothing wanted.

    It stands before the last stage's output layer; set `rows` before each forward pass.

    Args:
        config: Megatron's. layer: the output layer.
    """

    def __init__(self, config: Any, layer: torch.nn.Module) -> None:
        self._mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
        self._parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self.rows: torch.Tensor | None = None
        layer.register_forward_pre_hook(self._choose)

    def _choose(self, _: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.rows is None:
            return None
        hidden, *rest = args
        if self._parts == 1:
            return hidden.index_select(0, self.rows), *rest
        # Each rank has a part of the positions, and must have an equal part of the chosen ones.
        hidden = self._mappings.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        chosen = hidden.index_select(0, torch.nn.functional.pad(self.rows, (0, -len(self.rows) % self._parts)))
        return self._mappings.scatter_to_sequence_parallel_region(chosen), *rest


Loss = Callable[[Pack, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, float]]]
"""From a pack, the log-probabilities of the tokens wanted and the entropies at their positions, both [m] with
gradients: a sum over tokens, not divided by anything, and metrics that are sums as well."""


class Passes:
    """Runs packs through this rank's part of a model.

    Args:
        wrapped: Megatron's DistributedDataParallel. model: the GPTModel within. temperature: of the distribution.
        entropy: whether losses want entropies. on_progress: called with the tokens of each forward pass.
        before: called with each pack before it goes through.
    """

    def __init__(
        self,
        ranks: MegatronRanks,
        config: Any,
        wrapped: Any,
        model: Any,
        *,
        vocabulary: int,
        temperature: float,
        entropy: bool,
        on_progress: Callable[[int], None],
        before: Callable[[Pack], None],
    ) -> None:
        self._ranks, self._config, self._wrapped = ranks, config, wrapped
        self._on_progress, self._before = on_progress, before
        self._temperature, self._entropy = temperature, entropy
        self._schedule = importlib.import_module("megatron.core.pipeline_parallel").get_forward_backward_func()
        self._params = importlib.import_module("megatron.core.packed_seq_params").PackedSeqParams
        # Gradients of replicas are added up once a step, by whoever applies it.
        config.finalize_model_grads_func = None
        config.no_sync_func = wrapped.no_sync
        self._chosen = PredictedRows(config, model.output_layer) if ranks.last_stage else None
        self._part: VocabularySlice | None = None
        if ranks.last_stage:
            rows = model.output_layer.output_size_per_partition
            group = ranks.tensor_group if ranks.sizes.tensor > 1 else None
            self._part = VocabularySlice(ranks.at["tensor"] * rows, rows, vocabulary, group)

    def use(self, *, temperature: float | None, entropy: bool) -> None:
        """Set the temperature (None: as before), and whether entropies are computed."""
        self._temperature = self._temperature if temperature is None else temperature
        self._entropy = entropy

    def log_probabilities(self, packs: Sequence[Pack]) -> list[torch.Tensor]:
        """Compute log-probabilities of the tokens wanted in each pack, float32 [m], on the CPU of every rank of the
        replica."""
        found: list[torch.Tensor] = []
        with torch.no_grad():
            found = self._run(packs, lambda pack, out: self._predicted(pack, out, entropy=False)[0], forward_only=True)
        values = torch.cat([torch.zeros(0, device=self._ranks.device), *found])
        if not self._ranks.last_stage:
            values = torch.zeros(sum(len(pack.targets) for pack in packs), device=self._ranks.device)
        values = self._ranks.from_last_stage(values.float()).cpu()
        return list(torch.split(values, [len(pack.targets) for pack in packs]))

    def backward(self, packs: Sequence[Pack], loss: Loss, dummies: int) -> list[tuple[float, dict[str, float]]]:
        """Add the gradients of the packs' losses to what is there.

        Args:
            dummies: how many of the last packs only keep step with other ranks, and count for nothing.

        Returns:
            On the last stage loss and metrics of each pack that counts, elsewhere nothing.
        """
        counting = {id(pack) for pack in packs[: len(packs) - dummies]}

        def of(pack: Pack, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            logprobs, entropy = self._predicted(pack, out, entropy=self._entropy)
            nothing = torch.zeros((), dtype=torch.int, device=out.device)
            if id(pack) not in counting:
                return logprobs.sum() * 0.0, nothing, None
            total, metrics = loss(pack, logprobs, entropy)
            return total, nothing, (float(total.detach()), metrics)

        return [found for found in self._run(packs, of, forward_only=False) if found is not None]

    def _run(self, packs: Sequence[Pack], of: Callable[[Pack, torch.Tensor], Any], *, forward_only: bool) -> list[Any]:
        if not packs:
            return []
        found: list[Any] = self._schedule(
            forward_step_func=partial(self._forward, of),
            data_iterator=iter(packs),
            model=[self._wrapped],
            num_microbatches=len(packs),
            seq_length=max(pack.tokens for pack in packs),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return found

    def _forward(self, of: Callable[..., Any], packs: Iterator[Pack], model: Any) -> tuple[torch.Tensor, Any]:
        pack, device = next(packs), self._ranks.device
        self._before(pack)
        bounds, ids, positions, rows = pack.bounds.to(device), pack.ids, pack.positions, pack.rows
        if (share := self._share(pack)) is not None:
            ids, positions, rows = ids[:, share.places], positions[:, share.places], share.rows
        if self._chosen is not None:
            self._chosen.rows = rows.to(device)
        out = model(
            ids.to(device),
            positions.to(device),
            None,
            packed_seq_params=self._params(
                qkv_format="thd",
                cu_seqlens_q=bounds,
                cu_seqlens_kv=bounds,
                max_seqlen_q=pack.longest,
                max_seqlen_kv=pack.longest,
            ),
        )
        self._on_progress(pack.tokens)
        return out, lambda output, non_loss_data=False: of(pack, output)

    def _share(self, pack: Pack) -> ContextShare | None:
        """What this rank computes of a pack; None: all of it."""
        ranks = self._ranks.sizes.context
        return pack.share(self._ranks.at["context"], ranks) if ranks > 1 else None

    def _predicted(self, pack: Pack, logits: torch.Tensor, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of all tokens wanted, on every context-parallel rank."""
        assert self._part is not None
        share = self._share(pack)
        targets = (pack.targets if share is None else pack.targets[share.wanted]).to(logits.device)
        scaled = logits[0, : len(targets)] / self._temperature
        found = log_probabilities(scaled, targets, self._part, entropy=entropy)
        if share is None:
            return found
        wanted, group = share.wanted.to(logits.device), self._ranks.context_group
        whole: Any = GatherContext.apply
        return whole(found[0], wanted, len(pack.targets), group), whole(found[1], wanted, len(pack.targets), group)
