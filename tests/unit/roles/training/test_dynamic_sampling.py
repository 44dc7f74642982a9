"""Dynamic sampling against a real queue: what is kept, what the account says of the rest, what is made for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from queue_parts import V2, World, world

from relax_rt.roles.training import collector as collecting
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.registry import bind
from relax_rt.roles.training.algorithms.settings import AlgorithmTable, RefillOptions
from relax_rt.roles.training.collector import Collector
from relax_rt.roles.training.dynamic_sampling import GroupFilter
from relax_rt.transport.rpc.errors import Refused


class Silent:
    def waiting(self, reason: str) -> None:
        """Nobody looks."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "LEASE_WAIT_S", 0.0)


def collector(made: World, events: list[dict[str, Any]], *, ahead: float = 0, **options: float) -> Collector:
    group_filter = GroupFilter(
        made.trainer,
        Objective.of(AlgorithmTable()),
        [bind("filter", "zero_variance", ("algorithm", "filters"), defaults={})],
        RefillOptions(**options),
        groups=3,
        ahead=ahead,
        event=lambda kind, **facts: events.append({"kind": kind, **facts}),
    )
    return Collector(made.trainer, Silent(), groups=3, group_filter=group_filter)  # type: ignore[arg-type]


async def test_groups_of_equal_rewards_are_dropped_and_others_made(tmp_path: Path) -> None:
    async with world(tmp_path, max_staleness=0) as made:
        collect = collector(made, [])
        await made.make(1, 1, 1)
        first = await collect.collect(1)
        assert first is not None and not first.full
        assert (first.groups, first.leases, first.filtered, first.scored) == (0, [], {"zero_variance": 1}, 1)
        # Of the bound's three groups none is taken by what was left out, and one more may be under way instead of it.
        fine = await made.make(9, 1, 0)
        assert len(fine) == 4
        batch = await collect.collect(1)
        assert batch is first and batch.full and batch.scored == 4
        assert {one.key.group for one in batch.leased} == set(fine[:3])
        await made.trainer.complete_step(batch.leases, 1, V2)
        account = await made.account()
        assert (account["trained"], account["dropped(filter)"]) == (6, 2)
        # Of four prompts that were made afterwards one is left, and the dull one does not come back.
        assert (account["prompts_issued"], account["prompts_filtered"]) == (5, 1)


async def test_dull_groups_within_a_part_do_not_take_the_others_with_them(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        collect = collector(made, [])
        fine = await made.make(1, 0, 1)
        await made.make(1, 0, 0)
        fine += await made.make(1, 1, 0)
        batch = await collect.collect(1)
        assert batch is not None and (batch.full, batch.groups, batch.scored) == (False, 2, 3)
        assert [one.key.group for one in batch.leased] == [group for group in fine for _ in range(2)]
        assert [s.meta.group for s in batch.samples] == [one.key.group for one in batch.leased]
        fine += await made.make(1, 1, 0)
        assert await collect.collect(1) is batch
        assert batch.full
        await made.trainer.complete_step(batch.leases, 1, V2)
        assert (await made.account())["trained"] == 6


async def test_a_step_that_cannot_be_filled_is_taken_with_what_there_is_and_says_so(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        events: list[dict[str, Any]] = []
        collect = collector(made, events, most=2)
        await made.make(1, 1, 0)
        assert await collect.collect(1)
        batch = None
        for _ in range(5):
            await made.make(1, 1, 1)
            batch = await collect.collect(1)
            assert batch is not None
        assert batch is not None and batch.full
        assert events == [
            {"kind": "step_short", "step": 1, "groups": 1, "of": 3, "scored": 6, "filtered": {"zero_variance": 5}}
        ]
        await made.trainer.complete_step(batch.leases, 1, V2)
        account = await made.account()
        assert (account["trained"], account["dropped(filter)"]) == (2, 10)


async def test_filters_that_leave_out_every_group_warn_with_the_pass_rate_and_end_nothing(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    async with world(tmp_path) as made:
        collect = collector(made, events, most=1)
        for _ in range(7):
            await made.make(1, 1, 1)
            batch = await collect.collect(4)
            assert batch is not None and not batch.full
        warned = [event for event in events if event["kind"] == "groups_filtered"]
        assert [event["scored"] for event in warned] == [3, 6], "each doubling is reported"
        assert all(event["filtered"] == {"zero_variance": event["scored"]} for event in warned)
        assert warned[0]["pass_rate"] > warned[1]["pass_rate"] > 0
        # The first group that passes is trained.
        await made.make(1, 1, 0)
        batch = await collect.collect(4)
        assert batch is not None and batch.full and batch.groups == 1


async def test_the_state_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        collect = collector(made, [], memory=0.5)
        await made.make(1, 1, 0)
        await made.make(2, 1, 1)
        assert await collect.collect(7)
        await made.make(2, 1, 0)
        batch = await collect.collect(7)
        assert collect.group_filter is not None and batch is not None and batch.full
        resumed = collector(made, []).group_filter
        assert resumed is not None
        anew = resumed.state()
        state = collect.group_filter.state()
        resumed.restore(json.loads(json.dumps(state)))
        assert resumed.state() == state
        assert resumed.history.outcomes("i").groups == 5
        with pytest.raises(Refused, match="prompt history of a checkpoint"):
            resumed.restore({"refill": {"share": 0.1, "dropped": {}}})
        # The checkpoint before was of no filters.
        resumed.restore({})
        assert resumed.state() == anew
        assert state["refill"] == {"share": 0.8125, "dropped": {"zero_variance": 2}}


async def test_what_a_step_kept_that_is_not_taken_is_counted_when_it_comes_again(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        collect = collector(made, [], memory=0.5)
        await made.make(3, 1, 0)
        first = await collect.collect(1)
        assert first is not None and first.full
        await made.trainer.complete_step(first.leases, 1, V2)
        fine = await made.make(2, 1, 0)
        await made.make(1, 1, 1)
        batch = await collect.collect(2)
        assert collect.group_filter is not None and batch is not None and (batch.scored, batch.full) == (3, False)
        # The run is to end.
        await collect.release("the run ends")
        state = json.loads(json.dumps(collect.group_filter.state()))
        assert state["refill"] == {"share": 0.5, "dropped": {"zero_variance": 1}}
        again = collector(made, [], memory=0.5)
        assert again.group_filter is not None
        again.group_filter.restore(state)
        assert again.group_filter.history.outcomes("i").groups == 4
        fine += await made.make(1, 1, 0)
        batch = await again.collect(2)
        assert batch is not None and batch.full and {one.key.group for one in batch.leased} == set(fine)
        assert (
            again.group_filter.history.outcomes("i").groups == 7
            and again.group_filter.state()["history"]["items"]["i"][0] == 7
        )
