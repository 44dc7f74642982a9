"""Reward functions that configs name by path, as `reward.function = "relax_rt.roles.rewards.builtin:integer"`."""

from __future__ import annotations

from relax_rt.roles.rewards.library.answers import exact, integer, judged, lenient_integer, verifier

__all__ = ["exact", "integer", "judged", "lenient_integer", "verifier"]
