"""Groups that a rollout works on: tickets, what the engine has sampled, and what of it the queue has. Pure.

A group is a ticket in the engine. Each of its members ends in one of three ways: it is put on the queue; it is aborted
and its group released, tokens kept; or the group is dropped, because the queue gave it to others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from relax_rt.roles.rollout.engines.base import Assembly, Chunk, Completion, GroupRequest, Partial
from relax_rt.transport.queue.ledger.messages import PartialChunk, SampleKey, Ticket
from relax_rt.transport.queue.partials import PartialCompletion, partial_chunk

ABORTED = "abort"
"""Finish reason of a member that the engine stopped before its end."""
TOKEN_BYTES = 4
MAX_DOUBLINGS = 16
"""Limit of the back-off after the queue had no room: how often the required growth of a member doubles."""
CHUNK_BYTES = 1 << 18
"""Approximate size of a chunk of a partial completion. Longer ones are split; the queue keeps what it has room for."""


@dataclass(eq=False)
class ActiveGroup:
    """A ticket and its request.

    Attributes:
        origin: see PartialChunk.
        saved: tokens that the queue holds, by place in the request.
        refused: by place, where the queue kept less than it was sent: how often in a row, and the tokens then.
        running: places that the engine works on. aborted: completions of those that were aborted.
        pending_put: members that are finished and not yet on the queue.
        ending: why it is released; empty while it is active. taken: the chunks of its aborted members were taken.
    """

    number: int
    ticket: Ticket
    request: GroupRequest
    origin: bytes
    saved: list[int]
    running: set[int]
    refused: dict[int, tuple[int, int]] = field(default_factory=dict)
    aborted: dict[int, Completion] = field(default_factory=dict)
    pending_put: int = 0
    ending: str = ""
    taken: bool = False

    def member(self, place: int) -> int:
        """Return the number in the group of a place in the request."""
        return self.ticket.wanted()[place]

    @property
    def is_settled(self) -> bool:
        """Whether the engine has no member of it any more, and the queue has all finished ones."""
        return not self.running and not self.pending_put


@dataclass(frozen=True)
class DuePartial:
    """A chunk of a partial completion to save, and its member."""

    group: ActiveGroup
    place: int
    chunk: PartialChunk


class RolloutWork:
    """All groups of one rollout.

    Args:
        save_every_tokens: an unfinished member is saved when it has so many tokens more than the queue; 0: only when it
            is released.
        row_bytes: of a token's routing row; 0: there are none.
    """

    def __init__(self, save_every_tokens: int, row_bytes: int = 0) -> None:
        self._every, self._row = save_every_tokens, row_bytes
        self.groups: dict[int, ActiveGroup] = {}
        # By request number: a dropped group may come back with another ticket, while chunks of the old one arrive.
        self._assembly = Assembly()
        self._finished: list[tuple[ActiveGroup, Completion]] = []
        self._due: dict[tuple[int, int], ActiveGroup] = {}
        self.resumed_tokens = self.journaled_tokens = self.partials_dropped = 0

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def sequences(self) -> int:
        """Members in the engine."""
        return sum(len(group.running) for group in self.groups.values())

    @property
    def members(self) -> int:
        """Members in the engine, and those that are finished and not yet on the queue."""
        return sum(len(group.running) + group.pending_put for group in self.groups.values())

    def add(self, number: int, ticket: Ticket, request: GroupRequest, origin: bytes = b"") -> ActiveGroup:
        """Add a group whose request is about to be given to the engine."""
        had = [len(one.tokens) if (one := request.partial(n)) else 0 for n in range(len(request.seeds))]
        group = ActiveGroup(number, ticket, request, origin, had, set(range(len(request.seeds))))
        self.groups[number] = group
        self._assembly.expect(request)
        self.resumed_tokens += sum(had)
        return group

    def on_chunks(self, chunks: Iterable[Chunk]) -> None:
        """Apply chunks of the engine."""
        for chunk in chunks:
            group = self.groups.get(chunk.request)
            if group is None or chunk.member not in group.running:
                continue
            completion = self._assembly.add(chunk)
            if completion is None:
                if self._is_due(group, chunk.member, chunk.start + len(chunk.tokens)):
                    self._due[chunk.request, chunk.member] = group
                continue
            self._due.pop((chunk.request, chunk.member), None)
            group.running.remove(chunk.member)
            if completion.finish_reason == ABORTED:
                group.aborted[chunk.member] = completion
            else:
                group.pending_put += 1
                self._finished.append((group, completion))

    def _is_due(self, group: ActiveGroup, place: int, length: int) -> bool:
        """Whether a member must be saved. One that the queue had no room for is retried after twice the growth."""
        times, at = group.refused.get(place, (1, group.saved[place]))
        return self._every > 0 and length - at >= self._every << (times - 1)

    # --- finished members

    def take_finished(self) -> list[tuple[ActiveGroup, Completion]]:
        """Take the finished members of active groups; `put` confirms that the queue has them."""
        finished, self._finished = self._finished, []
        return [(group, completion) for group, completion in finished if group.number in self.groups]

    def put(self, done: Iterable[tuple[ActiveGroup, Completion]]) -> None:
        """Note that the queue has these members."""
        for group, _ in done:
            group.pending_put -= 1
            if group.is_settled and not group.aborted:
                self.groups.pop(group.number, None)

    # --- partial completions

    def take_due(self) -> list[DuePartial]:
        """Take the chunks to save now: of members that have grown enough, and all of released groups."""
        due: list[DuePartial] = []
        for (_, place), group in self._due.items():
            # Where the queue had no room only the first chunk, to see whether it has room now.
            due += islice(self._chunks(group, place), 1 if place in group.refused else None)
        self._due.clear()
        for group in self.groups.values():
            if group.aborted and group.is_settled and not group.taken:
                group.taken = True
                due += [one for place in group.aborted for one in self._chunks(group, place)]
        return due

    def take_all(self) -> list[DuePartial]:
        """Return chunks of everything unfinished, as far as it is known: the engine has ended."""
        places = ((group, place) for group in self.groups.values() for place in range(len(group.saved)))
        return [one for group, place in places for one in self._chunks(group, place)]

    @property
    def unsaved_tokens(self) -> int:
        """Tokens of unfinished members that the queue does not have."""
        places = ((group, place) for group in self.groups.values() for place in group.running | group.aborted.keys())
        had = (
            (group, place, group.aborted.get(place) or self._assembly.had(group.number, place))
            for group, place in places
        )
        return sum(max(0, len(one.tokens) - group.saved[place]) for group, place, one in had if one is not None)

    def _chunks(self, group: ActiveGroup, place: int) -> Iterator[DuePartial]:
        had = group.aborted.get(place) or self._assembly.had(group.number, place)
        if group.number not in self.groups or had is None:
            return
        row, member = self._row, group.member(place)
        step = max(1, CHUNK_BYTES // (8 + row))
        for start in range(group.saved[place], len(had.tokens), step):
            end = min(start + step, len(had.tokens))
            tokens, logprobs = had.tokens[start:end], had.logprobs[start:end]
            rows = bytes(had.routing[start * row : end * row])
            partial = partial_chunk(group.ticket, member, start, tokens, logprobs, had.versions, group.origin, rows)
            yield DuePartial(group, place, partial)

    def saved(self, due: Sequence[DuePartial], held: Sequence[int]) -> None:
        """Note how many tokens of each member the queue holds; back off where it had no room."""
        lengths: dict[tuple[int, int], int] = {}
        for one, tokens in zip(due, held, strict=True):
            wanted = one.chunk.start + len(one.chunk.tokens) // TOKEN_BYTES
            self.journaled_tokens += max(0, tokens - one.chunk.start)
            if tokens >= 0:
                one.group.saved[one.place] = tokens
            if tokens != wanted:
                self.partials_dropped += 1
                lengths[one.group.number, one.place] = wanted
        for number, group, place in {(one.group.number, one.group, one.place) for one in due}:
            times, _ = group.refused.pop(place, (0, 0))
            if (number, place) in lengths:
                group.refused[place] = (min(times + 1, MAX_DOUBLINGS), lengths[number, place])

    # --- other ends

    def release(self, numbers: Iterable[int], why: str) -> list[int]:
        """Release these groups; return the request numbers that the engine must abort."""
        stopping = [group for n in numbers if (group := self.groups.get(n)) is not None and not group.ending]
        for group in stopping:
            group.ending = why
        return [group.number for group in stopping]

    def interrupted(self) -> list[ActiveGroup]:
        """Return groups of which the engine aborted members on its own: they must be released."""
        return [group for group in self.groups.values() if group.aborted and not group.ending]

    def take_released(self) -> list[ActiveGroup]:
        """Take the released groups whose tokens the queue has: their tickets must be released."""
        over = [group for group in self.groups.values() if group.ending and group.is_settled and group.taken]
        for group in over:
            self._forget(group.number)
        return over

    def drop(self, groups: Sequence[int]) -> list[int]:
        """Drop groups that the queue gave to others or dropped; return the requests that the engine must abort."""
        numbers = [number for number, group in self.groups.items() if group.ticket.group in groups]
        for number in numbers:
            self._forget(number)
        return numbers

    def _forget(self, number: int) -> None:
        group = self.groups.pop(number)
        self._assembly.forget(number)
        for place in range(len(group.saved)):
            self._due.pop((number, place), None)


def resumable(
    found: PartialCompletion | None, origin: bytes, max_new_tokens: int, stop_ids: frozenset[int], row_bytes: int = 0
) -> Partial | None:
    """Return the partial that generation can resume: of the same prompt and temperature, not ended, and with routing
    rows if they are recorded; None: there is none."""
    if found is None or found.origin != origin or not 0 < len(found.tokens) < max_new_tokens:
        return None
    if not stop_ids.isdisjoint(found.tokens) or (row_bytes and len(found.rows) != row_bytes * len(found.tokens)):
        return None
    rows = found.rows if row_bytes else b""
    return Partial(tuple(found.tokens), tuple(found.logprobs), tuple(found.versions), rows)


def partials_of(
    ticket: Ticket,
    found: dict[SampleKey, PartialCompletion],
    origin: bytes,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    row_bytes: int = 0,
) -> tuple[Partial | None, ...]:
    """Return the partials of a request, in the order of the ticket's members."""
    keys = [SampleKey(ticket.group, member) for member in ticket.wanted()]
    partials = tuple(resumable(found.get(key), origin, max_new_tokens, stop_ids, row_bytes) for key in keys)
    return partials if any(partials) else ()
