"""Sends generation requests to the engines of a run, for every process that needs tokens."""

from __future__ import annotations

from relax_rt.roles.rollout.router.core import GenerationRequest, Outcome, RouterFull, RouterLimits
from relax_rt.roles.rollout.router.router import NotGenerated, Router, RouterEnded

__all__ = ["GenerationRequest", "NotGenerated", "Outcome", "Router", "RouterEnded", "RouterFull", "RouterLimits"]
