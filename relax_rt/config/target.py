"""User code named in a config: `file.py:name`, relative to the config file, or `package.module:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from relax_rt.config.problems import BadInput, did_you_mean


class TargetError(BadInput):
    """User code named in a config is not there or cannot be imported."""


def absolute_target(target: str, base: Path) -> str:
    """The target with its file, if it names one, as an absolute path: it then means the same in every process."""
    file, separator, name = target.rpartition(":")
    return f"{(base / file).resolve()}:{name}" if separator and file.endswith(".py") else target


def load_target(target: str, base: Path = Path()) -> Any:
    """What a target names. A file is imported once a process; modules beside it can be imported by their own name.

    Raises:
        TargetError: malformed, not there, or raised while it was imported.
    """
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name.isidentifier():
        raise TargetError(f"'{target}' names no code", hint="write file.py:name or package.module:name")
    try:
        module = _import_file((base / place).resolve()) if place.endswith(".py") else importlib.import_module(place)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"{place} cannot be imported", why=f"{type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        known = [n for n in vars(module) if not n.startswith("_")]
        raise TargetError(f"{place} has no '{name}'", hint=did_you_mean(name, known) or f"it has: {', '.join(known)}")
    return getattr(module, name)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise TargetError(f"there is no file {path}", hint=did_you_mean(path.name, beside))
    # Two files may bear one name in different folders.
    name = f"relax_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is no Python file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
