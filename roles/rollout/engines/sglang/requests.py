"""Requests to the SGLang server: segments of members, the calls that sample them, and routing rows of the answers.

A member of a group is sampled in segments, each under one version. A segment ends when the member does, when the server
is interrupted, or after a chunk if routing rows are recorded.
"""

from __future__ import annotations

import asyncio
import binascii
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.rollout.engines.base import Chunk, GroupRequest, extend_spans
from relax_rt.roles.rollout.engines.routing import RoutingShape, RowBuffer, canonical_rows, encode_rows, sparse_layers
from relax_rt.roles.rollout.engines.sglang.client import (
    LARGE_BYTES,
    MAX_EVENT_BYTES,
    Meta,
    SequenceEnd,
    ServerRefused,
    StreamEvent,
)
from relax_rt.roles.rollout.engines.sglang.weights import splitmix64
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Corrupt, ProtocolError, Refused

STOP, LENGTH, ABORT = "stop", "length", "abort"
PROGRESS_TOKENS = 16
"""A segment reports at least every so many tokens: health is judged by them."""
PIECE = 1 << 20
"""Characters of base64 decoded at a time, which blocks other threads; a multiple of 4."""


@dataclass(slots=True)
class SegmentedMember:
    """One completion.

    Attributes:
        order: of its request among all that were submitted.
        start: tokens of the partial, which are not reported again.
        reported: tokens reported in chunks, those of the partial included.
        salt: version under which its cache was started; None before its first segment.
        kv_version: oldest weights among its keys and values.
        rid: the running segment's name; empty: none is running.
        base: tokens at the start of the running segment. requested: tokens that it generates at most.
        rows: routing rows; None if not requested. They come with the end of a segment, and only tokens that have
            their row are reported.
        has_prompt_rows: the rows of the prompt have arrived.
        fresh: the running segment has not generated a token yet.
        progressed_at: when the running segment started, or generated its last token.
        interrupted: the engine has asked the server to end the running segment.
    """

    request: GroupRequest
    index: int
    order: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    start: int = 0
    reported: int = 0
    salt: int | None = None
    kv_version: int = 0
    rid: str = ""
    base: int = 0
    requested: int = 0
    rows: RowBuffer | None = None
    has_prompt_rows: bool = False
    fresh: bool = True
    progressed_at: float = 0.0
    interrupted: bool = False
    aborted: bool = False
    finish: str = ""

    @staticmethod
    def from_request(
        request: GroupRequest, index: int, order: int, routing: RoutingShape | None = None
    ) -> SegmentedMember:
        """Return a member as it is submitted, with the tokens of its partial."""
        member = SegmentedMember(request, index, order)
        partial = request.partial(index)
        if request.routing and routing is not None:
            member.rows = RowBuffer(routing, partial.routing if partial is not None else b"")
        if partial is not None:
            member.tokens, member.logprobs = list(partial.tokens), list(partial.logprobs)
            member.spans = list(partial.versions)
            member.start = member.reported = len(partial.tokens)
            member._check_finished()
        return member

    @property
    def left(self) -> int:
        """Maximum number of tokens still to come."""
        return max(0, self.request.max_new_tokens - len(self.tokens))

    @property
    def rows_from(self) -> int:
        """Position of the first routing row that the running segment must return."""
        return len(self.request.prompt) + self.base - 1 if self.has_prompt_rows else self.request.rows_from

    def begin(self, rid: str, version: int, now: float = 0.0) -> None:
        """Start a segment under `version`."""
        if self.salt is None:
            self.salt = self.kv_version = version
        self.rid, self.base, self.fresh, self.requested = rid, len(self.tokens), True, self.left
        if self.rows is not None and self.request.chunk_tokens:
            self.requested = min(self.left, self.request.chunk_tokens)
        self.progressed_at, self.interrupted = now, False

    def recompute(self, version: int) -> int:
        """Have its keys and values recomputed under `version`; return how many positions that are."""
        if self.salt is None:
            return 0
        self.salt = self.kv_version = version
        return len(self.request.prompt) + len(self.tokens)

    def take(self, event: StreamEvent, version: int) -> int:
        """Append the tokens of an event of the running segment; return how many are new.

        Raises:
            ProtocolError: tokens are missing, or come without their log-probabilities.
            Corrupt: the server sampled them from another version.
            ServerRefused: it ended the segment, unasked.
        """
        meta = event.meta_info
        assert meta is not None
        if (end := meta.finish_reason) is not None and end.type == ABORT and not (self.aborted or self.interrupted):
            # Checked before the tokens: those that it invents for a request that it rejects have no log-probability.
            raise self._ended_early(end)
        # An aborted segment repeats its last token: the position of the event's tokens counts.
        first = self.base + meta.completion_tokens - len(event.output_ids)
        if first > len(self.tokens):
            raise ProtocolError(f"segment {self.rid}", why=f"tokens {len(self.tokens)} to {first} never came")
        new = event.output_ids[len(self.tokens) - first :]
        entries = meta.output_token_logprobs[-len(new) :] if new else []
        if [token for _, token, _ in entries] != new or any(logprob is None for logprob, _, _ in entries):
            raise ProtocolError(f"segment {self.rid}", why=f"{len(new)} tokens with log-probabilities of {entries[:4]}")
        if odd := [span for span in meta.weight_versions if span.version != str(version) and span.end > span.start]:
            raise Corrupt(
                f"segment {self.rid}", why=f"sampled from version {odd[0].version}, and {version} is in place"
            )
        if self.fresh and new:
            self.fresh = False
            if not meta.cached_tokens:
                # Nothing of its cache was left: all of it is of these weights.
                self.kv_version = version
        for token, (logprob, _, _) in zip(new, entries, strict=True):
            at = len(self.tokens)
            self.tokens.append(token)
            self.logprobs.append(float(logprob or 0.0))
            extend_spans(self.spans, VersionSpan(at, at + 1, version, self.kv_version))
        return len(new)

    def take_rows(self, rows: NDArray[np.int16] | None, start: int) -> None:
        """Append the routing rows that came with the running segment's end, from position `start` on.

        A segment that was interrupted while the server had retracted it has none: its tokens are sampled again.

        Raises:
            ProtocolError: they are not those of its tokens.
        """
        assert self.rows is not None
        first, new = len(self.request.prompt) + self.base - 1, len(self.tokens) - self.base
        own = rows[first - start :][:new] if rows is not None else ()
        if len(own) < new:
            if not (self.interrupted or self.aborted):
                raise ProtocolError(f"segment {self.rid}", why=f"{new} tokens with {len(own)} routing rows")
            count = self.base + len(own)
            del self.tokens[count:], self.logprobs[count:]
            self.spans = [
                VersionSpan(s.start, min(s.end, count), s.version, s.kv_version) for s in self.spans if s.start < count
            ]
        if rows is None or not len(own):
            return
        if not self.has_prompt_rows:
            prompt = rows[self.request.rows_from - start : len(self.request.prompt) - 1 - start]
            self.rows.set_prompt(encode_rows(prompt))
            self.has_prompt_rows = True
        self.rows.extend(encode_rows(rows[first - start :][:new]))

    def end_segment(self, end: SequenceEnd | None = None) -> None:
        """End the running segment; `finish` then says whether the member has ended, too.

        Args:
            end: how the server ended it.

        Raises:
            ServerRefused: it ended it too early. It would do so again: the same segment is not requested twice.
        """
        self.rid = ""
        self._check_finished()
        if self.aborted and not self.finish:
            self.finish = ABORT
        if self.finish or self.interrupted or end is None:
            return
        new = len(self.tokens) - self.base
        if end.type == LENGTH and new == self.requested > 0:
            return
        # A token that ends sequences of the model need not be a stop token of this request.
        if end.type != STOP or not new:
            raise self._ended_early(end)

    def _ended_early(self, end: SequenceEnd) -> ServerRefused:
        had, wanted = len(self.tokens), self.request.max_new_tokens
        return ServerRefused(
            f"request {self.request.id}, member {self.index} on the SGLang server",
            why=f"it ended it ({end.type}) at {had} of {wanted} tokens, unasked: {end.message or 'no reason given'}",
            hint="its limits and options (sglang.arguments) must allow for what this engine is asked",
        )

    def _check_finished(self) -> None:
        if self.tokens and self.tokens[-1] in self.request.stop_ids:
            self.finish = STOP
        elif len(self.tokens) >= self.request.max_new_tokens:
            self.finish = LENGTH

    def chunk(self, *, everything: bool = False) -> Chunk | None:
        """Return what must be reported now: at the end everything, before it once the request's chunk is full."""
        end, every = len(self.tokens) if self.rows is None else len(self.rows), self.request.chunk_tokens
        unreported = end - self.reported
        if not self.finish and not (unreported if everything else every and unreported >= every):
            return None
        at, self.reported = self.reported, end
        spans = [
            VersionSpan(max(s.start, at), min(s.end, end), s.version, s.kv_version)
            for s in self.spans
            if s.end > at and s.start < end
        ]
        tokens, logprobs, rows = self.tokens[at:end], self.logprobs[at:end], self.rows
        routing, prompt = (b"", b"") if rows is None else (rows.get(at, end), rows.take_prompt())
        return Chunk(self.request.id, self.index, at, tokens, logprobs, spans, self.finish, routing, prompt)


