"""Programs on another node than the gateway: they reach it at its node's address, and their episodes are trained."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from netns import Nodes
from test_program_run import AGENT, CONFIG
from test_weights_nodes import OnNode, joined
from tiny_run import RELAX, steps_that_count

from relax_rt.roles.models.resolve import resolve_model

pytest.importorskip("torch")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytestmark = [pytest.mark.integration, pytest.mark.long]

STEPS = 3
JOB = """
from relax_rt.roles.job.job import RLJob


class SpreadJob(RLJob):
    one_node = tuple(kind for kind in RLJob.one_node if kind != "env")
"""
OVERRIDES = {
    "checkpoint.every_steps": 100,
    "evaluation.items": 4,
    "roles.env.node": '"b"',
    "run.job": '"spread"',
    "roles.gateway.host": '"node"',
}


@pytest.mark.parametrize("end", ["at its target", "drained"])
def test_programs_of_a_joined_node_play_through_the_gateway_of_the_head_until_the_run_ends(
    end: str, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The RL job keeps its env slots on the head. Here is one that does not."""
    resolve_model("package:tiny", Path())
    (tmp_path / "spread_job.py").write_text(JOB)
    package = tmp_path / "spread_job-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: spread-job\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[relax_rt.jobs]\nspread = spread_job:SpreadJob\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "job").mkdir()
    (tmp_path / "job/roles.toml").write_text(CONFIG)
    (tmp_path / "job/agent.py").write_text(AGENT)
    listen = {"supervision.nodes.listen": json.dumps(f"{nodes.host}:0")}
    steps = {"algorithm.steps": STEPS if end == "at its target" else 100}
    run = OnNode(tmp_path / "run", tmp_path / "job/roles.toml", **OVERRIDES, **listen, **steps)
    run.node = nodes.first
    run.start()
    try:
        with joined(run, nodes.second, tmp_path / "there") as there:
            run.until("the env role elsewhere", lambda: run.slot("env/0").get("node") == "b")
            if end == "drained":
                run.until("steps", lambda: run.last_step() >= STEPS)
                subprocess.run([RELAX, "down", str(run.run_dir)], timeout=120, check=True)
                run.process.wait(120)
            else:
                assert run.wait() == 0, run.text()
            assert there.wait(120) == run.process.returncode
    finally:
        run.end()
    path = steps_that_count(run.records("step"))
    assert sorted(path)[:STEPS] == list(range(1, STEPS + 1))
    finished = {event["slot"] for event in run.events("slot_exited") if event["finished"]}
    if end == "at its target":
        # It played the held-out episodes with the last weights, and ended by itself.
        assert sorted(path) == list(range(1, STEPS + 1)) and "env/0" in finished
        assert [e["when"] for e in run.events("evaluation_done")] == ["before", "after"]
    keys = [key for record in path.values() for key in record["keys"]]
    assert len(set(keys)) == len(keys) == 16 * len(path)
    (listening,) = run.events("gateway_listening")
    assert listening["url"].startswith(f"http://{nodes.host}:")
    assert not run.events("episode_lost") and not run.events("environment_failed")
    assert {event["node"] for event in run.events("first_work") if event["by"].startswith("env/")} == {"b"}
