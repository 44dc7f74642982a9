"""Members of a group that fail, lapse or are too stale, and what becomes of their group, prompt and credit."""

from __future__ import annotations

import pytest
from ledger_driver import CRITIC, ENGINE, JUDGE, OTHER, TRAINER, Driver, fields_of, make, policy, started, step

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.admission import outstanding
from relax_rt.transport.queue.ledger.messages import LeaseGrant, RowPut, SampleKey, VersionSpan
from relax_rt.transport.queue.ledger.policy import QueueLimits
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

ADVANTAGE = {"reward": ("tokens",), "advantage": ("reward",), "train": ("tokens", "advantage")}
TWO_JUDGES = {"reward": ("tokens",), "reference": ("tokens",), "train": ("tokens", "reward", "reference")}
HELPER = Incarnation("advantage/0", 6)


def keys(batch: LeaseGrant) -> list[SampleKey]:
    return [info.key for info in batch.samples]


# --- members made again


def test_a_failed_member_is_made_again_and_its_siblings_stay() -> None:
    d, version = started(group_size=3, prompts_per_step=1)
    (ticket,) = make(d, version)
    batch = d.take(JUDGE, "reward", samples=3)
    credit = outstanding(d.ledger.core)
    d.reward(JUDGE, batch, SampleKey(ticket.group, 1))
    assert d.ledger.account()["failed"] == 1 and outstanding(d.ledger.core) == credit
    (again,) = d.admit(OTHER, version).tickets
    assert (again.group, again.prompt, again.attempt, again.members) == (ticket.group, ticket.prompt, 1, [1])
    assert "0 of 1" in d.take(TRAINER, "train", groups=1).waiting_on
    d.generate(OTHER, again, version)
    assert keys(d.take(JUDGE, "reward", samples=3)) == [SampleKey(ticket.group, 1)]
    assert d.ledger.audit() == []


def test_what_is_made_again_is_another_sample_for_those_who_still_work_on_the_old_one() -> None:
    d, version = started(tasks=TWO_JUDGES)
    (ticket,) = make(d, version)
    bad = SampleKey(ticket.group, 0)
    reward, reference = d.take(JUDGE, "reward", samples=2), d.take(CRITIC, "reference", samples=2)
    d.reward(JUDGE, reward, bad)
    make(d, version)
    # The late failure is of the sample that is gone, the late column too.
    d.complete(CRITIC, reference, *d.columns(reference, "reference", without=[bad]), failed=[bad])
    assert d.ledger.account()["failed"] == 1
    again = d.take(CRITIC, "reference", samples=2)
    assert keys(again) == [bad] and fields_of(again, again.samples[0]) == {"tokens"}
    assert d.ledger.audit() == []


def test_a_late_column_of_the_old_sample_is_not_put_on_the_new_one() -> None:
    d, version = started(tasks=TWO_JUDGES)
    (ticket,) = make(d, version)
    bad = SampleKey(ticket.group, 0)
    reward, reference = d.take(JUDGE, "reward", samples=2), d.take(CRITIC, "reference", samples=2)
    d.reward(JUDGE, reward, bad)
    d.complete(CRITIC, reference, *d.columns(reference, "reference"))
    make(d, version)
    again = d.take(CRITIC, "reference", samples=2)
    assert keys(again) == [bad]
    d.complete(CRITIC, again, *d.columns(again, "reference"))
    d.reward_all(JUDGE)
    assert len(d.take(TRAINER, "train", groups=1).samples) == 2


