from __future__ import annotations

import math

import pytest
from ledger_driver import ENGINE, INLINE, JUDGE, OTHER, TRAINER, Driver, fields_of, make, policy, started, step

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Extent
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.events import JournalEntry
from relax_rt.transport.queue.ledger.messages import BlockPut, LeaseGrant, LeaseRequest, RowPut, SampleKey
from relax_rt.transport.queue.ledger.policy import QueueLimits
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation


def test_engines_wait_for_the_trainers_first_weights_and_for_known_versions() -> None:
    d = Driver(policy())
    assert "not announced" in d.admit(ENGINE, 1).waiting_on
    assert "not announced" in d.take(TRAINER, "train", groups=1).waiting_on
    version = d.rollback(TRAINER, 0, 0, changed=True)
    assert "version 9" in d.admit(ENGINE, 9).waiting_on
    assert len(d.admit(ENGINE, version).tickets) == 1


@pytest.mark.parametrize(("staleness", "groups"), [(0, 2), (1, 4), (3, 8)])
def test_admission_fills_the_bound_and_no_more(staleness: int, groups: int) -> None:
    d, version = started(max_staleness=staleness)
    assert len(d.admit(ENGINE, version, 100).tickets) == groups
    refused = d.admit(OTHER, version, 1)
    assert not refused.tickets
    assert "staleness bound" in refused.waiting_on


def test_unbounded_staleness_is_bounded_by_capacity() -> None:
    d = Driver(policy(max_staleness=math.inf), QueueLimits(capacity_bytes=40_000))
    version = d.rollback(TRAINER, 0, 0, changed=True)
    for _ in range(20):
        make(d, version)
    answer = d.admit(ENGINE, version)
    assert "fill the capacity" in answer.waiting_on
    v = step(d, 1, version)
    assert "4 samples wait for a checkpoint" in d.admit(ENGINE, v).waiting_on
    d.committed(TRAINER, 1)
    assert d.admit(ENGINE, v).tickets


def test_an_engine_behind_gets_less() -> None:
    d, v1 = started(max_staleness=1)
    make(d, v1, 2)
    v2 = step(d, 1, v1)
    assert len(d.admit(ENGINE, v1, 100).tickets) == 2  # (1 + 1 - 1) * 2 groups
    assert len(d.admit(OTHER, v2, 100).tickets) == 2  # 4 in all


def test_lag_is_distance_on_the_tree_not_a_difference_of_numbers() -> None:
    d, v1 = started(max_staleness=1)
    make(d, v1, 2)
    v2 = step(d, 1, v1)
    d.gone(TRAINER)
    trainer = Incarnation("trainer/0", 9)
    v3 = d.rollback(trainer, 0, v1)  # the same weights as v1 under a new number
    assert v3 - v1 == 2
    assert d.ledger.core.lag(v1) == 0
    assert d.ledger.core.lag(v2) == 1
    assert d.ledger.account()["samples_offered_again"] == 4
    batch = d.take(trainer, "train", groups=2)
    assert {info.staleness for info in batch.samples} == {0}


def test_tasks_see_a_sample_as_soon_as_its_fields_are_there() -> None:
    d, version = started()
    (ticket,) = d.admit(ENGINE, version).tickets
    assert "no sample" in d.take(JUDGE, "reward", samples=8).waiting_on
    d.put(ENGINE, SampleKey(ticket.group, 1), version)
    batch = d.take(JUDGE, "reward", samples=8)
    assert [info.key.member for info in batch.samples] == [1]
    assert fields_of(batch, batch.samples[0]) == {"tokens"}
    assert not d.take(JUDGE, "reward", samples=8).samples
    d.reward(JUDGE, batch)
    assert "0 of 1" in d.take(TRAINER, "train", groups=1).waiting_on
    d.put(ENGINE, SampleKey(ticket.group, 0), version)
    d.reward_all(JUDGE)
    batch = d.take(TRAINER, "train", groups=1)
    assert [info.key.member for info in batch.samples] == [0, 1]
    assert fields_of(batch, batch.samples[0]) == {"tokens", "reward"}


def test_whole_groups_for_another_task() -> None:
    d, version = started()
    first, second = d.admit(ENGINE, version, 2).tickets
    d.put(ENGINE, SampleKey(first.group, 0), version)
    d.generate(ENGINE, second, version)
    assert "1 of 2" in d.take(JUDGE, "reward", groups=2).waiting_on
    batch = d.take(JUDGE, "reward", groups=1)
    assert {info.key.group for info in batch.samples} == {second.group}


