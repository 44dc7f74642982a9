"""Steps in parts, groups left out of them, more that are asked for, and prompts whose items are chosen."""

from __future__ import annotations

import pytest
from ledger_driver import ENGINE, JUDGE, OTHER, TRAINER, Driver, make, started

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.messages import ItemsAssigned, LeaseGrant
from relax_rt.transport.rpc.errors import Refused


def ready(d: Driver, version: int, groups: int) -> list[int]:
    """So many groups, rewarded."""
    tickets = make(d, version, groups)
    d.reward_all(JUDGE)
    return [ticket.group for ticket in tickets]


def groups_of(batch: LeaseGrant) -> list[int]:
    return sorted({info.key.group for info in batch.samples})


def filtered(d: Driver, batch: LeaseGrant, *groups: int, why: str = "rule: why", pinned: bool = False) -> None:
    d.call(TRAINER, ev.FilterGroups(batch.lease, list(groups), why, pinned))


def trained(d: Driver, step: int, parent: int, *leases: int) -> int:
    version = next(d.versions)
    d.call(TRAINER, ev.CompleteStep(list(leases), step, VersionRecord(version, parent, step)))
    return version


# --- parts of a step


def test_parts_are_granted_as_they_are_ready_and_trained_together() -> None:
    d, v1 = started()
    (first,) = ready(d, v1, 1)
    assert not d.take(TRAINER, "train", groups=2).samples
    one = d.take(TRAINER, "train", groups=2, at_least=1)
    (second,) = ready(d, v1, 1)
    other = d.take(TRAINER, "train", groups=1, at_least=1)
    assert (groups_of(one), groups_of(other)) == ([first], [second])
    v2 = trained(d, 1, v1, one.lease, other.lease)
    assert sorted(record.group for record in d.ledger.state.path[1]) == [first, second]
    d.restart()
    assert d.ledger.account()["trained"] == 4
    # Undone together as well.
    d.rollback(TRAINER, 0, v1)
    assert d.ledger.account()["ready"] == 4 and v2 != v1


def test_no_part_is_trained_when_the_lease_of_another_lapsed() -> None:
    d, v1 = started()
    ready(d, v1, 2)
    one = d.take(TRAINER, "train", groups=1, at_least=1)
    d.tick(d.ledger.state.limits.lease_s - 1)
    other = d.take(TRAINER, "train", groups=1, at_least=1)
    d.tick(2)
    with pytest.raises(Refused, match=f"train lease {one.lease} is not the caller's"):
        trained(d, 1, v1, other.lease, one.lease)
    assert d.ledger.account()["trained"] == 0 and d.ledger.state.step == 0


def test_what_was_taken_and_is_not_in_the_step_is_offered_again() -> None:
    d, v1 = started()
    first, second = ready(d, v1, 2)
    one = d.take(TRAINER, "train", groups=1, at_least=1)
    other = d.take(TRAINER, "train", groups=1, at_least=1)
    v2 = trained(d, 1, v1, one.lease)
    assert d.ledger.account()["ready"] == 2
    with pytest.raises(Refused, match="lapsed"):
        trained(d, 2, v2, other.lease)
    assert groups_of(d.take(TRAINER, "train", groups=1)) == [second] != [first]


def test_only_the_last_part_waits_for_stragglers() -> None:
    d, v1 = started(max_staleness=0)
    ready(d, v1, 1)
    (late,) = d.admit(OTHER, v1).tickets
    assert len(groups_of(d.take(TRAINER, "train", groups=2, at_least=1))) == 1
    d, v1 = started(max_staleness=0, prompts_per_step=3)
    ready(d, v1, 2)
    (late,) = d.admit(OTHER, v1).tickets
    # Two would be a whole step; one of them goes out, the other with the straggler or without it.
    assert len(groups_of(d.take(TRAINER, "train", groups=2, at_least=1))) == 1
    held = d.take(TRAINER, "train", groups=1, at_least=1)
    assert not held.samples and f"group {late.group} over-stale" in held.waiting_on
    d.now += d.ledger.core.policy.straggler_wait_s
    assert d.take(TRAINER, "train", groups=1, at_least=1).samples
    assert d.ledger.account()["dropped(straggler)"] == 2


def test_another_caller_and_whole_batches_wait_for_the_parts() -> None:
    d, v1 = started()
    ready(d, v1, 2)
    d.take(TRAINER, "train", groups=1, at_least=1)
    assert "not finished" in d.take(TRAINER, "train", groups=1).waiting_on
    assert "not finished" in d.take(OTHER, "train", groups=1, at_least=1).waiting_on