def test_a_prompt_that_fails_too_often_is_retired_also_across_its_groups() -> None:
    d, version = started(failures_per_prompt=3)
    (ticket,) = make(d, version)
    bad = SampleKey(ticket.group, 0)
    d.reward(JUDGE, d.take(JUDGE, "reward", samples=2), bad)
    make(d, version)
    d.gone(ENGINE)
    other = d.rollback(TRAINER, 0, d.rollback(TRAINER, 0, version, changed=True), changed=True)
    assert d.ledger.account()["refused(stale)"] == 2  # two changes on: the prompt returns
    (again,) = make(d, other, who=OTHER)
    assert (again.prompt, again.attempt) == (ticket.prompt, 2)  # once for the member, once for the group
    d.reward(JUDGE, d.take(JUDGE, "reward", samples=2), SampleKey(again.group, 1))
    make(d, other, who=OTHER)
    d.reward(JUDGE, d.take(JUDGE, "reward", samples=2), SampleKey(again.group, 1))
    account = d.ledger.account()
    assert (account["failed"], account["dropped(sibling)"], account["prompts_retired"]) == (3, 1, 1)
    assert d.ledger.state.prompts.retired == [ticket.prompt]
    assert d.ledger.audit() == []


def test_a_member_that_fails_while_its_siblings_are_being_made() -> None:
    d, version = started(group_size=3, prompts_per_step=1, max_staleness=0)
    (ticket,) = d.admit(ENGINE, version).tickets
    first = SampleKey(ticket.group, 0)
    d.put(ENGINE, first, version)
    d.reward(JUDGE, d.take(JUDGE, "reward", samples=1), first)
    assert not d.admit(OTHER, version).tickets  # ENGINE holds the group until its own part is done
    for member in (1, 2):
        d.put(ENGINE, SampleKey(ticket.group, member), version)
    (again,) = d.admit(OTHER, version).tickets
    assert again.members == [0]
    assert d.ledger.audit() == []


def test_a_producers_death_costs_what_it_had_in_hand_only() -> None:
    d, version = started()
    (ticket,) = d.admit(ENGINE, version).tickets
    d.put(ENGINE, SampleKey(ticket.group, 0), version)
    d.gone(ENGINE)
    assert d.ledger.account()["dropped(producer gone)"] == 1
    answer = d.admit(OTHER, version)
    (again,) = answer.tickets
    assert (again.group, again.members, again.attempt) == (ticket.group, [1], 1)
    who, seq, event, _ = d.last or pytest.fail("no call")
    d.generate(OTHER, again, version)
    assert again.members == [1] and d.apply(event, who, seq) == answer  # no members would mean all of them
    assert len(d.take(JUDGE, "reward", groups=1).samples) == 2
    assert d.ledger.audit() == []


def test_an_engine_too_far_behind_does_not_get_missing_members() -> None:
    d, v1 = started(max_staleness=0, straggler_wait_s=0.0)
    make(d, v1, 2)
    v2 = step(d, 1, v1)
    (ticket,) = d.admit(ENGINE, v2).tickets
    d.put(ENGINE, SampleKey(ticket.group, 0), v2)
    d.gone(ENGINE)
    assert "1 updates behind" in d.admit(OTHER, v1).waiting_on
    assert d.admit(OTHER, v2).tickets[0].members == [1]


def test_work_of_a_lapsed_ticket_comes_late_also_when_the_caller_has_the_group_again() -> None:
    d, version = started()
    (ticket,) = d.admit(ENGINE, version).tickets
    d.put(ENGINE, SampleKey(ticket.group, 0), version)
    d.tick(61.0)
    (again,) = d.admit(ENGINE, version).tickets
    assert again.members == [1]
    assert not d.put(ENGINE, SampleKey(ticket.group, 1), version)  # made for the first ticket: as good
    assert len(d.put(ENGINE, SampleKey(ticket.group, 1), version)) == 1  # made for the second: not needed
    assert d.ledger.account()["late_puts"] == 1
    assert d.ledger.audit() == []


def test_given_back_groups_are_given_out_again() -> None:
    d, version = started()
    first, second = d.admit(ENGINE, version, 2).tickets
    d.put(ENGINE, SampleKey(second.group, 1), version)
    d.give_back(ENGINE, first.group, second.group)
    assert d.ledger.account()["dropped(returned)"] == 3
    tickets = d.admit(OTHER, version, 2).tickets
    assert [(t.prompt, t.attempt, t.wanted()) for t in tickets] == [(1, 1, [0]), (0, 1, [0, 1])]


