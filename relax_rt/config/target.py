"""User code named in a config: `file.py:name`, relative to the config file, or `package.module:name`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_rt.config.problems import BadInput
from relax_rt.transport.base import targets


class TargetError(BadInput):
    """User code named in a config is not there or cannot be imported."""


def absolute_target(target: str, base: Path) -> str:
    """Return the target with its file, if it names one, absolute: it then means the same in every process."""
    file, separator, name = target.rpartition(":")
    return f"{(base / file).resolve()}:{name}" if separator and file.endswith(".py") else target


def load_target(target: str, base: Path = Path()) -> Any:
    """Return what a target names. A file is imported once per process; modules beside it can be imported by name.

    Raises:
        TargetError: malformed, not there, or raised while it was imported (that is its cause).
    """
    try:
        return targets.load_target(target, base)
    except targets.NoTarget as error:
        raise TargetError(error.what, why=error.why, hint=error.hint) from error.__cause__