@pytest.mark.parametrize("want", [{"groups": 1, "at_least": 2}, {"samples": 1, "at_least": 1}])
def test_parts_that_cannot_be(want: dict[str, object]) -> None:
    d, _ = started()
    with pytest.raises(Refused, match=r"at_least is for training|say how many"):
        d.take(TRAINER, "train", **want)  # type: ignore[arg-type]


def test_a_step_over_nothing_is_refused() -> None:
    d, v1 = started()
    with pytest.raises(Refused, match="it names no lease"):
        trained(d, 1, v1)


# --- groups left out


def test_a_group_left_out_makes_room_for_another_and_its_prompt_is_retired() -> None:
    d, v1 = started(max_staleness=0)
    first, second = ready(d, v1, 2)
    batch = d.take(TRAINER, "train", groups=2, at_least=1)
    assert not d.admit(ENGINE, v1).tickets
    filtered(d, batch, first, why="zero_variance: all rewards are 1")
    account = d.ledger.account()
    assert (account["dropped(filter)"], account["filtered(zero_variance)"], account["prompts_filtered"]) == (2, 2, 1)
    (ticket,) = make(d, v1, 1)
    assert ticket.prompt == 2
    d.reward_all(JUDGE)
    other = d.take(TRAINER, "train", groups=1, at_least=1)
    trained(d, 1, v1, batch.lease, other.lease)
    assert [record.prompt.index for record in d.ledger.state.path[1] if record.prompt] == [1, 2]
    assert second in {record.group for record in d.ledger.state.path[1]}
    d.check_replay()


def test_it_stays_out_over_a_roll_back_and_the_death_of_the_queue() -> None:
    d, v1 = started()
    first, second = ready(d, v1, 2)
    batch = d.take(TRAINER, "train", groups=2, at_least=1)
    filtered(d, batch, first)
    v2 = trained(d, 1, v1, batch.lease)
    d.restart()
    v3 = d.rollback(TRAINER, 0, v1)
    assert (v2, groups_of(d.take(TRAINER, "train", groups=1))) == (v3 - 1, [second])
    account = d.ledger.account()
    assert (account["prompts_filtered"], account["prompts_waiting"], account["dropped(filter)"]) == (1, 0, 2)
    assert [ticket.prompt for ticket in d.admit(ENGINE, v3, 2).tickets] == [2, 3]
    assert d.ledger.audit() == []


def test_a_lease_of_which_all_is_left_out_ends() -> None:
    d, v1 = started()
    first, second = ready(d, v1, 2)
    batch = d.take(TRAINER, "train", groups=2)
    filtered(d, batch, first, second, pinned=True)
    assert not d.ledger.state.leases and list(d.ledger.state.pinned) == [batch.lease]
    d.unpin(TRAINER, batch.lease)
    assert not d.ledger.state.pinned and d.ledger.state.blocks.payload_bytes == 0
    ready(d, v1, 1)
    assert d.take(TRAINER, "train", groups=1).samples


