"""Gather the packages that a GPU machine lacks, so that this tree runs there without a package registry.

    python tools/gpu/bundle.py [--machine FILE] [--python PYTHON] [--into FOLDER]

`--machine` lists what the machine has, in the form of `pip list --format=freeze`. A package of the list stays out of
the bundle only where its version meets every requirement of pyproject.toml and of all packages in the bundle;
otherwise the bundle carries a newer one. Packages whose authors publish no wheel are built by `--python`, an
interpreter of the machine's version; without one, their sources are carried and install.sh compiles them there. The
bundle holds the packages, `needs.txt` (what the machine must have, with versions) and `install.sh`. Run by ``make
gpu-bundle``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Path(__file__).with_name("machine.txt")
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(34, 16, -1)),
    "manylinux2014_x86_64",
    "manylinux_2_12_x86_64",
    "manylinux_2_5_x86_64",
    "manylinux1_x86_64",
]
EXTRAS = ("gpu", "megatron", "lora")
"""Extras of pyproject.toml that are wanted whole."""
SINGLE = ("starlette", "uvicorn", "math-verify", "pytest", "pytest-asyncio", "hypothesis")
"""Packages of other extras that the tests and the gateway import."""
BARE = ("megatron-core",)
"""Carried without their requirements, which are not used here and would fill the bundle."""
SOURCE_ONLY = ("cellpylib", "pycosat", "zss")
"""Requirements of reasoning-gym that are published without wheels."""
PARENT_OF_SOURCES = "reasoning-gym"
TOO_LARGE_MIB = 50
"""A larger bundle has swallowed something that the machine has, and leaves no room for the tree beside it."""


def name_of(requirement: Requirement) -> str:
    """Return the normalised name."""
    return canonicalize_name(requirement.name)


def wanted(project: Mapping[str, Any]) -> list[Requirement]:
    """Return the requirements of running, testing and editably installing the project, read from pyproject.toml."""
    extras: dict[str, list[str]] = project["project"]["optional-dependencies"]
    whole = [Requirement(text) for extra in EXTRAS for text in extras[extra]]
    others = [Requirement(text) for texts in extras.values() for text in texts]
    single = [found for found in others if name_of(found) in SINGLE]
    if absent := set(SINGLE) - {name_of(found) for found in single}:
        raise SystemExit(f"error: no extra of pyproject.toml has {', '.join(sorted(absent))}: mend SINGLE")
    base = [*project["project"]["dependencies"], *project["build-system"]["requires"], "editables"]
    return [*map(Requirement, base), *whole, *single]


def read_machine(file: Path) -> dict[str, str]:
    """Return the version of each package on the machine; "" where it is not known."""
    lines = [line.split("#")[0].strip() for line in file.read_text().splitlines()]
    pairs = [line.partition("==") for line in lines if line and " @ " not in line]
    return {str(canonicalize_name(name)): version for name, _, version in pairs}


def environment_of(python: str) -> dict[str, str]:
    """Return what markers are evaluated with: the machine's, which is not the one that runs this."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "extra": "",
    }


def applies(requirement: Requirement, environment: Mapping[str, str]) -> bool:
    """Tell whether the requirement counts on the machine."""
    return requirement.marker is None or requirement.marker.evaluate(dict(environment))


def is_met(requirement: Requirement, machine: Mapping[str, str]) -> bool:
    """Tell whether the machine's own version will do."""
    version = machine.get(name_of(requirement))
    return version is not None and (not version or requirement.specifier.contains(version, prereleases=True))


