"""How many more failures a slot may have before the run would give it up: so that harm stays within what is promised.

No I/O; counts as the supervisor does, in the good time of each slot, from the event log alone.
"""

from __future__ import annotations

from typing import Any


class _Slot:
    def __init__(self) -> None:
        self.good_s = 0.0
        self.ready_at: float | None = None
        self.failures: list[float] = []


class Intensity:
    """Failures of each slot within its restart period.

    Args:
        max_restarts, period_s: of ``[supervision.restart]``.
    """

    def __init__(self, max_restarts: int, period_s: float) -> None:
        self._max, self._period_s = max_restarts, period_s
        self._slots: dict[str, _Slot] = {}

    def take(self, event: dict[str, Any]) -> None:
        """Take one event of the log."""
        kind, name, at = event.get("kind"), event.get("slot"), event.get("m")
        if kind == "run_started":
            self._slots.clear()
        if not isinstance(name, str) or not isinstance(at, int | float):
            return
        slot = self._slots.setdefault(name, _Slot())
        if kind == "slot_ready":
            slot.ready_at = float(at)
        elif kind == "slot_exited":
            if slot.ready_at is not None:
                slot.good_s += max(0.0, float(at) - slot.ready_at)
                slot.ready_at = None
            diagnosis = event.get("diagnosis")
            if isinstance(diagnosis, dict) and diagnosis.get("kind") != "clean" and not event.get("finished"):
                slot.failures = [f for f in slot.failures if slot.good_s - f < self._period_s]
                slot.failures.append(slot.good_s)

    def left(self, name: str, now: float) -> int:
        """Restarts that the slot still has, if it fails at `now` (monotonic seconds)."""
        slot = self._slots.get(name)
        if slot is None:
            return self._max
        good_s = slot.good_s + (max(0.0, now - slot.ready_at) if slot.ready_at is not None else 0.0)
        return self._max - sum(good_s - failure < self._period_s for failure in slot.failures)
