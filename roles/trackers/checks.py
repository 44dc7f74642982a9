"""What [roles.writer] lacks here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from relax_rt.config.problems import Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.trackers.settings import WriterSettings

PACKAGES = ("tensorboard", "wandb")
"""Keys of the table, which are also the packages and the extras that bring them."""


def not_writable(config: RunConfig) -> Iterator[Problem]:
    """A writer that has nothing to write with. Another interpreter's packages are its own affair."""
    table = config.roles.get("writer")
    if not isinstance(table, WriterSettings) or not table.count:
        return
    asked = [name for name in PACKAGES if getattr(table, name)]
    if not asked:
        message = "the writer has nothing to write: neither tensorboard nor wandb is set"
        yield Problem(("roles", "writer"), message, "set tensorboard = true, or leave the table out", at="key")
    for name in asked:
        if table.python is None and find_spec(name) is None:
            message = f"{name} = true, and the package {name} is not installed"
            yield Problem(("roles", "writer", name), message, f"pip install relax-rt[{name}], or leave it out")
