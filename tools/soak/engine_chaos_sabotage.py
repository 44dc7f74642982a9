"""What is broken on purpose, in an engine's process or a caller's, to see that the checks of engine_chaos.py find it:
weights that are half loaded, routing that looks at no version, marks that never reach the queue."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from relax_rt.roles.rollout import generation
from relax_rt.roles.rollout.engines.weights import FlatWeights
from relax_rt.roles.rollout.router.fleet import Fleet
from relax_rt.transport.weights.source import WeightSource

EXPECTED = {"fetch": {"weights"}, "swap": {"weights"}, "route": {"routed"}, "marks": {"marks"}}
"""By sabotage: the checks of which at least one must fire."""
EVERY = 3


class Torn:
    """A source that copies half of a version and says that it is the whole: nobody verified it."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.record, self.manifest = source.record, source.manifest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def copy_into(self, into: memoryview) -> None:
        copy_half(self._source, into)

    def mapped(self) -> AbstractContextManager[memoryview]:
        return self._source.mapped()


def copy_half(source: WeightSource, into: memoryview) -> None:
    """The second half stays as it was."""
    rest = bytes(into[len(into) // 2 :])
    source.copy_into(into)
    into[len(into) // 2 :] = rest


def apply(what: str) -> None:
    """What this process does once for all."""
    if what == "swap":
        FlatWeights._point = _point_half  # type: ignore[method-assign]
    elif what == "route":
        generation.admissible = lambda version, allowed: True
        Fleet.routable = _reachable  # type: ignore[method-assign]
    elif what and what not in EXPECTED:
        raise ValueError(f"sabotage {what!r}: known are {', '.join(sorted(EXPECTED))}")


def _reachable(fleet: Fleet, slot: str, lag: int) -> bool:
    """Whether an engine answers, whatever its version."""
    return fleet.health(slot) in ("healthy", "stale")


def tamper(what: str, source: WeightSource) -> WeightSource:
    """What one publication meets; some are left alone, so that there is something to train on."""
    return Torn(source) if what == "fetch" and not source.record.version % EVERY else source


def _point_half(weights: FlatWeights, views: list[torch.Tensor]) -> None:
    """A swap that stops in the middle: the other parameters keep the buffer that is filled next."""
    together = list(zip(views, weights._parameters, strict=True))
    for view, parameter in together[: len(together) // 2]:
        parameter.data = view
