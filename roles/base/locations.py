"""Where a run's inputs, its weight stage and its broadcast memory lie."""

from __future__ import annotations

from pathlib import Path

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.models.settings import ModelTable
from relax_rt.transport.weights.manifest import STAGE_DIR

MODEL_CODE = ("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3")
"""Code of the models that the examples train: transformers imports it only when such a model is made."""


def model_folder(ctx: RoleContext) -> Path:
    """Return the Hugging Face folder of the model; a package was converted at the launch."""
    return resolve_model(ctx.config.table(ModelTable).path, Path(ctx.config.config_dir))


OFFERS_DIR = "broadcasts"


def stage_folder(ctx: RoleContext) -> Path:
    """Where this node's weight stage lies."""
    return ctx.shm_dir / STAGE_DIR


def offers_folder(ctx: RoleContext) -> Path:
    """Where this node's engines say what memory they have for broadcasts."""
    return ctx.shm_dir / OFFERS_DIR


def files_folder(ctx: RoleContext, directory: str | None) -> Path | None:
    """Where the run's versions lie as files; None: they do not.

    Args:
        directory: `publication.directory`.
    """
    return None if directory is None else Path(ctx.config.config_dir) / Path(directory).expanduser() / ctx.run_id
