"""Actors: objects with a process of their own, called by name from anywhere in a run. See docs/guides/actors.md."""

from __future__ import annotations

from relax_rt.actors.actor import Actor
from relax_rt.transport.rpc.errors import ActorDied
from relax_rt.transport.rpc.interface import idempotent, tell
from relax_rt.transport.rpc.server import caller

__all__ = ["Actor", "ActorDied", "caller", "idempotent", "tell"]
