"""Whole runs with roles on a device."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tiny_run import CONFIG, TinyRun

ACTORS = """
[run]
name = "holder"
job = "plain"

[roles.holder]
target = "device_actor.py:Holder"
gpus = 1

[supervision.restart]
max_restarts = 3
backoff_first_s = 0.05
backoff_max_s = 0.1
"""


def test_a_role_on_the_device_is_ready_again_after_a_kill_and_no_memory_is_lost(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("device_actor.py"), tmp_path)
    config = tmp_path / "roles.toml"
    config.write_text(ACTORS)
    torch.cuda.init()
    before = torch.cuda.mem_get_info()[0]
    run = TinyRun(tmp_path / "run", config).start()
    try:
        run.until("holder/0", lambda: run.slot("holder/0").get("state") == "ready")
        holding = torch.cuda.mem_get_info()[0]
        assert holding < before - (200 << 20), "the role holds memory of the device"
        run.kill("holder/0")
        again = torch.cuda.mem_get_info()[0]
        assert again > holding - (200 << 20), "the killed one's memory came back before the next took its own"
    finally:
        subprocess.run([run.command()[0], "down", str(run.run_dir)], check=False, timeout=60)
        run.process.wait(60)
    run.gone(run.run_id())


def works_on_the_device(pid: int) -> bool:
    """Asks nvidia-smi; some virtual machines let it see no process, and then open files of the device count."""
    users = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.split()
    if any(user.isdigit() for user in users):
        return str(pid) in users
    opened = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    return any(name.startswith("/dev/nvidia") and name[len("/dev/nvidia") :].isdigit() for name in opened)


@pytest.mark.parametrize("slot", ["rollout/0", "trainer/0"])
def test_in_a_short_grpo_run_a_role_with_a_part_of_the_device_works_on_it(tmp_path: Path, slot: str) -> None:
    run = TinyRun(tmp_path / "run", CONFIG, **{"roles.trainer.gpus": 0.5, "roles.rollout.gpus": 0.5}).start()
    try:
        run.until("the first step", lambda: run.last_step() >= 1)
        pid = int(run.slot(slot)["pid"])
        assert works_on_the_device(pid), f"{slot} has no context on the device"
        assert run.wait() == 0
        assert json.loads((run.run_dir / "summary.json").read_text())["steps"] == 6
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