def test_the_batch_takes_first_what_the_update_would_make_stale() -> None:
    d, v1 = started(max_staleness=2)
    make(d, v1, 2)
    v2 = step(d, 1, v1)
    (fresh,) = make(d, v2, 1)
    (old,) = make(d, v1, 1, OTHER)
    (fresh2,) = make(d, v2, 1)
    d.reward_all(JUDGE)
    batch = d.take(TRAINER, "train", groups=2)
    assert [info.key.group for info in batch.samples] == [old.group] * 2 + [fresh.group] * 2
    assert [info.staleness for info in batch.samples] == [1, 1, 0, 0]
    assert fresh2.group in d.ledger.state.groups


def test_over_stale_samples_are_refused_and_their_prompts_return() -> None:
    d, v1 = started(max_staleness=0, straggler_wait_s=0.0)
    make(d, v1, 1)
    (slow,) = d.admit(OTHER, v1).tickets
    d.reward_all(JUDGE)
    batch = d.take(TRAINER, "train", groups=1)
    v2 = d.trained(TRAINER, batch, 1, v1)
    account = d.ledger.account()
    assert account["dropped(straggler)"] == 2
    freed = d.put(OTHER, SampleKey(slow.group, 0), v1)  # late: its memory goes straight back
    assert len(freed) == 1
    assert d.ledger.account()["late_puts"] == 1
    (again,) = d.admit(OTHER, v2).tickets
    assert (again.prompt, again.attempt) == (slow.prompt, 1)


def test_the_trainer_is_told_of_the_tokens_that_its_update_refused() -> None:
    d, v1 = started(max_staleness=0)
    first, second = d.admit(ENGINE, v1, 2).tickets
    d.generate(ENGINE, first, v1)
    for member, length in enumerate((5, 7)):
        d.put(ENGINE, SampleKey(second.group, member), v1, length=length)
    d.reward_all(JUDGE)
    v2 = d.trained(TRAINER, d.take(TRAINER, "train", groups=1), 1, v1)
    assert d.ledger.account()["refused(stale)"] == 2
    assert d.last is not None and d.last[3].refused_tokens == 12  # type: ignore[attr-defined]
    make(d, v2, 2)
    step(d, 2, v2)
    assert d.last[3].refused_tokens == 0  # type: ignore[attr-defined]


def test_a_batch_waits_for_stragglers_then_revokes_them() -> None:
    d, v1 = started(max_staleness=0, prompts_per_step=3)
    make(d, v1, 2)
    (slow,) = d.admit(OTHER, v1).tickets
    d.put(OTHER, SampleKey(slow.group, 0), v1)
    d.reward_all(JUDGE)
    waiting = d.take(TRAINER, "train", groups=2).waiting_on
    assert f"group {slow.group}" in waiting and "rollout/1#2 has made 1 of 2" in waiting
    assert d.ledger.straggler_deadline() == d.now + 10.0
    d.now += 9.0
    assert not d.take(TRAINER, "train", groups=2).samples
    d.now += 1.5
    assert d.take(TRAINER, "train", groups=2).samples
    assert d.ledger.account()["stragglers"] == 1
    assert d.ledger.audit() == []


def test_a_straggler_that_finishes_in_time_is_in_the_batch() -> None:
    d, v1 = started(max_staleness=0, prompts_per_step=3)
    make(d, v1, 2)
    (slow,) = d.admit(OTHER, v1).tickets
    d.reward_all(JUDGE)
    assert not d.take(TRAINER, "train", groups=2).samples
    d.generate(OTHER, slow, v1)
    d.reward_all(JUDGE)
    assert d.take(TRAINER, "train", groups=3).samples


def test_a_second_batch_waits_for_the_first_ones_update() -> None:
    d, v1 = started()
    make(d, v1, 4)
    d.reward_all(JUDGE)
    first = d.take(TRAINER, "train", groups=2)
    assert "not finished" in d.take(TRAINER, "train", groups=2).waiting_on
    d.trained(TRAINER, first, 1, v1)
    assert d.take(TRAINER, "train", groups=2).samples


def test_a_lapsed_lease_is_offered_again_but_its_memory_stays_pinned() -> None:
    d, version = started()
    make(d, version)
    batch = d.take(JUDGE, "reward", samples=8)
    d.tick(61.0)
    other = Incarnation("reward/1", 8)
    again = d.take(other, "reward", samples=8)
    assert [info.key for info in again.samples] == [info.key for info in batch.samples]
    d.reward(JUDGE, batch)  # late: without effect
    assert d.ledger.account()["late_completions"] == 1
    d.reward(other, again)
    assert d.ledger.audit() == []


