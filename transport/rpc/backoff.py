"""Exponential back-off with full jitter. Pure: it computes delays and does not wait."""

from __future__ import annotations

import dataclasses
import random

from relax_rt.transport.rpc.errors import Refused


@dataclasses.dataclass(frozen=True)
class BackoffPolicy:
    """How delays grow.

    Attributes:
        base_s: ceiling of the first delay, seconds.
        cap_s: no ceiling is above this, seconds.
        factor: each ceiling is the one before times this.
        max_attempts: delays to give out before giving up; None leaves the limit to the caller's deadline.
    """

    base_s: float = 0.02
    cap_s: float = 1.0
    factor: float = 2.0
    max_attempts: int | None = None

    def __post_init__(self) -> None:
        if not (0 < self.base_s <= self.cap_s and self.factor >= 1.0):
            raise Refused(f"back-off {self}", why="needs 0 < base_s <= cap_s and factor >= 1")
        if self.max_attempts is not None and self.max_attempts < 0:
            raise Refused(f"back-off {self}", why="max_attempts is negative")

    def ceiling_s(self, attempt: int) -> float:
        """The longest delay that attempt (from 0) may be given, seconds."""
        try:
            return min(self.cap_s, self.base_s * self.factor**attempt)
        except OverflowError:
            return self.cap_s


class Backoff:
    """The delays of one sequence of attempts: uniform between 0 and a ceiling that grows (full jitter).

    So many clients that lose a server at the same moment reconnect spread out, not together.
    """

    def __init__(self, policy: BackoffPolicy, rng: random.Random) -> None:
        self.policy = policy
        self.attempts = 0
        self._rng = rng

    def next_delay_s(self) -> float | None:
        """Seconds to wait before the next attempt, or None when max_attempts delays were given out."""
        limit = self.policy.max_attempts
        if limit is not None and self.attempts >= limit:
            return None
        delay = self._rng.uniform(0.0, self.policy.ceiling_s(self.attempts))
        self.attempts += 1
        return delay

    def reset(self) -> None:
        """Start over: the last attempt succeeded."""
        self.attempts = 0
