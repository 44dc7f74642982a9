"""Detect that a server stood still, so that it does not expire leases whose renewals it has not read yet. Pure."""

from __future__ import annotations

import dataclasses
from typing import Literal

PAUSE_S = 1.0
"""A gap between two checks from which on all leases start again at full length (or two ticks, if they are longer)."""


@dataclasses.dataclass
class PauseDetector:
    """Checks the clock before a server expires leases.

    Attributes:
        looked: time of the last check, in seconds of the server's monotonic clock; at first, of the start.
        tick_s: interval of the checks when the server is not held up.
    """

    looked: float
    tick_s: float
    held: bool = False

    def look(self, now: float) -> Literal["judge", "hold", "restart"]:
        """What to do now: expire leases (judge), leave them until the next check (hold), or restart their full length.

        After a gap (the process was stopped, the machine slept) renewals that arrived meanwhile are read first.
        """
        gap, self.looked = now - self.looked, now
        if gap >= max(PAUSE_S, 2 * self.tick_s):
            return "restart"
        # Not twice in a row, so that a server that is always late still expires leases.
        self.held = gap > 2 * self.tick_s and not self.held
        return "hold" if self.held else "judge"
