"""The table [roles.writer] of roles.toml."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated

from pydantic import Field

from relax_rt.config.problems import Problem
from relax_rt.config.schema import RoleSettings, RunConfig

PACKAGES = ("tensorboard", "wandb")
"""Keys of the table, which are also the packages and the extras that bring them."""


class WriterSettings(RoleSettings):
    """Writes the run's metrics for TensorBoard and Weights & Biases. Optional: it runs where it has a table, and its
    failure does not affect training."""

    count: Annotated[int, Field(ge=0, le=1)] = 1
    nice: Annotated[int, Field(ge=0, le=19)] = 10
    """Niceness of the process, below the roles that train."""
    tensorboard: bool = False
    """Write event files into the run's folder `tensorboard`."""
    wandb: bool = False
    """Write an offline run into the run's folder `wandb`, for `wandb sync`. Nothing is sent."""
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,100}$")] = "relax-rt"
    """Project of the W&B run."""


def not_writable(config: RunConfig) -> Iterator[Problem]:
    """Report a writer without a sink, or whose packages are not installed. Another interpreter's are not checked."""
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
