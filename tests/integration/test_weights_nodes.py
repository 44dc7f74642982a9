"""Rollouts on a node that the trainer is not on: their weights come by a stream, once for all engines there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from netns import Nodes
from tiny_run import RELAX, TinyRun

from relax_rt.roles.models.resolve import resolve_model

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM  # noqa: E402

from relax_rt.roles.rollout.engines.weights import FlatWeights  # noqa: E402
from relax_rt.transport.weights.manifest import bucket_digest, bucket_slices, total_digest  # noqa: E402

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
                process.wait(120)


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
            os.kill(run.pid("queue/0"), signal.SIGKILL)
            killed_at = run.last_step()
            assert run.wait() == 0, run.text()
            assert there.wait(120) == 0
    finally:
        run.end()
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
    assert not run.events("weights_save_failed")


def digest_of_checkpoint(folder: Path) -> str:
    """Of the version that a checkpoint's weights are in the engines' dtype."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    weights = FlatWeights(model, torch.bfloat16, torch.device("cpu"))
    data = weights.standby(base=True)
    return total_digest(bucket_digest(data[part]) for part in bucket_slices(weights.layout.nbytes))


def test_rollouts_elsewhere_get_deltas_alone_whoever_dies(nodes: Nodes, tmp_path: Path) -> None:
    """In bfloat16 a small learning rate changes few elements with each step."""
    resolve_model("package:tiny", Path())
    overrides: dict[str, Any] = {
        "algorithm.steps": 120,
        "algorithm.learning_rate": 3e-6,
        "checkpoint.every_steps": 20,
        "evaluation.items": 16,
        "publication.delta": "true",
        "supervision.nodes.listen": json.dumps(f"{nodes.host}:0"),
        "supervision.restart": "{ max_restarts = 50, backoff_max_s = 0.3 }",
        "roles.rollout.count": 2,
        "roles.rollout.node": '"b"',
        "roles.rollout.dtype": '"bfloat16"',
        "roles.evaluator.dtype": '"bfloat16"',
    }
    run = OnNode(tmp_path / "run", **overrides)
    run.node = nodes.first
    run.start()
    try:
        with joined(run, nodes.second, tmp_path / "there") as there:
            run.until("steps", lambda: run.last_step() >= 5)
            run.kill("rollout/0")
            # The server of the stage comes back at another port.
            killed_at = run.last_step()
            run.kill("queue/0")
            run.until("steps", lambda: run.last_step() >= killed_at + 10)
            run.kill("rollout/1")
            run.kill("trainer/0")
            assert run.wait() == 0, run.text()
            assert there.wait(120) == 0
    finally:
        run.end()
    assert run.last_step() == 120
    streamed, published = run.events("weights_streamed"), {e["version"]: e for e in run.events("published")}
    whole = published[1]["bytes"]
    deltas = [event for event in streamed if event["payload"] == "delta"]
    assert streamed[0]["payload"] == "full" and streamed[0]["bytes"] > whole
    # A version may be whole where it was fetched in part by who was killed; then it is told.
    assert all(event in deltas or event["why_full"] for event in streamed[1:])
    assert len(deltas) > 0.9 * len(streamed) > 50
    assert all(event["bytes"] < whole / 4 for event in deltas)
    assert max(event["version"] for event in deltas) > killed_at + 60
    # Who came back applies none itself: it copies what its node has.
    swapped = run.events("weights_swapped")
    assert len({event["by"] for event in swapped if event["by"].startswith("rollout/")}) == 4
    sent = {(event["payload"], event["carrier"]) for event in swapped if event["by"].startswith("rollout/")}
    assert sent == {("full", "stream"), ("delta", "stream")}
    # The evaluator is on the trainer's node.
    assert {event["carrier"] for event in swapped if event["by"].startswith("evaluator/")} <= {"shared_memory"}
    folders = sorted((run.run_dir / "checkpoints").glob("step-*"))
    assert folders
    for folder in folders:
        state = json.loads((folder / "relax_rt.json").read_text())
        assert state["digest"] == published[state["version"]]["digest"] == digest_of_checkpoint(folder)
    sizes = sorted(event["bytes"] for event in deltas)
    sys.stdout.write(f"{len(deltas)} deltas of {whole} bytes: {sizes[0]}, {sizes[len(sizes) // 2]}, {sizes[-1]}\n")
    run.gone(run.run_id())
