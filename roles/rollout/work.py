"""What a rollout has in hand: its tickets, what the engine has sampled for them, what of that the queue knows. Pure.

A job is a ticket in the engine. Each of its members ends in one of three ways: it is put on the queue; it is cut off
and its job handed over, tokens kept; or the job is lost, because the queue gave it to others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from relax_rt.roles.rollout.engines.base import Assembly, Chunk, Completion, GroupRequest, Partial
from relax_rt.transport.queue.ledger.messages import PartialChunk, SampleKey, Ticket
from relax_rt.transport.queue.partials import PartialCompletion, partial_chunk

INTERRUPTED = "abort"
"""Finish reason of a member that the engine stopped before its end."""
TOKEN_BYTES = 4
MOST_DOUBLINGS = 16
"""Of the tokens that a member grows by before what found no room is tried again."""
MARK_BYTES = 1 << 18
"""Of one mark, about. More tokens than that go in several, of which the queue keeps what it has room for."""


@dataclass(eq=False)
class Job:
    """A ticket and its request.

    Attributes:
        origin: see PartialChunk.
        marked: tokens that the queue holds, by place in the request.
        refused: of places of which it kept less than it was sent: how often in a row, and the tokens there were then.
        running: places that the engine works on. cut: completions of those that it was stopped at.
        unput: finished, and not yet on the queue.
        ending: why it is handed over; empty while it is worked on. told: the marks of what was cut were taken.
    """

    number: int
    ticket: Ticket
    request: GroupRequest
    origin: bytes
    marked: list[int]
    running: set[int]
    refused: dict[int, tuple[int, int]] = field(default_factory=dict)
    cut: dict[int, Completion] = field(default_factory=dict)
    unput: int = 0
    ending: str = ""
    told: bool = False

    def member(self, place: int) -> int:
        """Its number in the group."""
        return self.ticket.wanted()[place]

    @property
    def settled(self) -> bool:
        """The engine has nothing of it any more, and the queue has all that is finished."""
        return not self.running and not self.unput


@dataclass(frozen=True)
class Due:
    """A mark to be journaled, and whose it is."""

    job: Job
    place: int
    mark: PartialChunk


class Work:
    """All jobs of one rollout.

    Args:
        mark_every_tokens: an unfinished member is marked when it has so many tokens more than the queue knows of; 0:
            only when it is handed over.
        row_bytes: of a token's routing row; 0: there are none.
    """

    def __init__(self, mark_every_tokens: int, row_bytes: int = 0) -> None:
        self._every, self._row = mark_every_tokens, row_bytes
        self.jobs: dict[int, Job] = {}
        # By request number: a group that was lost may come back with another ticket, while old chunks arrive.
        self._assembly = Assembly()
        self._finished: list[tuple[Job, Completion]] = []
        self._due: dict[tuple[int, int], Job] = {}
        self.resumed_tokens = self.journaled_tokens = self.partials_dropped = 0

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def sequences(self) -> int:
        """Members in the engine."""
        return sum(len(job.running) for job in self.jobs.values())

    @property
    def members(self) -> int:
        """Members in the engine, and those that are finished and not yet on the queue."""
        return sum(len(job.running) + job.unput for job in self.jobs.values())

    def begin(self, number: int, ticket: Ticket, request: GroupRequest, origin: bytes = b"") -> Job:
        """The request is about to be given to the engine."""
        had = [len(one.tokens) if (one := request.partial(n)) else 0 for n in range(len(request.seeds))]
        job = Job(number, ticket, request, origin, had, set(range(len(request.seeds))))
        self.jobs[number] = job
        self._assembly.expect(request)
        self.resumed_tokens += sum(had)
        return job

    def arrive(self, chunks: Iterable[Chunk]) -> None:
        """What the engine sampled."""
        for chunk in chunks:
            job = self.jobs.get(chunk.request)
            if job is None or chunk.member not in job.running:
                continue
            completion = self._assembly.add(chunk)
            if completion is None:
                if self._is_due(job, chunk.member, chunk.start + len(chunk.tokens)):
                    self._due[chunk.request, chunk.member] = job
                continue
            self._due.pop((chunk.request, chunk.member), None)
            job.running.remove(chunk.member)
            if completion.finish_reason == INTERRUPTED:
                job.cut[chunk.member] = completion
            else:
                job.unput += 1
                self._finished.append((job, completion))

    def _is_due(self, job: Job, place: int, length: int) -> bool:
        """What found no room is tried again after twice as many new tokens each time, and not with every piece."""
        times, at = job.refused.get(place, (1, job.marked[place]))
        return self._every > 0 and length - at >= self._every << (times - 1)

    # --- finished members

    def take_finished(self) -> list[tuple[Job, Completion]]:
        """Members to be put, of jobs that are still in hand; `put` them or say nothing."""
        finished, self._finished = self._finished, []
        return [(job, completion) for job, completion in finished if job.number in self.jobs]

    def put(self, done: Iterable[tuple[Job, Completion]]) -> bool:
        """The queue has these. True if a job ended with them."""
        ended = False
        for job, _ in done:
            job.unput -= 1
            if job.settled and not job.cut and self.jobs.pop(job.number, None) is not None:
                ended = True
        return ended

    # --- marks

    def take_due(self) -> list[Due]:
        """Marks to be journaled now: of members that have grown enough, and all that is left of jobs handed over."""
        due = [one for (_, place), job in self._due.items() for one in self._some(job, place)]
        self._due.clear()
        for job in self.jobs.values():
            if job.cut and job.settled and not job.told:
                job.told = True
                due += [one for place in job.cut for one in self._marks(job, place)]
        return due

    def take_all(self) -> list[Due]:
        """Marks of everything unfinished, as far as it is known: the engine is no more, or not waited for."""
        places = ((job, place) for job in self.jobs.values() for place in range(len(job.marked)))
        return [one for job, place in places for one in self._marks(job, place)]

    @property
    def tokens_unmarked(self) -> int:
        """Tokens of unfinished members that the queue does not know of."""
        places = ((job, place) for job in self.jobs.values() for place in job.running | job.cut.keys())
        had = ((job, place, job.cut.get(place) or self._assembly.had(job.number, place)) for job, place in places)
        return sum(max(0, len(one.tokens) - job.marked[place]) for job, place, one in had if one is not None)

    def _some(self, job: Job, place: int) -> Iterator[Due]:
        """Of what the queue had no room for, one mark, to see whether it has room now."""
        marks = self._marks(job, place)
        return islice(marks, 1) if place in job.refused else marks

    def _marks(self, job: Job, place: int) -> Iterator[Due]:
        had = job.cut.get(place) or self._assembly.had(job.number, place)
        if job.number not in self.jobs or had is None:
            return
        row, member = self._row, job.member(place)
        step = max(1, MARK_BYTES // (8 + row))
        for start in range(job.marked[place], len(had.tokens), step):
            end = min(start + step, len(had.tokens))
            tokens, logprobs = had.tokens[start:end], had.logprobs[start:end]
            rows = bytes(had.routing[start * row : end * row])
            mark = partial_chunk(job.ticket, member, start, tokens, logprobs, had.versions, job.origin, rows)
            yield Due(job, place, mark)

    def marked(self, due: Sequence[Due], held: Sequence[int]) -> None:
        """The queue holds so many tokens of each. Of what found no room, more is tried when there is more."""
        lengths: dict[tuple[int, int], int] = {}
        for one, tokens in zip(due, held, strict=True):
            wanted = one.mark.start + len(one.mark.tokens) // TOKEN_BYTES
            self.journaled_tokens += max(0, tokens - one.mark.start)
            if tokens >= 0:
                one.job.marked[one.place] = tokens
            if tokens != wanted:
                self.partials_dropped += 1
                lengths[one.job.number, one.place] = wanted
        for number, job, place in {(one.job.number, one.job, one.place) for one in due}:
            times, _ = job.refused.pop(place, (0, 0))
            if (number, place) in lengths:
                job.refused[place] = (min(times + 1, MOST_DOUBLINGS), lengths[number, place])

    # --- jobs that end otherwise

    def hand_over(self, numbers: Iterable[int], why: str) -> list[int]:
        """These are to go to others: the numbers that the engine is to abort."""
        stopping = [job for n in numbers if (job := self.jobs.get(n)) is not None and not job.ending]
        for job in stopping:
            job.ending = why
        return [job.number for job in stopping]

    def interrupted(self) -> list[Job]:
        """Jobs of which the engine stopped members of its own accord: what is left of them is to be handed over."""
        return [job for job in self.jobs.values() if job.cut and not job.ending]

    def take_handed_over(self) -> list[Job]:
        """Jobs whose tokens the queue has, as far as it keeps them: they are to be given back."""
        over = [job for job in self.jobs.values() if job.ending and job.settled and job.told]
        for job in over:
            self._forget(job.number)
        return over

    def lost(self, groups: Sequence[int]) -> list[int]:
        """The queue gave these groups to others, or wants them no more: the numbers that the engine is to abort."""
        numbers = [number for number, job in self.jobs.items() if job.ticket.group in groups]
        for number in numbers:
            self._forget(number)
        return numbers

    def _forget(self, number: int) -> None:
        job = self.jobs.pop(number)
        self._assembly.forget(number)
        for place in range(len(job.marked)):
            self._due.pop((number, place), None)


def usable(
    begun: PartialCompletion | None, origin: bytes, max_new_tokens: int, stop_ids: frozenset[int], row_bytes: int = 0
) -> Partial | None:
    """What generation can go on behind: tokens of the same prompt and temperature, which have not ended, and where
    routing rows are wanted have them."""
    if begun is None or begun.origin != origin or not 0 < len(begun.tokens) < max_new_tokens:
        return None
    if not stop_ids.isdisjoint(begun.tokens) or (row_bytes and len(begun.rows) != row_bytes * len(begun.tokens)):
        return None
    rows = begun.rows if row_bytes else b""
    return Partial(tuple(begun.tokens), tuple(begun.logprobs), tuple(begun.versions), rows)


def partials_of(
    ticket: Ticket,
    found: dict[SampleKey, PartialCompletion],
    origin: bytes,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    row_bytes: int = 0,
) -> tuple[Partial | None, ...]:
    """The partials of a request, in the order of the ticket's members."""
    keys = [SampleKey(ticket.group, member) for member in ticket.wanted()]
    partials = tuple(usable(found.get(key), origin, max_new_tokens, stop_ids, row_bytes) for key in keys)
    return partials if any(partials) else ()