class SegmentBatch:
    """Members of one request whose segments are sampled in one call.

    Attributes:
        rows_from: position from which on the server returns the routing rows of each.
    """

    def __init__(self, members: Sequence[SegmentedMember]) -> None:
        self.members = {member.rid: member for member in members}
        self.rows_from = min(member.rows_from for member in members)

    def member(self, meta: Meta) -> SegmentedMember:
        """Return the member that an event belongs to.

        Raises:
            ProtocolError: it belongs to none.
        """
        member = self.members.get(meta.id)
        if member is None or member.rid != meta.id:
            raise ProtocolError(f"an event of segment {meta.id!r}", why="no such segment is running")
        return member

    @property
    def running(self) -> list[SegmentedMember]:
        """Members whose segments have not ended."""
        return [member for rid, member in self.members.items() if member.rid == rid]


class MemberQueue:
    """Members that wait for their next segment, in the order of their requests, so that interrupted ones go first."""

    def __init__(self) -> None:
        self._members: list[SegmentedMember] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[SegmentedMember]:
        return iter(self._members)

    def add(self, members: Iterable[SegmentedMember]) -> None:
        """Add new or interrupted members."""
        for member in members:
            insort(self._members, member, key=lambda one: (one.order, one.index))

    def take(self, room: int) -> list[SegmentedMember]:
        """Remove and return the next members of one request, at most `room`."""
        if not self._members or room < 1:
            return []
        order = self._members[0].order
        taken = list(takewhile(lambda member: member.order == order, self._members[:room]))
        del self._members[: len(taken)]
        return taken

    def drop(self, request: int) -> list[SegmentedMember]:
        """Remove and return a request's members."""
        out = [member for member in self._members if member.request.id == request]
        self._members = [member for member in self._members if member.request.id != request]
        return out


