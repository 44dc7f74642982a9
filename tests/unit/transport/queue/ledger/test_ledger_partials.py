"""Marks of unfinished samples: what is kept, for whom, how much, and when it ends."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from broker_world import world
from ledger_driver import AGENT, ENGINE, OTHER, TRAINER, Driver, a_mark, make, started, step

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.admission import capacity_blocker, load_partials
from relax_rt.transport.queue.ledger.messages import PartialChunk, SampleKey, Ticket, VersionSpan
from relax_rt.transport.queue.ledger.policy import QueueLimits
from relax_rt.transport.queue.partials import decode_partial, partial_chunk
from relax_rt.transport.rpc.errors import Refused


def tokens(first: int, count: int, version: int) -> list[tuple[int, int]]:
    return [(first + n, version) for n in range(count)]


def kept(d: Driver, who: object, ticket: Ticket) -> dict[int, list[int]]:
    keys = [SampleKey(ticket.group, member) for member in ticket.wanted()]
    return {mark.key.member: decode_partial(mark).tokens for mark in load_partials(d.ledger.core, who, keys)}  # type: ignore[arg-type]


def test_whoever_gets_the_group_next_goes_on_behind_the_marks() -> None:
    d, version = started(group_size=3, prompts_per_step=1)
    (ticket,) = d.admit(ENGINE, version).tickets
    d.put(ENGINE, SampleKey(ticket.group, 0), version)
    assert d.mark(ENGINE, ticket, 1, 0, tokens(10, 4, version)) == 4
    assert d.mark(ENGINE, ticket, 1, 4, tokens(14, 2, version)) == 6
    before = d.ledger.account()
    d.gone(ENGINE)
    ((kind, told),) = [notice for notice in d.ledger.core.notices if notice[0] == "group_reopened"]
    assert (told["holder"], told["missing"], told["partial"], told["tokens"]) == (str(ENGINE), 2, 1, 6), kind
    after = d.ledger.account()
    # The member that was begun goes on; the one without a mark is another sample.
    assert after["dropped(producer gone)"] == 1 and after["samples_issued"] == before["samples_issued"] + 1
    (again,) = d.admit(OTHER, version).tickets
    assert (again.group, again.members, again.partials) == (ticket.group, [1, 2], {1: 6})
    assert kept(d, OTHER, again) == {1: [10, 11, 12, 13, 14, 15]} and kept(d, ENGINE, ticket) == {}
    d.generate(OTHER, again, version)
    assert d.ledger.state.partials_bytes == 0 and d.ledger.audit() == []


def test_a_group_of_which_only_marks_are_there_keeps_its_place() -> None:
    d, version = started()
    (ticket,) = d.admit(ENGINE, version).tickets
    d.mark(ENGINE, ticket, 0, 0, tokens(1, 3, version))
    d.give_back(ENGINE, ticket.group)
    (again,) = d.admit(OTHER, version).tickets
    assert (again.group, again.partials, again.wanted()) == (ticket.group, {0: 3}, [0, 1])


def test_a_mark_takes_the_place_of_what_was_marked_from_its_start_on() -> None:
    d, version = started()
    (ticket,) = d.admit(ENGINE, version).tickets
    d.mark(ENGINE, ticket, 0, 0, tokens(1, 5, version))
    assert d.mark(ENGINE, ticket, 0, 3, tokens(50, 1, version)) == 4
    assert kept(d, ENGINE, ticket) == {0: [1, 2, 3, 50]}
    # What is missing in between is told, so that it can be sent again.
    assert d.mark(ENGINE, ticket, 0, 6, tokens(60, 1, version)) == 4
    assert d.mark(ENGINE, ticket, 0, 0, tokens(70, 1, version)) == 1


def test_what_was_sampled_under_an_earlier_ticket_is_not_mixed_into_a_later_one() -> None:
    d, version = started()
    (old,) = d.admit(ENGINE, version).tickets
    d.mark(ENGINE, old, 0, 0, tokens(1, 4, version))
    d.tick(100.0)
    (new,) = d.admit(ENGINE, version).tickets
    assert (new.group, new.issue) == (old.group, 2)
    assert d.mark(ENGINE, old, 0, 4, tokens(90, 2, version)) == -1
    assert d.mark(ENGINE, new, 0, 4, tokens(5, 2, version)) == 6
    assert kept(d, ENGINE, new) == {0: [1, 2, 3, 4, 5, 6]}


def test_spans_are_joined_and_count_for_staleness() -> None:
    d, v1 = started(max_staleness=1, straggler_wait_s=0.0)
    make(d, v1, 2)
    (ticket,) = d.admit(ENGINE, v1).tickets
    d.mark(ENGINE, ticket, 0, 0, tokens(1, 3, v1))
    d.mark(ENGINE, ticket, 0, 3, tokens(4, 1, v1))
    v2 = step(d, 1, v1)
    d.mark(ENGINE, ticket, 0, 4, tokens(5, 1, v2))
    held = d.ledger.state.groups[ticket.group].samples[0].partial
    assert held is not None and held.spans == [VersionSpan(0, 4, v1, v1), VersionSpan(4, 5, v2, v2)]
    d.gone(ENGINE)
    (again,) = d.admit(OTHER, v2).tickets
    assert again.group == ticket.group
    # Made on by an engine of v2, its tokens of v1 still count: the update after the next makes it over-stale.
    assert d.ledger.core.staleness(d.ledger.state.groups[ticket.group]) == 1
    make(d, v2, 2, who=AGENT)
    v3 = step(d, 2, v2)
    assert ticket.group not in d.ledger.state.groups and d.ledger.state.partials_bytes == 0
    assert d.admit(OTHER, v3).tickets[0].partials == {}
    assert d.ledger.account()["partial_tokens_dropped"] == 5


def test_where_over_stale_tokens_are_masked_they_are_kept_as_context() -> None:
    d, v1 = started(max_staleness=0, on_straggler="mask", over_provision=1)
    make(d, v1, 2)
    (ticket,) = d.admit(ENGINE, v1).tickets
    d.mark(ENGINE, ticket, 0, 0, tokens(1, 3, v1))
    v2 = step(d, 1, v1)
    d.give_back(ENGINE, ticket.group)
    (again,) = d.admit(OTHER, v2).tickets
    assert (again.group, again.partials) == (ticket.group, {0: 3})


def test_marks_are_bounded_for_each_member_and_in_all_and_count_in_the_capacity() -> None:
    limits = QueueLimits(partial_bytes=200, partials_bytes=400, capacity_bytes=1100)
    d, version = started(limits)
    one, other = d.admit(ENGINE, version, 2).tickets
    assert d.mark(ENGINE, one, 0, 0, tokens(1, 13, version)) == 13
    assert d.mark(ENGINE, one, 0, 13, tokens(14, 1, version)) == 13, "208 bytes"
    assert d.mark(ENGINE, one, 1, 0, tokens(1, 12, version)) == 12
    assert d.mark(ENGINE, other, 0, 0, tokens(1, 1, version)) == 0, "392 and 104 bytes"
    assert "without room" in d.ledger.core.partials_refused
    assert not capacity_blocker(d.ledger.core)
    d.put(ENGINE, SampleKey(one.group, 0), version)
    assert "of them partial completions" in capacity_blocker(d.ledger.core)
    assert d.ledger.audit() == []


def with_rows(mark: PartialChunk, size: int) -> PartialChunk:
    """A mark whose tokens have rows of so many bytes, of what they are."""
    return msgspec.structs.replace(mark, rows=b"".join(bytes([token]) * size for token in decode_partial(mark).tokens))


def test_what_is_kept_of_tokens_besides_goes_where_they_go() -> None:
    d, version = started()
    (ticket,) = d.admit(ENGINE, version).tickets

    def mark(start: int, first: int, count: int, size: int = 3) -> int:
        one = with_rows(a_mark(ticket, 0, start, tokens(first, count, version)), size)
        (held,) = d.call(ENGINE, ev.SavePartials([one])).held
        return int(held)

    def found() -> tuple[list[int], bytes]:
        (one,) = load_partials(d.ledger.core, ENGINE, [SampleKey(ticket.group, 0)])
        return decode_partial(one).tokens, decode_partial(one).rows

    assert (mark(0, 1, 5), mark(3, 50, 2)) == (5, 5)
    assert found() == ([1, 2, 3, 50, 51], b"\1\1\1\2\2\2\3\3\3" + b"222333")
    assert d.ledger.state.partials_bytes == 5 * (8 + 3) + 32 + 64
    # Rows of another size, or none, behind these could not be told apart.
    assert (mark(5, 60, 1, 2), mark(5, 60, 1, 0)) == (5, 5)
    assert d.ledger.core.partials_refused["of another kind"] == 2
    assert mark(0, 60, 2, 0) == 2 and found() == ([60, 61], b"")
    assert mark(2, 62, 1, 3) == 2 and mark(2, 62, 1, 0) == 3
    assert d.ledger.audit() == []


def test_tokens_that_bring_nobody_on_are_given_up() -> None:
    """They may be what kills whoever goes on with them."""
    d, version = started()
    (ticket,) = d.admit(ENGINE, version).tickets
    d.mark(ENGINE, ticket, 0, 0, tokens(1, 3, version))
    seen = []
    for _ in range(5):
        d.give_back(ENGINE, ticket.group)
        (ticket,) = d.admit(ENGINE, version).tickets
        seen.append(ticket.partials.get(0, 0))
    assert seen == [3, 3, 3, 0, 0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": b"\1\0\0"}, "bytes of tokens"),
        ({"logprobs": b""}, "bytes of tokens"),
        ({"tokens": b"", "logprobs": b"", "versions": []}, "bytes of tokens"),
        ({"versions": []}, "end at 0"),
        ({"versions": [VersionSpan(0, 1, 1, 1)]}, "end at 1"),
        ({"versions": [VersionSpan(0, 3, 99, 99)]}, "not known"),
        ({"versions": [VersionSpan(0, 2, 1, 1), VersionSpan(1, 3, 1, 1)]}, "follow each other"),
        ({"start": 1}, "follow each other"),
        ({"rows": b"1234"}, "4 bytes of rows for 3 tokens"),
    ],
)
def test_a_malformed_mark_is_refused_whole(change: dict[str, object], says: str) -> None:
    d, version = started()
    (ticket,) = d.admit(ENGINE, version).tickets
    good = a_mark(ticket, 1, 0, tokens(1, 3, version))
    bad = {"key": SampleKey(ticket.group, 0), "issue": 1, "start": 0, "tokens": good.tokens}
    bad |= {"logprobs": good.logprobs, "versions": good.versions, **change}
    with pytest.raises(Refused, match=says):
        d.call(ENGINE, ev.SavePartials([good, PartialChunk(**bad)]))  # type: ignore[arg-type]
    assert d.ledger.state.partials_bytes == 0


def test_marks_outlive_the_memory_of_the_node_and_are_judged_by_the_weights_after_it() -> None:
    d, v1 = started(group_size=3, prompts_per_step=1, max_staleness=2)
    one, other = d.admit(ENGINE, v1, 2).tickets
    d.put(ENGINE, SampleKey(one.group, 0), v1)
    d.mark(ENGINE, one, 1, 0, tokens(1, 3, v1))
    d.put(ENGINE, SampleKey(other.group, 0), v1)
    d.reopen("run-2")
    assert d.ledger.account()["lost"] == 4, "a finished member, and a whole group that nothing was marked of"
    assert d.ledger.audit() == [] and d.ledger.state.prompts.waiting[0].index == other.prompt
    v2 = d.rollback(TRAINER, 0, v1)
    (again,) = d.admit(OTHER, v2).tickets
    assert (again.group, again.partials, again.wanted()) == (one.group, {1: 3}, [0, 1, 2])
    d.generate(OTHER, again, v2)
    assert d.ledger.audit() == []


def test_a_mark_of_a_branch_that_was_left_is_not_gone_on_with() -> None:
    d, v1 = started(max_staleness=0)
    (ticket,) = d.admit(ENGINE, v1).tickets
    d.mark(ENGINE, ticket, 0, 0, tokens(1, 3, v1))
    d.reopen("run-2")
    v2 = next(d.versions)
    d.call(TRAINER, ev.Rollback(0, VersionRecord(v2, 0, 0)))
    (again,) = d.admit(OTHER, v2).tickets
    assert again.partials == {} and again.prompt == ticket.prompt and again.group != ticket.group


async def test_marks_are_in_the_journal_before_they_are_answered(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        trainer, first = w.client(TRAINER), w.client(ENGINE)
        async with trainer, first:
            await trainer.rollback(0, VersionRecord(1, 0, 0))
            (ticket,) = (await first.admit(1, 1, wait_s=1.0)).tickets
            values = list(range(1, 60_001))
            versions = [VersionSpan(0, len(values), 1, 1)]
            logprobs = [-0.5 - n / 7 for n in values]
            marks = [partial_chunk(ticket, member, 0, values, logprobs, versions, b"prompt") for member in (0, 1)]
            first.api.lose_answer.append("save_partials")  # type: ignore[attr-defined]
            assert await first.save_partials(marks) == [60_000, 60_000]
            await w.kill()
            await w.start()
            assert await first.save_partials(
                [partial_chunk(ticket, 0, 60_000, [7], [-1.0], [VersionSpan(0, 60_001, 1, 1)])]
            )
            await first.release_groups([ticket.group], "test")
        async with w.client(OTHER) as other:
            (again,) = (await other.admit(1, 1, wait_s=1.0)).tickets
            assert again.partials == {0: 60_001, 1: 60_000}
            found = await other.load_partials([again])
            mine = found[SampleKey(ticket.group, 1)]
            assert (mine.tokens, mine.versions, mine.origin) == (values, versions, b"prompt")
            assert mine.logprobs == pytest.approx(logprobs, rel=1e-6)
            assert found[SampleKey(ticket.group, 0)].tokens == [*values, 7]
