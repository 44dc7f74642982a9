"""The table [checkpoint] of roles.toml."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relax_rt.config.schema import Table


class CheckpointTable(Table):
    """Checkpoints: complete or absent, in Hugging Face format plus optimizer and queue mark."""

    every_steps: Annotated[int, Field(ge=1)] = 20
    """Steps between checkpoints; samples trained since the last one stay in the queue."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Checkpoints to keep; older ones are removed. With 1 there is no other to resume from if the newest is damaged."""