def to_carry(
    needs: Iterable[Requirement],
    resolved: Mapping[str, Sequence[str]],
    machine: Mapping[str, str],
    environment: Mapping[str, str],
) -> tuple[set[str], list[Requirement]]:
    """Decide what the bundle carries and what it leaves to the machine.

    Args:
        needs: requirements to start from.
        resolved: each package that may be carried, with the requirements of its chosen version.
        machine: versions that are there.
        environment: see `environment_of`.

    Returns:
        Names to carry, and the requirements that the machine has to meet.

    Raises:
        SystemExit: a requirement is met by neither.
    """
    carried: set[str] = set()
    waiting = [need for need in needs if applies(need, environment)]
    seen: list[Requirement] = []
    while waiting:
        need = waiting.pop()
        seen.append(need)
        name = name_of(need)
        if name in carried or is_met(need, machine):
            continue
        if name not in resolved:
            raise SystemExit(f"error: {need} is neither on the machine nor among what was resolved")
        carried.add(name)
        texts = [] if name in BARE else resolved[name]
        waiting.extend(found for found in map(Requirement, texts) if applies(found, environment))
    left: dict[str, SpecifierSet] = {}
    for need in seen:
        if (name := name_of(need)) not in carried:
            left[name] = left.get(name, SpecifierSet()) & need.specifier
    return carried, [Requirement(f"{name}{specifiers}") for name, specifiers in sorted(left.items())]


def pip(*arguments: str, python: str = sys.executable) -> str:
    """Run pip.

    Raises:
        SystemExit: it failed; says why.
    """
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: pip {' '.join(arguments[:2])}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def for_machine(python: str) -> list[str]:
    """Return pip's options for packages of the machine."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    return ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]


def resolve(requirements: Sequence[Requirement], python: str, scratch: Path) -> dict[str, tuple[str, list[str]]]:
    """Return version and requirements of each package that pip's resolver chooses for the machine."""
    out = scratch / "report.json"
    target = ["--ignore-installed", "--target", str(scratch), *for_machine(python)]
    pip("install", "--dry-run", "--quiet", *target, "--report", str(out), *map(str, requirements))
    report: dict[str, Any] = json.loads(out.read_text())
    found = [item["metadata"] for item in report["install"]]
    return {canonicalize_name(m["name"]): (m["version"], m.get("requires_dist", [])) for m in found}


def requirements_of(wheel: Path) -> list[str]:
    """Return what the metadata of a wheel requires."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])


def target_interpreter(version: str, named: str) -> str:
    """Return an interpreter of the machine's version: the named one, or one on the PATH; "" where there is none."""
    name = named or f"python{version}"
    code = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
    try:
        # pyenv's shims run only the versions that are selected.
        environment = {**os.environ, "PYENV_VERSION": version}
        done = subprocess.run([name, "-c", code], env=environment, capture_output=True, check=False)
        if done.returncode == 0:
            where = [name, "-c", "import sys; print(sys.executable)"]
            return subprocess.run(where, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    except OSError:
        pass
    if named:
        raise SystemExit(f"error: --python {named} is no Python {version}, which the machine has")
    return ""


def build(requirement: Requirement, version: str, python: str, scratch: Path, into: Path) -> list[str]:
    """Put a package that has no wheel into the bundle: built where that is possible here, otherwise its source.

    Returns:
        What it requires.
    """
    made = scratch / name_of(requirement)
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(made), str(requirement), python=python or sys.executable)
    (wheel,) = made.glob("*.whl")
    tags = {tag.interpreter for tag in parse_wheel_filename(wheel.name)[3]}
    requires = requirements_of(wheel)
    if tags & {"py3", f"py{version.replace('.', '')}", f"cp{version.replace('.', '')}"}:
        shutil.move(wheel, into)
    else:
        print(f"note: no Python {version} here to build {requirement}: the machine compiles its source")
        source = ["--no-deps", f"--no-binary={requirement.name}"]
        pip("download", "--quiet", *source, "--dest", str(into), str(requirement))
    return requires