@pytest.mark.parametrize("pinned", [False, True])
def test_memory_of_a_group_left_out_is_free_unless_it_is_looked_at(pinned: bool) -> None:
    d, v1 = started()
    first, _ = ready(d, v1, 1) + ready(d, v1, 1)
    batch = d.take(TRAINER, "train", groups=2)
    before = d.ledger.state.blocks.payload_bytes
    filtered(d, batch, first, pinned=pinned)
    assert d.ledger.state.blocks.payload_bytes == (before if pinned else before // 2)
    trained(d, 1, v1, batch.lease)
    d.committed(TRAINER, 1)
    assert d.ledger.state.blocks.payload_bytes == 0 and d.ledger.audit() == []


def test_only_groups_of_a_lease_that_is_held_can_be_left_out() -> None:
    d, v1 = started()
    first, second = ready(d, v1, 2)
    batch = d.take(TRAINER, "train", groups=1)
    for groups in ([second], [first, second], []):
        with pytest.raises(Refused, match="not part of it"):
            filtered(d, batch, *groups)
    d.tick(d.ledger.state.limits.lease_s + 1)
    with pytest.raises(Refused, match="lapsed"):
        filtered(d, batch, first)


def test_the_account_tells_a_bounded_number_of_rules_apart() -> None:
    d, v1 = started(max_staleness=100, group_size=1)
    for n in range(40):
        (group,) = ready(d, v1, 1)
        filtered(d, d.take(TRAINER, "train", groups=1), group, why=f"rule {n}: why")
    account = d.ledger.account()
    assert account["filtered(rule 0)"] == 1 and account["filtered(others)"] == 40 - 32
    assert account["prompts_filtered"] == 40 and d.ledger.audit() == []


# --- more groups than the bound allows


def test_asked_for_groups_go_beyond_the_bound_until_the_step() -> None:
    d, v1 = started(max_staleness=0)
    ready(d, v1, 2)
    assert not d.admit(ENGINE, v1).tickets
    d.call(TRAINER, ev.RequestSurplus(2))
    assert len(ready(d, v1, 3)) == 2
    d.restart()
    batch = d.take(TRAINER, "train", groups=2)
    v2 = d.trained(TRAINER, batch, 1, v1)
    # What was too much is over-stale now, and nothing was asked for since.
    assert d.ledger.account()["dropped(surplus)"] == 4
    assert len(d.admit(ENGINE, v2, 9).tickets) == 2 and d.ledger.audit() == []


def test_what_is_under_way_stays_allowed_when_less_is_asked_for() -> None:
    d, v1 = started(max_staleness=1)
    d.call(TRAINER, ev.RequestSurplus(3))
    assert len(ready(d, v1, 9)) == 7
    d.call(TRAINER, ev.RequestSurplus(0))
    assert d.ledger.state.surplus_requested == 3 and d.ledger.audit() == []
    v2 = d.trained(TRAINER, d.take(TRAINER, "train", groups=2), 1, v1)
    assert d.ledger.state.surplus_requested == 1 and not d.admit(ENGINE, v2).tickets
    d.trained(TRAINER, d.take(TRAINER, "train", groups=2), 2, v2)
    assert d.ledger.state.surplus_requested == 0 and d.ledger.audit() == []


def test_surplus_is_not_given_up_while_a_step_may_leave_groups_out() -> None:
    d, v1 = started(max_staleness=0)
    d.call(TRAINER, ev.RequestSurplus(1))
    first, second = ready(d, v1, 2)
    (ticket,) = d.admit(OTHER, v1).tickets
    batch = d.take(TRAINER, "train", groups=2, at_least=1)
    assert groups_of(batch) == [first, second]
    filtered(d, batch, first)
    d.generate(OTHER, ticket, v1)
    d.reward_all(JUDGE)
    other = d.take(TRAINER, "train", groups=1, at_least=1)
    assert groups_of(other) == [ticket.group]
    trained(d, 1, v1, batch.lease, other.lease)


# --- which prompts come next


def test_a_place_has_the_item_that_was_chosen_before_it_was_given_out() -> None:
    d, v1 = started()
    assert d.call(TRAINER, ev.AssignItems({0: 7, 1: 8, 2: 9})) == ItemsAssigned(0)
    assert d.call(TRAINER, ev.AssignItems({1: 5})) == ItemsAssigned(0)
    d.restart()
    tickets = d.admit(ENGINE, v1, 4).tickets
    assert [(ticket.prompt, ticket.item) for ticket in tickets] == [(0, 7), (1, 5), (2, 9), (3, None)]
    assert d.call(TRAINER, ev.AssignItems({0: 1, 3: 1, 4: 6})) == ItemsAssigned(4)
    assert d.ledger.state.prompts.chosen == {4: 6}


def test_it_keeps_the_item_however_often_it_is_given_out() -> None:
    d, v1 = started()
    d.call(TRAINER, ev.AssignItems({0: 7}))
    (ticket,) = d.admit(ENGINE, v1).tickets
    d.give_back(ENGINE, ticket.group)
    d.call(TRAINER, ev.AssignItems({0: 8}))
    (again,) = d.admit(ENGINE, v1).tickets
    d.mark(ENGINE, again, 0, 0, [(1, v1)])
    d.gone(ENGINE)
    (third,) = d.admit(OTHER, v1).tickets
    d.generate(OTHER, third, v1)
    make(d, v1, 1, OTHER)
    d.reward_all(JUDGE)
    d.trained(TRAINER, d.take(TRAINER, "train", groups=2), 1, v1)
    d.reopen("run-2")
    d.restart()
    v3 = d.rollback(TRAINER, 0, v1)
    tickets = d.admit(OTHER, v3, 2).tickets
    assert [one.item for one in [ticket, again, third, tickets[0]]] == [7] * 4
    assert (tickets[0].prompt, tickets[1].item) == (0, None)


def test_choices_are_bounded_and_end_with_the_order() -> None:
    d, _ = started(prompts=3)
    d.call(TRAINER, ev.AssignItems({2: 1, 3: 1}))
    assert d.ledger.state.prompts.chosen == {2: 1}
    with pytest.raises(Refused, match="choose at most 65536 ahead"):
        d.call(TRAINER, ev.AssignItems({65_536: 1}))
