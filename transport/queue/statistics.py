"""All numbers of the broker in one dictionary, for `statistics()`, metrics and tools."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from relax_rt.transport.base.calls import WaitingCalls
from relax_rt.transport.base.journal import Journal
from relax_rt.transport.queue.ledger import accounting, admission
from relax_rt.transport.queue.ledger.core import Core
from relax_rt.transport.queue.ledger.machine import Ledger

CHEAP_S = 0.001
"""A count that takes longer is not made anew before twenty times as long has passed."""


class States:
    """Samples by state. Counting looks at every sample, so a large queue is not counted all the time."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._again_at = 0.0

    def of(self, ledger: Ledger) -> dict[str, int]:
        """The counts of now, or of a moment ago."""
        began = time.perf_counter()
        if began >= self._again_at:
            self._counts = accounting.by_state(ledger.core)
            took = time.perf_counter() - began
            self._again_at = began + (20 * took if took > CHEAP_S else 0.0)
        return dict(self._counts)


def broker_statistics(ledger: Ledger, journal: Journal, waits: WaitingCalls, states: States) -> dict[str, Any]:
    """Numbers by part: `samples`, `memory`, `leases`, `staleness`, `waits`, `journal`, `tallies`.

    Counts are samples unless named otherwise. `lengths` has ten counts for each way in which samples ended, shortest
    tenth first, since this broker started.
    """
    core = ledger.core
    return {
        "samples": states.of(ledger),
        "memory": _memory(core),
        "leases": _leases(core),
        "staleness": {
            "max": core.policy.max_staleness,
            "outstanding": admission.outstanding(core),
            "trainer_version": core.state.trainer_version,
            "by_length_decile": core.losses.staleness(),
        },
        "lengths": core.losses.by_decile(),
        "waits": {"now": waits.now(), "over": waits.over()},
        "journal": {
            "records": ledger.n,
            "segment_bytes": journal.nbytes,
            "snapshots": journal.snapshots,
            "snapshot_bytes": journal.snapshot_bytes,
        },
        "tallies": dict(core.state.tallies),
    }


def _memory(core: Core) -> dict[str, Any]:
    table, limits = core.blocks, core.state.limits
    return {
        "payload_bytes": table.payload_bytes,
        "capacity_bytes": limits.capacity_bytes,
        "occupancy": core.used_bytes / limits.capacity_bytes,
        "partials_bytes": core.state.partials_bytes,
        "partials_refused": dict(core.partials_refused),
        "spilled_bytes": table.spilled_bytes,
        "inline_bytes": table.inline_bytes,
        "deduplicated_bytes": table.deduplicated_bytes,
        "blocks": len(table.blocks),
        "blobs": len(table.blobs),
        "extents": sum(len(extents) for extents in table.live.values()),
        "pinned_extents": sum(one.references > 1 for extents in table.live.values() for one in extents.values()),
        "slabs": len(table.live),
        "freed_extents_unreported": sum(len(extents) for extents in table.freed.values()),
    }


def _leases(core: Core) -> dict[str, Any]:
    state = core.state
    return {
        "held": dict(Counter(lease.task for lease in state.leases.values())),
        "ended_but_pinned": len(state.pinned),
        "tickets": sum(group.holder is not None for group in state.groups.values()),
        "groups_reopened": len(state.reopened),
        "ready": {**{task: len(keys) for task, keys in core.ready.items()}, "groups_for_step": len(core.step_ready)},
    }