# --- members left out, groups dropped


def test_a_group_shrinks_to_min_group_and_ends_below_it() -> None:
    d, version = started(group_size=4, prompts_per_step=1, on_failed_member="shrink", min_group=3)
    (ticket,) = make(d, version)
    d.reward(JUDGE, d.take(JUDGE, "reward", samples=2), SampleKey(ticket.group, 1))
    assert outstanding(d.ledger.core) == 3
    assert d.ledger.account()["failed"] == 1
    d.reward(JUDGE, d.take(JUDGE, "reward", samples=2))
    batch = d.take(TRAINER, "train", groups=1)
    assert [info.key.member for info in batch.samples] == [0, 2, 3]
    d.trained(TRAINER, batch, 1, version)
    assert d.ledger.account()["samples_on_path"] == 3
    (ticket,) = make(d, version)
    d.reward(JUDGE, d.take(JUDGE, "reward", samples=4), SampleKey(ticket.group, 0), SampleKey(ticket.group, 3))
    account = d.ledger.account()
    assert (account["failed"], account["dropped(sibling)"], account["prompts_waiting"]) == (3, 2, 1)
    assert d.ledger.audit() == []


def test_two_tasks_may_leave_out_the_same_member() -> None:
    d, version = started(group_size=3, prompts_per_step=1, on_failed_member="shrink", tasks=TWO_JUDGES)
    (ticket,) = make(d, version)
    bad = SampleKey(ticket.group, 0)
    reward, reference = d.take(JUDGE, "reward", samples=3), d.take(CRITIC, "reference", samples=3)
    d.reward(JUDGE, reward, bad)
    d.complete(CRITIC, reference, *d.columns(reference, "reference", without=[bad]), failed=[bad])
    assert d.ledger.account()["failed"] == 1
    assert outstanding(d.ledger.core) == 2
    assert d.ledger.audit() == []


def test_a_failed_member_can_end_its_group() -> None:
    d, version = started(on_failed_member="drop", failures_per_prompt=2)
    (ticket,) = make(d, version)
    d.reward(JUDGE, d.take(JUDGE, "reward", samples=8), SampleKey(ticket.group, 0))
    account = d.ledger.account()
    assert (account["failed"], account["dropped(sibling)"], account["failed_groups"]) == (1, 1, 1)
    (again,) = make(d, version)
    assert (again.prompt, again.attempt) == (ticket.prompt, 1)
    d.reward(JUDGE, d.take(JUDGE, "reward", samples=8), SampleKey(again.group, 1))
    assert d.ledger.account()["prompts_retired"] == 1
    (ticket,) = d.admit(ENGINE, version).tickets
    d.put(ENGINE, SampleKey(ticket.group, 0), version)
    d.gone(ENGINE)
    assert d.ledger.account()["dropped(producer gone)"] == 2  # no member is made again here
    assert d.ledger.audit() == []


def test_a_sample_that_nobody_will_complete_fails() -> None:
    d, version = started(tasks=TWO_JUDGES, failures_per_prompt=2)
    (ticket,) = make(d, version)
    d.reward_all(JUDGE)
    batch = d.take(CRITIC, "reference", samples=2)
    puts = d.columns(batch, "reference", without=[SampleKey(ticket.group, 0)])
    d.complete(CRITIC, batch, *puts)  # says that it is done, and forgot a column
    account = d.ledger.account()
    assert (account["failed"], account["failed_groups"]) == (1, 1)
    (again,) = make(d, version)
    assert (again.prompt, again.attempt, again.members) == (ticket.prompt, 1, [0])
    d.reward_all(JUDGE)
    d.complete(CRITIC, d.take(CRITIC, "reference", samples=2))
    assert d.ledger.account()["prompts_retired"] == 1


# --- the task that fixes the composition