def test_memory_is_used_again_only_when_pins_are_released() -> None:
    d, version = started(prompts_per_step=1)
    (ticket,) = d.admit(ENGINE, version).tickets
    for member in range(2):
        d.put(ENGINE, SampleKey(ticket.group, member), version)
    d.take(JUDGE, "reward", samples=1)
    d.tick(61.0)
    d.reward_all(Incarnation("reward/1", 8))
    batch = d.take(TRAINER, "train", groups=1)
    d.trained(TRAINER, batch, 1, version)
    d.committed(TRAINER, 1)
    assert len(d.put_all(ENGINE, [])) == 1
    assert d.ledger.state.blocks.payload_bytes == 1000
    d.gone(JUDGE)
    assert len(d.put_all(ENGINE, [])) == 1
    assert d.ledger.state.blocks.payload_bytes == 0
    assert not d.ledger.state.blocks.live


def test_renewals_hold_leases_and_name_what_is_lost() -> None:
    d, version = started()
    (ticket,) = d.admit(ENGINE, version).tickets
    for _ in range(5):
        d.tick(50.0)
        assert d.ledger.renew(ENGINE, [ticket.group], d.now) == []
    assert d.ledger.renew(OTHER, [ticket.group], d.now) == [ticket.group]
    d.tick(61.0)
    assert d.ledger.renew(ENGINE, [ticket.group, 777], d.now) == [ticket.group, 777]
    assert d.ledger.account()["dropped(lapsed)"] == 2


def test_a_sample_that_kills_its_consumers_is_quarantined() -> None:
    d, version = started()
    (ticket,) = make(d, version)
    for epoch in (20, 21, 22):
        judge = Incarnation("reward/0", epoch)
        assert d.take(judge, "reward", samples=1).samples
        d.gone(judge)
    account = d.ledger.account()
    assert account["quarantined"] == 1 and account["dropped(sibling)"] == 1
    assert account["prompts_retired"] == 1
    assert ticket.prompt in d.ledger.state.prompts.retired
    assert d.ledger.audit() == []


def test_a_roll_back_is_no_death_of_what_was_in_hand() -> None:
    d, version = started(max_staleness=2)
    make(d, version, 2)
    d.reward_all(JUDGE)
    for _ in range(5):
        assert d.take(TRAINER, "train", groups=2).samples
        d.rollback(TRAINER, 0, version)
    assert "quarantined" not in d.ledger.account()


def test_abandoning_is_no_death() -> None:
    d, version = started()
    make(d, version)
    for _ in range(5):
        batch = d.take(JUDGE, "reward", samples=8)
        assert batch.samples
        d.call(JUDGE, ev.ReleaseLease(batch.lease, "stopping"))
    assert "quarantined" not in d.ledger.account()


def test_a_producers_death_returns_its_prompts() -> None:
    d, version = started()
    lost, kept = d.admit(ENGINE, version).tickets[0], d.admit(OTHER, version).tickets[0]
    d.gone(ENGINE)
    assert lost.group not in d.ledger.state.groups and kept.group in d.ledger.state.groups
    with pytest.raises(StaleEpoch):
        d.put(ENGINE, SampleKey(lost.group, 1), version)
    (again,) = d.admit(OTHER, version).tickets
    assert (again.prompt, again.attempt) == (lost.prompt, 1)
    assert d.ledger.account()["dropped(producer gone)"] == 2


def test_a_newer_incarnation_fences_the_older() -> None:
    d, version = started()
    (ticket,) = d.admit(ENGINE, version).tickets
    newer = Incarnation("rollout/0", 5)
    d.admit(newer, version)
    with pytest.raises(StaleEpoch):
        d.put(ENGINE, SampleKey(ticket.group, 0), version)
    with pytest.raises(StaleEpoch):
        d.ledger.knows(ENGINE)
    assert d.ledger.account()["dropped(producer gone)"] == 2


