"""Members that their producer cannot make."""

from __future__ import annotations

import pytest
from ledger_driver import ENGINE, JUDGE, OTHER, TRAINER, Driver, make, started

from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.admission import MAX_PRODUCER_LOSSES
from relax_rt.transport.queue.ledger.messages import SampleKey, Ticket
from relax_rt.transport.rpc.identity import Incarnation


def begun(d: Driver, version: int) -> Ticket:
    """A group whose last member is there and whose others are not."""
    (ticket,) = d.admit(ENGINE, version).tickets
    d.put(ENGINE, SampleKey(ticket.group, ticket.size - 1), version)
    return ticket


def give_up(d: Driver, ticket: Ticket) -> None:
    d.call(ENGINE, ev.ReleaseGroups([ticket.group], "it raised ValueError", failed=True))


def test_it_is_made_again_by_whoever_asks_and_its_siblings_stay() -> None:
    d, version = started(group_size=2, prompts_per_step=1)
    give_up(d, ticket := begun(d, version))
    assert d.ledger.account()["failed"] == 1
    (again,) = d.admit(OTHER, version).tickets
    assert (again.group, again.prompt, again.attempt, again.members) == (ticket.group, ticket.prompt, 1, [0])
    assert d.ledger.audit() == []


def test_a_prompt_that_cannot_be_made_is_retired() -> None:
    d, version = started(group_size=2, prompts_per_step=1, failures_per_prompt=3)
    give_up(d, ticket := begun(d, version))
    for _ in range(2):
        (again,) = d.admit(ENGINE, version).tickets
        assert again.prompt == ticket.prompt
        give_up(d, again)
    (other,) = d.admit(ENGINE, version).tickets
    assert other.prompt != ticket.prompt
    assert d.ledger.account()["prompts_retired"] == 1 and d.ledger.audit() == []


@pytest.mark.parametrize("nothing", [True, False])
def test_what_is_returned_without_a_failure_does_not_count(nothing: bool) -> None:
    d, version = started(group_size=2, prompts_per_step=1, failures_per_prompt=1)
    ticket = d.admit(ENGINE, version).tickets[0] if nothing else begun(d, version)
    d.give_back(ENGINE, ticket.group)
    (again,) = d.admit(ENGINE, version).tickets
    assert again.prompt == ticket.prompt and d.ledger.account()["prompts_retired"] == 0


def test_the_policy_may_leave_it_out_or_end_its_group() -> None:
    d, version = started(group_size=3, prompts_per_step=1, on_failed_member="shrink", min_group=2)
    ticket = begun(d, version)
    d.put(ENGINE, SampleKey(ticket.group, 1), version)
    give_up(d, ticket)
    d.reward_all(JUDGE)
    assert d.ledger.core.state.groups[ticket.group].size == 2 and d.ledger.audit() == []
    d, version = started(group_size=2, prompts_per_step=1, on_failed_member="drop")
    give_up(d, ticket := begun(d, version))
    assert ticket.group not in d.ledger.core.state.groups and d.ledger.account()["dropped(sibling)"] == 1


# --- what is begun and lost again and again


def lose(d: Driver, how: str, ticket: Ticket, who: Incarnation) -> Incarnation:
    """Lose a ticket on its producer; who produces from then on."""
    if how == "died":
        d.gone(who)
        return Incarnation(who.slot, who.epoch + 10)
    if how == "lapsed":
        d.tick(1000.0)
    else:
        d.give_back(who, ticket.group, losses=1)
    return who


@pytest.mark.parametrize("how", ["returned", "died", "lapsed"])
@pytest.mark.parametrize("nothing", [True, False])
def test_what_is_lost_again_and_again_has_failed_and_is_retired_in_the_end(how: str, nothing: bool) -> None:
    d, version = started(group_size=2, prompts_per_step=1, failures_per_prompt=2)
    (first,) = d.admit(ENGINE, version).tickets
    if not nothing:
        d.put(ENGINE, SampleKey(first.group, 1), version)
    tickets, ticket, who = 1, first, ENGINE
    while ticket.prompt == first.prompt:
        who = lose(d, how, ticket, who)
        # A member that is there stays until the prompt is retired.
        (ticket,) = d.admit(who, version).tickets
        tickets += ticket.prompt == first.prompt
        assert tickets < 50 and d.ledger.audit() == []
        assert nothing or ticket.prompt != first.prompt or ticket.members == [0]
    account = d.ledger.account()
    assert tickets == 2 * MAX_PRODUCER_LOSSES and account["prompts_retired"] == 1 and account["failed_groups"] == 2
    assert d.ledger.state.prompts.retired == [first.prompt]