def test_from_the_advantages_on_a_failure_ends_the_group() -> None:
    d, version = started(tasks={**ADVANTAGE, "audit": ("advantage",)}, frozen_by="advantage")
    (ticket,) = make(d, version)
    d.reward_all(JUDGE)
    batch = d.take(HELPER, "advantage", groups=1)
    d.complete(HELPER, batch, *d.columns(batch, "advantage"))
    batch = d.take(CRITIC, "audit", samples=1)
    d.complete(CRITIC, batch, failed=[batch.samples[0].key])
    account = d.ledger.account()
    assert (account["failed"], account["dropped(sibling)"], account["prompts_waiting"]) == (1, 1, 1)
    assert ticket.group not in d.ledger.state.groups


@pytest.mark.parametrize("mode", ["regenerate", "shrink"])
def test_advantages_over_a_group_that_changed_meanwhile_are_computed_again(mode: str) -> None:
    d, version = started(
        tasks={**ADVANTAGE, "filter": ("tokens",)},
        frozen_by="advantage",
        on_failed_member=mode,
        group_size=3,
        prompts_per_step=1,
    )
    (ticket,) = make(d, version)
    d.reward_all(JUDGE)
    batch, filtered = d.take(HELPER, "advantage", groups=1), d.take(CRITIC, "filter", samples=3)
    d.complete(CRITIC, filtered, failed=[SampleKey(ticket.group, 1)])
    d.complete(HELPER, batch, *d.columns(batch, "advantage"))
    if mode == "regenerate":
        assert not d.take(HELPER, "advantage", groups=1).samples
        make(d, version)
        d.reward_all(JUDGE)
    again = d.take(HELPER, "advantage", groups=1)
    assert [key.member for key in keys(again)] == ([0, 1, 2] if mode == "regenerate" else [0, 2])
    d.complete(HELPER, again, *d.columns(again, "advantage"))
    assert d.take(TRAINER, "train", groups=1).samples
    assert d.ledger.audit() == []


def test_a_failure_found_while_advantages_are_computed_leaves_none_of_them() -> None:
    d, version = started(tasks=ADVANTAGE, frozen_by="advantage")
    (ticket,) = make(d, version)
    d.reward_all(JUDGE)
    batch, bad = d.take(HELPER, "advantage", groups=1), SampleKey(ticket.group, 1)
    d.complete(HELPER, batch, *d.columns(batch, "advantage", without=[bad]), failed=[bad])
    make(d, version)
    d.reward_all(JUDGE)
    again = d.take(HELPER, "advantage", groups=1)
    assert len(again.samples) == 2
    assert all(fields_of(again, info) == {"tokens", "reward"} for info in again.samples)
    assert d.ledger.audit() == []


def test_whole_groups_of_which_a_member_was_made_again_come_with_what_is_not_done() -> None:
    d, version = started()
    (ticket,) = make(d, version)
    batch, bad = d.take(JUDGE, "reward", groups=1), SampleKey(ticket.group, 0)
    d.reward(JUDGE, batch, bad)
    make(d, version)
    again = d.take(JUDGE, "reward", groups=1)
    assert keys(again) == [bad]


# --- stragglers, surplus and masks


def test_requeue_revokes_stragglers_at_once() -> None:
    d, v1 = started(max_staleness=0, prompts_per_step=3, on_straggler="requeue")
    make(d, v1, 2)
    (slow,) = d.admit(OTHER, v1).tickets
    d.reward_all(JUDGE)
    assert len(d.take(TRAINER, "train", groups=2).samples) == 4
    assert d.ledger.account()["dropped(straggler)"] == 2
    assert d.ledger.state.prompts.waiting[0].index == slow.prompt


def test_a_new_broker_begins_the_wait_for_stragglers_anew() -> None:
    d, v1 = started(max_staleness=0, prompts_per_step=3)
    make(d, v1, 2)
    d.admit(OTHER, v1)
    d.reward_all(JUDGE)
    assert not d.take(TRAINER, "train", groups=2).samples
    d.restart()
    d.reopen()
    assert not d.take(TRAINER, "train", groups=2).samples
    d.now += 10.0
    assert d.take(TRAINER, "train", groups=2).samples


