"""Groups begun beyond the bound: dropped or recycled when a step is complete without them."""

from __future__ import annotations

import pytest
from ledger_driver import CRITIC, ENGINE, JUDGE, OTHER, TASKS, TRAINER, Driver, make, started, step

from relax_rt.transport.queue.ledger.messages import LeaseGrant, SampleKey, Ticket


def begun(on_surplus: str, max_staleness: int = 0) -> tuple[Driver, int, Ticket]:
    """A step's groups are finished; of one more the first member is, and the second has three tokens."""
    d, v1 = started(max_staleness=max_staleness, over_provision=1, on_surplus=on_surplus, straggler_wait_s=0.0)
    make(d, v1, 2)
    (ticket,) = d.admit(OTHER, v1).tickets
    d.put(OTHER, SampleKey(ticket.group, 0), v1)
    d.mark(OTHER, ticket, 1, 0, [(1, v1), (2, v1), (3, v1)])
    return d, v1, ticket


def test_dropped_a_surplus_group_begins_anew() -> None:
    d, v1, ticket = begun("drop")
    v2 = step(d, 1, v1)
    assert d.ledger.account()["dropped(surplus)"] == 2
    (again,) = d.admit(OTHER, v2).tickets
    assert (again.prompt, again.partials) == (ticket.prompt, {}) and again.group != ticket.group


def test_recycled_it_goes_on_with_its_tokens_as_context() -> None:
    d, v1, ticket = begun("recycle")
    v2 = step(d, 1, v1)
    account = d.ledger.account()
    # The finished member has no token of the new weights: it is made again. The other is still sampled.
    assert (account["dropped(surplus)"], account["groups_recycled"]) == (1, 1)
    assert d.ledger.audit() == []
    d.put(OTHER, SampleKey(ticket.group, 1), v1, v1, v1, v2)
    (again,) = d.admit(ENGINE, v2).tickets
    assert (again.group, again.members) == (ticket.group, [0])
    d.generate(ENGINE, again, v2)
    make(d, v2)
    d.reward_all(JUDGE)
    batch = d.take(TRAINER, "train", groups=2)
    info = next(info for info in batch.samples if info.key == SampleKey(ticket.group, 1))
    assert (info.masked, info.staleness) == ([(0, 1), (1, 2), (2, 3)], 0)
    assert d.ledger.audit() == []


def test_recycled_and_given_back_it_goes_on_elsewhere() -> None:
    d, v1, ticket = begun("recycle")
    v2 = step(d, 1, v1)
    d.give_back(OTHER, ticket.group)
    (again,) = d.admit(ENGINE, v2).tickets
    assert (again.group, again.partials, again.wanted()) == (ticket.group, {1: 3}, [0, 1])


def test_a_member_that_ends_without_a_token_within_the_bound_is_made_again() -> None:
    d, v1, ticket = begun("recycle")
    v2 = step(d, 1, v1)
    d.put(OTHER, SampleKey(ticket.group, 1), v1, v1, v1)
    (again,) = d.admit(ENGINE, v2).tickets
    assert (again.group, again.wanted(), again.partials) == (ticket.group, [0, 1], {})
    assert d.ledger.audit() == []


def recycled(*failed: int, **changes: object) -> tuple[Driver, int, Ticket, LeaseGrant]:
    """A step is being trained, without a group that was recycled: the update puts the group's first member over the
    bound, the second is still sampled. Members that `failed` could not be rewarded."""
    values: dict[str, object] = {"prompts_per_step": 1, "over_provision": 1, "on_surplus": "recycle", **changes}
    d, v1 = started(max_staleness=1, straggler_wait_s=1000.0, **values)
    make(d, v1, 2)
    (long,) = d.admit(OTHER, v1).tickets
    d.put(OTHER, SampleKey(long.group, 0), v1)
    d.mark(OTHER, long, 1, 0, [(1, v1), (2, v1)])
    d.reward(JUDGE, d.take(JUDGE, "reward", samples=16), *[SampleKey(long.group, member) for member in failed])
    v2 = d.trained(TRAINER, d.take(TRAINER, "train", groups=1), 1, v1)
    d.admit(ENGINE, v2)
    batch = d.take(TRAINER, "train", groups=1)
    assert batch.samples and d.ledger.state.groups[long.group].recycled
    return d, v2, long, batch


