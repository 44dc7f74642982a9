"""One member of a group while it is generated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.rollout.engines.base import Chunk, GroupRequest, extend_spans
from relax_rt.roles.rollout.engines.routing import RoutingShape, Rows, told
from relax_rt.roles.rollout.engines.sampling import member_uniforms
from relax_rt.transport.queue.ledger.messages import VersionSpan


class Sequence:
    """Tokens, log-probabilities and versions of one member; knows what of it has been reported.

    Args:
        routing: of the engine; rows are kept if the request asks for them.

    Attributes:
        identity: of its prompt; see GroupRequest.
        kv_version: the oldest version in its KV cache.
        rows: its routing rows; None where nobody asked for them.
    """

    __slots__ = (
        "_uniforms",
        "finish_reason",
        "identity",
        "kv_version",
        "logprobs",
        "member",
        "reported",
        "request",
        "rows",
        "spans",
        "tokens",
    )

    def __init__(self, request: GroupRequest, member: int, routing: RoutingShape | None = None) -> None:
        self.request, self.member = request, member
        self.identity = request.identity()
        self._uniforms: NDArray[np.float32] | None = None
        self.kv_version = 0
        had = request.partial(member)
        self.tokens: list[int] = list(had.tokens) if had else []
        self.logprobs: list[float] = list(had.logprobs) if had else []
        self.spans: list[VersionSpan] = list(had.versions) if had else []
        self.rows = Rows(routing, had.routing if had else b"") if routing is not None and request.routing else None
        self.reported = len(self.tokens)
        self.finish_reason = ""
        self._judge()

    @property
    def position(self) -> int:
        """Where the newest token stands in the whole sequence; the cache holds what is before it."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def due(self) -> bool:
        """A chunk is to be reported."""
        marked = self.request.chunk_tokens
        return bool(self.finish_reason) or (marked > 0 and len(self.tokens) - self.reported >= marked)

    def uniform(self) -> float:
        """The draw of its next token."""
        if self._uniforms is None:
            self._uniforms = member_uniforms(self.request.seeds[self.member], self.request.max_new_tokens)
        return float(self._uniforms[len(self.tokens)])

    @property
    def untold(self) -> bool:
        """Some of its tokens could be reported before its end."""
        return self.request.chunk_tokens > 0 and self.reported < len(self.tokens)

    def begin(self, prompt: NDArray[np.int16] | None) -> None:
        """Its prompt was computed, with these routing rows [prompt, layers, k]; the last of them is its next token's
        where it has none yet."""
        if self.rows is not None and prompt is not None:
            self.rows.set_prompt(told(prompt[self.request.rows_from : -1]))

    def append(self, token: int, logprob: float, version: int, row: NDArray[np.int16] | None = None) -> None:
        """A sampled token, and the routing row [layers, k] of the position that it was sampled at."""
        at = len(self.tokens)
        if self.rows is not None and row is not None:
            self.rows.extend(told(row))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        extend_spans(self.spans, VersionSpan(at, at + 1, version, self.kv_version))
        self._judge()

    def chunk(self) -> Chunk:
        """What has not been reported; it is now."""
        start, self.reported = self.reported, len(self.tokens)
        rows = self.rows
        return Chunk(
            self.request.id,
            self.member,
            start,
            self.tokens[start:],
            self.logprobs[start:],
            list(self._spans_from(start)),
            self.finish_reason,
            rows.of(start, self.reported) if rows is not None else b"",
            rows.take_prompt() if rows is not None else b"",
        )

    def _spans_from(self, start: int) -> Iterator[VersionSpan]:
        for span in self.spans:
            if span.end > start:
                yield VersionSpan(max(span.start, start), span.end, span.version, span.kv_version)

    def _judge(self) -> None:
        if self.tokens and self.tokens[-1] in self.request.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.request.max_new_tokens:
            self.finish_reason = "length"