def test_surplus_comes_on_top_of_the_bound_and_is_not_waited_for() -> None:
    d, v1 = started(max_staleness=0, over_provision=2)
    tickets = d.admit(ENGINE, v1, 10).tickets
    assert len(tickets) == 4
    for ticket in tickets[1:3]:
        d.generate(ENGINE, ticket, v1)
    d.reward_all(JUDGE)
    assert len(d.take(TRAINER, "train", groups=2).samples) == 4
    account = d.ledger.account()
    assert account["dropped(surplus)"] == 4 and account["prompts_waiting"] == 2
    assert d.ledger.audit() == []


def test_an_engine_too_far_behind_makes_no_surplus() -> None:
    d, v1 = started(max_staleness=0, over_provision=2)
    make(d, v1, 2)
    v2 = step(d, 1, v1)
    assert "to an engine 1 updates behind" in d.admit(ENGINE, v1).waiting_on
    assert len(d.admit(ENGINE, v2, 10).tickets) == 4


def test_within_the_bound_a_batch_is_held_for_stragglers_without_the_surplus() -> None:
    d, v1 = started(max_staleness=0, over_provision=1)
    tickets = d.admit(ENGINE, v1, 10).tickets
    d.generate(ENGINE, tickets[1], v1)
    d.reward_all(JUDGE)
    waiting = d.take(TRAINER, "train", groups=1).waiting_on
    assert f"group {tickets[0].group}" in waiting
    assert d.ledger.account()["dropped(surplus)"] == 2
    assert [ticket.group in d.ledger.state.groups for ticket in tickets] == [True, True, False]


def test_surplus_that_an_update_makes_over_stale_is_not_called_refused() -> None:
    d, v1 = started(max_staleness=0, over_provision=2)
    make(d, v1, 4)
    v2 = step(d, 1, v1)
    account = d.ledger.account()
    assert account["dropped(surplus)"] == 4 and "refused(stale)" not in account
    assert [ticket.attempt for ticket in d.admit(ENGINE, v2, 10).tickets] == [1, 1, 0, 0]


def test_surplus_within_the_bound_is_carried_over() -> None:
    d, v1 = started(max_staleness=1, over_provision=2)
    make(d, v1, 6)
    v2 = step(d, 1, v1)
    assert d.ledger.account()["ready"] == 8
    v3 = step(d, 2, v2)
    account = d.ledger.account()
    assert account["dropped(surplus)"] == 4 and account["trained"] == 8
    assert len(d.admit(ENGINE, v3, 10).tickets) == 6


def test_over_stale_tokens_can_be_masked() -> None:
    d, v1 = started(max_staleness=0, on_straggler="mask", prompts_per_step=1)
    make(d, v1)
    d.reward_all(JUDGE)
    v2 = d.trained(TRAINER, d.take(TRAINER, "train", groups=1), 1, v1)
    (ticket,) = d.admit(ENGINE, v2).tickets
    spread = [VersionSpan(0, 7, v1, v1), VersionSpan(7, 9, v2, v2)]
    d.put_all(ENGINE, [d.rows(ENGINE, [RowPut(SampleKey(ticket.group, 0), 0, 9, spread)])])
    d.put(ENGINE, SampleKey(ticket.group, 1), v2)
    d.reward_all(JUDGE)
    batch = d.take(TRAINER, "train", groups=1)
    assert [(info.staleness, info.masked) for info in batch.samples] == [(0, [(0, 7)]), (0, [])]
    assert d.ledger.audit() == []


