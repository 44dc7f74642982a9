"""When a server that judges leases must not: it stood still, and renewals wait unread. Pure, the clock comes along."""

from __future__ import annotations

import dataclasses
from typing import Literal

PAUSE_S = 1.0
"""A gap between two looks from which on all leases start again at full length (or two ticks, if they are longer)."""


@dataclasses.dataclass
class PauseDetector:
    """Looks at the clock before each judgement.

    Attributes:
        looked: when it did so last, in seconds of the server's monotonic clock; at first, when it began.
        tick_s: how often it looks when it is not held up.
    """

    looked: float
    tick_s: float
    held: bool = False

    def look(self, now: float) -> Literal["judge", "hold", "restart"]:
        """What to do now: judge leases, leave them until the next look, or start them again at full length.

        After a gap (the process was stopped, the machine slept) renewals that arrived meanwhile are read first.
        """
        gap, self.looked = now - self.looked, now
        if gap >= max(PAUSE_S, 2 * self.tick_s):
            return "restart"
        # Not twice running, so that a server that is always late still lets leases lapse.
        self.held = gap > 2 * self.tick_s and not self.held
        return "hold" if self.held else "judge"
