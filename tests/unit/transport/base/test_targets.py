"""Code of the user's own, found and imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from relax_rt.transport.base.targets import NoTarget, load_target


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder, beside an installed package `tools_x` and module `helpers_x` that it has namesakes of."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    installed = tmp_path / "installed"
    write(installed, "tools_x/__init__.py", "T = 'installed'")
    write(installed, "helpers_x.py", "H = 'installed'")
    write(installed, "data_x/__init__.py", "D = 'installed'")
    monkeypatch.syspath_prepend(str(installed))
    return tmp_path / "project"


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


RELATIVE = {
    "from . import beside": "beside.B",
    "from .beside import B": "B",
    "from ..common import B": "B",
    "from .. import common": "common.B",
    "from .deep.low import B": "B",
    "import pack.beside": "pack.beside.B",
    "from pack import beside": "beside.B",
    "from pack.beside import B": "B",
    "import common": "common.B",
}


@pytest.mark.parametrize("package", [True, False], ids=["package", "plain folder"])
@pytest.mark.parametrize(("line", "value"), RELATIVE.items())
def test_a_module_of_a_package_imports_what_is_near(folder: Path, line: str, value: str, package: bool) -> None:
    if package:
        write(folder, "pack/__init__.py", "")
    for name in ("common", "pack/beside"):
        write(folder, f"{name}.py", "B = 5")
    write(folder, "pack/deep/low.py", "from ...common import B")
    write(folder, "pack/sub.py", f"{line}\ndef f(): return {value}")
    assert load_target("pack/sub.py:f", folder)() == 5
    assert load_target("pack/sub.py:f", folder) is load_target("pack.sub:f", folder)
    assert load_target("pack/sub.py:f", folder) is load_target(f"{folder}/pack/sub.py:f")
    assert "pack.sub" not in sys.modules
    sys.modules.pop("common", None)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("import tools_x", "tools_x.T"),
        ("from tools_x import T", "T"),
        ("import helpers_x.inner", "helpers_x.inner.T"),
        ("from helpers_x import inner", "inner.T"),
        ("from helpers_x.inner import T", "T"),
        ("", "__import__('tools_x').T"),
    ],
)
@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("place", ["reward.py", "rewards/mine.py"])
def test_a_name_that_is_installed_too_means_the_users_own_to_him_alone(
    folder: Path, line: str, value: str, place: str, loaded: bool
) -> None:
    if loaded:
        importlib.import_module("tools_x"), importlib.import_module("helpers_x")
    write(folder, "tools_x.py", "T = 'own'")
    write(folder, "helpers_x/inner.py", "from tools_x import T")
    write(folder, place, f"{line}\ndef f():\n    import tools_x as late\n    return {value}, late.T")
    assert load_target(f"{place}:f", folder)() == ("own", "own")
    assert importlib.import_module("tools_x").T == "installed" and importlib.import_module("helpers_x").H == "installed"
    for name in ("tools_x", "helpers_x"):
        sys.modules.pop(name, None)


def test_a_package_that_bears_an_installed_name_can_be_the_target(folder: Path) -> None:
    write(folder, "tools_x/mine.py", "from .inner import T\nimport tools_x.inner\ndef f(): return T, tools_x.inner.T")
    write(folder, "tools_x/inner.py", "T = 'own'")
    assert load_target("tools_x/mine.py:f", folder)() == ("own", "own")
    assert load_target("tools_x.mine:f", folder)() == ("own", "own")
    write(folder, "roles/mine.py", "from roles.inner import T\nfrom . import inner\ndef f(): return T + inner.T")
    write(folder, "roles/inner.py", "T = 2")
    assert load_target("roles/mine.py:f", folder)() == 4
    sys.modules.pop("tools_x", None)


def test_a_folder_of_data_is_no_package_and_the_standard_library_is_what_it_is(folder: Path) -> None:
    write(folder, "data_x/make.py", "")
    write(folder, "json.py", "loads = None")
    write(
        folder,
        "code/reward.py",
        "import json, code\nfrom data_x import D\ndef f(): return json.loads('1'), D, code.interact",
    )
    number, data, interact = load_target("code/reward.py:f", folder)()
    assert (number, data) == (1, "installed") and callable(interact)
    sys.modules.pop("data_x", None)


def test_names_that_no_import_can_spell(folder: Path) -> None:
    write(folder, "v1.2/my.reward.py", "from .beside import B\ndef f(): return B")
    write(folder, "v1.2/beside.py", "B = 1")
    write(folder, "my-pack/my-reward.py", "from .beside import B\nfrom ..other import C\ndef f(): return B + C")
    write(folder, "my-pack/beside.py", "B = 2")
    write(folder, "other.py", "C = 3")
    write(folder, "twice.py", "def f(): return 'file'")
    write(folder, "twice/__init__.py", "def f(): return 'package'")
    assert load_target("v1.2/my.reward.py:f", folder)() == 1
    assert load_target("my-pack/my-reward.py:f", folder)() == 5
    assert load_target("twice.py:f", folder)() == "file"
    assert load_target("twice/__init__.py:f", folder)() == "package"


def test_what_fails_to_import_is_named_and_tried_again(folder: Path) -> None:
    write(folder, "pack/sub.py", "from .beside import B\ndef f(): return B")
    with pytest.raises(NoTarget, match=r"pack/sub.py cannot be imported.*beside"):
        load_target("pack/sub.py:f", folder)
    write(folder, "pack/beside.py", "B = 1")
    importlib.invalidate_caches()
    assert load_target("pack/sub.py:f", folder)() == 1
    with pytest.raises(NoTarget, match=r"there is no file .*pack/sup.py"):
        load_target("pack/sup.py:f", folder)


def test_files_of_one_name_in_two_folders(folder: Path) -> None:
    for name in ("a", "b"):
        write(folder / name, "pack/sub.py", "from .beside import B\ndef f(): return B")
        write(folder / name, "pack/beside.py", f"B = '{name}'")
    assert [load_target("pack/sub.py:f", folder / name)() for name in ("a", "b")] == ["a", "b"]
