"""Requests to the SGLang server: segments of members, their calls, and the routing rows of the answers."""

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
    Event,
    Finish,
    Meta,
    ServerRefused,
)
from relax_rt.roles.rollout.engines.sglang.weights import finished
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Corrupt, ProtocolError, Refused

STOP, LENGTH, ABORT = "stop", "length", "abort"


@dataclass(slots=True)
class Member:
    """One completion.

    Attributes:
        order: of its request among all that were submitted.
        start: tokens of the partial, which are not told again.
        reported: tokens that chunks have told, those of the partial included.
        salt: version under which its cache was begun; None before its first segment.
        kv_version: oldest weights among its keys and values.
        rid: the running segment's name; empty while there is none.
        base: tokens that were there when the running segment began. asked: how many it is to bring at most.
        rows: routing rows, of the tokens that have them; None where nobody asked for them. They come with the end of a
            segment, and only what has its row is told.
        prompted: those of the prompt have come.
        fresh: the running segment has not yielded a token yet.
        heard: when it began, or yielded its last token.
        interrupted: we have asked the server to end the running segment.
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
    asked: int = 0
    rows: RowBuffer | None = None
    prompted: bool = False
    fresh: bool = True
    heard: float = 0.0
    interrupted: bool = False
    aborted: bool = False
    finish: str = ""

    @staticmethod
    def of(request: GroupRequest, index: int, order: int, routing: RoutingShape | None = None) -> Member:
        """A member as it is submitted, with the tokens of its partial."""
        member = Member(request, index, order)
        had = request.partial(index)
        if request.routing and routing is not None:
            member.rows = RowBuffer(routing, had.routing if had is not None else b"")
        if had is not None:
            member.tokens, member.logprobs = list(had.tokens), list(had.logprobs)
            member.spans = list(had.versions)
            member.start = member.reported = len(had.tokens)
            member._judge()
        return member

    @property
    def left(self) -> int:
        """Tokens still to come at most."""
        return max(0, self.request.max_new_tokens - len(self.tokens))

    @property
    def known(self) -> int:
        """Tokens that may be told."""
        return len(self.tokens) if self.rows is None else len(self.rows)

    @property
    def rows_from(self) -> int:
        """Position of the first routing row that the running segment is to bring."""
        return len(self.request.prompt) + self.base - 1 if self.prompted else self.request.rows_from

    def begin(self, rid: str, version: int, now: float = 0.0) -> None:
        """A segment begins under `version`."""
        if self.salt is None:
            self.salt = self.kv_version = version
        self.rid, self.base, self.fresh, self.asked = rid, len(self.tokens), True, self.left
        if self.rows is not None and self.request.chunk_tokens:
            self.asked = min(self.left, self.request.chunk_tokens)
        self.heard, self.interrupted = now, False

    def renew(self, version: int) -> int:
        """Its keys and values are computed again under `version`; how many positions that are."""
        if self.salt is None:
            return 0
        self.salt = self.kv_version = version
        return len(self.request.prompt) + len(self.tokens)

    def take(self, event: Event, version: int) -> int:
        """Append what an event of the running segment brings; the number of new tokens.

        Raises:
            ProtocolError: tokens are missing, or come without their log-probabilities.
            Corrupt: the server sampled them from another version.
            ServerRefused: it broke the segment off, and we did not ask it to.
        """
        meta = event.meta_info
        assert meta is not None
        if (end := meta.finish_reason) is not None and end.type == ABORT and not (self.aborted or self.interrupted):
            # Before a look at the tokens: what it invents for a request that it does not take has no log-probability.
            raise self._broken_off(end)
        # An aborted segment repeats its last token: what counts is where the event's tokens stand.
        first = self.base + meta.completion_tokens - len(event.output_ids)
        if first > len(self.tokens):
            raise ProtocolError(f"segment {self.rid}", why=f"tokens {len(self.tokens)} to {first} never came")
        new = event.output_ids[len(self.tokens) - first :]
        told = meta.output_token_logprobs[-len(new) :] if new else []
        if [token for _, token, _ in told] != new or any(logprob is None for logprob, _, _ in told):
            raise ProtocolError(f"segment {self.rid}", why=f"{len(new)} tokens with log-probabilities of {told[:4]}")
        if odd := [span for span in meta.weight_versions if span.version != str(version) and span.end > span.start]:
            raise Corrupt(
                f"segment {self.rid}", why=f"sampled from version {odd[0].version}, and {version} is in place"
            )
        if self.fresh and new:
            self.fresh = False
            if not meta.cached_tokens:
                # Nothing of its cache was left: all of it is of these weights.
                self.kv_version = version
        for token, (logprob, _, _) in zip(new, told, strict=True):
            self._append(token, float(logprob or 0.0), version)
        return len(new)

    def _append(self, token: int, logprob: float, version: int) -> None:
        at = len(self.tokens)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        extend_spans(self.spans, VersionSpan(at, at + 1, version, self.kv_version))

    def take_rows(self, rows: NDArray[np.int16] | None, start: int) -> None:
        """Routing rows that came with the running segment's end, from position `start` on.

        A segment that was ended while the server had it put aside has none: its tokens are sampled again.

        Raises:
            ProtocolError: they are not those of its tokens.
        """
        assert self.rows is not None
        first, new = len(self.request.prompt) + self.base - 1, len(self.tokens) - self.base
        own = rows[first - start :][:new] if rows is not None else ()
        if len(own) < new:
            if not (self.interrupted or self.aborted):
                raise ProtocolError(f"segment {self.rid}", why=f"{new} tokens with {len(own)} routing rows")
            self._cut(self.base + len(own))
        if rows is None or not len(own):
            return
        if not self.prompted:
            self.rows.set_prompt(
                encode_rows(rows[self.request.rows_from - start : len(self.request.prompt) - 1 - start])
            )
            self.prompted = True
        self.rows.extend(encode_rows(rows[first - start :][:new]))

    def _cut(self, count: int) -> None:
        del self.tokens[count:], self.logprobs[count:]
        self.spans = [
            VersionSpan(s.start, min(s.end, count), s.version, s.kv_version) for s in self.spans if s.start < count
        ]

    def end_segment(self, end: Finish | None = None) -> None:
        """The running segment is over; `finish` says whether the member is, too.

        Args:
            end: how the server ended it.

        Raises:
            ServerRefused: it did so too early. It would again: the same segment is not asked for twice.
        """
        self.rid = ""
        self._judge()
        if self.aborted and not self.finish:
            self.finish = ABORT
        if self.finish or self.interrupted or end is None or self._asked_for(end):
            return
        # A token that ends sequences of the model need not be one that ends those of this request.
        if end.type != STOP or len(self.tokens) == self.base:
            raise self._broken_off(end)

    def _asked_for(self, end: Finish) -> bool:
        """The segment was to be no longer."""
        return end.type == LENGTH and len(self.tokens) - self.base == self.asked > 0

    def _broken_off(self, end: Finish) -> ServerRefused:
        had, wanted = len(self.tokens), self.request.max_new_tokens
        return ServerRefused(
            f"request {self.request.id}, member {self.index} on the SGLang server",
            why=f"it ended it ({end.type}) at {had} of {wanted} tokens, unasked: {end.message or 'no reason given'}",
            hint="its limits and options (sglang.arguments) must allow for what this engine is asked",
        )

    def _judge(self) -> None:
        if self.tokens and self.tokens[-1] in self.request.stop_ids:
            self.finish = STOP
        elif len(self.tokens) >= self.request.max_new_tokens:
            self.finish = LENGTH

    def chunk(self, *, all_of_it: bool = False) -> Chunk | None:
        """What is to be told now: at the end all that is untold, before it once it is as much as the request wants."""
        end, every = self.known, self.request.chunk_tokens
        untold = end - self.reported
        if not self.finish and not (untold if all_of_it else every and untold >= every):
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


class Batch:
    """Members of one request whose segments the server samples in one call.

    Attributes:
        rows_from: position from which on it tells the routing rows of each.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = {member.rid: member for member in members}
        self.rows_from = min(member.rows_from for member in members)

    def of(self, meta: Meta) -> Member:
        """Whose event it is.

        Raises:
            ProtocolError: nobody's.
        """
        member = self.members.get(meta.id)
        if member is None or member.rid != meta.id:
            raise ProtocolError(f"an event of segment {meta.id!r}", why="no such segment is running")
        return member

    @property
    def running(self) -> list[Member]:
        """Those whose segments have not ended."""
        return [member for rid, member in self.members.items() if member.rid == rid]


