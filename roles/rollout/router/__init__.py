"""Sends generation requests to the engines of a run, for whoever wants tokens and is no rollout. See docs/router.md."""

from __future__ import annotations

from relax_rt.roles.rollout.router.core import Limits, RouterFull
from relax_rt.roles.rollout.router.requests import Outcome, Wanted
from relax_rt.roles.rollout.router.router import NotGenerated, Router, RouterEnded

__all__ = ["Limits", "NotGenerated", "Outcome", "Router", "RouterEnded", "RouterFull", "Wanted"]