def test_a_sample_whose_tokens_would_all_be_masked_is_refused() -> None:
    d, v1 = started(max_staleness=0, on_straggler="mask")
    make(d, v1, 1)
    (slow,) = d.admit(OTHER, v1).tickets
    d.reward_all(JUDGE)
    batch = d.take(TRAINER, "train", groups=1)  # is not held for the straggler
    v2 = d.trained(TRAINER, batch, 1, v1)
    d.put(OTHER, SampleKey(slow.group, 0), v1, v2)
    assert slow.group in d.ledger.state.groups
    d.put(OTHER, SampleKey(slow.group, 1), v1)
    account = d.ledger.account()
    assert account["refused(stale)"] == 2 and account["prompts_waiting"] == 1


# --- steps thrown away


def test_a_skipped_step_ends_its_samples_and_keeps_the_weights() -> None:
    d, v1 = started()
    make(d, v1, 4)
    d.reward_all(JUDGE)
    batch = d.take(TRAINER, "train", groups=2)
    with pytest.raises(Refused, match="leaves the weights as they are"):
        d.skip(TRAINER, batch, 1, VersionRecord(99, v1, 1))
    d.skip(TRAINER, batch, 1, d.weights())
    account = d.ledger.account()
    assert (account["skipped"], account["trained"], account["samples_on_path"]) == (4, 0, 4)
    assert d.ledger.state.trainer_version == v1
    assert len(d.put_all(ENGINE, [])) == 2  # their memory is free at once
    assert len(d.admit(ENGINE, v1, 10).tickets) == 2  # and so is their place
    v2 = step(d, 2, v1)
    d.committed(TRAINER, 2)
    assert d.ledger.account()["freed"] == 4
    d.rollback(TRAINER, 0, v1)  # the prompts of the skipped step come back with its place on the path
    account = d.ledger.account()
    assert account.get("skipped", 0) == 0 and account["lost"] == 8 and v2 > v1
    assert d.ledger.audit() == []


def test_a_skipped_step_is_no_update() -> None:
    d, v1 = started(max_staleness=1)
    make(d, v1, 4)
    d.reward_all(JUDGE)
    first = d.take(TRAINER, "train", groups=2)
    d.skip(TRAINER, first, 1, d.weights())
    batch = d.take(TRAINER, "train", groups=1)
    d.call(TRAINER, ev.CompleteStep([batch.lease], 2, d.weights()))  # accumulates: its samples are of the coming update
    before = outstanding(d.ledger.core)
    batch = d.take(TRAINER, "train", groups=1)
    d.skip(TRAINER, batch, 3, d.weights())
    assert outstanding(d.ledger.core) == before - 2


# --- quarantine


def test_one_sample_that_kills_its_consumers_does_not_taint_the_others_of_its_lease() -> None:
    d, version = started()
    first, second = make(d, version, 2)
    for epoch in (20, 21):
        judge = Incarnation("reward/0", epoch)
        assert len(d.take(judge, "reward", samples=4).samples) == 4
        d.gone(judge)
    judge = Incarnation("reward/0", 22)
    for _ in range(3):
        batch = d.take(judge, "reward", samples=4)
        assert len(batch.samples) == 1, "a suspect is leased by itself"
        d.reward(judge, batch)
    assert keys(d.take(judge, "reward", samples=4)) == [SampleKey(second.group, 1)]
    d.gone(judge)
    account = d.ledger.account()
    assert (account["quarantined"], account["dropped(sibling)"], account["prompts_retired"]) == (1, 1, 1)
    assert first.group in d.ledger.state.groups
    assert d.ledger.audit() == []


def test_a_group_that_kills_trainers_is_quarantined() -> None:
    d = Driver(policy(), QueueLimits(quarantine_after=2))
    version = d.rollback(TRAINER, 0, 0, changed=True)
    make(d, version)
    d.reward_all(JUDGE)
    for epoch in (30, 31):
        trainer = Incarnation("trainer/0", epoch)
        assert d.take(trainer, "train", groups=1).samples
        d.gone(trainer)
    account = d.ledger.account()
    assert (account["quarantined"], account["prompts_retired"]) == (2, 1)
    assert d.ledger.audit() == []
