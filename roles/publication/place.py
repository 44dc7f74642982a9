"""Where weights lie."""

from __future__ import annotations

from pathlib import Path

from relax_rt.role import RoleContext


def stage_folder(ctx: RoleContext) -> Path:
    """Where this node's weight stage lies."""
    return ctx.shm_dir / "weights"
