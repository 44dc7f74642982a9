"""Packs through the pipeline: forward for log-probabilities, forward and backward for gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from relax_rt.roles.training.megatron.logprobs import GatherContext, VocabularySlice, log_probabilities
from relax_rt.roles.training.megatron.model import PredictedRows
from relax_rt.roles.training.megatron.packs import ContextShare, Pack
from relax_rt.roles.training.megatron.ranks import MegatronRanks

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
