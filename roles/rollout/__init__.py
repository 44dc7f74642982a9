"""The rollout: one engine that samples groups of completions for the queue."""

from relax_rt.roles.rollout.role import RolloutRole

__all__ = ["RolloutRole"]
