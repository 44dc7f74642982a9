"""Faults that a role's host carries out on its own process."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from typing import get_args

import pytest
from waiting import eventually_blocking

from relax_rt.hosting.faults import Faults
from relax_rt.process.limits import own_memory
from relax_rt.supervision.channel import FaultKind, FaultMsg

MIB = 1 << 20
WAIT_S = 120


def order(kind: FaultKind, seconds: float, amount: float = 0.0) -> FaultMsg:
    return FaultMsg(kind, seconds, amount)


async def test_loop_is_blocked_for_as_long_as_asked() -> None:
    faults = Faults()
    faults.follow(asyncio.get_running_loop())
    began = time.monotonic()
    await asyncio.to_thread(faults.carry_out, order("hang_loop", 0.3))
    await asyncio.sleep(0)
    assert time.monotonic() - began >= 0.3


def test_interpreter_is_held_against_all_other_threads() -> None:
    turns: list[float] = []
    done = threading.Event()

    def turn() -> None:
        while not done.is_set():
            turns.append(time.monotonic())

    with_turns = threading.Thread(target=turn)
    with_turns.start()
    eventually_blocking(lambda: bool(turns))
    Faults().carry_out(order("hold_gil", 0.4))
    done.set()
    with_turns.join()
    gaps = [later - earlier for earlier, later in itertools.pairwise([*turns, time.monotonic()])]
    assert max(gaps) >= 0.4


def test_memory_is_taken_and_given_back() -> None:
    before = own_memory(os.getpid())
    Faults().carry_out(order("eat_memory", 0.5, 96))
    eventually_blocking(lambda: own_memory(os.getpid()) - before >= 90 * MIB)
    eventually_blocking(lambda: own_memory(os.getpid()) - before < 48 * MIB)


def test_time_of_day_jumps_and_comes_back() -> None:
    clock, monotonic, before = time.time, time.monotonic(), time.time()
    Faults().carry_out(order("clock_jump", 0.2, -3600))
    assert time.time() < before - 3000 and time.time_ns() < (before - 3000) * 1e9
    assert time.monotonic() >= monotonic
    eventually_blocking(lambda: time.time is clock)
    assert time.time() >= before


def test_messages_are_impaired_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, float]] = []
    monkeypatch.setattr("relax_rt.hosting.faults.impair", lambda **how: asked.append(how))
    Faults().carry_out(order("delay", 5.0, 0.2))
    Faults().carry_out(order("partition", 3.0))
    assert asked == [{"delay_s": 0.2, "for_s": 5.0}, {"drop": 1.0, "for_s": 3.0}]


def test_fault_that_cannot_be_carried_out_harms_nobody_and_is_told() -> None:
    told: list[tuple[str, str]] = []
    faults = Faults(lambda kind, fields: told.append((kind, fields["order"])))
    faults.carry_out(order("hang_loop", 60.0))
    faults.carry_out(order("eat_memory", 1.0, -5))
    eventually_blocking(lambda: len(told) == 2)
    assert told == [("fault_failed", "hang_loop"), ("fault_failed", "eat_memory")]


async def test_each_fault_says_that_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_rt.hosting.faults.impair", lambda **how: None)
    told: list[tuple[str, str]] = []
    faults = Faults(lambda kind, fields: told.append((kind, fields["order"])))
    faults.follow(asyncio.get_running_loop())
    for kind in get_args(FaultKind):
        faults.carry_out(order(kind, 0.01, 1.0))
    await asyncio.sleep(0.05)
    eventually_blocking(lambda: len(told) == len(get_args(FaultKind)))
    assert sorted(told) == sorted(("fault_started", kind) for kind in get_args(FaultKind))
