"""The table [checkpoint] of roles.toml."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relax_rt.config.schema import Table


class CheckpointTable(Table):
    """Checkpoints: complete or absent, in Hugging Face format plus optimizer and queue mark."""

    every_steps: Annotated[int, Field(ge=1)] = 20
    """Steps from one to the next; what was trained meanwhile stays in the queue."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Older ones are removed. With 1 there is none to go on from should the newest be damaged."""
