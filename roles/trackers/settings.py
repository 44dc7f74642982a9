"""The table [roles.writer] of roles.toml."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relax_rt.config.schema import RoleSettings


class WriterSettings(RoleSettings):
    """Writes the run's metrics for TensorBoard and Weights & Biases. There is one where it has a table; nothing that
    becomes of it touches the training."""

    count: Annotated[int, Field(ge=0, le=1)] = 1
    nice: Annotated[int, Field(ge=0, le=19)] = 10
    """Niceness of the process: it gives way to those that train."""
    tensorboard: bool = False
    """Write event files into the run's folder `tensorboard`."""
    wandb: bool = False
    """Write an offline run into the run's folder `wandb`, for `wandb sync`. Nothing is sent."""
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,100}$")] = "relax-rt"
    """Project of the W&B run."""
