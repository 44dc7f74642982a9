"""The tutorials run as written: their files are made and their commands called, in the order of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from live_run import WAIT_S

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
BLOCK = re.compile(r"<!-- (?P<what>run|file)(?P<more>[^>]*) -->\n```\w*\n(?P<text>.*?)```", re.DOTALL)
COMMAND_TIMEOUT_S = 4 * WAIT_S

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("page", ["first_run", "own_reward", "environment", "killed_trainer"])
def test_a_tutorial_runs_as_written(page: str, tmp_path: Path) -> None:
    blocks = list(BLOCK.finditer((TUTORIALS / f"{page}.md").read_text()))
    assert any(block["what"] == "run" for block in blocks)
    # `relax-rt` and `python` are those of the environment that runs this test.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
    env.pop("PYTHONWARNINGS", None)
    try:
        for block in blocks:
            if block["what"] == "file":
                (tmp_path / block["more"].removeprefix(":").strip()).write_text(block["text"])
                continue
            call(block["text"], tmp_path, env)
    finally:
        subprocess.run(["relax-rt", "down", "--now"], cwd=tmp_path, env=env, capture_output=True, check=False)


def call(commands: str, folder: Path, env: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-ec", commands],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{commands}gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
