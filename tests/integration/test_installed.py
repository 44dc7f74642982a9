"""The built wheel, installed into an empty environment, without the clone: `init`, `validate`, `up`.

Each interpreter that is found (3.11 and newer) runs a job without torch. The RL job is run by this interpreter's
version, and by those that RELAX_INSTALL_PYTHONS names (as `3.12 3.13`): there pip may fetch a torch of several GB.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"


def interpreter(version: str) -> str | None:
    """Find a Python that stands beside this one, or else on the PATH (where it may be a stub that starts nothing)."""
    if version == THIS:
        return sys.executable
    beside = sorted(Path(sys.base_prefix).parent.glob(f"*{version}*/bin/python{version}"))
    named = shutil.which(f"python{version}")
    works = named and subprocess.run([named, "--version"], capture_output=True, check=False).returncode == 0
    return str(beside[-1]) if beside else named if works else None


FOUND = [version for version in ("3.11", "3.12", "3.13") if interpreter(version)]
WITH_TORCH = sorted({THIS, *os.environ.get("RELAX_INSTALL_PYTHONS", "").split()})
TIMEOUT_S = 1800.0
ASK = """
import asyncio, sys
sys.path.insert(0, "actors")
from judges import Judge
from relax_rt import discovery

async def ask():
    async with discovery.connect("runs/actors") as run:
        print("score", await run.actor("judge", Judge).score("the quick brown fox"))

asyncio.run(ask())
"""

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    call([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], REPO)
    (built,) = folder.iterdir()
    return built


def call(command: list[str], folder: Path) -> str:
    # No variable of the tests' own environment (PYTHONPATH above all) may show the clone to the installation.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{command} gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def install(wheel: Path, version: str, folder: Path, extra: str = "") -> str:
    """Make an environment, install the wheel into it at the versions of requirements.lock, and name its `relax-rt`."""
    python = interpreter(version)
    assert python, f"no Python {version} is installed"
    call([python, "-m", "venv", str(folder / "env")], folder)
    pip = [
        str(folder / "env/bin/python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        str(REPO / "requirements.lock"),
    ]
    call([*pip, f"{wheel}{extra}"], folder)
    return str(folder / "env/bin/relax-rt")


@pytest.mark.parametrize("version", FOUND)
def test_without_torch_a_job_of_own_roles_runs(version: str, wheel: Path, tmp_path: Path) -> None:
    relax_rt = install(wheel, version, tmp_path)
    call([relax_rt, "init", "starter"], tmp_path)
    assert (tmp_path / "starter/roles.toml").is_file()
    shutil.copytree(REPO / "examples/actors", tmp_path / "actors")
    call([relax_rt, "validate", "actors/roles.toml"], tmp_path)
    call([relax_rt, "up", "actors/roles.toml", "--detach"], tmp_path)
    try:
        assert "score" in call([relax_rt.replace("relax-rt", "python"), "-c", ASK], tmp_path)
    finally:
        call([relax_rt, "down", "runs/actors"], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("version", WITH_TORCH)
def test_the_starter_trains_from_the_wheel_alone(version: str, wheel: Path, tmp_path: Path) -> None:
    relax_rt = install(wheel, version, tmp_path, "[cpu]")
    call([relax_rt, "init", "starter"], tmp_path)
    call([relax_rt, "validate", "starter/roles.toml"], tmp_path)
    call([relax_rt, "up", "starter/roles.toml", "--set", "algorithm.steps=5"], tmp_path)
    summary = json.loads((tmp_path / "runs/starter/summary.json").read_text())
    assert summary["steps"]["done"] == 5