def test_why_it_has_failed_is_told() -> None:
    d, version = started(group_size=2, prompts_per_step=1)
    ticket = begun(d, version)
    d.give_back(ENGINE, ticket.group, losses=MAX_PRODUCER_LOSSES - 1)
    told = dict(d.ledger.core.notices)["group_reopened"]
    assert told["losses"] == MAX_PRODUCER_LOSSES - 1 and d.ledger.account()["prompts_returned"] == 0
    (again,) = d.admit(ENGINE, version).tickets
    d.call(ENGINE, ev.ReleaseGroups([again.group], "the gateway was started again", losses=1))
    (reason,) = dict(d.ledger.core.notices)["samples_failed"]["reasons"]
    assert reason == "begun and lost 6 times, the last time: the gateway was started again"
    assert d.ledger.account()["failed"] == 1 and d.ledger.core.state.groups[ticket.group].size == 2


@pytest.mark.parametrize("progress", ["member", "mark"])
def test_losses_count_only_in_a_row(progress: str) -> None:
    d, version = started(group_size=8, prompts_per_step=1)
    (ticket,) = d.admit(ENGINE, version).tickets
    for number in range(7):
        d.give_back(ENGINE, ticket.group, losses=MAX_PRODUCER_LOSSES - 1)
        (ticket,) = d.admit(ENGINE, version).tickets
        if progress == "member":
            d.put(ENGINE, SampleKey(ticket.group, number), version)
        else:
            assert d.mark(ENGINE, ticket, 7, number, [(number, version)]) == number + 1
    assert "failed_groups" not in d.ledger.account()
    # Marks that tell of no more than was there before are no progress: its tokens may be what kills its producers.
    if progress == "mark":
        for _ in range(MAX_PRODUCER_LOSSES):
            assert d.mark(ENGINE, ticket, 7, 0, [(50, version)]) == 1
            d.give_back(ENGINE, ticket.group, losses=1)
            (ticket,) = d.admit(ENGINE, version).tickets
        assert d.ledger.account()["failed_groups"] == 1


def test_what_is_handed_back_in_order_is_no_loss() -> None:
    d, version = started(group_size=2, prompts_per_step=1, failures_per_prompt=1)
    ticket = begun(d, version)
    for _ in range(5 * MAX_PRODUCER_LOSSES):
        d.give_back(ENGINE, ticket.group)
        (again,) = d.admit(ENGINE, version).tickets
        assert again.group == ticket.group


def test_the_policy_decides_about_what_is_lost_again_and_again() -> None:
    d, version = started(group_size=3, prompts_per_step=1, on_failed_member="shrink", min_group=2)
    ticket = begun(d, version)
    d.put(ENGINE, SampleKey(ticket.group, 1), version)
    d.give_back(ENGINE, ticket.group, losses=MAX_PRODUCER_LOSSES)
    group = d.ledger.core.state.groups[ticket.group]
    assert group.size == 2 and group.prompt is not None and group.prompt.losses == 0 and d.ledger.audit() == []
    d, version = started(group_size=2, prompts_per_step=1, on_failed_member="drop", failures_per_prompt=1)
    ticket = begun(d, version)
    d.give_back(ENGINE, ticket.group, losses=MAX_PRODUCER_LOSSES)
    assert d.ledger.account()["prompts_retired"] == 1 and d.ledger.audit() == []


def test_where_a_loss_ends_the_group_its_other_members_are_no_progress() -> None:
    d, version = started(group_size=2, prompts_per_step=1, on_failed_member="drop", failures_per_prompt=2)
    tickets = 0
    while (ticket := begun(d, version)).prompt == 0:
        tickets += 1
        assert tickets < 50
        d.give_back(ENGINE, ticket.group, losses=1)
    assert tickets == 2 * MAX_PRODUCER_LOSSES and d.ledger.account()["prompts_retired"] == 1
    # All of it is.
    d, version = started(group_size=2, prompts_per_step=1, on_failed_member="drop")
    (ticket,) = d.admit(ENGINE, version).tickets
    d.give_back(ENGINE, ticket.group, losses=MAX_PRODUCER_LOSSES - 1)
    (group,) = [d.ledger.core.state.groups[one.group] for one in make(d, version)]
    assert group.prompt is not None and (group.prompt.index, group.prompt.losses) == (0, 0)


@pytest.mark.parametrize(("wait_s", "retired"), [(10.0, 1), (0.0, 0)])
def test_nobody_waits_for_the_same_prompt_for_ever(wait_s: float, retired: int) -> None:
    """A batch that waits for a group that is never there in time does so `failures_per_prompt` times."""
    d, version = started(max_staleness=0, prompts_per_step=3, failures_per_prompt=3, straggler_wait_s=wait_s)
    for number in range(1, 5):
        (slow,) = d.admit(OTHER, version).tickets
        assert (slow.prompt == 0) == (number <= 3 or not retired)
        make(d, version, 2)
        d.reward_all(JUDGE)
        batch = d.take(TRAINER, "train", groups=2)
        if wait_s:
            assert "over-stale" in batch.waiting_on
            d.now += wait_s
            batch = d.take(TRAINER, "train", groups=2)
        version = d.trained(TRAINER, batch, number, version)
    assert d.ledger.account()["prompts_retired"] == retired and d.ledger.audit() == []
