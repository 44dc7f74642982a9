"""What the supervisor knows of a slot before it starts: its order, its restart policy, its time limits."""

from __future__ import annotations

from typing import Literal

import msgspec

RestartClass = Literal["permanent", "transient", "temporary"]


class SlotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One slot of the tree.

    Attributes:
        slot: its name, ``rollout/0``.
        kind: the role that fills it.
        tier: start order; lower tiers are ready before higher ones start, stop runs in reverse.
        restart: permanent (always), transient (after a failure), temporary (never).
        significant: the run ends in order when every significant slot has finished.
        system: part of every run (registry, queue); the run ends when all slots that are not have ended.
        start_timeout_s: from spawn to ready; also the longest wait for an epoch before the spawn.
        stop_timeout_s: from the stop request to the kill.
        hang_after_s: busy without progress for so long is a hang.
        dump_grace_s: time for the stack dump between finding a hang and the kill.
        max_restarts, period_s: restarts allowed within a window. The window is measured in the slot's own good
            time (ready, and up to its last progress): waits, starts and hangs do not age a restart, so a role that
            fails slowly is found out as surely as one that fails at once.
        backoff_first_s, backoff_max_s: upper limits of the wait before the first and any restart (full jitter).
    """

    slot: str
    kind: str
    tier: int = 50
    restart: RestartClass = "permanent"
    significant: bool = False
    system: bool = False
    start_timeout_s: float = 180.0
    stop_timeout_s: float = 20.0
    hang_after_s: float = 120.0
    dump_grace_s: float = 1.0
    max_restarts: int = 5
    period_s: float = 120.0
    backoff_first_s: float = 0.1
    backoff_max_s: float = 5.0
