"""Where weights lie."""

from __future__ import annotations

from pathlib import Path

from relax_rt.interfaces.role import RoleContext
from relax_rt.transport.weights.served import STAGE_DIR

OFFERS_DIR = "broadcasts"


def stage_folder(ctx: RoleContext) -> Path:
    """Where this node's weight stage lies."""
    return ctx.shm_dir / STAGE_DIR


def offers_folder(ctx: RoleContext) -> Path:
    """Where this node's engines say what memory they have for broadcasts."""
    return ctx.shm_dir / OFFERS_DIR
