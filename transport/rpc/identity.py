"""Who is speaking: slots, incarnations and their epochs."""

from __future__ import annotations

from typing import Annotated

import msgspec


class Incarnation(msgspec.Struct, frozen=True, array_like=True):
    """One process in one slot.

    Attributes:
        slot: the place it fills, as ``rollout/0``.
        epoch: issued by the registry, unique in the run, only grows. A lower epoch of the same slot is fenced.
    """

    slot: str
    epoch: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]

    @property
    def role(self) -> str:
        """The role's name: ``rollout`` of ``rollout/0``."""
        return self.slot.partition("/")[0]

    def __str__(self) -> str:
        return f"{self.slot}#{self.epoch}"


class Hello(msgspec.Struct, frozen=True):
    """First message of each side of a connection; versions are compared before anything else is read."""

    protocol: int
    run_id: str
    who: Incarnation
    pid: int
