"""Where weights lie."""

from __future__ import annotations

from pathlib import Path

from relax_rt.role import RoleContext
from relax_rt.transport.weights.api import STAGE_DIR


def stage_folder(ctx: RoleContext) -> Path:
    """Where this node's weight stage lies."""
    return ctx.shm_dir / STAGE_DIR
