"""Episodes with several turns: the environments of the users, and the role that plays them."""

from __future__ import annotations

from relax_rt.roles.agentic.interface import Chat, Environment, EpisodeOver, Message, Observation, Reply, Step, Task

__all__ = ["Chat", "Environment", "EpisodeOver", "Message", "Observation", "Reply", "Step", "Task"]