class Line:
    """Members that wait for their next segment, in the order of their requests: so interrupted ones go first."""

    def __init__(self) -> None:
        self._members: list[Member] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def add(self, members: Iterable[Member]) -> None:
        """New ones, or ones that were interrupted."""
        for member in members:
            insort(self._members, member, key=_place)

    def take(self, room: int) -> list[Member]:
        """The next members of one request, at most `room` of them."""
        if not self._members or room < 1:
            return []
        order = self._members[0].order
        taken = list(takewhile(lambda member: member.order == order, self._members[:room]))
        del self._members[: len(taken)]
        return taken

    def drop(self, request: int) -> list[Member]:
        """Take a request's members out."""
        out = [member for member in self._members if member.request.id == request]
        self._members = [member for member in self._members if member.request.id != request]
        return out


def _place(member: Member) -> tuple[int, int]:
    return member.order, member.index


PROGRESS_TOKENS = 16
"""A segment is heard of at least every so many tokens: health is judged by them."""
PIECE = 1 << 20
"""Characters of base64 that are decoded at a time, which nothing else of the process runs beside; a multiple of 4."""


def server_seed(seed: int) -> int:
    """The 63 bits that the server takes, made of all 64: seeds of two domains must not meet for want of the highest."""
    return finished(seed) >> 1


