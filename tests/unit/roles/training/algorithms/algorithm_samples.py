"""Samples and token tensors for the tests of algorithms."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from relax_rt.roles.base.sample import Sample, SampleMeta, TurnSpan
from relax_rt.roles.training.algorithms.inputs import AdvantageInputs, TokenTensors, Trajectory
from relax_rt.roles.training.algorithms.registry import BoundPart, bind
from relax_rt.transport.rpc.errors import Refused


def sample(
    group: int,
    mask: list[int],
    reward: float | None = 0.0,
    *,
    member: int = 0,
    truncated: bool = False,
    turns: list[TurnSpan] | None = None,
    info: dict[str, Any] | None = None,
    **columns: Any,
) -> Sample:
    """A sample whose trained tokens are those of mask 1."""
    rng = np.random.default_rng(1000 * group + 10 * len(mask) + member)
    loss_mask = np.array(mask, np.uint8)
    meta = SampleMeta(
        group=group,
        member=member,
        prompt=group,
        attempt=0,
        item=f"item{group}",
        split="train",
        finish_reason="stop",
        truncated=truncated,
        sampling={},
        tokenizer_digest="",
        template_digest="",
        turns=turns or [],
        info=info or {},
    )
    return Sample(
        meta=meta,
        tokens=rng.integers(1, 60, len(mask)).astype(np.int32),
        loss_mask=loss_mask,
        behaviour_logprobs=(-rng.random(len(mask)) * loss_mask).astype(np.float32),
        versions=[],
        reward=reward,
        **{name: np.array(values, np.float32) for name, values in columns.items()},
    )


def trajectories(*given: tuple[int, float, int], **columns: list[list[float]]) -> AdvantageInputs:
    """(group, reward, trained tokens) each, behind a prompt of two tokens; columns by trajectory, of trained tokens."""
    made = []
    for i, (group, reward, length) in enumerate(given):
        mask = np.array([False, False] + [True] * length)
        padded = {name: np.array([9.0, 9.0, *values[i]]) for name, values in columns.items()}
        padded.setdefault("behaviour", np.zeros(length + 2))
        made.append(Trajectory(group=group, reward=reward, mask=mask, **padded))
    return AdvantageInputs(made)


def tokens(lengths: list[int], *, seed: int = 0, spread: float = 0.3, groups: list[int] | None = None) -> TokenTensors:
    """Sequences of these lengths, all tokens trained, with every column; float64, logprobs a leaf with gradient."""
    generator = torch.Generator().manual_seed(seed)
    m = sum(lengths)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(m, generator=generator, dtype=torch.float64)

    behaviour = -torch.rand(m, generator=generator, dtype=torch.float64) - 0.2
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    by_sequence = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    found = TokenTensors(
        logprobs=behaviour + normal(spread),
        behaviour=behaviour,
        advantages=by_sequence[sequence],
        mask=torch.ones(m, dtype=torch.bool),
        sequence=sequence,
        proximal=behaviour + normal(spread / 2),
        reference=behaviour + normal(spread),
        group=None if groups is None else torch.tensor(groups)[sequence],
        entropy=torch.rand(m, generator=generator, dtype=torch.float64),
    )
    found.logprobs.requires_grad_()
    return found


def bound(kind: Any, given: Any, **defaults: Any) -> BoundPart:
    """A part by name.

    Raises:
        Refused: there is none of that name, or its options are wrong.
    """
    found = bind(kind, given, ("algorithm", kind), defaults=defaults)
    if isinstance(found, list):
        raise Refused(f"algorithm.{kind}", why="; ".join(p.message for p in found), hint=found[0].hint)
    return found
