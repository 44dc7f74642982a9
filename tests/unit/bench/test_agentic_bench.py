"""The figures of tools/bench/agentic.py, and its scripted slots."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "bench"))

import agentic
from agentic import DIRECT, OURS, PROXY, busy_share, enough_until, quantile, rows
from peers.slots import Slots, name_of


def test_busy_is_what_lies_within_the_time_that_is_looked_at() -> None:
    # Two slots from 10 to 20: one works all the time and longer, the other from 12 to 15 and from 18 on.
    log = [("a", 5.0, 25.0), ("b", 12.0, 15.0), ("c", 18.0, 30.0), ("d", 2.0, 9.0), ("e", 21.0, 22.0)]
    assert busy_share(log, 2, 10.0, 20.0) == pytest.approx((10 + 3 + 2) / 20)
    assert busy_share([], 2, 10.0, 20.0) == 0.0
    assert math.isnan(busy_share(log, 2, 10.0, 10.0))


def test_there_is_enough_to_do_until_fewer_episodes_are_left_than_slots() -> None:
    ends = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert enough_until(ends, 5) == 1.0, "the first that ends leaves a slot without an episode"
    assert enough_until(ends, 2) == 4.0, "at 3 there are still two, at 4 there is one"
    assert enough_until(ends, 1) == 5.0


def test_a_tail_of_few_is_their_maximum() -> None:
    assert quantile([float(n) for n in range(100)], 0.99) == 99.0
    assert quantile([float(n) for n in range(1000)], 0.99) == 990.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def measured(way: str, busy: float, slots: int, p50: float) -> dict[str, Any]:
    spent = {"over_p50_ms": p50, "over_p99_ms": 10 * p50, "later_p99_ms": 5 * p50, "cpu_ms": 1.5, "rss_mib": 100.0}
    return {"way": way, "busy": busy, "slots": slots, **spent}


@pytest.mark.parametrize(("busy", "holds"), [(0.951, True), (0.949, False)])
def test_rows_have_the_goal_of_the_tight_load_alone(busy: float, holds: bool) -> None:
    found = {(way, False): measured(way, 0.9, 10, p50) for way, p50 in ((OURS, 4.0), (PROXY, 6.0), (DIRECT, 1.0))}
    found |= {(way, True): measured(way, share, 5, 7.0) for way, share in ((OURS, busy), (PROXY, 1.0))}
    table = {row["name"]: row for row in rows(found, 10)}
    keys = {"name", "unit", "better", "ours", "peers", "limit", "goal", "holds"}
    assert all(row.keys() == keys for row in table.values())
    p50 = table["overhead of a call, p50"]
    assert (p50["ours"], p50["peers"], p50["holds"]) == (4.0, {PROXY: 6.0, DIRECT: 1.0}, None)
    tight = table["slots busy, 5 slots for 10 episodes"]
    assert (tight["ours"], tight["peers"], tight["holds"]) == (busy, {PROXY: 1.0}, holds)
    assert [row["name"] for row in table.values() if row["goal"]] == [tight["name"]]


@pytest.mark.parametrize(("busy", "code"), [(0.951, 0), (0.949, 1), (math.nan, 1)])
def test_a_missed_goal_is_an_exit_code(busy: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(way: str, slots: int, *_: object) -> dict[str, Any]:
        rest = {"counted": {}, "client": 0.5, "client_lag_s": 0.001, "others": 0.0, "again": 0, "seconds": 1.0}
        return {**measured(way, busy, slots, 4.0), **rest}

    monkeypatch.setattr(agentic, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["agentic.py", "--quick", "--ours"])
    assert agentic.main() == code


async def test_slots_are_had_by_as_many_as_there_are_and_logged() -> None:
    slots = Slots(2, 0.01)
    most = 0

    async def call(number: int) -> None:
        nonlocal most
        await slots.work(name_of(f"It is call {number}-3."))

    async def look() -> None:
        nonlocal most
        while True:
            most = max(most, slots.busy)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await asyncio.gather(*(call(number) for number in range(6)))
    looking.cancel()
    assert sorted(name for name, _, _ in slots.log) == [f"{number}-3" for number in range(6)]
    assert most == 2 and slots.busy == 0
    begun = sorted(began for _, began, _ in slots.log)
    ended = sorted(ended for _, _, ended in slots.log)
    assert all(began >= end for began, end in zip(begun[2:], ended, strict=False)), "a third had a slot"
