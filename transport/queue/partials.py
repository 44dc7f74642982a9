"""Partial completions as producers see them: tokens of unfinished samples, journaled for whoever resumes them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from sys import byteorder
from typing import Any

import msgspec

from relax_rt.transport.queue.ledger.messages import PartialChunk, SampleKey, Ticket, VersionSpan

CALL_BYTES = 1 << 20
"""Chunks go out in calls of about this size, so that none holds the broker for long."""
CALL_CHUNKS = 1024


class PartialCompletion(msgspec.Struct, frozen=True):
    """The saved first tokens of a member's completion, with their rows (see PartialChunk)."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    origin: bytes = b""
    rows: bytes = b""


def partial_chunk(
    ticket: Ticket,
    member: int,
    start: int,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[VersionSpan],
    origin: bytes = b"",
    rows: bytes = b"",
) -> PartialChunk:
    """A chunk of a member's tokens from `start` on; `versions` are those of its whole completion, `rows` of `tokens`.

    Log-probabilities are kept as float32, which is what a sample has of them.
    """
    end = start + len(tokens)
    spans = [
        VersionSpan(max(span.start, start), min(span.end, end), span.version, span.kv_version)
        for span in versions
        if span.end > start and span.start < end
    ]
    key, ids, probable = SampleKey(ticket.group, member), _bytes("i", tokens), _bytes("f", logprobs)
    return PartialChunk(key, ticket.issue, start, ids, probable, spans, origin, rows)


def _bytes(code: str, values: Iterable[int] | Iterable[float]) -> bytes:
    made = array(code, values)
    if byteorder == "big":
        made.byteswap()
    return made.tobytes()


def _values(code: str, data: bytes) -> list[Any]:
    made = array(code, data)
    if byteorder == "big":
        made.byteswap()
    return made.tolist()


def decode_partial(chunk: PartialChunk) -> PartialCompletion:
    """Decode a chunk that `load_partials` returned."""
    tokens, logprobs = _values("i", chunk.tokens), _values("f", chunk.logprobs)
    return PartialCompletion(tokens, logprobs, chunk.versions, chunk.origin, chunk.rows)


def in_calls(chunks: Sequence[PartialChunk]) -> Iterator[list[PartialChunk]]:
    """Split chunks into calls of bounded size."""
    some: list[PartialChunk] = []
    nbytes = 0
    for one in chunks:
        if some and (nbytes >= CALL_BYTES or len(some) >= CALL_CHUNKS):
            yield some
            some, nbytes = [], 0
        some.append(one)
        nbytes += len(one.tokens) + len(one.logprobs) + len(one.rows)
    if some:
        yield some
