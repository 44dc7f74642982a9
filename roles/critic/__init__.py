"""The critic: values of tokens for advantages such as gae, trained beside the policy on the returns of each step."""

from relax_rt.roles.critic.role import CriticRole

__all__ = ["CriticRole"]
