"""Log-probabilities of samples under a transformers model; trainer and reference compute them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.data.media.vision_tower import VisionTower
from relax_rt.roles.models.device import CPU, autocasting, denormals_flushed
from relax_rt.roles.training.batch.budget import TokenBudget
from relax_rt.roles.training.batch.collate import MicroBatch, collate
from relax_rt.roles.training.batch.rows import Costs, plan_micro_batches, shared_rows


def hidden_states(model: Any, batch: MicroBatch, vision_tower: VisionTower | None = None) -> torch.Tensor:
    """Hidden states of the last layer at the positions that predict the batch's trained tokens; [m, hidden].

    Args:
        model: without its output layer. vision_tower: of a model that takes images.
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
    with autocasting(batch.ids.device, autocast):
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