def test_a_repeated_call_gets_the_first_answer_and_changes_nothing() -> None:
    d, version = started()
    first = d.admit(ENGINE, version, 2)
    assert d.last is not None
    who, seq, event, _ = d.last
    assert d.apply(event, who, seq) == first
    (ticket, _) = first.tickets
    d.generate(ENGINE, ticket, version)
    batch = d.take(JUDGE, "reward", samples=1)
    who, seq, event, _ = d.last
    assert d.apply(event, who, seq) == batch
    d.restart()
    assert d.apply(event, who, seq) == batch
    d.gone(JUDGE)
    judge = Incarnation("reward/0", 50)
    batch = d.take(judge, "reward", samples=1)
    who, seq, event, _ = d.last
    d.tick(61.0)
    repeated = d.apply(event, who, seq)
    assert repeated == LeaseGrant(batch.lease, [])  # named, because its memory is pinned until it is given back
    assert d.ledger.state.pinned
    d.call(judge, ev.ReleaseLease(batch.lease, "it ended before its answer arrived"))
    assert not d.ledger.state.pinned


def test_answers_are_kept_for_a_bounded_number_of_calls() -> None:
    d, version = started(max_staleness=math.inf)
    for _ in range(200):
        d.admit(ENGINE, version)
    entry = JournalEntry(d.ledger.n + 1, d.now, ev.RequestTickets(version, 1), ENGINE, 3)
    with pytest.raises(Refused, match="last 128 calls"):
        d.ledger.apply(entry)


def test_a_step_on_a_lapsed_lease_does_not_count() -> None:
    d, version = started()
    make(d, version, 2)
    d.reward_all(JUDGE)
    batch = d.take(TRAINER, "train", groups=2)
    d.tick(61.0)
    with pytest.raises(Refused, match="offered again"):
        d.trained(TRAINER, batch, 1, version)


def test_rollback_counts_what_its_checkpoint_covers_and_offers_the_rest_again() -> None:
    d, v1 = started(max_staleness=2)
    make(d, v1, 2)
    v2 = step(d, 1, v1)
    make(d, v2, 2)
    v3 = step(d, 2, v2)
    make(d, v3, 2)
    d.reward_all(JUDGE)
    d.take(TRAINER, "train", groups=2)
    # The checkpoint of step 1 was renamed into place, but the trainer died before it could say so.
    d.gone(TRAINER)
    trainer = Incarnation("trainer/0", 9)
    d.rollback(trainer, 1, v2)
    account = d.ledger.account()
    assert account["freed"] == 4 and account["samples_on_path"] == 4
    assert account["trained"] == 0 and account["samples_offered_again"] == 4
    batch = d.take(trainer, "train", groups=2)
    assert [info.staleness for info in batch.samples] == [1] * 4  # made with v3, a change away from v2
    assert d.ledger.audit() == []


def test_rollback_to_a_step_that_the_queue_does_not_know_is_refused() -> None:
    d, v1 = started(max_staleness=2)
    make(d, v1, 2)
    v2 = step(d, 1, v1)
    d.gone(TRAINER)
    trainer = Incarnation("trainer/0", 9)
    # The weights are known, the steps are not: their samples would be given out once more.
    with pytest.raises(Refused, match="the last step that the queue knows of is 1") as caught:
        d.rollback(trainer, 3, v2)
    assert "checkpoint of before" in caught.value.hint
    d.rollback(trainer, 1, v2)
    assert d.ledger.account()["freed"] == 4 and d.ledger.audit() == []


def test_rollback_returns_prompts_of_what_is_too_stale_now() -> None:
    d, version = started(max_staleness=0)
    first = version
    for number in range(1, 4):
        make(d, version, 2)
        version = step(d, number, version)
    d.gone(TRAINER)
    d.rollback(Incarnation("trainer/0", 9), 0, first)
    account = d.ledger.account()
    assert account["samples_offered_again"] == 4  # those made with the checkpoint's weights
    assert account["refused(stale)"] == 8
    assert account["samples_on_path"] == 0
    assert d.ledger.audit() == []


def test_falling_back_behind_a_commit_returns_its_prompts() -> None:
    d, v1 = started()
    make(d, v1, 2)
    step(d, 1, v1)
    d.committed(TRAINER, 1)
    d.gone(TRAINER)
    d.rollback(Incarnation("trainer/0", 9), 0, v1)
    account = d.ledger.account()
    assert account["lost"] == 4 and account["freed"] == 0
    assert account["prompts_waiting"] == 2
    assert d.ledger.audit() == []


