"""A trainer's calls through the client: parts of a step, what is left out, whose memory is still looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
from broker_world import World, world
from test_broker import ENGINE, JUDGE, TRAINER, V1, generate, judge_all

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.client import QueueClient
from relax_rt.transport.queue.ledger.events import Lapse
from relax_rt.transport.rpc.errors import Refused


def payload(w: World) -> int:
    assert w.broker is not None
    return w.broker._ledger.state.blocks.payload_bytes


async def test_a_step_of_parts_of_which_groups_are_left_out_with_lost_answers(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.client(ENGINE) as engine, w.client(JUDGE) as judge, w.client(TRAINER) as trainer:
        for name in ("assign_items", "request_surplus", "lease", "filter_groups", "complete_step"):
            trainer.api.lose_answer.append(name)  # type: ignore[attr-defined]
            trainer.api.lose_request.append(name)  # type: ignore[attr-defined]
        assert (await trainer.assign_items({0: 30, 1: 31})).next_index == 0
        await trainer.rollback(0, V1)
        await trainer.request_surplus(1)
        tickets = await generate(engine, groups=2)
        assert [ticket.item for ticket in tickets] == [30, 31]
        await judge_all(judge)
        batch = await trainer.lease("train", groups=3, at_least=1, wait_s=1)
        assert list(batch.groups()) == [ticket.group for ticket in tickets]
        before = payload(w)
        rest = await trainer.filter_groups(batch, [tickets[0].group], "zero_variance: all rewards are 0")
        assert list(rest.groups()) == [tickets[1].group] and payload(w) < before
        await generate(engine)
        await judge_all(judge)
        other = await trainer.lease("train", groups=2, at_least=1, wait_s=1)
        for one in (rest.samples[0], other.samples[0]):
            assert (one["tokens"] == 10 * one.key.group).all()
        await w.kill()
        await w.start()
        await trainer.complete_step([rest, other], 1, VersionRecord(2, 1, 1))
        assert w.broker is not None
        account = await w.broker.account()
        assert (account["trained"], account["dropped(filter)"], account["leased"]) == (4, 2, 0)


async def test_columns_of_a_group_left_out_are_not_read_any_more_unless_they_are_held(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.client(ENGINE) as engine, w.client(JUDGE) as judge, w.client(TRAINER) as trainer:
        await trainer.rollback(0, V1)
        first, second = [ticket.group for ticket in await generate(engine, groups=2)]
        await judge_all(judge)
        batch = await trainer.lease("train", groups=2, wait_s=1)
        groups, before = batch.groups(), payload(w)
        held = groups[first][0]["tokens"]
        rest = await trainer.filter_groups(batch, [first], "rule: why")
        assert payload(w) == before and (held == 10 * first).all()
        with pytest.raises(Refused, match="left out of the step"):
            groups[first][1]["tokens"]
        assert (rest.samples[0]["tokens"] == 10 * second).all()
        assert not await trainer.filter_groups(rest, [second], "rule: why")
        assert trainer.leases == set() and (held == 10 * first).all()


async def test_a_group_that_is_not_in_the_batch_is_refused_before_anything_is_said(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.client(ENGINE) as engine, w.client(JUDGE) as judge, w.client(TRAINER) as trainer:
        await trainer.rollback(0, V1)
        await generate(engine)
        await judge_all(judge)
        batch = await trainer.lease("train", groups=1, wait_s=1)
        with pytest.raises(Refused, match="has no such group"):
            await trainer.filter_groups(batch, [99], "rule: why")
        assert await trainer.filter_groups(batch, [], "rule: why") is batch
        await trainer.complete_step(batch, 1, VersionRecord(2, 1, 1))


async def two_parts(w: World, engine: QueueClient, judge: QueueClient, trainer: QueueClient) -> list[object]:
    await trainer.rollback(0, V1)
    await generate(engine, groups=2)
    await judge_all(judge)
    return [await trainer.lease("train", groups=1, at_least=1, wait_s=1) for _ in range(2)]


async def test_when_one_part_lapsed_the_other_goes_back_too(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.client(ENGINE) as engine, w.client(JUDGE) as judge, w.client(TRAINER) as trainer:
        one, other = await two_parts(w, engine, judge, trainer)
        assert w.broker is not None
        w.broker._apply(Lapse([], [one.lease]))  # type: ignore[attr-defined]
        with pytest.raises(Refused, match="lapsed"):
            await trainer.complete_step([one, other], 1, VersionRecord(2, 1, 1))  # type: ignore[list-item]
        state = w.broker._ledger.state
        assert (state.leases, state.pinned, trainer.leases) == ({}, {}, set())
        assert (await w.broker.account())["ready"] == 4


async def test_a_filter_on_a_lapsed_lease_says_so_and_holds_no_memory(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.client(ENGINE) as engine, w.client(JUDGE) as judge, w.client(TRAINER) as trainer:
        one, _ = await two_parts(w, engine, judge, trainer)
        assert w.broker is not None
        w.broker._apply(Lapse([], [one.lease]))  # type: ignore[attr-defined]
        with pytest.raises(Refused, match="lapsed"):
            await trainer.filter_groups(one, [one.samples[0].key.group], "rule: why")  # type: ignore[arg-type, attr-defined]
        assert w.broker._ledger.state.pinned == {}