def server_seed(seed: int) -> int:
    """Mix a 64-bit seed to the 63 bits that the server takes, so that seeds that differ in the highest bit only differ
    afterwards, too."""
    return splitmix64(seed) >> 1


def request_body(batch: SegmentBatch, *, seeded: bool) -> dict[str, Any]:
    """Return the body of the call that samples a segment of each member.

    Args:
        seeded: sample each by its own seed.
    """
    members = list(batch.members.values())
    first = members[0].request
    sampling = []
    for member in members:
        request = member.request
        params: dict[str, Any] = {
            "temperature": request.temperature,
            "max_new_tokens": member.requested,
            "stop_token_ids": sorted(request.stop_ids),
            # True would make the server ignore stop ids, too.
            "ignore_eos": not request.stop_ids,
            "stream_interval": min(first.chunk_tokens or PROGRESS_TOKENS, PROGRESS_TOKENS),
        }
        if seeded:
            params["sampling_seed"] = server_seed(request.seeds[member.index])
        sampling.append(params)
    body: dict[str, Any] = {
        "rid": [member.rid for member in members],
        "input_ids": [[*first.prompt, *member.tokens] for member in members],
        "sampling_params": sampling,
        "extra_key": [f"v{member.salt}" for member in members],
        "return_logprob": True,
        "stream": True,
    }
    if first.routing:
        # The server takes one start for all of them.
        body |= {"return_routed_experts": True, "routed_experts_start_len": batch.rows_from}
    return body


class RowDecoder:
    """Decodes the routing rows of one model: int32 in base64, for all layers, at the end of a segment.

    Raises:
        Refused: the model has none. A server that was asked to keep them would not start.
    """

    def __init__(self, folder: Path) -> None:
        self.shape, sparse = sparse_layers(folder)
        self._dense = [layer for layer, is_sparse in enumerate(sparse) if not is_sparse]

    def check(self, request: GroupRequest) -> None:
        """Refuse a sequence whose rows exceed the bound of one answer."""
        most = MAX_EVENT_BYTES * 3 // (8 * self.shape.row_bytes)
        need = len(request.prompt) - request.rows_from + request.max_new_tokens
        if request.routing and need > most:
            raise Refused(
                f"request {request.id}: routing rows of {need} tokens",
                why=f"an answer of the SGLang server is read up to {MAX_EVENT_BYTES >> 20} MiB, the rows of {most}",
                hint="lower sampling.max_new_tokens or data.max_prompt_tokens, or leave roles.rollout.routing out",
            )

    async def rows_in(self, meta: Meta) -> NDArray[np.int16] | None:
        """Return the rows of an event, or None; many are decoded off the event loop.

        Raises:
            ProtocolError: see read.
        """
        string = memoryview(meta.routed_experts)
        if bytes(string[:1]) != b'"' or len(string) == 2:  # also null
            return None
        text = string[1:-1]
        return await asyncio.to_thread(self.read, text) if len(text) > LARGE_BYTES else self.read(text)

    def read(self, text: memoryview) -> NDArray[np.int16]:
        """Decode rows [positions, layers, k] from base64.

        Raises:
            ProtocolError: they are not of this model.
        """
        try:
            pieces = [binascii.a2b_base64(text[at : at + PIECE], strict_mode=True) for at in range(0, len(text), PIECE)]
            if any(len(piece) < PIECE // 4 * 3 for piece in pieces[:-1]):
                raise ValueError("it is padded before its end")
            values = np.frombuffer(b"".join(pieces), "<i4")
            return canonical_rows(values.reshape(-1, self.shape.layers, self.shape.chosen), self._dense)
        except (binascii.Error, ValueError) as error:
            what = f"routing rows of the SGLang server, {len(text)} characters"
            why = f"they are not of {self.shape.layers} layers and {self.shape.chosen} experts each: {error}"
            raise ProtocolError(what, why=why) from error
