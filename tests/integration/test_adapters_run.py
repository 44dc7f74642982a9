"""Adapters in place of weights, in whole runs: engines that were killed, a resume, another node; the bits are those
that anybody makes of the model's folder and a checkpoint's adapters."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from netns import Nodes
from numpy.typing import NDArray
from test_weights_nodes import OnNode, joined
from tiny_run import TinyRun, steps_that_count

from relax_rt.roles.models.resolve import resolve_model

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from safetensors.numpy import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from relax_rt.roles.rollout.engines.weights import FlatWeights  # noqa: E402
from relax_rt.transport.weights.manifest import bucket_digest, bucket_slices, total_digest  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.long]

STEPS, RANK, ALPHA = 120, 8, 16.0
OVERRIDES: dict[str, Any] = {
    "algorithm.steps": STEPS,
    "algorithm.learning_rate": 3e-3,
    "checkpoint.every_steps": 20,
    "evaluation.items": 16,
    "roles.rollout.count": 2,
    "roles.trainer.lora": f"{{ rank = {RANK}, alpha = {ALPHA} }}",
    "publication.adapters": "true",
    "supervision.restart": "{ max_restarts = 50, backoff_max_s = 0.3 }",
}
Swaps = dict[str, list[dict[str, Any]]]


def swaps(run: TinyRun) -> Swaps:
    """What each incarnation took, in order."""
    found: Swaps = {}
    for event in run.events("weights_swapped"):
        found.setdefault(event["by"], []).append(event)
    return found


def taken_by(run: TinyRun, slot: str) -> int:
    return sum(len(them) for who, them in swaps(run).items() if who.startswith(slot))


def digest_of_checkpoint(folder: Path) -> str:
    """Of the version that a checkpoint's adapters make of the model's folder, without the project's merge."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model("package:tiny", Path()), dtype=torch.float32)
    weights = FlatWeights(model, torch.float32, torch.device("cpu"))
    data = weights.standby(base=True)
    adapters = load_file(folder / "adapter" / "adapter_model.safetensors")
    for entry in weights.layout.entries:
        name = "base_model.model." + entry.name.removesuffix(".weight")
        if f"{name}.lora_A.weight" not in adapters:
            continue
        a, of_a = whole_numbers(adapters[f"{name}.lora_A.weight"])
        b, of_b = whole_numbers(adapters[f"{name}.lora_B.weight"])
        total = (b @ a).astype(np.float64) * (ALPHA / RANK * 2.0 ** (of_a + of_b))
        weight = np.frombuffer(data[entry.offset : entry.offset + entry.nbytes], np.float32).reshape(entry.shape)
        weight += total.astype(np.float32)
    return total_digest(bucket_digest(data[part]) for part in bucket_slices(weights.layout.nbytes))


def whole_numbers(values: NDArray[np.float32]) -> tuple[NDArray[np.int64], int]:
    """Up to 2^25, as rank 8 allows, and the power of two that they count times."""
    power = math.frexp(float(np.abs(values).max()))[1] - 25
    return np.rint(values.astype(np.float64) * 2.0**-power).astype(np.int64), power


def check_digests(run: TinyRun) -> None:
    """The digests of the checkpoints' versions, as they were published and as they are worked out here."""
    published = {event["version"]: event for event in run.events("published")}
    folders = sorted((run.run_dir / "checkpoints").glob("step-*"))
    assert folders
    for folder in folders:
        state = json.loads((folder / "relax_rt.json").read_text())
        assert state["digest"] == published[state["version"]]["digest"] == digest_of_checkpoint(folder)


def test_versions_are_made_of_the_base_and_adapters_whoever_dies(runs: list[TinyRun], tmp_path: Path) -> None:
    """On the trainer's node engines copy what is made."""
    run = TinyRun(tmp_path / "run", **OVERRIDES)
    runs.append(run.start())
    run.until("versions in both", lambda: min(taken_by(run, f"rollout/{n}") for n in (0, 1)) > 5)
    run.kill("rollout/1")
    before = taken_by(run, "rollout/1")
    run.until("versions in the successor", lambda: taken_by(run, "rollout/1") > before + 2)
    run.until("a checkpoint", lambda: run.events("checkpoint"))
    run.kill("trainer/0")
    run.process.send_signal(signal.SIGINT)  # all of it, and a resume in new shared memory
    run.wait()
    stopped = run.last_step()
    assert stopped < STEPS, "it was over too soon to matter"
    run.start()
    assert run.wait() == 0, run.text()

    assert sorted(steps_that_count(run.records("step"))) == list(range(1, STEPS + 1))
    assert run.events("queue_account")[-1]["trained_twice"] == 0
    incarnations = swaps(run)
    assert len([who for who in incarnations if who.startswith("rollout/1")]) >= 3
    whole = run.events("published")[0]["bytes"]
    assert all(0 < event["adapter_bytes"] < whole / 5 for event in run.events("published"))
    for events in incarnations.values():
        assert {(event["payload"], event["bytes"]) for event in events} == {("full", whole)}
    # At the resume engines wait for the trainer: what was committed before is not in the new shared memory.
    assert all("not on the stage" in event["why"] for event in run.events("weights_prepare_failed"))
    assert not run.events("engine_removed")
    check_digests(run)
    run.gone(run.run_id())


def test_another_node_gets_adapters_alone_behind_the_first(nodes: Nodes, runs: list[TinyRun], tmp_path: Path) -> None:
    listen = {"supervision.nodes.listen": json.dumps(f"{nodes.host}:0"), "roles.rollout.node": '"b"'}
    run = OnNode(tmp_path / "run", **OVERRIDES, **listen)
    run.node = nodes.first
    runs.append(run.start())
    with joined(run, nodes.second, tmp_path / "there") as there:
        assert run.wait() == 0, run.text()
        assert there.wait(120) == 0
    streamed = run.events("weights_streamed")
    whole = run.events("published")[0]["bytes"]
    assert len(streamed) > STEPS / 2 and {event["payload"] for event in streamed} == {"adapters"}
    # The first with what they are added to.
    assert whole < streamed[0]["bytes"] < 1.3 * whole
    assert all(event["bytes"] < whole / 5 for event in streamed[1:])
    # Of both engines, the one that fetched a version says so.
    swapped = [event for event in run.events("weights_swapped") if event["carrier"] == "stream"]
    assert 0 < sum(event["bytes"] for event in swapped) <= sum(event["bytes"] for event in streamed)
    check_digests(run)
