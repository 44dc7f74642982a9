"""How many slots of a role may be starting at a time: starts take cores, and so does watching over them."""

from __future__ import annotations

from relax_rt.supervision.lifecycle import Lifecycle
from relax_rt.supervision.slots import Slot

LEAST_STARTS = 2
"""That may be under way at a time, however few cores there are."""


class Pacing(Lifecycle):
    """Slots are started as fast as the cores of their nodes allow; others are pending and say what they wait for.

    The limit is of each role: what one role's start waits for, as another role's weights, is never held up by it. Slots
    that are started as one (a gang, one_for_all) may wait for each other, so they are not counted.
    """

    def _start(self, s: Slot) -> None:
        if reason := self._too_many_starts(s):
            self._defer(s, reason)
        else:
            super()._start(s)

    def _too_many_starts(self, s: Slot) -> str:
        if self._placer is None or s.role.as_one:
            return ""
        pin = s.spec.node
        most = max(LEAST_STARTS, sum(node.cores for node in self._placer.nodes if pin in ("", node.name)))
        under_way = [o for o in s.role.slots if o.state in ("requested", "starting") and pin in ("", o.node)]
        if len(under_way) < most:
            return ""
        return f"{len(under_way)} others of its role are starting, as many as there are cores for"

    def _defer(self, s: Slot, reason: str) -> None:
        if s.state != "pending":
            s.renew()
            self._enter(s, "pending", None)
        s.waiting = reason
