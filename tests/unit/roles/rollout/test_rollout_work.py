"""Groups of a rollout, with a real ledger: partial completions, release and resumption."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from relax_rt.roles.rollout import work as works
from relax_rt.roles.rollout.engines.base import Chunk, Completion, GroupRequest
from relax_rt.roles.rollout.work import ActiveGroup, RolloutWork, partials_of, resumable
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.refs import BlockRef
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.admission import load_partials
from relax_rt.transport.queue.ledger.events import JournalEntry
from relax_rt.transport.queue.ledger.machine import Ledger
from relax_rt.transport.queue.ledger.messages import BlockPut, RowPut, SampleKey, Ticket, VersionSpan
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.queue.partials import PartialCompletion, decode_partial
from relax_rt.transport.rpc.identity import Incarnation

TRAINER = Incarnation("trainer/0", 1)
STOP = 7
EVERY = 8
SIZE = 3
ROW = 4
"""Bytes of a token's routing row, which is its place here."""


def rows(start: int, end: int) -> bytes:
    return b"".join(place.to_bytes(ROW, "little") for place in range(start, end))


class Queue:
    """The ledger with prompts, and its first weights announced."""

    def __init__(self, partials_bytes: int = 1 << 20) -> None:
        self.ledger, self.now, self.version = Ledger(), 0.0, 1
        policy = LedgerPolicy(tasks={"train": ("tokens",)}, group_size=SIZE, prompts_per_step=4, max_staleness=1)
        self.apply(ev.ConfigureQueue(policy, QueueLimits(lease_s=1e6, partials_bytes=partials_bytes)))
        self.apply(ev.OpenRun("run"))
        self.join(TRAINER)
        self.apply(ev.Rollback(0, VersionRecord(1, 0, 0)), TRAINER)

    def apply(self, event: ev.Event, who: Incarnation | None = None) -> object:
        return self.ledger.apply(JournalEntry(self.ledger.n + 1, self.now, event, who)).answer

    def join(self, who: Incarnation) -> None:
        self.apply(ev.JoinQueue(), who)


