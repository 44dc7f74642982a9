"""A call of a user's own advantage and loss, on a small made-up batch, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from relax_rt.config.problems import Problem
from relax_rt.roles.algorithms.objective import Objective, read_parts
from relax_rt.roles.algorithms.own import OwnPartFailed
from relax_rt.roles.algorithms.tensors import TokenTensors
from relax_rt.roles.sample import Sample, TurnSpan, bare_meta
from relax_rt.roles.sections import RLConfig
from relax_rt.transport.errors import Refused

GROUPS, MOST_MEMBERS, PROMPT = 2, 4, 2
NO_GRADIENT = "its loss has no gradient to tokens.logprobs: nothing would be learnt"


def check_own_parts(config: RLConfig) -> list[Problem]:
    """What goes wrong first when the parts of [algorithm] that are a user's own are called; nothing, without any."""
    parts = read_parts(config.algorithm, base=Path(config.config_dir), longest=config.sampling.max_new_tokens)
    if isinstance(parts, list) or not any(part.target for part in parts.all()):
        # What is wrong with how they are named is told already.
        return []
    objective = Objective(config.algorithm, parts)
    samples = _samples(min(config.algorithm.group_size, MOST_MEMBERS))
    try:
        objective.advantages(samples)
        if parts.advantage.target and "returns" in parts.advantage.part.extras:
            objective.returns(samples)
        objective.count(samples)
        tokens = _tokens(samples)
        loss, _ = objective.loss(tokens)
        if parts.loss.target and not loss.requires_grad:
            raise parts.loss.wrong(NO_GRADIENT, tokens)
    except OwnPartFailed as error:
        return [Problem(error.place, f"{error.who} failed in a dry run: {error.told}", "mend it there")]
    except Refused:
        # The made-up batch lacks something that a part of a known name asks for: nothing can be said of the user's.
        return []
    return []


def _samples(members: int) -> list[Sample]:
    """Groups of samples with every column, of several lengths and rewards."""
    made = []
    for group in range(GROUPS):
        for member in range(members):
            length = PROMPT + 3 + member
            mask = (np.arange(length) >= PROMPT).astype(np.uint8)
            numbers = (-0.1 * mask * (1 + np.arange(length))).astype(np.float32)
            turn = TurnSpan(PROMPT, length, "assistant")
            info = {"turn_rewards": [float(member % 2)], "turn_states": ["a state"]}
            meta = msgspec.structs.replace(bare_meta(group, member), turns=[turn], info=info)
            made.append(
                Sample(
                    meta=meta,
                    tokens=np.arange(1, length + 1, dtype=np.int32),
                    loss_mask=mask,
                    behaviour_logprobs=numbers,
                    versions=[],
                    reward=float(member % 2),
                    proximal_logprobs=numbers * np.float32(1.1),
                    reference_logprobs=numbers * np.float32(0.9),
                    values=mask.astype(np.float32) * np.float32(0.5),
                )
            )
    return made


def _tokens(samples: Sequence[Sample]) -> TokenTensors:
    """The trained tokens of samples, as a backend would make them."""
    import torch

    def column(name: str) -> torch.Tensor:
        values = [getattr(one, name)[one.loss_mask != 0] for one in samples]
        return torch.from_numpy(np.concatenate(values).astype(np.float32))

    counts = torch.tensor([int(one.loss_mask.sum()) for one in samples])
    sequence = torch.repeat_interleave(torch.arange(len(samples)), counts)
    return TokenTensors(
        logprobs=column("proximal_logprobs").requires_grad_(),
        behaviour=column("behaviour_logprobs"),
        advantages=column("advantages"),
        mask=torch.ones(len(sequence), dtype=torch.bool),
        sequence=sequence,
        proximal=column("proximal_logprobs"),
        reference=column("reference_logprobs"),
        group=torch.tensor([one.meta.group for one in samples])[sequence],
        entropy=torch.full((len(sequence),), 0.5),
    )
