"""An engine is struck at every step of a publication, in a real run: it is whole at a version or out, and the others
do not notice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fragile_rollout import FRAGILE, STRIKES
from tiny_run import TinyRun, steps_that_count

from relax_rt.roles.models.resolve import resolve_model

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]

OVERRIDES: dict[str, Any] = {
    "algorithm.steps": 100_000,
    "checkpoint.every_steps": 25,
    "evaluation.items": 16,
    "roles.rollout.count": 2,
    "roles.rollout.hang_after_s": 10,
    "roles.rollout.target": json.dumps(f"{Path(__file__).parent / 'fragile_rollout.py'}:FragileRollout"),
    "publication.ack_timeout_s": 10,
    "supervision.restart": "{ max_restarts = 50, backoff_max_s = 0.3 }",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    resolve_model("package:tiny", Path())
    run = TinyRun(tmp_path_factory.mktemp("publication") / "run", **OVERRIDES).start()
    try:
        run.until("an engine that outlived all strikes", lambda: outlived(run))
        run.down()
        yield run
    finally:
        run.end()


def outlived(run: TinyRun) -> bool:
    """Whether the incarnation after the last strike has a version."""
    epochs = [one["epoch"] for one in run.processes_of(FRAGILE)]
    last = f"{FRAGILE}#{epochs[-1]}" if len(epochs) > len(STRIKES) else ""
    return any(event["by"] == last for event in run.events("weights_swapped"))


def struck(run: TinyRun) -> dict[str, int]:
    """Each strike and the version at which it fell."""
    told = (path.read_text().split() for path in sorted((run.run_dir / "struck").iterdir()))
    return {strike: int(version) for strike, version in told}


def test_every_strike_fell_and_the_run_did_all_its_work(run: TinyRun) -> None:
    assert tuple(struck(run)) == STRIKES
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, run.last_step() + 1))
    keys = [key for record in path.values() for key in record["keys"]]
    assert len(set(keys)) == len(keys)
    assert run.events("queue_account")[-1]["trained_twice"] == 0
    run.gone(run.run_id())


def test_only_the_engine_that_was_struck_ended(run: TinyRun) -> None:
    failed = [e for e in run.events("slot_exited") if e["diagnosis"]["kind"] != "clean"]
    assert {e["slot"] for e in failed} == {FRAGILE}
    assert len(failed) == len(STRIKES)


def test_engines_that_could_not_be_whole_say_why(run: TinyRun) -> None:
    why = [event["why"] for event in run.events("engine_removed")]
    assert len(why) == 3, "the others had no chance to say anything"
    assert "it answered that it swapped, and samples from version" in why[0]
    assert "struck by the test" in why[1], "newer versions came all the while, and it could take none"
    assert "10 s" in why[2]


def test_no_engine_says_that_it_has_what_it_was_struck_at(run: TinyRun) -> None:
    """By incarnation: what a struck one acknowledged, and what it sampled from, lies before the strike."""
    swapped: dict[str, list[int]] = {}
    for event in run.events("weights_swapped"):
        swapped.setdefault(event["by"], []).append(event["version"])
    # One may be struck before its first version is whole, where a newer one took that one's place.
    begun = [f"{FRAGILE}#{event['epoch']}" for event in run.events("slot_exited") if event["slot"] == FRAGILE]
    assert len(begun) == len(STRIKES) + 1
    assert sum(by in swapped for by in begun) > len(STRIKES) / 2
    for by, version in zip(begun, struck(run).values(), strict=False):
        had_by = swapped.get(by, [])
        assert version not in had_by
        assert had_by == sorted(had_by)
    committed = {event["version"] for event in run.events("version_committed")}
    had = {version for versions in swapped.values() for version in versions}
    for record in run.records("produced"):
        for _, _, versions in record["samples"]:
            assert set(versions) <= had & committed, record


def test_a_successor_begins_at_the_committed_version(run: TinyRun) -> None:
    events = sorted(run.events("version_committed") + run.events("weights_swapped"), key=lambda e: e["m"])
    committed, met = 0, set()
    for event in events:
        if event["kind"] == "version_committed":
            committed = event["version"]
        elif event["by"] not in met:
            met.add(event["by"])
            if event["by"].startswith("rollout/"):
                assert committed - event["version"] <= 2, "a version or two may be committed while it loads the first"


def test_the_trainer_waited_for_nobody(run: TinyRun) -> None:
    # Before the optimizer, for the copy, and behind it, for the publication before.
    held = [record["stage_wait_s"] + record["publish_s"] for record in run.records("step")]
    assert max(held) < OVERRIDES["publication.ack_timeout_s"], "not even for one that hung or was stopped"
    assert {event["engine"].partition("#")[0] for event in run.events("engine_lost")} <= {FRAGILE}
    lost = run.events("engine_lost")
    assert lost and not any("finished" in event["why"] for event in lost), "none of them ended in order"
