"""Converts completions of an engine to samples for the queue."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from relax_rt.roles.base.sample import Sample, SampleMeta, TurnSpan, content_digest, generated_columns
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.rollout.engines.base import Completion
from relax_rt.roles.rollout.engines.routing import RoutingShape
from relax_rt.roles.rollout.work import ActiveGroup
from relax_rt.transport.queue.client import NewSample
from relax_rt.transport.queue.ledger.messages import SampleKey, Ticket, VersionSpan
from relax_rt.transport.rpc.errors import Refused


class SampleMaker:
    """Makes the samples of one rollout.

    Args:
        engine: slot and epoch, for the sample's meta.
        routing: shape of the routing rows; None: completions have none.
        has_vision: the model takes images, of which prompts of data have none.
    """

    def __init__(
        self,
        source: PromptSource,
        tokenizer: ChatTokenizer,
        *,
        temperature: float,
        max_new_tokens: int,
        engine: str,
        routing: RoutingShape | None = None,
        has_vision: bool = False,
    ) -> None:
        self._has_vision = has_vision
        self._source, self._tokenizer, self._routing = source, tokenizer, routing
        self._temperature, self._max_new_tokens, self._engine = temperature, max_new_tokens, engine

    def origin(self, ticket: Ticket) -> bytes:
        """Digest what a completion of the ticket's prompt depends on besides weights and seed; see PartialChunk."""
        digest = xxhash.xxh3_128(np.array(self._source.prompt(ticket.prompt, ticket.item).tokens, np.int32).tobytes())
        digest.update(f"{self._temperature!r} {self._tokenizer.tokenizer_digest}".encode())
        return digest.digest()

    def make(self, group: ActiveGroup, completion: Completion) -> Sample:
        """Return the sample of a finished member.

        Raises:
            Refused: routing rows are missing.
        """
        ticket, member = group.ticket, group.member(completion.member)
        item = self._source.prompt(ticket.prompt, ticket.item)
        start, total = len(item.tokens), len(item.tokens) + len(completion.tokens)
        mask, logprobs = np.zeros(total, np.uint8), np.zeros(total, np.float32)
        mask[start:] = 1
        logprobs[start:] = completion.logprobs
        meta = SampleMeta(
            group=ticket.group,
            member=member,
            prompt=ticket.prompt,
            attempt=ticket.attempt,
            item=item.item,
            split=item.split,
            finish_reason=completion.finish_reason,
            truncated=completion.finish_reason == "length",
            sampling={
                "temperature": self._temperature,
                "max_new_tokens": self._max_new_tokens,
                "seed": self._source.sample_seed(ticket.prompt, member, ticket.attempt),
            },
            tokenizer_digest=self._tokenizer.tokenizer_digest,
            template_digest=self._tokenizer.template_digest,
            turns=[TurnSpan(0, start, "user"), TurnSpan(start, total, "assistant")],
            engine=self._engine,
            answer=item.answer,
            info=item.info,
        )
        # Spans of the completion, moved to positions in the whole sample.
        spans = [VersionSpan(s.start + start, s.end + start, s.version, s.kv_version) for s in completion.versions]
        tokens = np.array([*item.tokens, *completion.tokens], np.int32)
        sample = Sample(meta=meta, tokens=tokens, loss_mask=mask, behaviour_logprobs=logprobs, versions=spans)
        sample.media = [] if self._has_vision else None
        if self._routing is not None:
            sample.routing = self._routing.rows(completion.prompt_routing, completion.routing)
            if len(sample.routing) != total - 1:
                raise Refused(
                    f"sample {_name(sample)} with {len(sample.routing)} routing rows of {total} tokens",
                    why="each token but the last has one",
                    hint="the engine lost some of them; it must be restarted",
                )
        return sample


def as_put(sample: Sample) -> NewSample:
    """Return a sample in the form of the queue's client."""
    key = SampleKey(sample.meta.group, sample.meta.member)
    return NewSample(key, generated_columns(sample), sample.versions)


def made_record(slot: str, made: list[tuple[ActiveGroup, Completion, Sample]]) -> dict[str, Any]:
    """Return this rollout's own record of its samples, which the chaos checker compares with the trainer's.

    resumed: for samples that another ticket started, the number of its tokens, and the digest of these and their
    log-probabilities as they are in the finished sample.
    """
    record: dict[str, Any] = {
        "kind": "produced",
        "slot": slot,
        "samples": [(_name(s), content_digest(s), sorted({span.version for span in s.versions})) for _, _, s in made],
        "prompts": {s.meta.group: s.meta.prompt for _, _, s in made},
    }
    resumed: dict[str, tuple[int, str]] = {}
    for group, completion, sample in made:
        partial = group.request.partial(completion.member)
        if partial is not None:
            count, start = len(partial.tokens), len(sample.tokens) - len(completion.tokens)
            digest = xxhash.xxh3_64(sample.tokens[start : start + count].tobytes())
            digest.update(sample.behaviour_logprobs[start : start + count].tobytes())
            resumed[_name(sample)] = (count, digest.hexdigest())
    return {**record, "resumed": resumed} if resumed else record


def _name(sample: Sample) -> str:
    return f"{sample.meta.group}.{sample.meta.member}"
