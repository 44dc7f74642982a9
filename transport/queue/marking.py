"""Marks at the producer's end: tokens of unfinished samples, kept by the queue for whoever goes on with them."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from sys import byteorder
from typing import Any

import msgspec

from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.ledger.messages import Mark, Marked, SampleKey, Ticket, VersionSpan

CALL_BYTES = 1 << 20
"""Marks go out in calls of about this size, so that none holds the broker for long."""
CALL_MARKS = 1024

Call = Callable[[Callable[[int], Awaitable[Any]]], Awaitable[Any]]


class Begun(msgspec.Struct, frozen=True):
    """What was sampled of a member before: the first tokens of its completion, and their rows (see Mark)."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    origin: bytes = b""
    rows: bytes = b""


def make_mark(
    ticket: Ticket,
    member: int,
    start: int,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[VersionSpan],
    origin: bytes = b"",
    rows: bytes = b"",
) -> Mark:
    """The mark of a member's tokens from `start` on; `versions` are those of its whole completion, `rows` of `tokens`.

    Log-probabilities are kept as float32, which is what a sample has of them.
    """
    end = start + len(tokens)
    spans = [
        VersionSpan(max(span.start, start), min(span.end, end), span.version, span.kv_version)
        for span in versions
        if span.end > start and span.start < end
    ]
    key, ids, probable = SampleKey(ticket.group, member), _bytes("i", tokens), _bytes("f", logprobs)
    return Mark(key, ticket.issue, start, ids, probable, spans, origin, rows)


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


def begun(mark: Mark) -> Begun:
    """What `partials` answered, as values."""
    return Begun(_values("i", mark.tokens), _values("f", mark.logprobs), mark.versions, mark.origin, mark.rows)


class Marks:
    """Of one client.

    Args:
        api: the broker's interface.
        call: makes a changing call (see QueueClient).
    """

    def __init__(self, api: QueueApi, call: Call) -> None:
        self._api, self._call = api, call

    async def keep(self, marks: Sequence[Mark]) -> list[int]:
        """Have these journaled; answers with the tokens now held of each (see Marked).

        Raises:
            Refused: a mark is malformed. Unreachable: the broker did not answer for the client's patience.
        """
        held: list[int] = []
        for some in _calls(marks):
            answer: Marked = await self._call(lambda seq, some=some: self._api.mark(seq, some))  # type: ignore[misc]
            held += answer.held
        return held

    async def of(self, tickets: Iterable[Ticket]) -> dict[SampleKey, Begun]:
        """What these tickets' partials are. A group that was lost meanwhile has none."""
        wanted = [SampleKey(ticket.group, member) for ticket in tickets for member in ticket.partials]
        found: dict[SampleKey, Begun] = {}
        while wanted:
            # Numbered like a changing call only to be sent again while the broker is away.
            marks: list[Mark] = await self._call(lambda _: self._api.partials(wanted[:CALL_MARKS]))  # noqa: B023
            if not marks:
                wanted = wanted[CALL_MARKS:]
                continue
            found.update((mark.key, begun(mark)) for mark in marks)
            # Those before the last one that were left out are not held any more.
            wanted = wanted[wanted.index(marks[-1].key) + 1 :]
        return found


def _calls(marks: Sequence[Mark]) -> Iterator[list[Mark]]:
    some: list[Mark] = []
    nbytes = 0
    for one in marks:
        if some and (nbytes >= CALL_BYTES or len(some) >= CALL_MARKS):
            yield some
            some, nbytes = [], 0
        some.append(one)
        nbytes += len(one.tokens) + len(one.logprobs) + len(one.rows)
    if some:
        yield some
