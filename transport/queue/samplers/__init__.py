"""Samplers: which of the ready samples a consumer gets. Pure, and pluggable by import path."""

from relax_rt.transport.queue.samplers.base import Choice, Sampler, Unit, choose, choose_urgent_first
from relax_rt.transport.queue.samplers.loading import load_sampler

__all__ = ["Choice", "Sampler", "Unit", "choose", "choose_urgent_first", "load_sampler"]
