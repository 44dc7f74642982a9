"""Queues without prompts or steps, samplers, columns that lapse, what a new node finds, and what is kept how long."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from ledger_driver import (
    CRITIC,
    ENGINE,
    JUDGE,
    OTHER,
    ROW_BYTES,
    TRAINER,
    Driver,
    fields_of,
    free_policy,
    make,
    policy,
    spans,
    started,
    step,
)

from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.events import JournalEntry
from relax_rt.transport.queue.ledger.machine import load_samplers
from relax_rt.transport.queue.ledger.messages import BlockPut, GroupsPut, LeaseGrant, LeaseRequest, RowPut, SampleKey
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits, SamplerSpec
from relax_rt.transport.queue.ledger.selection import Selection, Unit
from relax_rt.transport.queue.samplers.builtin import load_sampler
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

READER = Incarnation("reader/0", 3)
CRITIC_TASKS = {"reward": ("tokens",), "values": ("tokens",), "train": ("tokens", "reward", "values")}


def members(batch: LeaseGrant) -> list[tuple[int, int]]:
    return [(info.key.group, info.key.member) for info in batch.infos()]


def free(limits: QueueLimits | None = None, **changes: object) -> Driver:
    return Driver(free_policy(**changes), limits or QueueLimits())


class Last:
    """The newest of what it is shown; sometimes it fails."""

    whole_groups = False

    def choose(self, units: Iterable[Unit], want: LeaseRequest) -> Selection:
        found = list(units)
        if len(found) > 2:
            raise ValueError("too many")
        return Selection(found[-1:])


# --- without prompts, without steps


def test_offered_samples_are_finished_when_all_tasks_are_done() -> None:
    d = free()
    offered = d.offer(ENGINE, 2, 1)
    assert len(offered.groups) == 2 and not offered.waiting_on
    batch = d.take(READER, "a", samples=10)
    assert members(batch) == [(1, 0), (1, 1), (2, 0)] and {info.prompt for info in batch.infos()} == {-1}
    assert not d.take(READER, "b", samples=10).infos()
    d.complete(READER, batch, *d.columns(batch, "label"))
    for n in (2, 1):
        batch = d.take(READER, "b", samples=n)
        d.complete(READER, batch)
    assert d.put_all(ENGINE, []) != []
    account = d.ledger.account()
    assert account["finished"] == account["samples_issued"] == 3
    assert not d.ledger.state.groups and not d.ledger.state.blocks.blocks
    assert d.ledger.audit() == []


def test_offers_wait_while_the_queue_is_full() -> None:
    d = free(QueueLimits(capacity_samples=4, capacity_bytes=100 * ROW_BYTES))
    d.offer(ENGINE, 3)
    assert "3 samples are in the queue, 4 allowed" in d.offer(ENGINE, 2).waiting_on
    assert d.offer(ENGINE, 1).groups
    assert "4 samples are in the queue, 4 allowed" in d.offer(ENGINE, 1).waiting_on
    with pytest.raises(Refused, match="5 samples, 4 are allowed at once"):
        d.offer(ENGINE, 5)
    d.complete(READER, batch := d.take(READER, "a", samples=5), *d.columns(batch, "label"))
    d.complete(READER, d.take(READER, "b", samples=5))
    assert d.offer(ENGINE, 1).groups
    d = free(QueueLimits(capacity_bytes=2 * ROW_BYTES))
    d.offer(ENGINE, 2)
    assert "2000 of 2000 bytes" in d.offer(ENGINE, 1).waiting_on


def test_an_offer_that_came_twice_is_taken_once() -> None:
    d = free()
    first = d.offer(ENGINE, 2)
    assert d.last is not None
    who, seq, event, _ = d.last
    assert d.apply(event, who, seq) == GroupsPut(first.groups)
    d.restart()
    assert d.apply(event, who, seq) == GroupsPut(first.groups)
    assert d.ledger.account()["samples_issued"] == 2


def test_senseless_offers_are_refused() -> None:
    d = free()
    for sizes, keys, why in (
        ([], [], "each needs at least 1"),
        ([0], [], "each needs at least 1"),
        ([70_000], [SampleKey(0, 0)], "70000 samples, 65536 are allowed"),
        ([1], [SampleKey(1, 0)], "none of its groups"),
        ([2], [SampleKey(0, 0)], "1 rows for 2 samples"),
        ([2], [SampleKey(0, 0), SampleKey(0, 0)], "2 rows for 2 samples"),
    ):
        rows = [RowPut(key, row) for row, key in enumerate(keys)]
        with pytest.raises(Refused, match=why):
            d.call(ENGINE, ev.PutGroups([d.rows(ENGINE, rows)] if rows else [], sizes))
    with pytest.raises(Refused, match=r"no task can take them.*the tasks need a: tokens; b: tokens, label"):
        d.offer(ENGINE, 1, fields=["label"])
    with pytest.raises(Refused, match="no prompts"):
        d.admit(ENGINE, 0)
    prompts, _ = started()
    with pytest.raises(Refused, match="admits groups of prompts"):
        prompts.offer(ENGINE, 1)


def test_a_block_without_rows_is_refused_beside_others() -> None:
    d = free()
    empty = BlockPut(d.block(ENGINE, 0, nbytes=ROW_BYTES), [])
    whole = d.rows(ENGINE, [RowPut(SampleKey(0, 0), 0)])
    for puts in ([empty, whole], [whole, empty]):
        with pytest.raises(Refused, match=r"a block of 0 rows comes with rows \[\]"):
            d.call(ENGINE, ev.PutGroups(puts, [1]))
    with pytest.raises(Refused, match=r"a block of 1 rows comes with rows \[\]"):
        d.call(ENGINE, ev.PutGroups([BlockPut(d.block(ENGINE), []), whole], [1]))
    assert d.call(ENGINE, ev.PutGroups([whole], [1])) == GroupsPut([1])


def test_a_failed_offered_sample_is_left_out_and_its_siblings_go_on() -> None:
    d = free(tasks={"a": ("tokens",)})
    d.offer(ENGINE, 2)
    batch = d.take(READER, "a", samples=2)
    d.complete(READER, batch, failed=[SampleKey(1, 0)])
    account = d.ledger.account()
    assert (account["failed"], account["finished"]) == (1, 1)
    assert d.ledger.audit() == []


def test_offered_groups_can_be_trained_on() -> None:
    d, v1 = started(group_size=0, prompts_per_step=0, max_staleness=0)
    put = [d.rows(ENGINE, [RowPut(SampleKey(g, 0), g, 1, spans(v1)) for g in range(3)])]
    d.call(ENGINE, ev.PutGroups(put, [1, 1, 1]))
    d.reward_all(JUDGE)
    batch = d.take(TRAINER, "train", groups=1)
    v2 = d.trained(TRAINER, batch, 1, v1)
    account = d.ledger.account()
    assert (account["trained"], account["refused(stale)"]) == (1, 2)
    stale = [d.rows(ENGINE, [RowPut(SampleKey(0, 0), 0, 1, spans(v1))])]
    d.call(ENGINE, ev.PutGroups(stale, [1]))
    assert d.ledger.account()["refused(stale)"] == 3
    batch = d.take(TRAINER, "train", groups=1)
    assert not batch.samples and v2
    d.rollback(TRAINER, 0, v1)
    assert members(d.take(TRAINER, "train", groups=1)) == [(1, 0)]
    assert d.ledger.audit() == []


# --- who is chosen


def test_a_token_budget_ends_the_batch_but_one_sample_always_goes() -> None:
    d = free()
    d.offer(ENGINE, 3, lengths=40)
    assert len(d.take(READER, "a", samples=8, tokens=90).infos()) == 2
    assert len(d.take(READER, "a", samples=8, tokens=10).infos()) == 1
    d.offer(ENGINE, 1)
    with pytest.raises(Refused, match=r"of sample 4\.0: no producer said how many tokens"):
        d.take(READER, "a", samples=8, tokens=10)


def test_a_tasks_own_sampler_chooses_and_a_replay_does_not_ask_it_again() -> None:
    d = free(samplers={"a": SamplerSpec("priority")})
    keys = [SampleKey(0, member) for member in range(3)]
    rows = [RowPut(key, row, priority=float(row == 1)) for row, key in enumerate(keys)]
    d.call(ENGINE, ev.PutGroups([d.rows(ENGINE, rows)], [3]))
    assert members(d.take(READER, "a", samples=2)) == [(1, 1), (1, 0)]
    d.check_replay()
    taken = [entry.event for entry in d.entries() if isinstance(entry.event, ev.RequestLease)]
    assert [event.keys for event in taken] == [[SampleKey(1, 1), SampleKey(1, 0)]]


def test_a_sampler_that_fails_is_told_to_the_caller() -> None:
    d = free(samplers={"a": SamplerSpec("test_ledger_offers:Last")})
    d.offer(ENGINE, 2)
    assert members(d.take(READER, "a", samples=1)) == [(1, 1)]
    d.offer(ENGINE, 2)
    with pytest.raises(Refused, match="raised ValueError: too many"):
        d.take(READER, "a", samples=1)


def test_what_was_settled_before_a_sampler_failed_is_not_forgotten() -> None:
    d, v1 = started(
        max_staleness=0,
        prompts_per_step=4,
        on_straggler="requeue",
        samplers={"train": SamplerSpec("test_ledger_offers:Last")},
    )
    make(d, v1, 3)
    d.admit(OTHER, v1)
    d.reward_all(JUDGE)
    waiting = d.take(TRAINER, "train", groups=1).waiting_on
    assert "too many" in waiting and d.ledger.account()["stragglers"] == 1
    d.check_replay()
    with pytest.raises(Refused, match="too many"):
        d.take(TRAINER, "train", groups=1)


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(Refused, match="fifo"):
        load_samplers(free_policy(samplers={"a": SamplerSpec("fifa")}), load_sampler)


def test_what_lapsed_is_offered_first_again_to_its_task() -> None:
    d = free(tasks={"z": ("tokens",), "a": ("tokens",)})
    d.offer(ENGINE, 4)
    batch = d.take(READER, "a", samples=2)
    d.call(READER, ev.ReleaseLease(batch.lease, "test"))
    assert members(d.take(READER, "a", samples=3)) == [(1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tasks": {}}, "no consumer task"),
        ({"step_task": "x"}, "'x' is not among"),
        ({"frozen_by": "x"}, "'x' is not among"),
        ({"samplers": {"x": SamplerSpec()}}, "a sampler is set for 'x'"),
        ({"group_size": -1}, "cannot be negative"),
        ({"group_size": 2}, "admitted for a step task"),
        ({"group_size": 2, "step_task": "a"}, "prompts_per_step must be"),
        ({"max_staleness": -1.0}, "must be 0 or more"),
        ({"fields": {"tokens": "int32[*]"}}, "needs label, the declared fields are tokens"),
    ],
)
def test_policies_that_cannot_work_are_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(Refused, match=why):
        Driver(free_policy(**changes))


# --- columns of other weights


def values(d: Driver, version: int) -> None:
    batch = d.take(CRITIC, "values", samples=16)
    d.complete(CRITIC, batch, *d.columns(batch, "values", version=version))


def test_columns_that_depend_on_the_weights_lapse_with_them() -> None:
    d, v1 = started(tasks=CRITIC_TASKS, versioned=("values",), max_staleness=3)
    make(d, v1, 4)
    values(d, v1)
    v2 = step(d, 1, v1)
    assert d.ledger.account()["columns_lapsed"] == 4
    assert not d.take(TRAINER, "train", groups=1).samples
    with pytest.raises(Refused, match="'values' depends on the weights"):
        values(d, -1)
    d.tick(61.0)
    values(d, v2)
    batch = d.take(TRAINER, "train", groups=2)
    assert len(batch.samples) == 4 and d.ledger.audit() == []


def test_columns_of_old_weights_that_come_late_are_not_kept() -> None:
    d, v1 = started(tasks=CRITIC_TASKS, versioned=("values",), max_staleness=3, prompts_per_step=1)
    make(d, v1, 1)
    values(d, v1)
    make(d, v1, 1)
    late = d.take(CRITIC, "values", samples=2)
    d.reward_all(JUDGE)
    v2 = d.trained(TRAINER, d.take(TRAINER, "train", groups=1), 1, v1)
    d.complete(CRITIC, late, *d.columns(late, "values", version=v1))
    assert not d.take(TRAINER, "train", groups=1).samples
    values(d, v2)
    assert d.take(TRAINER, "train", groups=1).samples
    assert d.ledger.audit() == []


def test_all_that_a_task_put_lapses_together() -> None:
    tasks = {"values": ("tokens",), "train": ("tokens", "values", "notes")}
    d, v1 = started(tasks=tasks, versioned=("values",), max_staleness=3, prompts_per_step=1)
    make(d, v1, 2)
    batch = d.take(CRITIC, "values", samples=4)
    puts = [*d.columns(batch, "values", version=v1), *d.columns(batch, "notes")]
    d.complete(CRITIC, batch, *puts)
    d.trained(TRAINER, d.take(TRAINER, "train", groups=1), 1, v1)
    again = d.take(CRITIC, "values", samples=4)
    assert [fields_of(again, info) for info in again.samples] == [{"tokens"}] * 2
    v2 = d.weights().version
    d.complete(CRITIC, again, *d.columns(again, "values", version=v2), *d.columns(again, "notes"))
    assert d.take(TRAINER, "train", groups=1).samples
    assert d.ledger.audit() == []


def test_work_on_columns_that_lapsed_meanwhile_has_no_effect() -> None:
    tasks = {"values": ("tokens",), "advantage": ("values",), "train": ("tokens", "advantage")}
    d, v1 = started(tasks=tasks, versioned=("values",), max_staleness=3)
    make(d, v1)
    values(d, v1)
    batch = d.take(JUDGE, "advantage", groups=1)
    v2 = d.rollback(TRAINER, 0, v1, changed=True)
    d.complete(JUDGE, batch, *d.columns(batch, "advantage"))
    assert not d.take(TRAINER, "train", groups=1).samples
    values(d, v2)
    batch = d.take(JUDGE, "advantage", groups=1)
    d.complete(JUDGE, batch, *d.columns(batch, "advantage"))
    assert d.take(TRAINER, "train", groups=1).samples


@pytest.mark.parametrize("trained", [False, True])
def test_a_roll_back_lapses_columns_also_of_what_was_in_the_trainers_hands(trained: bool) -> None:
    d, v1 = started(tasks=CRITIC_TASKS, versioned=("values",), max_staleness=3)
    make(d, v1, 2)
    values(d, v1)
    d.reward_all(JUDGE)
    batch = d.take(TRAINER, "train", groups=2)
    if trained:
        d.trained(TRAINER, batch, 1, v1)
    v3 = d.rollback(TRAINER, 0, v1, changed=True)
    assert not d.take(TRAINER, "train", groups=1).samples
    values(d, v3)
    assert d.take(TRAINER, "train", groups=2).samples
    assert d.ledger.audit() == []


def test_who_works_on_a_sample_while_it_is_trained_on_does_not_hold_it_for_ever() -> None:
    tasks = {"reward": ("tokens",), "log": ("tokens",), "train": ("tokens", "reward")}
    d, v1 = started(tasks=tasks, max_staleness=3)
    make(d, v1, 2)
    logged = d.take(CRITIC, "log", samples=4)
    step(d, 1, v1)
    d.complete(CRITIC, logged)
    d.rollback(TRAINER, 0, v1)
    assert len(d.take(CRITIC, "log", samples=4).samples) == 4


# --- a new node, and what is kept


def test_durable_payloads_outlive_the_node() -> None:
    d = Driver(policy(max_staleness=2), QueueLimits(durable=True))
    v1 = d.rollback(TRAINER, 0, 0, changed=True)
    make(d, v1, 2)
    v2 = step(d, 1, v1)
    make(d, v2, 1)
    d.take(JUDGE, "reward", samples=1)
    (half,) = d.admit(OTHER, v2).tickets
    d.put(OTHER, SampleKey(half.group, 1), v2)
    d.reopen("run-2")
    account = d.ledger.account()
    assert (account.get("lost", 0), account["trained"], account["dropped(producer gone)"]) == (0, 4, 1)
    assert not d.ledger.state.leases and not d.ledger.state.pinned and d.ledger.audit() == []
    d.restart()
    trainer, engine, judge = Incarnation("trainer/0", 20), Incarnation("rollout/0", 21), Incarnation("reward/0", 22)
    v3 = d.rollback(trainer, 0, v1)
    assert d.ledger.account()["samples_offered_again"] == 4
    assert [ticket.members for ticket in d.admit(engine, v3).tickets] == [[0]]
    d.put(engine, SampleKey(half.group, 0), v3)
    d.reward_all(judge)
    assert len(d.take(trainer, "train", groups=4).samples) == 8
    assert d.ledger.audit() == []


def test_steps_too_old_to_be_returned_to_are_kept_as_counts() -> None:
    d, version = started(QueueLimits(keep_steps=2))
    for number in range(1, 6):
        make(d, version, 2)
        version = step(d, number, version)
        d.committed(TRAINER, number)
    assert sorted(d.ledger.state.path) == [4, 5]
    account = d.ledger.account()
    assert account["samples_on_path"] == account["freed"] == 20
    with pytest.raises(Refused, match="no record of single steps up to 3"):
        d.rollback(TRAINER, 2, version)
    d.rollback(TRAINER, 3, version)
    assert d.ledger.audit() == []
    d.own(ev.ConfigureQueue(policy(), QueueLimits(keep_steps=1)))
    d.committed(TRAINER, 3)  # nothing new is covered, but less is kept
    d.check_replay()


def test_calls_are_recognised_in_any_order_within_the_window() -> None:
    d, version = started(max_staleness=float("inf"))
    d.apply(ev.JoinQueue(), ENGINE)
    order = [127, *range(1, 127), *range(128, 256)]
    for seq in order:
        d.apply(ev.RequestTickets(version, 1), ENGINE, seq)
    for seq in (127, 1, 255):
        entry = JournalEntry(d.ledger.n + 1, d.now, ev.RequestTickets(version, 1), ENGINE, seq)
        if seq == 255:
            assert not d.ledger.apply(entry).changed
            continue
        with pytest.raises(Refused, match="last 128 calls"):
            d.ledger.apply(entry)
    assert d.ledger.account()["prompts_issued"] == len(order)


def test_a_policy_is_what_it_was_when_an_event_was_judged() -> None:
    d, v1 = started()
    make(d, v1, 2)
    d.own(ev.ConfigureQueue(policy(max_staleness=5), QueueLimits()))
    assert len(d.admit(ENGINE, v1, 100).tickets) == 10
    d.check_replay()
    assert isinstance(d.ledger.state.policy, LedgerPolicy)


# --- another policy at the next start


def test_a_task_that_is_no_more_is_forgotten_and_a_new_one_sees_what_is_there() -> None:
    d = free(tasks={"a": ("tokens",), "b": ("tokens",)})
    d.offer(ENGINE, 1, 1)
    d.complete(READER, d.take(READER, "a", samples=1))
    held = d.take(READER, "b", samples=1)
    d.own(ev.ConfigureQueue(free_policy(tasks={"a": ("tokens",), "c": ("tokens",)}), d.ledger.state.limits))
    assert d.ledger.audit() == []
    assert len(d.take(READER, "c", samples=5).infos()) == 2, "done with a is not done with c"
    d.complete(READER, held)
    assert d.ledger.audit() == []
    d.own(ev.ConfigureQueue(free_policy(tasks={"a": ("tokens",)}), d.ledger.state.limits))
    assert d.ledger.account()["finished"] == 1, "the sample that only a had to do with"
    assert d.ledger.audit() == []


def test_a_queue_with_samples_does_not_become_one_of_steps() -> None:
    d = free()
    d.offer(ENGINE, 1)
    with pytest.raises(Refused, match="step_task"):
        d.own(ev.ConfigureQueue(policy(), d.ledger.state.limits))


def test_packed_samples_do_not_outlive_the_kind_of_their_queue() -> None:
    d = free()
    d.call(ENGINE, ev.PutGroups([BlockPut(d.block(ENGINE, 3), [])], [1, 1, 1]))
    assert d.ledger.state.runs and not d.ledger.state.groups
    with pytest.raises(Refused, match=r"another step_task.*3 groups of samples were made under the old one"):
        d.own(ev.ConfigureQueue(policy(), QueueLimits()))


def test_a_replay_needs_no_sampler() -> None:
    d = free(samplers={"a": SamplerSpec("no_such_file.py:Sampler")})
    d.offer(ENGINE, 1)
    with pytest.raises(Refused, match="no_such_file"):
        d.take(READER, "a", samples=1)
    d.restart()
    assert d.ledger.audit() == []
