"""Gather the wheels that a bare GPU machine lacks, so that this tree runs there without a package registry.

What is needed is read from pyproject.toml and resolved as a whole by pip for CPython 3.12 on Linux; what such a machine
has already (PRESENT) is left out, megatron-core comes without its dependencies, and reasoning-gym stays away (parts of
it have no wheels): name prompts of your own with ``data.path``. Into the folder go the wheels, their
list, and ``install.sh``. Run by ``make gpu-bundle``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON_VERSION = "3.12"
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(34, 16, -1)),
    "manylinux2014_x86_64",
    "manylinux_2_12_x86_64",
    "manylinux_2_5_x86_64",
    "manylinux1_x86_64",
]
PRESENT = {
    *("torch", "numpy", "transformers", "safetensors", "accelerate", "matplotlib", "pyarrow", "tokenizers", "triton"),
    *("cupy-cuda13x", "nvidia-nccl-cu13", "huggingface-hub", "sympy", "pillow", "networkx", "pyyaml", "tensordict"),
}
"""What a machine for torch and CuPy has; large, and of a build that fits its driver."""
TEST_TOOLS = ("pytest", "pytest-asyncio", "hypothesis")
SERVING = ("starlette", "uvicorn", "httpx")
TOO_LARGE_MIB = 40
"""A bundle of more than this has swallowed something that belongs into PRESENT."""


def name_of(requirement: str) -> str:
    """The normalised name at the start of a requirement."""
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end].lower().replace("_", "-").replace(".", "-")


def wanted() -> list[str]:
    """Requirements to resolve: the runtime's, those of tests and of serving, and what an editable install needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    optional = [r for extra in ("gpu", "agentic", "dev") for r in extras[extra]]
    chosen = [r for r in optional if name_of(r) in (*TEST_TOOLS, *SERVING)]
    found = [*project["project"]["dependencies"], *chosen, *project["build-system"]["requires"], "editables"]
    return [r for r in found if name_of(r) not in PRESENT]


def megatron() -> str:
    """The requirement on megatron-core for this Python."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["megatron"]
    (found,) = (r for r in extras if name_of(r) == "megatron-core" and ">= '3.12'" in r)
    return str(found).split(";")[0].strip()


def pip(*arguments: str) -> str:
    """Run pip, for the target machine."""
    target = ["--only-binary=:all:", "--python-version", PYTHON_VERSION, "--implementation", "cp"]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, *target, *platforms]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: pip {' '.join(arguments[:2])}: {done.stderr.strip()}")
    return done.stdout


def resolve(requirements: list[str], scratch: Path) -> list[str]:
    """Pinned requirements of all that is needed and not there, as pip's resolver has them."""
    out = scratch / "report.json"
    pip(
        "install",
        "--dry-run",
        "--quiet",
        "--ignore-installed",
        "--target",
        str(scratch),
        "--report",
        str(out),
        *requirements,
    )
    report: dict[str, Any] = json.loads(out.read_text())
    found = {i["metadata"]["name"]: i["metadata"]["version"] for i in report["install"]}
    return sorted(f"{name}=={version}" for name, version in found.items() if name_of(name) not in PRESENT)


INSTALL = """#!/bin/sh
# Installs the wheels beside this file, and the tree they were made for, without a registry.
#   install.sh TREE [TARGET]     TARGET: a folder for PYTHONPATH; without it they go into the environment of $PYTHON.
# What is installed already stays as it is. megatron-core is among them without its dependencies.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tree=${1:?the folder of relax-rt}
python=${PYTHON:-python3}
pip="$python -m pip --disable-pip-version-check install --quiet --no-index --find-links $here"
if [ $# -gt 1 ]; then
    $pip --no-deps --upgrade --target "$2" "$here"/*.whl
    PYTHONPATH="$2${PYTHONPATH:+:$PYTHONPATH}" $pip --no-deps --no-build-isolation --upgrade --target "$2" "$tree"
else
    $pip --no-deps -r "$here/names.txt"
    $pip --no-deps --no-build-isolation --editable "$tree"
fi
$python - <<'CHECK'
import importlib.util as u
missing = [n for n in ("torch", "numpy", "transformers", "safetensors", "cupy") if u.find_spec(n) is None]
print("installed;", "missing here: " + ", ".join(missing) if missing else "torch, transformers and CuPy are there")
CHECK
"""


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "gpu-bundle")
    into: Path = parser.parse_args().into
    shutil.rmtree(into, ignore_errors=True)
    scratch = into / ".scratch"
    scratch.mkdir(parents=True)
    pinned = resolve(wanted(), scratch)
    pip("download", "--quiet", "--no-deps", "--dest", str(into), *pinned, megatron())
    shutil.rmtree(scratch)
    wheels = sorted(into.glob("*.whl"))
    (into / "names.txt").write_text("".join(f"{name_of(w.name.split('-')[0])}\n" for w in wheels))
    script = into / "install.sh"
    script.write_text(INSTALL)
    script.chmod(0o755)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:8.2f} MB  {wheel.name}")
    total = sum(w.stat().st_size for w in wheels)
    print(f"{total / 1e6:8.2f} MB in {len(wheels)} wheels in {into}")
    if total > TOO_LARGE_MIB << 20:
        raise SystemExit(f"error: more than {TOO_LARGE_MIB} MiB; what the machine has belongs into PRESENT")


if __name__ == "__main__":
    main()