class Rollout:
    """A rollout with a queue, and an engine that samples at random: token n has the log-probability -n and
    the routing row n."""

    def __init__(self, queue: Queue, epoch: int, rng: random.Random) -> None:
        self.queue, self.rng, self.who = queue, rng, Incarnation("rollout/0", epoch)
        queue.join(self.who)
        self.work, self.numbers = RolloutWork(EVERY, ROW), 0
        self.engine: dict[tuple[int, int], int] = {}
        self.acknowledged: dict[SampleKey, list[int]] = {}

    def ask(self, groups: int, origin: bytes = b"o") -> list[Ticket]:
        tickets: list[Ticket] = self.queue.apply(ev.RequestTickets(self.queue.version, groups), self.who).tickets  # type: ignore[attr-defined]
        for ticket in tickets:
            keys = [SampleKey(ticket.group, member) for member in ticket.partials]
            found = {mark.key: decode_partial(mark) for mark in load_partials(self.queue.ledger.core, self.who, keys)}
            assert {key.member: len(one.tokens) for key, one in found.items()} == ticket.partials
            self.numbers += 1
            request = GroupRequest(
                id=self.numbers,
                prompt=(1, 2),
                seeds=tuple(ticket.wanted()),
                temperature=1.0,
                max_new_tokens=200,
                stop_ids=frozenset({STOP}),
                partials=partials_of(ticket, found, origin, 200, frozenset({STOP}), ROW),
                chunk_tokens=EVERY,
                routing=True,
            )
            self.work.add(self.numbers, ticket, request, origin)
            for place in range(len(request.seeds)):
                had = request.partial(place)
                self.engine[self.numbers, place] = len(had.tokens) if had else 0
        return tickets

    def sample(self, key: tuple[int, int], count: int, finish: str = "") -> None:
        """The engine goes on with a member."""
        start = self.engine[key]
        tokens = [self.rng.randrange(8, 1000) for _ in range(count)]
        if finish == "stop":
            tokens.append(STOP)
        logprobs = [-float(start + n) for n in range(len(tokens))]
        spans = [VersionSpan(start, start + len(tokens), self.queue.version, self.queue.version)] if tokens else []
        self.engine[key] = start + len(tokens)
        if finish:
            del self.engine[key]
        self.work.on_chunks([Chunk(*key, start, tokens, logprobs, spans, finish, rows(start, start + len(tokens)))])

    def abort(self, numbers: list[int]) -> None:
        for key in [key for key in self.engine if key[0] in numbers]:
            self.sample(key, self.rng.randrange(3), "abort")

    def put(self) -> list[tuple[ActiveGroup, Completion]]:
        done = self.work.take_finished()
        for job, completion in done:
            key = SampleKey(job.ticket.group, job.member(completion.member))
            row = RowPut(key, 0, len(completion.tokens), completion.versions)
            self.queue.apply(ev.PutSamples([BlockPut(BlockRef(None, 1, ("tokens",), b"x"), [row])]), self.who)
        self.work.put(done)
        return done

    def save(self) -> int:
        due = self.work.take_due()
        if due:
            answer = self.queue.apply(ev.SavePartials([one.chunk for one in due]), self.who)
            self.work.saved(due, answer.held)  # type: ignore[attr-defined]
        for job in self.work.groups.values():
            for place in job.running:
                had = self.work._assembly.had(job.number, place)
                assert had is not None
                key = SampleKey(job.ticket.group, job.member(place))
                self.acknowledged[key] = list(had.tokens[: job.saved[place]])
        return len(due)

    def give_back(self) -> None:
        over = self.work.take_released()
        self.queue.apply(ev.ReleaseGroups([job.ticket.group for job in over], "test"), self.who)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(1)


