"""A whole run of the tiny job with SGLang, whose server is killed in the middle of a publication."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_parts import PYTHON, needs_server
from struck_rollout import AT_VERSION, STRUCK
from test_sglang_failures import left_since, shared_memory
from tiny_run import TinyRun, steps_that_count

from relax_rt.roles.models.resolve import resolve_model

pytestmark = [pytest.mark.engines, needs_server]

STEPS = 12
BATCH = 64
ROLE = "rollout/0"
OVERRIDES = {
    "algorithm.steps": STEPS,
    "evaluation.items": 8,
    "roles.rollout.engine": '"sglang"',
    "roles.rollout.sglang": json.dumps({"python": str(PYTHON), "device": "cpu"}).replace(":", " ="),
    "roles.rollout.target": json.dumps(f"{Path(__file__).parent / 'struck_rollout.py'}:StruckRollout"),
    "supervision.restart": "{ max_restarts = 5, backoff_max_s = 0.3 }",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    resolve_model("package:tiny", Path())
    before = shared_memory()
    run = TinyRun(tmp_path_factory.mktemp("run") / "run", **OVERRIDES).start()
    try:
        assert run.wait() == 0, run.text()
        assert not left_since(before)
        yield run
    finally:
        run.end()


def test_only_the_server_was_killed_and_the_role_reports_it(run: TinyRun) -> None:
    assert int((run.run_dir / STRUCK).read_text()) >= AT_VERSION
    (failed,) = [e for e in run.events("slot_exited") if e["diagnosis"]["kind"] != "clean"]
    assert failed["slot"] == ROLE
    assert "SGLang server" in json.dumps(failed["diagnosis"])
    run.gone(run.run_id())


def test_all_samples_are_accounted_for(run: TinyRun) -> None:
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, STEPS + 1))
    keys = [key for record in path.values() for key in record["keys"]]
    assert len(keys) == len(set(keys)) == STEPS * BATCH
    account = run.events("queue_account")[-1]
    assert (account["trained_twice"], account["freed"]) == (0, STEPS * BATCH)


def test_each_sample_is_of_committed_versions_of_its_engine(run: TinyRun) -> None:
    struck = int((run.run_dir / STRUCK).read_text())
    committed = [event["version"] for event in run.events("version_committed")]
    assert committed == sorted(set(committed)) and committed[-1] >= STEPS
    had: dict[str, list[int]] = {}
    for event in run.events("weights_swapped"):
        had.setdefault(event["by"], []).append(event["version"])
    (first, second) = [had[by] for by in had if by.startswith(f"{ROLE}#")]
    assert first == sorted(first) and max(first) < struck, "it never had what it was struck at"
    assert second == sorted(second) and min(second) >= struck
    made = {version for record in run.records("produced") for _, _, of in record["samples"] for version in of}
    assert made <= set(first + second) <= set(committed)
    for step in run.records("step"):
        trained = step["trained_version"]
        assert all(trained - 1 <= version <= trained for versions in step["versions"] for version in versions)


def test_rewards_are_recorded_and_the_policy_is_the_same_with_the_new_server(run: TinyRun) -> None:
    struck = int((run.run_dir / STRUCK).read_text())
    path = steps_that_count(run.records("step"))
    for record in path.values():
        assert len(record["sample_rewards"]) == BATCH and set(record["sample_rewards"]) <= {0.0, 1.0}
        assert record["reward_mean"] == pytest.approx(sum(record["sample_rewards"]) / BATCH)
    for part in ([r for r in path.values() if r["step"] < struck], [r for r in path.values() if r["step"] > struck]):
        # It adds rightly about a quarter of the time; by chance, or with other weights, hardly ever.
        assert sum(record["reward_mean"] for record in part) / len(part) > 0.1
