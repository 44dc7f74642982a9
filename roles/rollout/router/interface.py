"""Interface between routers and the processes that have an engine: one sequence is requested, and streamed back.

Every process with an engine serves `Generation` (roles.rollout.generation); `router.router` calls it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Literal, Protocol

import msgspec

from relax_rt.roles.data.media.images import MAX_IMAGES, ImageSpan
from relax_rt.roles.rollout.engines.base import MAX_TEMPERATURE
from relax_rt.transport.queue.ledger.messages import Finite, VersionSpan
from relax_rt.transport.rpc.interface import idempotent

CHUNK_TOKENS = 8
MAX_TOKENS = 1 << 20
MAX_ROW_BYTES = 32 << 20

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Tokens = Annotated[list[TokenId], msgspec.Meta(max_length=MAX_TOKENS)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=MAX_TEMPERATURE)]
Rejection = Literal["", "stale", "full", "stopping"]


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate.

    Attributes:
        prompt: token ids.
        seed: with the weights it decides the tokens.
        temperature: 0 is greedy.
        max_new_tokens: of the whole completion, `tokens` included.
        stop_ids: one of these ends it.
        tokens, logprobs, versions: beginning of the completion, from another engine; generation resumes behind it.
        routing: return routing rows (see engines.routing), of the prompt from position `rows_from` on.
        rows: routing rows of `tokens`.
        media: the images in the prompt.
        allowed: policy versions that may begin it, the committed one last; a newer one than that may, too.
        chunk_tokens: approximate number of tokens between two updates.
        left_s: the engine ends the sequence after so long.
    """

    prompt: Tokens
    seed: Annotated[int, msgspec.Meta(ge=0)]
    temperature: Temperature = 1.0
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    stop_ids: Annotated[list[TokenId], msgspec.Meta(max_length=4096)] = []
    tokens: Tokens = []
    logprobs: Annotated[list[Finite], msgspec.Meta(max_length=MAX_TOKENS)] = []
    versions: Annotated[list[VersionSpan], msgspec.Meta(max_length=MAX_TOKENS)] = []
    routing: bool = False
    rows_from: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] = 0
    media: Annotated[list[ImageSpan], msgspec.Meta(max_length=MAX_IMAGES)] = []
    rows: Annotated[bytes, msgspec.Meta(max_length=MAX_ROW_BYTES)] = b""
    allowed: Annotated[list[int], msgspec.Meta(min_length=1, max_length=1024)]
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = CHUNK_TOKENS
    left_s: Annotated[float, msgspec.Meta(ge=0)] = 600.0


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Load and state of an engine, as it reports.

    Attributes:
        version: policy version that it samples from.
        generated: tokens since it started.
        running, waiting: sequences of all its callers.
        outstanding_tokens: tokens still to come, at most, for all its callers.
        kv_used: share of its KV cache in use.
        room: further requests that it accepts.
        waiting_on: why it generates no tokens, if it generates none.
        stopping: it accepts nothing and ends soon.
    """

    epoch: int
    version: int
    generated: int
    running: int = 0
    waiting: int = 0
    outstanding_tokens: int = 0
    kv_used: float = 0.0
    room: int = 0
    waiting_on: str = ""
    stopping: bool = False


class SequenceUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of a sequence since the last update; without tokens it is a heartbeat.

    Attributes:
        start: position of the first of `tokens` in the completion.
        logprobs: behaviour log-probability of each.
        versions: policy versions over positions of the completion.
        finish_reason: stop, length or abort, in the last update.
        rejected: why the sequence was not started, or is not continued here; then it is the last update.
        routing: a routing row for each of `tokens`, if requested. prompt_routing: those of the prompt, from `rows_from`
            on, with the first tokens of this engine.
    """

    start: int = 0
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[VersionSpan] = []
    finish_reason: str = ""
    rejected: Rejection = ""
    report: EngineReport
    routing: bytes = b""
    prompt_routing: bytes = b""


class Generation(Protocol):
    """Generates sequences with one engine, for any process of the run."""

    def generate(self, request: SequenceRequest) -> AsyncIterator[SequenceUpdate]:
        """Generate one sequence. Refused when the engine can never do it. Closing the stream ends the sequence."""

    @idempotent
    async def load(self) -> EngineReport:
        """Report the engine's load."""
