"""A sample as columns of the TransferQueue, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from relax_rt.roles.sample import Sample, SampleMeta
from relax_rt.transport.queue.api import VersionSpan


def generated_columns(sample: Sample) -> dict[str, Any]:
    """What a rollout puts: tokens, mask, behaviour log-probabilities, meta; routing rows when there are any."""
    columns: dict[str, Any] = {
        "tokens": sample.tokens,
        "loss_mask": sample.loss_mask,
        "behaviour_logprobs": sample.behaviour_logprobs,
        "meta": sample.meta,
    }
    if sample.routing is not None:
        columns["routing"] = sample.routing
    return columns


def read_meta(raw: Any) -> SampleMeta:
    """The `meta` column as its type."""
    return msgspec.convert(raw, SampleMeta)


def read_sample(field: Callable[[str], Any], names: frozenset[str], versions: list[VersionSpan]) -> Sample:
    """A sample from its columns; `field` gives a column's value, `names` are those that are there."""

    def optional(name: str) -> Any:
        return field(name) if name in names else None

    reward = optional("reward")
    return Sample(
        meta=read_meta(field("meta")),
        tokens=field("tokens"),
        loss_mask=field("loss_mask"),
        behaviour_logprobs=field("behaviour_logprobs"),
        versions=versions,
        reward=None if reward is None else float(np.asarray(reward)),
        rewards=dict(optional("rewards") or {}),
        advantages=optional("advantages"),
        proximal_logprobs=optional("proximal_logprobs"),
        reference_logprobs=optional("reference_logprobs"),
        values=optional("values"),
        routing=optional("routing"),
    )
