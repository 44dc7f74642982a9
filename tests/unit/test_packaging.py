"""What an installation claims: one module, `relax_rt`; the short names of its two linked folders stay the user's."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def python(code: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", ["transport", "roles"])
def test_short_names_raise_with_the_repository_on_the_path(name: str) -> None:
    done = python(f"import {name}", cwd=REPO)
    assert done.returncode == 1
    assert f"ImportError: import relax_rt.{name}, not {name}" in done.stderr


def test_own_packages_of_the_same_name_work(tmp_path: Path) -> None:
    for name in ("roles", "transport"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"mine = '{name} of the user'\n")
    code = "import relax_rt.roles, relax_rt.transport, roles, transport; print(roles.mine, '/', transport.mine)"
    done = python(code, cwd=tmp_path)
    assert done.stdout == "roles of the user / transport of the user\n", done.stderr


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("relax_rt", ("numpy", "torch", "pydantic", "msgspec", "zmq")),
        ("relax_rt.config.loader", ("numpy", "torch", "zmq")),
        ("relax_rt.cli.main", ("numpy", "torch", "zmq", "transformers", "pydantic", "relax_rt.supervision.control")),
    ],
)
def test_imports_stay_light(module: str, heavy: tuple[str, ...], tmp_path: Path) -> None:
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    done = python(code, cwd=tmp_path)
    assert done.stdout == "[]\n", done.stderr


def test_what_is_raised_has_a_name_in_the_package(tmp_path: Path) -> None:
    code = "import relax_rt; print(issubclass(relax_rt.BadInput, relax_rt.RelaxError), sorted(relax_rt.__all__))"
    done = python(code, cwd=tmp_path)
    names = ["Actor", "BadInput", "RelaxError", "Runtime", "__version__", "discovery"]
    assert done.stdout == f"True {names}\n", done.stderr


def build(target: str, source: Path, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (built,) = into.iterdir()
    return built


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_and_sdist_hold_the_linked_folders_once_and_under_their_import_name(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    files = contents(build("wheel", REPO, tmp_path / "wheel"))
    assert {name.split("/")[0] for name in files} == {"relax_rt"}
    for folder in ("transport", "roles"):
        sources = {f"relax_rt/{path.relative_to(REPO)}" for path in (REPO / folder).rglob("*.py")}
        assert sources <= files
    with tarfile.open(build("sdist", REPO, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    assert contents(build("wheel", source, tmp_path / "again")) == files


def test_modules_that_roles_preload_exist() -> None:
    """A zygote goes on without a module that it cannot import, so nothing else would notice a renamed one."""
    missing = [
        (entry.name, module)
        for entry in entry_points(group="relax_rt.roles")
        if entry.dist is not None and entry.dist.name == "relax-rt"  # tests install roles of their own
        for module in getattr(entry.load(), "preload", ())
        if module.startswith("relax_rt.") and find_spec(module) is None
    ]
    assert not missing


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their name alone: where both are collected, the second one is an error."""
    names = Counter(path.name for path in (REPO / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
