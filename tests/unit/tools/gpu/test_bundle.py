"""What tools/gpu/bundle.py carries to a GPU machine and what it leaves to it; a bundle made and installed for real."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).parents[4] / "tools" / "gpu"))

from bundle import (
    BARE,
    MACHINE,
    PARENT_OF_SOURCES,
    environment_of,
    is_met,
    name_of,
    read_machine,
    target_interpreter,
    to_carry,
    wanted,
)

REPO = Path(__file__).parents[4]
ENVIRONMENT = environment_of("3.12")
PROJECT: dict[str, Any] = tomllib.loads((REPO / "pyproject.toml").read_text())


def carried(needs: list[str], resolved: dict[str, list[str]], machine: dict[str, str]) -> tuple[set[str], list[str]]:
    names, left = to_carry(list(map(Requirement, needs)), resolved, machine, ENVIRONMENT)
    return names, [str(need) for need in left]


def test_the_projects_own_requirements_are_read_as_pyproject_has_them() -> None:
    """A name that pyproject.toml loses has to be noticed here, and not on the machine."""
    names = {name_of(need) for need in wanted(PROJECT)}
    assert {"pyzmq", "torch", "transformers", "pytest", "peft", "hatchling", *BARE, PARENT_OF_SOURCES} <= names


def test_a_package_that_no_extra_has_any_more_is_named() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    without = {name: [r for r in found if not r.startswith("uvicorn")] for name, found in extras.items()}
    project = {**PROJECT, "project": {**PROJECT["project"], "optional-dependencies": without}}
    with pytest.raises(SystemExit, match=r"no extra of pyproject\.toml has uvicorn"):
        wanted(project)


def test_an_older_package_on_the_machine_is_carried_in_a_newer_version() -> None:
    (need,) = (n for n in wanted(PROJECT) if name_of(n) == "transformers")
    machine = read_machine(MACHINE)
    assert machine["transformers"] and not is_met(need, machine)
    resolved = {"transformers": ["tokenizers>=0.23.1,<0.24", "huggingface-hub>=1.31"]}
    assert carried([str(need)], resolved, machine)[0] == {"transformers"}, "the machine's own tokenizers will do"


@pytest.mark.parametrize(
    ("requires", "machine", "expected"),
    [
        (["b>=2"], {"b": "2.0"}, {"a"}),
        (["b>=2"], {"b": "1.9"}, {"a", "b"}),
        (["b>=2"], {"b": ""}, {"a"}),
        (["b>=2"], {}, {"a", "b"}),
        (["b>=2; python_version < '3.12'"], {}, {"a"}),
        (["b>=2; python_version >= '3.12'"], {}, {"a", "b"}),
        (["b>=2; extra == 'more'"], {}, {"a"}),
        (["B_>=2; sys_platform == 'win32'"], {}, {"a"}),
        (["b<3,>=2"], {"b": "3.0"}, {"a", "b"}),
        (["b"], {"b": "1.0.dev1+cu130"}, {"a"}),
        (["b>=2.9"], {"b": "2.11.0+cu130"}, {"a"}),
    ],
)
def test_what_the_machine_lacks_or_has_too_old_is_carried(
    requires: list[str], machine: dict[str, str], expected: set[str]
) -> None:
    assert carried(["a"], {"a": requires, "b": []}, machine)[0] == expected


def test_a_carried_package_asks_for_newer_ones_in_turn() -> None:
    resolved = {"a": ["b>=1"], "b": ["c>=2"], "c": ["d"], "d": ["a"]}
    names, left = carried(["a", "b"], resolved, {"b": "0.9", "c": "2.1"})
    assert names == {"a", "b"} and left == ["c>=2"], "c is new enough, so that d is not wanted"


def test_a_late_requirement_counts_for_a_package_that_was_left_to_the_machine_first() -> None:
    names, left = carried(["b>=1", "a"], {"a": ["b>=2"], "b": []}, {"b": "1.5"})
    assert names == {"a", "b"} and left == []


def test_packages_without_their_requirements_ask_for_nothing() -> None:
    assert carried(["megatron-core==0.16.1"], {"megatron-core": ["nowhere"]}, {})[0] == set(BARE)


def test_what_nobody_has_is_an_error_by_name() -> None:
    with pytest.raises(SystemExit, match="b>=2 is neither on the machine nor among"):
        carried(["a"], {"a": ["b>=2"]}, {"b": "1.0"})


def test_a_list_of_pip_is_read(tmp_path: Path) -> None:
    file = tmp_path / "machine.txt"
    file.write_text("# a comment\nPyYAML==6.0\nnvidia_nccl_cu13\nmine @ file:///x\n\ntorch==2.11.0+cu130  # 2026\n")
    assert read_machine(file) == {"pyyaml": "6.0", "nvidia-nccl-cu13": "", "torch": "2.11.0+cu130"}


def test_an_interpreter_of_another_version_is_refused() -> None:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert target_interpreter(own, sys.executable)
    with pytest.raises(SystemExit, match=r"is no Python 3\.99"):
        target_interpreter("3.99", sys.executable)
    assert target_interpreter("3.99", "") == ""


# What is large, or has a build of its own for a device, is there in this environment; all else is carried.
STAND_IN = [
    *("torch", "numpy", "safetensors", "tokenizers", "huggingface-hub"),
    *("pyarrow", "peft", "matplotlib", "pillow", "sympy"),
]
IMPORTS = "import relax_rt.roles.rollout, reasoning_gym, transformers, zmq, pytest, math_verify, megatron.core.utils"


@pytest.mark.long
def test_a_bundle_is_made_and_installed_without_an_index(tmp_path: Path) -> None:
    """The machine is this Python with torch and little else. Asks the package index that `make env` asks."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    machine = tmp_path / "machine.txt"
    lines = [f"python=={python}", "transformers==5.17.0", "cupy-cuda13x==14.2.0", "nvidia-nccl-cu13==2.30.7"]
    machine.write_text("\n".join([*lines, *(f"{name}=={metadata.version(name)}" for name in STAND_IN), ""]))
    bundle = tmp_path / "bundle"
    make = [sys.executable, str(REPO / "tools/gpu/bundle.py"), "--machine", str(machine), "--into", str(bundle)]
    made = subprocess.run(make, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr + made.stdout
    names = {file.name.split("-")[0] for file in bundle.glob("*.whl")}
    assert {"transformers", "reasoning_gym", "pycosat", "zss", "megatron_core"} <= names
    assert not {"torch", "numpy", "cupy_cuda13x"} & names

    venv = tmp_path / "venv"
    environment = {**os.environ, "PYTHON": sys.executable, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    environment.pop("PIP_FIND_LINKS", None)
    install = ["sh", str(bundle / "install.sh"), str(REPO), str(venv)]
    done = subprocess.run(install, env=environment, capture_output=True, text=True, timeout=600)
    # CuPy and NCCL are said to be on the machine, and are not: just that has to be found.
    told = done.stdout.splitlines()
    assert done.returncode == 1 and len(told) == 2, done.stderr + done.stdout
    assert all(line.endswith("is wanted, none is there") for line in told) and "cupy" in told[0]
    ran = subprocess.run([venv / "bin/python", "-c", IMPORTS], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    ran = subprocess.run([venv / "bin/relax-rt", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
