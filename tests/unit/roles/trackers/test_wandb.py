"""A real offline run of Weights & Biases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("wandb")

TOLD = """
from pathlib import Path
from relax_rt.roles.trackers.feed import Point
from relax_rt.roles.trackers.feed import WandbSink

folder = Path({folder!r})
sink = WandbSink(folder, project="p", name="tiny", run_id="abcd1234", config={{"algorithm": {{"steps": 6}}}})
sink.write([Point(step, 1.0, {{"train/reward_mean": step / 8}}) for step in range(1, 7)])
sink.close()
"""


def test_an_offline_run_lies_in_the_runs_folder(tmp_path: Path) -> None:
    folder, home = tmp_path / "run" / "wandb", tmp_path / "home"
    home.mkdir()
    # In a process of its own: wandb changes the environment and starts a helper.
    environment = {**os.environ, "HOME": str(home)}
    command = [sys.executable, "-c", TOLD.format(folder=str(folder))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = folder.glob("offline-run-*-abcd1234")
    (kept,) = run.glob("*.wandb")
    assert b"train/reward_mean" in kept.read_bytes()
    assert list(home.iterdir()) == []