def test_a_new_shared_memory_loses_what_no_checkpoint_covers() -> None:
    d, v1 = started(max_staleness=2)
    make(d, v1, 2)
    v2 = step(d, 1, v1)
    make(d, v2, 2)
    v3 = step(d, 2, v2)
    make(d, v3, 1)
    d.admit(OTHER, v3)
    d.own(ev.OpenRun("run-1"))  # the same run: nothing is lost
    assert "lost" not in d.ledger.account()
    d.own(ev.OpenRun("run-2"))
    assert d.ledger.account()["lost"] == 4
    assert d.admit(Incarnation("rollout/0", 30), v3).waiting_on
    d.restart()
    # The checkpoint of step 1 had been renamed into place unreported: it is found at the resume.
    trainer = Incarnation("trainer/0", 31)
    v4 = d.rollback(trainer, 1, v2)
    account = d.ledger.account()
    assert account["lost"] == 8 and account["freed"] == 4 and account["trained_twice"] == 0
    assert d.ledger.audit() == []
    prompts = [ticket.prompt for ticket in d.admit(Incarnation("rollout/0", 30), v4, 4).tickets]
    assert prompts == [2, 3, 4, 5]


def test_the_prompt_order_can_end() -> None:
    d, version = started(prompts=1)
    make(d, version)
    assert "all 1 prompts" in d.admit(ENGINE, version).waiting_on


def test_foreign_and_double_extents_are_refused() -> None:
    d, version = started()
    (ticket,) = d.admit(ENGINE, version).tickets
    zero, one = (RowPut(SampleKey(ticket.group, member), 0) for member in (0, 1))
    own, used, empty = d.block(ENGINE), d.block(ENGINE), BlockRef(Extent("rollout-0-1-1.slab", 1, 0), 1, ("tokens",))
    d.put_all(ENGINE, [BlockPut(used, [RowPut(SampleKey(99, 0), 0)])])
    for puts, why in (
        ([BlockPut(d.block(OTHER), [zero])], "not its own"),
        ([BlockPut(own, [zero]), BlockPut(own, [one])], "twice in the same call"),
        ([BlockPut(own, [zero], [d.blob(OTHER, "x")])], "not its own"),
        ([BlockPut(own, [zero], [BlobRef(b"x" * 16, own.extent or Extent("", 0, 0))])], "twice in the same call"),
        ([BlockPut(empty, [zero])], "has 0 bytes"),
        ([BlockPut(BlockRef(None, 1, ("tokens",)), [zero])], "neither an extent nor bytes"),
        ([BlockPut(own, [])], "1 rows comes with rows"),
        ([BlockPut(d.block(ENGINE, 2), [zero, RowPut(one.key, 0)])], r"rows \[0, 0\]"),
    ):
        with pytest.raises(Refused, match=why):
            d.put_all(ENGINE, puts)
    d.put_all(ENGINE, [BlockPut(own, [zero])])
    with pytest.raises(Refused, match="in use"):
        d.put_all(ENGINE, [BlockPut(own, [one])])


def test_what_a_put_may_hold() -> None:
    fields = {"tokens": "int32[*]", "reward": "float32"}
    d = Driver(policy(fields=fields, versioned=("reward",)), QueueLimits(max_sample_bytes=1000))
    version = d.rollback(TRAINER, 0, 0, changed=True)
    (ticket,) = d.admit(ENGINE, version).tickets
    zero = RowPut(SampleKey(ticket.group, 0), 0)
    for puts, why in (
        ([d.rows(ENGINE, [zero], "logits")], "'logits'.*declared fields are reward, tokens"),
        ([BlockPut(d.block(ENGINE, 1, nbytes=1001), [zero])], "1001 bytes, max_sample_bytes is 1000"),
        ([d.rows(ENGINE, [zero], "tokens", "reward")], "'reward'.*lapses with the weights"),
    ):
        with pytest.raises(Refused, match=why):
            d.put_all(ENGINE, puts)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (ev.RequestLease("nonsense", LeaseRequest(1)), "tasks are"),
        (ev.RequestLease("train", LeaseRequest(1)), "whole groups"),
        (ev.RequestLease("reward", LeaseRequest()), "neither"),
        (ev.RequestTickets(1, 0), "at least one"),
        (ev.Commit(5, "x"), "last step trained is 0"),
        (ev.Rollback(-1, VersionRecord(9, 0, 0)), "begin at 0"),
        (ev.Rollback(0, VersionRecord(9, 8, 0)), "parent 8"),
        (ev.OpenRun("run-9"), "broker's own"),
    ],
)
def test_senseless_calls_are_refused(event: ev.Event, why: str) -> None:
    d, _ = started()
    with pytest.raises(Refused, match=why):
        d.call(TRAINER, event)


