"""The data plane under a virtual clock: a queue, its processes, lost messages, kills, zombies, crashes at any point."""

from __future__ import annotations

from collections import Counter

import pytest
from sim_checker import TWICE, Checker, Trained
from sim_world import World, streaming, training

from relax_rt.transport.queue.ledger.messages import SampleKey

SEEDS = range(100, 110)
ALL_FAULTS = {"killed", "paused", "hung", "node died", "broker died", "spilled", "marked", "gone on with"} | {
    "filtered",
    "in parts",
}


def findings(world: World) -> list[str]:
    return [f"{kind}: {detail}" for kind, detail in world.checker.findings]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_prompt_is_trained_on_once_whatever_dies(seed: int) -> None:
    world = training(seed)
    assert findings(world) == []
    assert world.checker.reads > 500 and len(world.path) >= 20


@pytest.mark.parametrize("seed", SEEDS)
def test_every_offered_sample_is_read_whatever_dies(seed: int) -> None:
    world = streaming(seed)
    assert findings(world) == []
    assert len(world.seen_by["store"]) >= 30


def test_all_kinds_of_faults_happen() -> None:
    happened = sum((make(seed).happened for seed in range(6) for make in (training, streaming)), Counter[str]())
    assert set(+happened) == ALL_FAULTS, happened


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = training(3), training(3)
    assert first.broker.journal == second.broker.journal and first.broker.snapshot == second.broker.snapshot
    assert first.kernel.now == second.kernel.now
    assert training(4).broker.snapshot != first.broker.snapshot


def test_the_checker_sees_what_was_trained_twice() -> None:
    one, other = SampleKey(1, 0), SampleKey(2, 0)
    checker = Checker(1.0)
    checker.judge_path({1: [Trained(one, 0, "a")], 2: [Trained(other, 0, "b")]}, 1, set())
    assert checker.findings == [(TWICE, "prompt 0: 2 times")]
