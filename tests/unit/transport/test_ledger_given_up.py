"""Members that their producer cannot make."""

from __future__ import annotations

import pytest
from ledger_driver import ENGINE, JUDGE, OTHER, Driver, started

from relax_rt.transport.ledger import events as ev
from relax_rt.transport.queue.api import SampleKey, Ticket


def begun(d: Driver, version: int) -> Ticket:
    """A group whose last member is there and whose others are not."""
    (ticket,) = d.admit(ENGINE, version).tickets
    d.put(ENGINE, SampleKey(ticket.group, ticket.size - 1), version)
    return ticket


def give_up(d: Driver, ticket: Ticket) -> None:
    d.call(ENGINE, ev.GiveBack([ticket.group], "it raised ValueError", failed=True))


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