def test_senseless_puts_are_refused() -> None:
    d, version = started()
    (ticket,) = d.admit(ENGINE, version).tickets
    key = SampleKey(ticket.group, 0)
    with pytest.raises(Refused, match="2 members"):
        d.put(ENGINE, SampleKey(ticket.group, 2), version)
    with pytest.raises(Refused, match="version 44"):
        d.put(ENGINE, key, 44)
    d.put(ENGINE, key, version)
    with pytest.raises(Refused, match="once"):
        d.put(ENGINE, key, version)
    batch = d.take(JUDGE, "reward", samples=1)
    other = SampleKey(ticket.group, 1)
    double = BlockPut(BlockRef(None, 1, ("tokens",), INLINE), [RowPut(key, 0)])
    foreign = BlockPut(BlockRef(None, 1, ("reward",), INLINE), [RowPut(other, 0)])
    newer = BlockPut(BlockRef(None, 1, ("reward",), INLINE), [RowPut(key, 0)], version=44)
    for put, why in ((double, "has column tokens already"), (foreign, "not part of it"), (newer, "version 44")):
        with pytest.raises(Refused, match=why):
            d.complete(JUDGE, batch, put)
    with pytest.raises(Refused, match="not part of it"):
        d.complete(JUDGE, batch, failed=[other])
    d.reward(JUDGE, batch)
    d.put(ENGINE, other, version)
    d.reward_all(JUDGE)
    batch = d.take(JUDGE, "train", groups=1)
    with pytest.raises(Refused, match="finished with"):
        d.complete(JUDGE, batch)


def test_the_trainer_can_report_a_sample_it_cannot_train_on() -> None:
    d, version = started()
    first, second = make(d, version, 2)
    d.reward_all(JUDGE)
    batch = d.take(TRAINER, "train", groups=2)
    d.complete(TRAINER, batch, failed=[SampleKey(first.group, 0)])
    assert list(d.ledger.core.step_ready) == [second.group]
    assert [ticket.wanted() for ticket in d.admit(ENGINE, version).tickets] == [[0]]
    assert d.ledger.audit() == []


def test_an_abandoned_branch_is_refused_when_it_arrives() -> None:
    d, v1 = started(max_staleness=1)
    make(d, v1, 2)
    (slow,) = d.admit(OTHER, v1).tickets
    v2 = step(d, 1, v1)
    d.gone(TRAINER)
    trainer = Incarnation("trainer/0", 9)
    v3 = d.rollback(trainer, 0, v1)
    make(d, v3, 1)
    step(d, 1, v3, trainer)
    # rollout/1 had swapped to v2, a version of the branch that the trainer has left: two changes away by now.
    d.put(OTHER, SampleKey(slow.group, 0), v1, v2)
    assert d.ledger.account()["refused(stale)"] >= 2
    assert d.ledger.audit() == []


def test_spans_without_tokens_count_with_the_engines_version() -> None:
    d, v1 = started(prompts_per_step=1)
    (ticket,) = d.admit(ENGINE, v1).tickets
    for member in (0, 1):
        d.put(ENGINE, SampleKey(ticket.group, member))
    d.reward_all(JUDGE)
    assert {info.staleness for info in d.take(TRAINER, "train", groups=1).samples} == {0}


def test_what_an_update_makes_over_stale_is_refused_at_once() -> None:
    d, v1 = started(max_staleness=1)
    make(d, v1, 4)
    d.reward_all(JUDGE)
    version = v1
    for number in (1, 2):
        batch = d.take(TRAINER, "train", groups=1)
        version = d.trained(TRAINER, batch, number, version)
    account = d.ledger.account()
    assert account["refused(stale)"] == 4 and account["prompts_waiting"] == 2
    assert len(d.admit(ENGINE, version, 100).tickets) == 4


def test_rollback_offers_no_more_again_than_the_bound() -> None:
    d, v1 = started(max_staleness=1)
    make(d, v1, 2)
    v2 = step(d, 1, v1)
    make(d, v1, 2, OTHER)
    make(d, v2, 2)
    v3 = step(d, 2, v2)
    make(d, v2, 2)
    step(d, 3, v3)
    d.gone(TRAINER)
    d.rollback(Incarnation("trainer/0", 9), 0, v1)
    account = d.ledger.account()
    assert account["samples_offered_again"] == 8 and account["dropped(surplus)"] > 0
    # What is nearest to being over-stale is kept: it would be lost first.
    core = d.ledger.core
    assert sorted(core.staleness(group) for group in core.state.groups.values()) == [0, 0, 1, 1]
    assert d.ledger.audit() == []
