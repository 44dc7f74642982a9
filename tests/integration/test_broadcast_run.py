"""Weights broadcast over gloo to two rollouts of a whole run: one of these is killed in the middle of broadcasts, ranks
are killed and stopped, and nobody else notices."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_run import TinyRun, steps_that_count

from relax_rt.roles.models.resolve import resolve_model

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]

OVERRIDES: dict[str, Any] = {
    "algorithm.steps": 100_000,
    "checkpoint.every_steps": 50,
    "evaluation.items": 16,
    "evaluation.every_steps": 20,
    "roles.rollout.count": 2,
    "publication.carrier": '"collective"',
    "publication.communicator": '"gloo"',
    "publication.broadcast_timeout_s": 15,
    "supervision.restart": "{ max_restarts = 50, backoff_max_s = 0.3 }",
}
BOTH = ["rollout/0", "rollout/1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    resolve_model("package:tiny", Path())
    run = TinyRun(tmp_path_factory.mktemp("broadcast") / "run", **OVERRIDES).start()
    try:
        strike(run)
        run.down()
        yield run
    finally:
        run.end()


def strike(run: TinyRun) -> None:
    """Two kills of an engine, each while versions are broadcast to both; then of a rank, and a rank that stops."""
    for _ in range(2):
        reaches_both(run)
        run.kill("rollout/1")
    reaches_both(run)
    os.kill(rank_of(run), signal.SIGKILL)
    reaches_both(run)
    os.kill(rank_of(run), signal.SIGSTOP)
    reaches_both(run, 10)
    run.until("an evaluation", lambda: any(e["by"].startswith("evaluator/0") for e in run.events("weights_swapped")))


def reaches_both(run: TinyRun, more: int = 2) -> None:
    """Wait for so many more broadcasts that reach both engines."""
    before = sum(event["engines"] == BOTH for event in run.events("weights_broadcast"))
    run.until(
        "broadcasts to both",
        lambda: sum(event["engines"] == BOTH for event in run.events("weights_broadcast")) >= before + more,
    )


def rank_of(run: TinyRun) -> int:
    """The process of a receiver: the youngest that the trainer's launcher has forked."""
    trainer = psutil.Process(run.slot("trainer/0")["pid"])
    (launcher,) = (p for p in trainer.children() if "relax_rt.transport.weights.broadcast.rank" in p.cmdline())
    return max(launcher.children(), key=lambda p: (p.create_time(), p.pid)).pid


def test_the_run_did_all_its_work_and_left_nothing(run: TinyRun) -> None:
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, run.last_step() + 1))
    assert run.events("queue_account")[-1]["trained_twice"] == 0
    run.gone(run.run_id())


def test_only_the_engine_that_was_killed_ended(run: TinyRun) -> None:
    failed = [event["slot"] for event in run.events("slot_exited") if event["diagnosis"]["kind"] != "clean"]
    assert failed == ["rollout/1"] * 2
    assert not run.events("engine_removed") and not run.events("broadcast_disabled")


def test_every_version_of_every_engine_says_how_it_came(run: TinyRun) -> None:
    served = {event["version"]: event for event in run.events("weights_broadcast")}
    ways: Counter[tuple[str, str]] = Counter()
    for event in run.events("weights_swapped"):
        slot = event["by"].partition("#")[0]
        ways[slot, event["carrier"]] += 1
        if event["carrier"] == "collective":
            assert slot in served[event["version"]]["engines"]
    assert {carrier for _, carrier in ways} == {"collective", "shared_memory"}
    assert ways["evaluator/0", "collective"] == 0 < ways["evaluator/0", "shared_memory"]
    for slot in BOTH:
        assert ways[slot, "collective"] > 10
    # Whoever begins has its first version from the stage: the broadcast of that one was before its time.
    begun = {}
    for event in run.events("weights_swapped"):
        begun.setdefault(event["by"], event["carrier"])
    assert set(begun.values()) == {"shared_memory"}


def test_who_was_lost_is_told_and_was_served_from_the_stage(run: TinyRun) -> None:
    lost = {why.partition(":")[0] for event in run.events("weights_broadcast") for why in event["lost"].values()}
    assert lost & {"died", "silent", "stuck", "late"}, "the ranks that were struck"
    swapped = {(e["by"].partition("#")[0], e["version"]): e["carrier"] for e in run.events("weights_swapped")}
    missed = [(slot, e["version"]) for e in run.events("weights_broadcast") for slot in e["lost"]]
    assert {swapped.get(one, "shared_memory") for one in missed} == {"shared_memory"}


def test_the_trainer_waited_for_nobody(run: TinyRun) -> None:
    held = [record["stage_wait_s"] + record["publish_s"] for record in run.records("step")]
    assert max(held) < json.loads(str(OVERRIDES["publication.broadcast_timeout_s"])), "nor for the one that was stopped"