def test_what_took_long_is_not_lost_with_a_sibling_when_it_ends_while_a_step_is_trained() -> None:
    d, v2, long, batch = recycled()
    d.put(OTHER, SampleKey(long.group, 1), v2 - 1, v2 - 1, v2)
    d.reward_all(JUDGE)
    v3 = d.trained(TRAINER, batch, 2, v2)
    assert d.ledger.account()["dropped(surplus)"] == 1
    (again,) = d.admit(ENGINE, v3).tickets
    assert (again.group, again.members) == (long.group, [0])
    d.generate(ENGINE, again, v3)
    (late,) = d.ledger.state.groups.keys() - {long.group}
    for member in (0, 1):
        d.put(ENGINE, SampleKey(late, member), v2)
    d.reward_all(JUDGE)
    batch = d.take(TRAINER, "train", groups=1)
    assert {info.key.member: info.masked for info in batch.samples} == {0: [], 1: [(0, 1), (1, 2)]}
    assert {info.key.group for info in batch.samples} == {long.group}
    assert d.ledger.audit() == []


def test_a_recycled_group_without_a_token_within_the_bound_ends() -> None:
    d, v2, long, batch = recycled()
    d.put(OTHER, SampleKey(long.group, 1), v2 - 1, v2 - 1)
    d.trained(TRAINER, batch, 2, v2)
    assert d.ledger.account()["dropped(surplus)"] == 2 and long.group not in d.ledger.state.groups
    assert d.ledger.audit() == []


def test_a_recycled_group_whose_composition_is_fixed_ends_whole() -> None:
    d, v2, long, batch = recycled(tasks={**TASKS, "advantage": ("tokens", "reward")}, frozen_by="advantage")
    d.put(OTHER, SampleKey(long.group, 1), v2 - 1, v2 - 1, v2)
    d.reward_all(JUDGE)
    while (found := d.take(CRITIC, "advantage", groups=1)).samples:
        d.complete(CRITIC, found)
    d.trained(TRAINER, batch, 2, v2)
    assert d.ledger.account()["dropped(surplus)"] == 2 and long.group not in d.ledger.state.groups
    assert d.ledger.audit() == []


def test_a_member_that_was_left_out_of_a_recycled_group_is_not_made_again() -> None:
    d, v2, long, batch = recycled(0, group_size=3, min_group=2, on_failed_member="shrink")
    d.put(OTHER, SampleKey(long.group, 1), v2 - 1)
    d.trained(TRAINER, batch, 2, v2)
    group = d.ledger.state.groups[long.group]
    assert group.samples[0].excluded and group.missing() == [1, 2]
    assert d.ledger.audit() == []


@pytest.mark.parametrize("on_surplus", ["drop", "recycle"])
def test_what_stays_within_the_bound_is_carried_over_either_way(on_surplus: str) -> None:
    d, v1, ticket = begun(on_surplus, max_staleness=1)
    step(d, 1, v1)
    assert d.ledger.account().get("dropped(surplus)", 0) == 0
    assert not d.ledger.state.groups[ticket.group].recycled


def test_a_group_of_which_nothing_is_under_way_is_not_recycled() -> None:
    d, v1 = started(max_staleness=0, over_provision=1, on_surplus="recycle", straggler_wait_s=0.0)
    make(d, v1, 3)
    step(d, 1, v1)
    assert d.ledger.account()["dropped(surplus)"] == 2 and not d.ledger.state.groups


def test_what_was_recycled_and_goes_on_takes_the_room_of_surplus() -> None:
    d, v1 = started(
        max_staleness=1, prompts_per_step=1, over_provision=1, on_surplus="recycle", straggler_wait_s=1000.0
    )

    def train(number: int, version: int) -> int:
        d.reward_all(JUDGE)
        batch = d.take(TRAINER, "train", groups=1)
        assert batch.samples, batch.waiting_on
        return d.trained(TRAINER, batch, number, version)

    def unfinished() -> list[int]:
        return [g.id for g in d.ledger.state.groups.values() if g.recycled and g.missing()]

    make(d, v1, 2)
    (long,) = d.admit(OTHER, v1).tickets
    v2 = train(1, v1)
    (late,) = d.admit(ENGINE, v2).tickets
    # Three groups are there, and the bound is two: the step does not wait for the newest one that is late.
    v3 = train(2, v2)
    assert unfinished() == [long.group]
    # Three again, but one of them goes on already: the step waits for the one that is within the bound.
    make(d, v3)
    d.reward_all(JUDGE)
    batch = d.take(TRAINER, "train", groups=1)
    assert not batch.samples and f"group {late.group}" in batch.waiting_on
    assert unfinished() == [long.group]
    d.generate(ENGINE, late, v2)
    train(3, v3)
    assert unfinished() == [long.group]
    assert d.ledger.audit() == []
