"""A sample as columns of the TransferQueue, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_rt.roles.base.sample import Sample, SampleMeta
from relax_rt.roles.data.media.pictures import Shown, digest_of

if TYPE_CHECKING:
    from relax_rt.transport.queue.client import LeasedSample


def generated_columns(sample: Sample) -> dict[str, Any]:
    """What a rollout puts: tokens, mask, behaviour log-probabilities, meta; routing rows when there are any, and
    pictures, or that there are none, where the model sees."""
    columns: dict[str, Any] = {
        "tokens": sample.tokens,
        "loss_mask": sample.loss_mask,
        "behaviour_logprobs": sample.behaviour_logprobs,
        "meta": sample.meta,
    }
    if sample.routing is not None:
        columns["routing"] = sample.routing
    if sample.media is not None:
        columns["media"] = {digest_of(one.data): one.data for one in sample.media}
    return columns


def read_sample(leased: LeasedSample) -> Sample:
    """A leased sample as its type. Arrays are views in shared memory."""

    def optional(name: str) -> Any:
        return leased[name] if name in leased else None  # noqa: SIM401 a LeasedSample is no dict

    reward, meta = optional("reward"), leased.decode("meta", SampleMeta)
    loss_mask = leased["loss_mask"]
    if leased.masked:
        # Tokens over the staleness bound stay as context.
        loss_mask = loss_mask.copy()
        for start, end in leased.masked:
            loss_mask[start:end] = 0
    return Sample(
        meta=meta,
        tokens=leased["tokens"],
        loss_mask=loss_mask,
        behaviour_logprobs=leased["behaviour_logprobs"],
        versions=leased.versions,
        reward=None if reward is None else float(np.asarray(reward)),
        rewards=dict(optional("rewards") or {}),
        turn_rewards=optional("turn_rewards"),
        advantages=optional("advantages"),
        proximal_logprobs=optional("proximal_logprobs"),
        reference_logprobs=optional("reference_logprobs"),
        values=optional("values"),
        routing=optional("routing"),
        media=_pictures(meta, leased.decode("media", dict[str, bytes])) if "media" in leased else None,
    )


def _pictures(meta: SampleMeta, held: Mapping[str, bytes]) -> list[Shown]:
    """The pictures of a sample: `meta.media` says where they stand, the column has each one's bytes once."""
    return [Shown(one["start"], one["end"], held[one["digest"]]) for one in meta.media]
