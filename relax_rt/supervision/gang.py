"""Slots that go down and come back together."""

from __future__ import annotations

from collections.abc import Iterable

from relax_rt.supervision.slots import Slot


class Cohort:
    """Slots that are brought down to be started again together: none starts before all have exited.

    One slot that failed on its own is a cohort of one.

    Attributes:
        wait_s: the one wait of all of them, from the moment at which the last has exited.
        cause: why, in words.
        failed: because of a failure that was counted.
    """

    def __init__(self, members: Iterable[Slot], wait_s: float, cause: str, *, failed: bool) -> None:
        self.members = list(members)
        self.wait_s, self.cause, self.failed = wait_s, cause, failed
        self.released = False
        """All have exited, and the wait has begun."""

    @property
    def missing(self) -> list[Slot]:
        """Members that have not exited yet."""
        return [slot for slot in self.members if slot.live]

    @property
    def holdup(self) -> str:
        """What its members wait for."""
        names = [slot.name for slot in self.missing]
        return f"waits until {listed(names)} {'has' if len(names) == 1 else 'have'} exited" if names else ""


def listed(names: list[str], most: int = 4) -> str:
    """The first few, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
