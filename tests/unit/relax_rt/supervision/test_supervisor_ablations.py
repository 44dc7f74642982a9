"""With one of the supervisor's safeguards switched off, its random tests find it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_supervisor_properties import World

from relax_rt.supervision.supervisor import Supervisor
from relax_rt.supervision.tree import RestartGroup, RestartWindow, RoleNode, SlotTree

FIND = settings(
    max_examples=5000, stateful_step_count=50, deadline=None, phases=[Phase.generate], database=None, derandomize=True
)

SAFEGUARDS: dict[str, tuple[type, str, Any]] = {
    "a gang waits until all its ranks have exited": (RestartGroup, "missing", property(lambda self: [])),
    "a gang starts again whole": (RoleNode, "restarted_with", lambda self, slot: [slot]),
    "higher tiers wait for lower ones": (SlotTree, "not_ready_below", lambda self, tier: []),
    "restarts of a slot are limited": (RestartWindow, "failed", lambda self, diagnosis: 0),
    "restarts of a role are limited": (RoleNode, "may_restart", lambda self, slot: True),
    "what was drained stays down": (
        Supervisor,
        "_end_by_request",
        lambda self, slot: self._restart_together([slot], 0.0, ""),
    ),
    "room is looked for again": (Supervisor, "_retry_placement", lambda self: None),
    "a kill reaches every process": (Supervisor, "_kill_all", lambda self, slots, reason: None),
}


@pytest.mark.parametrize("safeguard", SAFEGUARDS)
def test_missing_safeguard_is_found(safeguard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, name, without = SAFEGUARDS[safeguard]
    monkeypatch.setattr(of, name, without)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run_state_machine_as_test(World, settings=FIND)
