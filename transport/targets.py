"""Code that a setting names: `file.py:name`, or `package.module:name`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from relax_rt.transport.errors import Refused


class NoTarget(Refused):
    """The code is not there or cannot be imported; what it raised is the cause."""


def load_target(target: str, base: Path = Path()) -> Any:
    """What a target names. A file is imported once a process; modules beside it can be imported by their own name.

    Args:
        base: what a relative file is relative to.

    Raises:
        NoTarget: malformed, not there, or raised while it was imported.
    """
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name.isidentifier():
        raise NoTarget(f"'{target}' names no code", hint="write file.py:name or package.module:name")
    try:
        module = _import_file((base / place).resolve()) if place.endswith(".py") else importlib.import_module(place)
    except NoTarget:
        raise
    except Exception as error:
        beside = base / f"{place}.py" if isinstance(error, ModuleNotFoundError) and error.name == place else None
        hint = (
            f"did you mean '{place}.py:{name}'? A file is named with its ending" if beside and beside.is_file() else ""
        )
        raise NoTarget(f"{place} cannot be imported", why=f"{type(error).__name__}: {error}", hint=hint) from error
    if not hasattr(module, name):
        known = [n for n in vars(module) if not n.startswith("_")]
        raise NoTarget(f"{place} has no '{name}'", hint=did_you_mean(name, known) or f"it has: {', '.join(known)}")
    return getattr(module, name)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise NoTarget(f"there is no file {path}", hint=did_you_mean(path.name, beside))
    # Two files may bear one name in different folders.
    name = f"relax_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise NoTarget(f"{path} is no Python file")
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


NEAR = 0.7
"""Twice the letters that two names share in order, by all their letters: a typo leaves more. `stop` and `top_p` have
less."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` if one of the known names is near, else the empty string."""
    by_folded = {name.lower().replace("-", "_"): name for name in known}
    folded = given.lower().replace("-", "_")
    # Two letters that changed places are much of a short name.
    turned = [name for name in by_folded if sorted(name) == sorted(folded)]
    near = turned or difflib.get_close_matches(folded, list(by_folded), n=1, cutoff=NEAR)
    return f"did you mean '{by_folded[near[0]]}'?" if near else ""
