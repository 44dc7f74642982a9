"""Pending starts: who answers for a slot when starts are called off, forgotten and begun again in between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.interfaces.agent import Diagnosis
from relax_rt.supervision.agent import Agent
from relax_rt.supervision.executor import (
    GangOrder,
    GangRendezvous,
    PendingStart,
    PendingStarts,
    SlotOrder,
    StartOrder,
    gang_orders,
)
from relax_rt.supervision.local import unspawned
from relax_rt.supervision.placement import Node, Placer
from relax_rt.supervision.protocol import KillRequested, NodeLost, RunStarted, StartGang, StopRequested, Tick
from relax_rt.supervision.supervisor import Supervisor
from relax_rt.supervision.tree import RoleSpec, SlotSpec


def off(slot: str) -> Diagnosis:
    return unspawned(slot, 0, "killed", "test")


def test_a_start_is_settled_once_with_the_diagnosis_that_called_it_off() -> None:
    starts = PendingStarts()
    attempt = starts.begin(["w/0", "w/1"])
    why = off("w/1")
    assert starts.call_off(why) is attempt and attempt.broken
    assert list(starts.settle(attempt)) == [("w/0", None), ("w/1", why)]
    assert list(starts.settle(attempt)) == [] and "w/0" not in starts
    assert starts.call_off(why) is None, "an executor answers for it now"


def test_a_superseded_start_does_not_affect_the_next_one() -> None:
    starts = PendingStarts()
    old = starts.begin(["w/0"])
    assert starts.forget(["w/0", "w/1"]) == [old] and old.broken
    new = starts.begin(["w/0"])
    assert list(starts.settle(old)) == []
    assert "w/0" in starts and not new.broken
    assert list(starts.settle(new)) == [("w/0", None)]


def test_a_gang_of_which_some_slots_are_forgotten_is_settled_for_the_others() -> None:
    starts = PendingStarts()
    gang = starts.begin(["w/0", "w/1"])
    starts.forget(["w/1"])
    assert gang.broken, "a part of a gang is not started"
    assert [slot for slot, _ in starts.settle(gang)] == ["w/0"]


def test_a_slot_that_is_called_off_while_the_attempt_is_settled_is_not_lost() -> None:
    starts = PendingStarts()
    gang = starts.begin(["w/0", "w/1", "w/2"])
    found = []
    for slot, why in starts.settle(gang):
        found.append((slot, why and why.slot))
        if slot == "w/0":
            starts.call_off(off("w/1"))
            starts.begin(["w/2"])
    assert found == [("w/0", None), ("w/1", "w/1")]
    assert "w/2" in starts


STEPS = st.lists(st.tuples(st.sampled_from(["begin", "call_off", "forget", "settle"]), st.integers(0, 5)), max_size=40)


@given(STEPS)
def test_each_start_is_settled_exactly_once(steps: list[tuple[str, int]]) -> None:
    starts, attempts = PendingStarts(), []
    owner: dict[str, PendingStart] = {}
    for what, n in steps:
        slot = f"w/{n % 3}"
        if what == "begin":
            slots = [slot] if n < 3 else ["w/0", "w/1", "w/2"]
            attempts.append(starts.begin(slots))
            owner |= dict.fromkeys(slots, attempts[-1])
        elif what == "call_off":
            assert starts.call_off(off(slot)) is owner.get(slot)
        elif what == "forget":
            assert starts.forget([slot]) == ([owner.pop(slot)] if slot in owner else [])
        elif attempts:
            attempt = attempts[n % len(attempts)]
            expected = [s for s in attempt.slots if owner.get(s) is attempt]
            assert [s for s, _ in starts.settle(attempt)] == expected
            for s in expected:
                del owner[s]
        assert all((s in starts) == (s in owner) for s in ("w/0", "w/1", "w/2"))


class Far:
    """Stands for whatever is around an agent: registry, executors, fleet, event log."""

    node = "head"

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.epoch = 0
        self.here = {"head", "b"}
        self.orders: list[StartOrder] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    async def issue_epoch(self, slot: str) -> int:
        await self.gate.wait()
        self.epoch += 1
        return self.epoch

    def report_exit(self, *args: object) -> None: ...

    def executor(self, node: str) -> Any:
        return self if node in self.here else None

    def carry_out(self, order: SlotOrder) -> None:
        if isinstance(order, StartOrder):
            self.orders.append(order)

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def causes(self) -> list[str]:
        return [fields["diagnosis"]["cause"] for kind, fields in self.events if kind == "slot_exited"]


class BareAgent(Agent):
    """The part of an agent that starts slots, over nodes `head` (one core) and `b`."""

    def __init__(self, far: Far, count: int, *, gang: bool) -> None:
        specs = [SlotSpec(slot=f"w/{n}", kind="w", threads=2) for n in range(count)]
        placer = Placer([Node("head", 1), Node("b", 80)])
        self._supervisor = Supervisor(specs, lambda: 0.0, [RoleSpec(kind="w", gang=gang)], placer)
        self._starts = PendingStarts()
        self._preparing, self._processes, self._placed = {}, {}, {}
        self._events = self._system = self._fleet = self._local = far  # type: ignore[assignment]
        self._log, self._status, self._next_tick = structlog.get_logger(), "draining", 0.0
        self._tick_earlier = asyncio.Event()
        self._done = asyncio.get_running_loop().create_future()

    async def _open_rendezvous(self, gang: StartGang) -> list[GangOrder]:
        return gang_orders(gang, GangRendezvous("head", 1))


@pytest.mark.parametrize("gang", [False, True])
async def test_a_node_that_is_lost_before_the_epochs_are_there_costs_no_failure(gang: bool) -> None:
    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    far = Far()
    agent = BareAgent(far, 2 if gang else 1, gang=gang)
    agent.post(RunStarted())
    await asyncio.sleep(0.01)
    far.here.remove("b")
    # The core begins the next start, on the head, in this very call.
    agent.post(NodeLost("b", "test", at=1.0))
    await asyncio.sleep(0.01)
    far.gate.set()
    for _ in range(5):
        agent.post(Tick())
        await asyncio.sleep(0.005)
    assert [(order.slot, order.node) for order in far.orders] == [(f"w/{n}", "head") for n in range(2 if gang else 1)]
    assert not [cause for cause in far.causes() if "b is lost" not in cause and "node" not in cause], far.causes()
    assert faults == []


@pytest.mark.parametrize("gang", [False, True])
@pytest.mark.parametrize("event", [StopRequested("test"), KillRequested("test")])
async def test_a_start_that_is_called_off_before_its_first_step_ends(event: Any, gang: bool) -> None:
    agent = BareAgent(Far(), 2, gang=gang)
    agent.post(RunStarted())
    agent.post(event)
    for _ in range(5):
        await asyncio.sleep(0.001)
        agent.post(Tick())
    assert [view.state for view in agent._supervisor.view()] == ["ended", "ended"]