def test_a_member_is_journaled_every_so_many_new_tokens(rng: random.Random) -> None:
    r = Rollout(Queue(), 1, rng)
    (ticket,) = r.ask(1)
    r.sample((1, 0), EVERY)
    r.sample((1, 1), EVERY - 1)
    due = r.work.take_due()
    assert [(one.place, one.chunk.start, len(one.chunk.tokens) // 4) for one in due] == [(0, 0, EVERY)]
    assert r.work.unsaved_tokens == 2 * EVERY - 1
    r.work.saved(due, [EVERY])
    assert r.work.unsaved_tokens == EVERY - 1
    r.sample((1, 0), EVERY + 2)
    r.sample((1, 1), 1)
    assert [(one.place, one.chunk.start, len(one.chunk.tokens) // 4) for one in r.work.take_due()] == [
        (0, EVERY, EVERY + 2),
        (1, 0, EVERY),
    ]
    assert ticket.wanted() == [0, 1, 2]


def test_ended_members_make_room_once_they_are_put(rng: random.Random) -> None:
    r = Rollout(Queue(), 1, rng)
    r.ask(2)
    assert r.work.members == r.work.sequences == 2 * SIZE
    r.sample((1, 0), 3, "stop")
    r.sample((1, 1), 3, "stop")
    assert (r.work.members, r.work.sequences) == (2 * SIZE, 2 * SIZE - 2)
    r.put()
    assert r.work.members == r.work.sequences == 2 * SIZE - 2
    assert len(r.work) == 2


def test_a_refused_partial_is_journaled_with_the_next_tokens(rng: random.Random) -> None:
    q = Queue(partials_bytes=0)
    r = Rollout(q, 1, rng)
    r.ask(1)
    r.sample((1, 0), EVERY)
    assert r.save() == 1 and r.work.partials_dropped == 1 and r.work.journaled_tokens == 0
    q.apply(ev.ConfigureQueue(q.ledger.core.policy, QueueLimits(lease_s=1e6)))
    r.sample((1, 0), EVERY - 1)
    assert r.save() == 0
    r.sample((1, 0), 1)
    assert r.save() == 1 and r.work.journaled_tokens == 2 * EVERY


def test_refused_partials_are_retried_with_back_off(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_rt.roles.rollout.work.CHUNK_BYTES", (8 + ROW) * EVERY)
    q = Queue(partials_bytes=0)
    r = Rollout(q, 1, rng)
    r.ask(1)
    sent = []
    for _ in range(64):
        r.sample((1, 0), EVERY)
        sent.append(r.save())
    assert max(sent[1:]) == 1 and sum(map(bool, sent)) == 7, "after 1, 2, 4 … 64 times the interval"
    q.apply(ev.ConfigureQueue(q.ledger.core.policy, QueueLimits(lease_s=1e6)))
    while not r.work.journaled_tokens:
        r.sample((1, 0), EVERY)
        r.save()
    piece = r.work.journaled_tokens
    r.sample((1, 0), EVERY)
    assert r.save() > 32 and r.work.journaled_tokens > 64 * EVERY > 32 * piece, "there is room: the rest follows"


def test_a_released_group_keeps_every_token(rng: random.Random) -> None:
    q = Queue()
    first = Rollout(q, 1, rng)
    first.ask(1)
    first.sample((1, 0), 5, "stop")
    first.sample((1, 1), 3)
    first.put()
    first.abort(first.work.release([1], "drain"))
    assert not first.work.take_released(), "its tokens are not marked yet"
    cut = {n: list(one.tokens) for n, one in first.work.groups[1].aborted.items()}
    first.save()
    first.give_back()
    assert not first.work.groups
    second = Rollout(q, 2, rng)
    (ticket,) = second.ask(1)
    assert ticket.members == [1, 2] and ticket.partials == {n: len(tokens) for n, tokens in cut.items() if tokens}
    assert list(second.work.groups[1].request.partials[0].tokens) == cut[1]  # type: ignore[union-attr]


def test_a_group_is_released_after_its_last_put(rng: random.Random) -> None:
    r = Rollout(Queue(), 1, rng)
    r.ask(1)
    r.sample((1, 0), 5, "stop")
    r.abort(r.work.release([1], "drain"))
    finished = r.work.take_finished()
    assert r.work.take_due() == [] and r.work.take_released() == []
    r.work.put(finished)
    r.save()
    assert [job.number for job in r.work.take_released()] == [1]


def test_late_chunks_of_a_lost_group_are_ignored(rng: random.Random) -> None:
    r = Rollout(Queue(), 1, rng)
    (ticket,) = r.ask(1)
    r.sample((1, 0), EVERY)
    r.sample((1, 1), 2, "stop")
    assert r.work.drop([ticket.group]) == [1]
    r.sample((1, 2), EVERY)
    r.sample((1, 0), 3, "stop")
    assert not r.work.take_due() and not r.work.take_finished() and not r.work.take_all() and not len(r.work)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"origin": b"other"}, False),
        ({"tokens": [8] * 200, "logprobs": [-1.0] * 200}, False),
        ({"tokens": [8, STOP], "logprobs": [-1.0, -1.0]}, False),
    ],
)
def test_only_resumable_partials_are_resumed(change: dict[str, object], taken: bool) -> None:
    values = {"tokens": [8, 9], "logprobs": [-1.0, -2.0], "versions": [VersionSpan(0, 2, 1, 1)], "origin": b"o"}
    one = PartialCompletion(**{**values, **change})  # type: ignore[arg-type]
    assert (resumable(one, b"o", 200, frozenset({STOP})) is not None) == taken


