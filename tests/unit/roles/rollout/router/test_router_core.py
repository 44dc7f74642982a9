"""The router's core alone: the order of assignments, and the cost of events while many requests wait."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from relax_rt.roles.rollout.router.core import GenerationRequest, RouterAction, RouterCore, RouterLimits, StartAttempt
from relax_rt.roles.rollout.router.fleet import EngineEntry
from relax_rt.roles.rollout.router.interface import EngineReport, SequenceUpdate
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.messages import VersionSpan

RECORDS = [VersionRecord(1, 0, 1), VersionRecord(2, 1, 2)]


def report(version: int = 2, generated: int = 1, room: int = 0) -> EngineReport:
    return EngineReport(epoch=1, version=version, generated=generated, room=room)


def token(start: int, room: int = 0) -> SequenceUpdate:
    spans = [VersionSpan(start, start + 1, 2, 2)]
    return SequenceUpdate(
        start=start, tokens=[7], logprobs=[-1.0], versions=spans, report=report(generated=start + 2, room=room)
    )


def wanted(lag: int = 0, tokens: int = 50) -> GenerationRequest:
    return GenerationRequest(prompt=(1, 2), max_new_tokens=tokens, lag=lag)


def fleet_of(waiting: int, *, lags: tuple[int, ...] = (0,)) -> tuple[RouterCore, int]:
    """One engine that is full with one request, and others that wait; the number of the one that runs."""
    core = RouterCore(RouterLimits())
    core.on_members(0.0, [EngineEntry("rollout/0", 1, "ready", 2, 0)], RECORDS)
    core.on_report(0.0, "rollout/0", report(room=1))
    running, actions = core.submit(0.0, wanted())
    assert sent(actions) == [running]
    for n in range(waiting):
        assert core.submit(0.0, wanted(lags[n % len(lags)]))[1] == []
    return core, running


def sent(actions: list[RouterAction]) -> list[int]:
    return [action.number for action in actions if isinstance(action, StartAttempt)]


def lines_of(event: Any) -> int:
    """Lines of Python that it takes."""
    count = 0

    def trace(frame: FrameType, kind: str, arg: Any) -> Any:
        nonlocal count
        count += kind == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        event()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("lags", [(0,), (0, 1, 2)])
def test_an_update_costs_the_same_however_many_wait(lags: tuple[int, ...]) -> None:
    costs = []
    for waiting in (6, 600):
        core, running = fleet_of(waiting, lags=lags)
        core.on_update(0.1, running, 1, token(0))
        costs.append(lines_of(lambda core=core, running=running: core.on_update(0.2, running, 1, token(1))))
        assert sum(core.waiting_on().values()) == waiting + (not core.requests[running].tokens)
    assert costs[0] == costs[1]


def test_room_goes_to_the_oldest_eligible_request() -> None:
    core = RouterCore(RouterLimits())
    core.on_members(0.0, [EngineEntry("rollout/0", 1, "ready", 1, 0)], RECORDS)
    core.on_report(0.0, "rollout/0", report(version=1, room=0))
    numbers = [core.submit(0.0, wanted(lag))[0] for lag in (0, 1, 0, 2, 1)]
    # One publication behind: nothing for those that allow no lag, the others in their turn.
    assert sent(core.on_report(0.1, "rollout/0", report(version=1, generated=2, room=2))) == [numbers[1], numbers[3]]
    reasons = core.waiting_on()
    assert sum(n for why, n in reasons.items() if why.startswith("an engine at version 2")) == 3
    assert sent(core.on_report(0.2, "rollout/0", report(generated=3, room=9))) == [numbers[0], numbers[2], numbers[4]]


def test_a_late_request_says_what_it_waited_for() -> None:
    core, _ = fleet_of(1)
    (end,) = [a for a in core.tick(400.0) if getattr(a, "number", 0) == 2]
    assert "it waited for an engine at version 2: rollout/0 is" in end.outcome.why  # type: ignore[union-attr]
