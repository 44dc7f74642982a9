"""One sample: a trajectory with the policy version of every generated token, and its columns in the TransferQueue.

Rollouts and environments write it, reward, reference and critic add columns, the trainer reads all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_rt.roles.data.media.images import ImageSpan, image_digest
from relax_rt.transport.queue.batch import LeasedSample
from relax_rt.transport.queue.ledger.messages import VersionSpan

FINISH_REASONS = ("stop", "length", "abort", "error")


class TurnSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) belong to one turn; role is system, user, assistant or tool."""

    start: int
    end: int
    role: str


class SampleMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What a sample carries besides tensors; the `meta` column.

    Attributes:
        prompt: index in the run's prompt order. item: stable id of the data item (hash of the canonical question).
        split: train or held_out.
        finish_reason: one of FINISH_REASONS; truncated is True when the length limit cut it.
        sampling: temperature, max_new_tokens, seed and other options of the engine.
        tokenizer_digest, template_digest: what turned text into tokens.
        media: what is among the tokens besides text: kind, digest, and the tokens [start, end) that stand for it.
        engine: slot and epoch of the engine that finished it, or of who played it.
        answer: of the data item, of any JSON type.
        branches: tokens [start, end) of each branch of an episode, a causal sequence of its own; empty: there is one.
        turn_order: with branches the numbers of the assistant's turns in `turns`, in the order of calls.
    """

    group: int
    member: int
    prompt: int
    attempt: int
    item: str
    split: str
    finish_reason: str
    truncated: bool
    sampling: dict[str, float | int | str]
    tokenizer_digest: str
    template_digest: str
    turns: list[TurnSpan]
    media: list[dict[str, Any]] = []
    engine: str = ""
    answer: Any = ""
    info: dict[str, Any] = {}
    branches: list[tuple[int, int]] = []
    turn_order: list[int] = []


def bare_meta(group: int, member: int) -> SampleMeta:
    """Return the meta of a sample that no engine generated, such as a supervised row: its group and member alone."""
    return SampleMeta(
        group=group,
        member=member,
        prompt=group,
        attempt=0,
        item="",
        split="train",
        finish_reason="stop",
        truncated=False,
        sampling={},
        tokenizer_digest="",
        template_digest="",
        turns=[],
    )


class Sample(msgspec.Struct, kw_only=True):
    """One trajectory. T tokens = prompt and completion; all per-token columns have length T.

    Attributes:
        tokens: int32 [T], prompt then completion, a sampled EOS included.
        loss_mask: uint8 [T], 1 on tokens that were sampled by the policy.
        behaviour_logprobs: float32 [T], log-softmax over the full vocabulary of logits / temperature at the sampled
            token; 0 where loss_mask is 0.
        versions: policy version of each generated token, run-length coded over positions in [0, T).
        rewards: by component; `reward` is their total.
        turn_rewards: float32, one for each turn of the assistant, where a reward function gives them.
        advantages: float32 [T].
        proximal_logprobs: float32 [T] of the weights of proximal_version. reference_logprobs, values: float32 [T]; the
            reference never changes, and the critic is asked within the step.
        routing: int16 [T-1, layers, k] experts chosen (MoE); -1 at a branch's last token, which was sent nowhere.
        media: the images among the tokens, in order; None: the model reads text alone.
    """

    meta: SampleMeta
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    behaviour_logprobs: NDArray[np.float32]
    versions: list[VersionSpan]
    reward: float | None = None
    rewards: dict[str, float] = {}
    turn_rewards: NDArray[np.float32] | None = None
    advantages: NDArray[np.float32] | None = None
    proximal_logprobs: NDArray[np.float32] | None = None
    proximal_version: int | None = None
    reference_logprobs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    routing: NDArray[np.int16] | None = None
    media: list[ImageSpan] | None = None

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        sampled = np.flatnonzero(self.loss_mask)
        return int(sampled[0]) if len(sampled) else len(self.tokens)


TASK_FIELDS: dict[str, tuple[str, ...]] = {
    "reward": ("tokens", "loss_mask", "meta"),
    "train": ("tokens", "loss_mask", "behaviour_logprobs", "meta", "reward", "rewards"),
}
"""The fields that each consumer task waits for. `train` is the task whose completion is a step."""
REFERENCE_FIELDS = ("tokens", "loss_mask", "behaviour_logprobs", "meta")


def task_fields(
    roles: Collection[str], *, rewarded: bool = False, has_vision: bool = False
) -> dict[str, tuple[str, ...]]:
    """Return TASK_FIELDS for a run with these roles: with a reference, training waits for its log-probabilities.

    rewarded: samples have their reward when they are put. has_vision: the model takes images, and training waits for
    them.
    """
    tasks = {name: fields for name, fields in TASK_FIELDS.items() if name != "reward" or not rewarded}
    if has_vision:
        tasks["train"] = (*tasks["train"], "media")
    if "reference" not in roles:
        return tasks
    train = (*tasks["train"], "reference_logprobs")
    return {**tasks, "reference": REFERENCE_FIELDS, "train": train}


def content_digest(sample: Sample) -> str:
    """Return 16 hex digits of the sampled tokens and their log-probabilities.

    Recorded by who made a sample and by who trained on it, so that the two can be compared.
    """
    digest = xxhash.xxh3_64(np.ascontiguousarray(sample.tokens).tobytes())
    digest.update(np.ascontiguousarray(sample.behaviour_logprobs).tobytes())
    return digest.hexdigest()


def generated_columns(sample: Sample) -> dict[str, Any]:
    """Return the columns that a producer puts: tokens, mask, behaviour log-probabilities and meta.

    Routing rows are there if the sample has any; images, perhaps none, where the model takes images.
    """
    columns: dict[str, Any] = {
        "tokens": sample.tokens,
        "loss_mask": sample.loss_mask,
        "behaviour_logprobs": sample.behaviour_logprobs,
        "meta": sample.meta,
    }
    if sample.routing is not None:
        columns["routing"] = sample.routing
    if sample.media is not None:
        columns["media"] = {image_digest(one.data): one.data for one in sample.media}
    return columns


def read_sample(leased: LeasedSample) -> Sample:
    """Read a leased sample. Its arrays are views in shared memory."""

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
        media=_images(meta, leased.decode("media", dict[str, bytes])) if "media" in leased else None,
    )


def _images(meta: SampleMeta, held: Mapping[str, bytes]) -> list[ImageSpan]:
    """Return the images: `meta.media` has their places among the tokens, the column the bytes by digest."""
    return [ImageSpan(one["start"], one["end"], held[one["digest"]]) for one in meta.media]
