"""A run inside a program: started, asked, watched, and ended with the block that holds it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from relax_rt import Runtime
from relax_rt.config.problems import BadInput
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.supervision import control

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]
EXAMPLE = Path(__file__).parents[2] / "examples" / "embed"
DEADLINE_S = 240.0
SMALL = ["evaluation.items=4", "evaluation.during_items=4"]


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    resolve_model("package:tiny", Path())


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("embed_train", EXAMPLE / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def at(run_dir: Path, *more: str) -> list[str]:
    return [f"run.dir={json.dumps(str(run_dir))}", *SMALL, *more]


def over(run_dir: Path, run_id: str) -> str:
    """Wait until nothing of the run lives; how it ended."""
    end = time.monotonic() + DEADLINE_S
    while control.find_run(run_dir).alive or Path(f"/tmp/relax-{run_id}").exists():
        assert time.monotonic() < end, "the run lives on"
        time.sleep(0.05)
    return control.status(run_dir).status


async def test_the_example_is_short_and_trains(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len((EXAMPLE / "train.py").read_text().splitlines()) < 60
    async with asyncio.timeout(DEADLINE_S):
        rewards = await example.main(*at(tmp_path / "run", "algorithm.steps=4"))
    said = capsys.readouterr().out
    assert len(rewards) == 4 and "17 + 25 = " in said and said.endswith("finished\n")


async def test_an_error_in_the_block_ends_the_run_in_order(tmp_path: Path) -> None:
    run = Runtime.from_toml(EXAMPLE / "roles.toml", at(tmp_path / "run", "algorithm.steps=100000"))
    with pytest.raises(ValueError, match="mine"):
        async with asyncio.timeout(DEADLINE_S), run:
            async for step in run.records("step"):
                assert step["step"] == 1
                break
            assert (await run.status()).status == "running"
            raise ValueError("mine")
    assert over(run.run_dir, run.run_id) == "stopped"


async def test_what_is_wrong_is_told_and_nothing_is_started(tmp_path: Path) -> None:
    run = Runtime.from_toml(EXAMPLE / "roles.toml", at(tmp_path / "run", "algorithm.stepz=1"))
    with pytest.raises(BadInput, match="stepz"):
        await run.start()
    await run.close()
    assert not (tmp_path / "run").exists()


PROGRAM = """
import asyncio, sys, relax_rt
async def main():
    async with relax_rt.Runtime.from_toml(sys.argv[1], sys.argv[2:]) as run:
        print(run.run_id, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


def test_the_run_ends_when_the_program_is_killed(tmp_path: Path) -> None:
    overrides = at(tmp_path / "run", "algorithm.steps=100000")
    argv = [sys.executable, "-c", PROGRAM, str(EXAMPLE / "roles.toml"), *overrides]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        run_id = program.stdout.readline().strip()
        assert run_id
        os.kill(program.pid, signal.SIGKILL)
    assert over(tmp_path / "run", run_id) == "stopped"