INSTALL = """#!/bin/sh
# Install relax-rt and the packages beside this file without a registry, into a virtual environment of its own.
#   install.sh TREE VENV     TREE: the folder of relax-rt; VENV: the environment to make, on top of that of $PYTHON.
# The environment sees all packages of $PYTHON (python3) and changes none of them.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tree=$(cd "${1:?the folder of relax-rt}" && pwd)
venv=${2:?the folder of the environment to make}
base=${PYTHON:-python3}
"$base" -m venv --without-pip "$venv"
"$base" - "$venv" <<'LINK'
import pathlib, site, sys, sysconfig
folders = dict.fromkeys([sysconfig.get_path("purelib"), *site.getsitepackages()])
venv = pathlib.Path(sys.argv[1]) / "lib" / ("python%d.%d" % sys.version_info[:2]) / "site-packages"
(venv / "below.pth").write_text("".join(f"import site; site.addsitedir({f!r})\\n" for f in folders))
LINK
python="$venv/bin/python"
pip="$python -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-build-isolation"
$pip "$here"/*.whl
for source in "$here"/*.tar.gz; do
    [ -e "$source" ] || continue
    $pip "$source" || echo "warning: $source was not compiled: what imports it will fail"
done
$pip --editable "$tree"
"$python" - "$here/needs.txt" <<'CHECK'
import importlib.metadata as metadata, sys
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
wrong = []
for need in map(Requirement, open(sys.argv[1]).read().splitlines()):
    try:
        found = metadata.version(need.name)
    except metadata.PackageNotFoundError:
        found = "none"
    if found == "none" or not need.specifier.contains(found, prereleases=True):
        wrong.append(f"{need} is wanted, {found} is there")
print("\\n".join(wrong) or "installed: every requirement is met", flush=True)
sys.exit(bool(wrong))
CHECK
"""


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "gpu-bundle")
    parser.add_argument("--machine", type=Path, default=MACHINE, help="what the machine has; a pip list in freeze form")
    parser.add_argument("--python", default="", help="an interpreter of the machine's version, to build with")
    arguments = parser.parse_args()
    into: Path = arguments.into
    machine = read_machine(arguments.machine)
    version = machine.pop("python", "3.12")
    environment = environment_of(version)
    python = target_interpreter(version, arguments.python)
    shutil.rmtree(into, ignore_errors=True)
    scratch = into / ".scratch"
    scratch.mkdir(parents=True)

    needs = wanted(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    parent = [need for need in needs if name_of(need) == PARENT_OF_SOURCES]
    pip("download", "--quiet", "--no-deps", "--dest", str(scratch), *for_machine(version), *map(str, parent))
    (wheel,) = scratch.glob("*.whl")
    children = [r for r in map(Requirement, requirements_of(wheel)) if applies(r, environment)]
    sources = [child for child in children if name_of(child) in SOURCE_ONLY]
    needs.extend(child for child in children if child not in sources)
    for source in sources:
        needs.extend(map(Requirement, build(source, version, python, scratch, into)))
    apart = {*BARE, PARENT_OF_SOURCES}
    open_needs = [n for n in needs if applies(n, environment) and not is_met(n, machine) and name_of(n) not in apart]
    resolved = resolve(open_needs, version, scratch)
    for need in needs:
        if name_of(need) in apart:
            resolved[name_of(need)] = (str(need.specifier).removeprefix("=="), [])
    carried, left = to_carry(needs, {name: texts for name, (_, texts) in resolved.items()}, machine, environment)
    pins = sorted(f"{name}=={resolved[name][0]}" for name in carried)
    pip("download", "--quiet", "--no-deps", "--dest", str(into), *for_machine(version), *pins)
    shutil.rmtree(scratch)
    (into / "needs.txt").write_text("".join(f"{need}\n" for need in left))
    script = into / "install.sh"
    script.write_text(INSTALL)
    script.chmod(0o755)
    report(into)


def report(into: Path) -> None:
    """Print what was gathered.

    Raises:
        SystemExit: it is too large.
    """
    packages = sorted([*into.glob("*.whl"), *into.glob("*.tar.gz")])
    for package in packages:
        parsed = parse_wheel_filename(package.name) if package.suffix == ".whl" else parse_sdist_filename(package.name)
        print(f"{package.stat().st_size / 1e6:8.2f} MB  {parsed[0]} {parsed[1]}")
    total = sum(package.stat().st_size for package in packages)
    print(f"{total / 1e6:8.2f} MB in {len(packages)} packages in {into}")
    print(f"left to the machine: {', '.join((into / 'needs.txt').read_text().split(chr(10))[:-1])}")
    if total > TOO_LARGE_MIB << 20:
        raise SystemExit(f"error: more than {TOO_LARGE_MIB} MiB; name large packages that the machine has in --machine")


if __name__ == "__main__":
    main()
