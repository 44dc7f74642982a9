"""Rollouts on a node that the trainer is not on: their weights come by a stream, once for all engines there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from netns import Nodes
from tiny_run import RELAX, TinyRun

from relax_rt.roles.models.resolve import resolve_model

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]


class OnNode(TinyRun):
    """A run whose head is on a node."""

    node: list[str]

    def command(self) -> list[str]:
        return [*self.node, *super().command()]


@contextlib.contextmanager
def joined(run: OnNode, node: list[str], run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another node, joined."""
    record = run.run_dir / "run.json"
    listen = run.until("an address", lambda: record.exists() and json.loads(record.read_bytes()).get("listen"))
    address = listen.removeprefix("tcp://")
    command = [*node, RELAX, "up", "--join", address, "--key", str(run.run_dir / "join.key"), "--name", "b"]
    with (run_dir.parent / "join.out").open("wb") as out:
        process = subprocess.Popen(
            [*command, "--dir", str(run_dir)], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)


def test_rollouts_elsewhere_follow_the_trainer_by_one_stream_a_version(nodes: Nodes, tmp_path: Path) -> None:
    resolve_model("package:tiny", Path())
    overrides = {
        "algorithm.steps": 150,
        "checkpoint.every_steps": 50,
        "evaluation.items": 16,
        "supervision.nodes.listen": json.dumps(f"{nodes.host}:0"),
        "roles.rollout.count": 2,
        "roles.rollout.node": '"b"',
        "publication.directory": json.dumps(str(tmp_path / "files")),
    }
    run = OnNode(tmp_path / "run", **overrides)
    run.node = nodes.first
    run.start()
    try:
        with joined(run, nodes.second, tmp_path / "there") as there:
            run.until("steps", lambda: run.last_step() >= 4)
            # The server of the stage comes back at another port.
            os.kill(run.slot("queue/0")["pid"], signal.SIGKILL)
            killed_at = run.last_step()
            assert run.wait() == 0, run.text()
            assert there.wait(60) == 0
    finally:
        if run.process.poll() is None:
            subprocess.run([RELAX, "down", str(run.run_dir), "--kill"], timeout=60, check=False)
            run.process.kill()
            run.process.wait()
    assert run.last_step() == 150
    streamed = Counter(event["version"] for event in run.events("weights_streamed"))
    published = {event["version"] for event in run.events("published")}
    assert len(streamed) >= 75 and set(streamed) <= published
    assert set(streamed.values()) == {1}, "once for both engines of the node"
    assert max(streamed) > killed_at + 50
    swapped = run.events("weights_swapped")
    assert {event["by"].partition("#")[0] for event in swapped if "rollout" in event["by"]} == {
        "rollout/0",
        "rollout/1",
    }
    # The folder has the last version, and no other.
    (folder,) = (tmp_path / "files").iterdir()
    assert [path.name for path in folder.glob("v*")] == [f"v{max(published):08d}"]
    assert not run.events("weights_not_filed")
