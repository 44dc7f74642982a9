"""Ways of laying rows out, whatever they cost; and gradients of sequences each computed alone, to hold them to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.training.algorithms.inputs import TokenTensors
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.batch.rows import Costs, SampleRow


class Packed(Costs):
    """Padding costs more, whatever the rows are."""

    def padded(self, rows: Sequence[SampleRow]) -> float:
        return math.inf


APART = Packed(pair=1.0, call=0.0)
"""One behind the other, each member of a group read by itself."""
MASKED = Packed(pair=1.0, call=1e9)
"""One behind the other, the members of a group under one mask."""
WAYS: dict[str, Costs | None] = {"padded": None, "apart": APART, "masked": MASKED}


def exactly(model: Any) -> Any:
    """The model in float64; transformers' norms would compute in float32, and its grouped product of experts not at
    all."""
    model.double()
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _norm(module)
    return model


def _norm(module: Any) -> Any:
    return lambda x: F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def load_exactly(folder: Path) -> Any:
    """As transformers computes it, in float64; its eager attention would round to float32."""
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return exactly(found)


def alone(model: Any, tokens: Any, temperature: float) -> tuple[Any, Any]:
    """Log-probabilities and entropies of one sequence computed alone, float64 [T]; of the first token 0."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    every = torch.log_softmax(model(ids[None]).logits[0, :-1] / temperature, -1)
    picked = every.gather(-1, ids[1:, None])[:, 0]
    nothing = torch.zeros(1, dtype=picked.dtype)
    return torch.cat([nothing, picked]), torch.cat([nothing, -(every.exp() * every).sum(-1)])


def gradients_alone(
    model: Any, objective: Objective, samples: Sequence[Sample], temperature: float
) -> dict[str, torch.Tensor]:
    """Of one loss of all sequences, by the parameter's name; a sample's branches are sequences of their own."""
    columns: dict[str, list[torch.Tensor]] = {}
    for index, s in enumerate(samples):
        for start, end in s.meta.branches or [(0, len(s.tokens))]:
            logprobs, entropy = alone(model, s.tokens[start:end], temperature)
            mask = s.loss_mask[start:end].copy()
            mask[0] = 0
            found = {"logprobs": logprobs, "entropy": entropy, "mask": torch.from_numpy(mask)}
            for name in ("behaviour_logprobs", "proximal_logprobs", "reference_logprobs", "advantages"):
                values = getattr(s, name)
                assert values is not None
                found[name.removesuffix("_logprobs")] = torch.from_numpy(values[start:end]).to(logprobs.dtype)
            found["sequence"] = torch.full((end - start,), index)
            found["group"] = torch.full((end - start,), s.meta.group)
            for name, value in found.items():
                columns.setdefault(name, []).append(value)
    loss, _ = objective.loss(TokenTensors(**{name: torch.cat(values) for name, values in columns.items()}))
    (loss / objective.count(samples)).backward()
    return {name: p.grad for name, p in model.named_parameters()}