def test_partials_without_requested_rows_are_not_resumed() -> None:
    one = PartialCompletion([8, 9], [-1.0, -2.0], [VersionSpan(0, 2, 1, 1)], b"o")
    assert resumable(one, b"o", 200, frozenset(), ROW) is None
    taken = resumable(msgspec.structs.replace(one, rows=rows(0, 2)), b"o", 200, frozenset(), ROW)
    assert taken is not None and taken.routing == rows(0, 2)
    assert resumable(msgspec.structs.replace(one, rows=rows(0, 2)), b"o", 200, frozenset(), 2 * ROW) is None
    without = resumable(msgspec.structs.replace(one, rows=rows(0, 2)), b"o", 200, frozenset())
    assert without is not None and without.routing == b"", "nobody wants them any more"


def test_long_partials_are_journaled_in_chunks(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(works, "CHUNK_BYTES", 10 * (8 + ROW))
    q = Queue(partials_bytes=64 + 32 + 25 * (8 + ROW))
    r = Rollout(q, 1, rng)
    (ticket,) = r.ask(1)
    r.sample((1, 0), 38)
    due = r.work.take_due()
    assert [(one.chunk.start, len(one.chunk.rows) // ROW) for one in due] == [(0, 10), (10, 10), (20, 10), (30, 8)]
    answer = q.apply(ev.SavePartials([one.chunk for one in due]), r.who)
    assert answer.held == [10, 20, 20, 20]  # type: ignore[attr-defined]
    r.work.saved(due, answer.held)  # type: ignore[attr-defined]
    assert r.work.groups[1].saved[0] == 20
    (mark,) = load_partials(q.ledger.core, r.who, [SampleKey(ticket.group, 0)])
    assert decode_partial(mark).rows == rows(0, 20)


@pytest.mark.parametrize("seed", range(40))
def test_a_resumed_group_has_every_acknowledged_token(seed: int) -> None:
    """Rollouts that are killed, stopped and lose groups at any moment; one after the other goes on."""
    rng, q = random.Random(seed), Queue()
    made: dict[SampleKey, Completion] = {}
    known: dict[SampleKey, list[int]] = {}
    r = Rollout(q, 1, rng)

    def go_on(why: Callable[[], None]) -> None:
        nonlocal r
        why()
        known.update(r.acknowledged)
        r = Rollout(q, r.who.epoch + 1, rng)

    def killed() -> None:
        q.apply(ev.ProcessExited(r.who, "killed"), TRAINER)

    def stopped() -> None:
        r.abort(r.work.release(list(r.work.groups), "stop"))
        collect(r.put())
        r.save()
        known.update(r.acknowledged)
        for job in r.work.groups.values():
            for place, one in job.aborted.items():
                r.acknowledged[SampleKey(job.ticket.group, job.member(place))] = list(one.tokens)
        r.give_back()
        assert not r.work.groups

    def collect(done: list[tuple[ActiveGroup, Completion]]) -> None:
        for job, completion in done:
            made[SampleKey(job.ticket.group, job.member(completion.member))] = completion

    for _ in range(300):
        act = rng.random()
        if act < 0.1:
            for ticket in r.ask(rng.randint(1, 2)):
                for member in ticket.wanted():
                    before = known.get(SampleKey(ticket.group, member), [])
                    if q.ledger.state.groups[ticket.group].idle <= 3:
                        assert ticket.partials.get(member, 0) >= len(before)
        elif act < 0.75 and r.engine:
            r.sample(rng.choice(list(r.engine)), rng.randint(1, 12), rng.choice(["", "", "", "", "stop", "length"]))
        elif act < 0.9:
            r.save()
        elif act < 0.97:
            collect(r.put())
        else:
            go_on(rng.choice([killed, stopped]))
    assert made
    for key, completion in made.items():
        assert completion.logprobs == [-float(n) for n in range(len(completion.tokens))], "each token has its own"
        assert completion.routing == rows(0, len(completion.tokens))
        assert sum(span.end - span.start for span in completion.versions) == len(completion.tokens)
        before = known.get(key, [])
        if q.ledger.account().get("partials_dropped", 0) == 0:
            assert completion.tokens[: len(before)] == before
    assert q.ledger.audit() == []
