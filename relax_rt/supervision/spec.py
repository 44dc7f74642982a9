"""What the supervisor knows before anything starts: of a slot its order, restart policy and time limits, of a role
how its slots hang together."""

from __future__ import annotations

from typing import Literal

import msgspec

RestartClass = Literal["permanent", "transient", "temporary"]
Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]


class SlotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One slot of the tree.

    Attributes:
        slot: its name, ``rollout/0``.
        kind: the role that fills it.
        tier: start order; lower tiers are ready before higher ones start, stop runs in reverse.
        restart: permanent (always), transient (after a failure), temporary (never).
        significant: the run ends in order when every significant slot has finished.
        system: part of every run (registry, queue); the run ends when all slots that are not have ended.
        counts_for_stall: whether progress of this slot resets the stall timer (not registry, queue, writer, dashboard).
        spawn_timeout_s: from the order to start until a process exists. What is waited for there is not the role's:
            its epoch, a zygote's imports, memory of its devices that the dead still hold; each has a shorter limit.
        start_timeout_s: from spawn to ready; counted anew from each word of a slot that waits for others.
        stop_timeout_s: from the stop request to the kill.
        drains: after a stop request each progress gives it stop_timeout_s again.
        drain_timeout_s: from the stop request to the kill at most, whatever it asks for.
        hang_after_s: busy without progress for so long is a hang.
        dump_grace_s: time for the stack dump between finding a hang and the kill.
        max_restarts, period_s: restarts allowed within a window. The window is measured in the slot's own good
            time (ready, and up to its last progress): waits, starts and hangs do not age a restart, so a role that
            fails slowly is found out as surely as one that fails at once.
        backoff_first_s, backoff_max_s: upper limits of the wait before the first and any restart (full jitter).
        threads, gpus, memory_mib, node: what it asks of the node it is placed on (memory 0: it has no limit), and the
            only node it may run on (empty: any).
    """

    slot: str
    kind: str
    tier: int = 50
    restart: RestartClass = "permanent"
    significant: bool = False
    system: bool = False
    counts_for_stall: bool = True
    spawn_timeout_s: float = 300.0
    start_timeout_s: float = 180.0
    stop_timeout_s: float = 20.0
    drains: bool = False
    drain_timeout_s: float = 600.0
    hang_after_s: float = 120.0
    dump_grace_s: float = 1.0
    max_restarts: int = 5
    period_s: float = 120.0
    backoff_first_s: float = 0.1
    backoff_max_s: float = 5.0
    threads: int = 1
    gpus: float = 0.0
    memory_mib: int = 0
    node: str = ""

    @property
    def stop_most_s(self) -> float:
        """From the stop request to the kill at most."""
        return max(self.drain_timeout_s, self.stop_timeout_s)


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One role of the tree: what its slots have to do with each other.

    Attributes:
        kind: its name.
        strategy: which slots are started again when one fails: that one, all, or it and those of higher index.
            With one_for_all the limit on restarts counts the role's failures, not each slot's.
        gang: its slots are ranks of one whole. They start, fail and come back together, a failure of any counts once,
            and the others are killed, because a collective that lost a member cannot be finished.
        min_ready: slots that must be ready before higher tiers start, and must be left when one is given up.
            None: all.
        role_restarts, role_period_s: restarts of the whole role allowed within a window of good time, once one of its
            slots has used up its own.
        slot: rules of the slots that `scale` adds; None: those of its first slot.
    """

    kind: str
    strategy: Strategy = "one_for_one"
    gang: bool = False
    min_ready: int | None = None
    role_restarts: int = 1
    role_period_s: float = 3600.0
    slot: SlotSpec | None = None