def body_of(batch: Batch, *, seeded: bool) -> dict[str, Any]:
    """The call that samples a segment of each member.

    Args:
        seeded: each by its own seed.
    """
    members = list(batch.members.values())
    first = members[0].request
    every = min(first.chunk_tokens or PROGRESS_TOKENS, PROGRESS_TOKENS)
    body: dict[str, Any] = {
        "rid": [member.rid for member in members],
        "input_ids": [[*first.prompt, *member.tokens] for member in members],
        "sampling_params": [_sampling(member, every, seeded) for member in members],
        "extra_key": [f"v{member.salt}" for member in members],
        "return_logprob": True,
        "stream": True,
    }
    if first.routing:
        # It takes one start for all of them.
        body |= {"return_routed_experts": True, "routed_experts_start_len": batch.rows_from}
    return body


def _sampling(member: Member, every: int, seeded: bool) -> dict[str, Any]:
    request = member.request
    params: dict[str, Any] = {
        "temperature": request.temperature,
        "max_new_tokens": member.asked,
        "stop_token_ids": sorted(request.stop_ids),
        # It would make the server overlook stop ids, too.
        "ignore_eos": not request.stop_ids,
        "stream_interval": every,
    }
    if seeded:
        params["sampling_seed"] = server_seed(request.seeds[member.index])
    return params


class RowReader:
    """Routing rows of one model as the server tells them: int32 in base64, for all layers, at the end of a segment.

    Raises:
        Refused: the model has none. A server that was asked to keep them would not start.
    """

    def __init__(self, folder: Path) -> None:
        self.shape, sparse = sparse_layers(folder)
        self._without = [layer for layer, has in enumerate(sparse) if not has]

    def check(self, request: GroupRequest) -> None:
        """Refuse a sequence whose rows one answer might not hold.

        Raises:
            Refused: with how many it holds.
        """
        most = MAX_EVENT_BYTES * 3 // (8 * self.shape.row_bytes)
        need = len(request.prompt) - request.rows_from + request.max_new_tokens
        if request.routing and need > most:
            raise Refused(
                f"request {request.id}: routing rows of {need} tokens",
                why=f"an answer of the SGLang server is read up to {MAX_EVENT_BYTES >> 20} MiB, the rows of {most}",
                hint="lower sampling.max_new_tokens or data.max_prompt_tokens, or leave roles.rollout.routing out",
            )

    async def told_by(self, meta: Meta) -> NDArray[np.int16] | None:
        """Rows that came with an event; None: it has none. Many are read off the event loop.

        Raises:
            ProtocolError: see read.
        """
        string = memoryview(meta.routed_experts)
        if bytes(string[:1]) != b'"' or len(string) == 2:  # null is none either
            return None
        text = string[1:-1]
        return await asyncio.to_thread(self.read, text) if len(text) > LARGE_BYTES else self.read(text)

    def read(self, text: memoryview) -> NDArray[np.int16]:
        """Rows [positions, layers, k], of base64.

        Raises:
            ProtocolError: they are not of this model.
        """
        try:
            values = np.frombuffer(_of_base64(text), "<i4")
            return canonical_rows(values.reshape(-1, self.shape.layers, self.shape.chosen), self._without)
        except (binascii.Error, ValueError) as error:
            what = f"routing rows of the SGLang server, {len(text)} characters"
            why = f"they are not of {self.shape.layers} layers and {self.shape.chosen} experts each: {error}"
            raise ProtocolError(what, why=why) from error


def _of_base64(text: memoryview) -> bytes:
    pieces = [binascii.a2b_base64(text[at : at + PIECE], strict_mode=True) for at in range(0, len(text), PIECE)]
    if any(len(piece) < PIECE // 4 * 3 for piece in pieces[:-1]):
        raise ValueError("it is padded before its end")
    return b"".join(pieces)
