"""Whether a run plays episodes ([roles.env]), for roles below roles/agentic, which must not import its table."""

from __future__ import annotations

from typing import Any

from relax_rt.config.schema import RunConfig

KIND = "env"
DEFAULT_MAX_TOKENS = 2048
"""Default of roles.env.max_tokens."""


def plays_episodes(config: RunConfig) -> bool:
    """Return whether the run has [roles.env], unless a role of the user's own has that name."""
    table = config.roles.get(KIND)
    return table is not None and _value(table, "target", None) is None


def episode_tokens(config: RunConfig) -> int | None:
    """Return roles.env.max_tokens, if the run plays episodes."""
    return int(_value(config.roles[KIND], "max_tokens", DEFAULT_MAX_TOKENS)) if plays_episodes(config) else None


def _value(table: Any, key: str, default: Any) -> Any:
    """Return a key of a role's table, which is plain data in some processes and a model in others."""
    return table.get(key, default) if isinstance(table, dict) else getattr(table, key, default)
