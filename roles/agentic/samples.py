"""Turn a finished episode into the sample that is put into the queue: its branches, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.agentic.episode import PlayedEpisode
from relax_rt.roles.agentic.interface import Task
from relax_rt.roles.agentic.tokens.types import Branch
from relax_rt.roles.base.sample import Sample, SampleMeta, TurnSpan, content_digest, generated_columns
from relax_rt.roles.data.media.images import IMAGE, ImageRef, ImageSpan
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.rollout.engines.routing import NO_EXPERT, RoutingShape
from relax_rt.roles.training.algorithms.inputs import TURN_REWARDS, TURN_STATES
from relax_rt.transport.queue.client import NewSample
from relax_rt.transport.queue.ledger.messages import SampleKey, Ticket, VersionSpan
from relax_rt.transport.rpc.errors import Refused

TRUNCATED_BY = "truncated_by"
"""Key of meta.info with PlayedEpisode.truncated."""


def make_sample(
    ticket: Ticket,
    member: int,
    task: Task,
    played: PlayedEpisode,
    *,
    tokenizer: ChatTokenizer,
    sampling: dict[str, float | int | str],
    player: str,
    routing: RoutingShape | None = None,
    has_vision: bool = False,
) -> Sample:
    """Return the sample of a member; its T tokens are those of all branches.

    `meta.info` has the rewards of the assistant's turns, and the states before them if the environment named them all.

    Args:
        sampling: what replies were sampled with. player: slot and epoch of the role that played it.
        routing: what routing rows look like; None: replies have none. has_vision: the model takes images.

    Raises:
        Refused: a branch lacks routing rows.
    """
    branches, said = played.episode.branches, played.episode.trained
    starts = np.cumsum([0, *(len(branch.tokens) for branch in branches)]).tolist()
    turns: list[TurnSpan] = []
    versions: list[VersionSpan] = []
    for start, branch in zip(starts, branches, strict=False):
        turns += [TurnSpan(turn.start + start, turn.end + start, turn.role) for turn in branch.turns]
        versions += [VersionSpan(v.start + start, v.end + start, v.version, v.kv_version) for v in branch.versions]
    placed = [
        ImageRef(one.start + start, one.end + start, one.digest)
        for start, branch in zip(starts, branches, strict=False)
        for one in branch.media
    ]
    # The reward of an untrained reply goes to the trained one before it, which led to it.
    rewards, last = dict.fromkeys((turn.response for turn in said), 0.0), ""
    for reply, value in played.rewards.items():
        last = reply if reply in rewards else last
        if last:
            rewards[last] += value
    order = {reply: place for place, reply in enumerate(played.episode.replies)}
    info: dict[str, Any] = {TURN_REWARDS: [rewards[turn.response] for turn in said]}
    if all(turn.response in played.states for turn in said):
        info[TURN_STATES] = [played.states[turn.response] for turn in said]
    if played.truncated:
        info[TRUNCATED_BY] = played.truncated
    if task.question:
        info |= {"question": task.question, "metadata": task.metadata}
    meta = SampleMeta(
        group=ticket.group,
        member=member,
        prompt=ticket.prompt,
        attempt=ticket.attempt,
        item=task.item,
        split=task.split,
        finish_reason="length" if played.truncated else "stop",
        truncated=bool(played.truncated),
        sampling=sampling,
        tokenizer_digest=tokenizer.tokenizer_digest,
        template_digest=tokenizer.template_digest,
        turns=turns,
        engine=player,
        answer=task.answer,
        info=info,
        branches=list(itertools.pairwise(starts)) if len(branches) > 1 else [],
        media=[{"kind": IMAGE, "digest": one.digest, "start": one.start, "end": one.end} for one in placed],
        turn_order=sorted(range(len(said)), key=lambda n: order[said[n].response]) if len(branches) > 1 else [],
    )
    return Sample(
        meta=meta,
        tokens=np.array([token for branch in branches for token in branch.tokens], np.int32),
        loss_mask=np.array([bit for branch in branches for bit in branch.loss_mask], np.uint8),
        behaviour_logprobs=np.array([value for branch in branches for value in branch.logprobs], np.float32),
        versions=versions,
        reward=played.reward,
        rewards=played.parts or {"episode": played.reward},
        media=[ImageSpan(p.start, p.end, played.episode.images[p.digest]) for p in placed] if has_vision else None,
        routing=None if routing is None else _routing(routing, branches, f"{ticket.group}.{member}"),
    )


def _routing(shape: RoutingShape, branches: Sequence[Branch], name: str) -> NDArray[np.int16]:
    """Return the routing rows of all branches, int16 [T - 1, layers, k]; a branch's last token has no expert."""
    parts: list[NDArray[np.int16]] = []
    for number, branch in enumerate(branches):
        if len(branch.routing) != (len(branch.tokens) - 1) * shape.row_bytes:
            raise Refused(
                f"branch {number} of sample {name}",
                why=f"{len(branch.routing)} bytes of routing rows for {len(branch.tokens)} tokens",
                hint="the engines lost or repeated rows; see their logs",
            )
        nowhere = np.full((1, shape.layers, shape.chosen), NO_EXPERT, np.int16)
        parts += [shape.rows(branch.routing), nowhere]
    return np.concatenate(parts[:-1])


def new_sample(sample: Sample) -> NewSample:
    """Return a sample for the queue's client, with its reward."""
    key = SampleKey(sample.meta.group, sample.meta.member)
    columns = {**generated_columns(sample), "reward": np.float32(sample.reward or 0.0), "rewards": sample.rewards}
    return NewSample(key, columns, sample.versions)


def produced_record(slot: str, sample: Sample) -> dict[str, Any]:
    """Return the metrics record of a produced sample, which is independent of the queue's journal; as a rollout's."""
    versions = sorted({span.version for span in sample.versions})
    name = f"{sample.meta.group}.{sample.meta.member}"
    return {
        "kind": "produced",
        "slot": slot,
        "samples": [(name, content_digest(sample), versions)],
        "prompts": {sample.meta.group: sample.meta.prompt},
    }
