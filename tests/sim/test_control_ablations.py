"""Each safeguard of the control plane is switched off alone, and the simulation must find what it guards against.

The safeguards are taken out by patching the real parts, or the simulated shell around them, for the length of a test:
there is no switch in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count, islice
from typing import Any
from unittest.mock import patch

import pytest
from plane_agent import Executor
from plane_checker import EPOCHS, HEARD, LAPSED, MIXED, OVERDUE, TWO, UNANSWERED, UNESCALATED, VERSIONS
from plane_servers import Registry, Stage
from plane_world import KINDS, World
from sim_checker import DOUBLED, STANDSTILL, TWICE, UNEXPECTED

from relax_rt.cluster.nodes import table as table_module
from relax_rt.cluster.nodes.api import NodeMembership, Orders
from relax_rt.cluster.nodes.session import HeadSession
from relax_rt.cluster.nodes.table import NodeTable
from relax_rt.cluster.registry.core import RegistryCore
from relax_rt.interfaces.agent import Diagnosis
from relax_rt.interfaces.registry import Member
from relax_rt.supervision.executor import SlotOrder
from relax_rt.supervision.protocol import Kill, SlotExited
from relax_rt.supervision.supervisor import Supervisor
from relax_rt.supervision.tree import RestartWindow, RoleNode, Slot
from relax_rt.transport.base.liveness import PauseDetector
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.state import Callers
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

RUNS = 1000
"""The most that an ablation may take to be found: as many as the suite plays. Where a safeguard matters only in runs of
one kind, these alone are played."""
KIND_OF = {"stage: epochs": "three hosts", "gang: generations": "three hosts"}
ENTER, REGROUP, FLUSH = Supervisor._enter, Supervisor._restart_together, Registry._flush
CARRY_OUT = Executor.carry_out


def hear_all(core: RegistryCore, who: Incarnation) -> Member:
    """Whoever names a slot is taken for who holds it."""
    member = core.member(who.slot)
    if member is None:
        raise Refused(f"{who}")
    return member


def commit_anything(core: RegistryCore, who: Incarnation, record: VersionRecord) -> VersionRecord:
    """The last commit counts, whoever makes it and whatever it follows."""
    core._committed = record
    core.revision += 1
    core.writes.append(record)
    return record


def answer_first(registry: Registry) -> None:
    """What is answered is on disk a little later, if the registry is still there."""
    assert registry.core is not None
    writes, registry.core.writes = registry.core.writes, []
    if writes:
        registry.later(0.3, partial(registry.world.registry_disk.put, writes))
    FLUSH(registry)


def report_exit_at_kill(executor: Executor, order: SlotOrder) -> None:
    """The exit is reported with the kill, and comes when it comes."""
    if not isinstance(order, Kill):
        CARRY_OUT(executor, order)
    elif (role := executor.roles.pop(order.slot, None)) is not None:
        executor.world.kernel.after(1.0, partial(role.exit, order.kind, order.reason))
        diagnosis = Diagnosis(slot=order.slot, epoch=role.who.epoch, kind=order.kind, cause=order.reason)
        executor._on_event(SlotExited(order.slot, diagnosis))


def all_orders(core: HeadSession, answer: Orders) -> list[Any]:
    """What was taken is not noted, so it comes again, and is carried out again."""
    return answer.items


def nothing_known(core: NodeTable, membership: NodeMembership, first: int, count: int) -> int:
    """Reports that come twice happen twice."""
    return 0


def regroup_at_once(core: Supervisor, members: Any, wait_s: float, cause: str, **how: Any) -> None:
    """Restarts follow each other without a wait."""
    REGROUP(core, members, 0.0, cause, **how)


def give_up_quietly(core: Supervisor, s: Slot, diagnosis: Diagnosis) -> None:
    """Who has used up its restarts is left lying."""
    core._end(s, failed=True)


def enter_without_deadline(core: Supervisor, s: Slot, state: Any, timeout_s: float | None) -> None:
    """A stop is waited for, however long it takes."""
    ENTER(core, s, state, None if state == "stopping" else timeout_s)


def forever_when_waiting(core: Supervisor, s: Slot) -> float:
    """Who says that it waits is believed for ever."""
    return 1e9 if s.waiting else s.spec.hang_after_s


ONE_GENERATION = property(lambda role: 1, lambda role, value: None)

ABLATIONS: dict[str, tuple[Any, set[str]]] = {
    "registry: epochs": (patch.object(RegistryCore, "_living", hear_all), {HEARD}),
    "queue: epochs": (patch.object(Callers, "check", lambda *_: None), {HEARD}),
    "stage: epochs": (patch.object(Stage, "fence", lambda *_: None), {HEARD}),
    "registry and queue: no judgement after a pause": (
        patch.object(PauseDetector, "check", lambda *_: "expire"),
        {LAPSED},
    ),
    "registry: durable before the answer": (patch.object(Registry, "_flush", answer_first), {EPOCHS, VERSIONS}),
    "registry: compare-and-set of the commit": (
        patch.object(RegistryCore, "commit_version", commit_anything),
        {VERSIONS},
    ),
    "queue: calls that are made again": (patch.object(Callers, "reply", lambda *_: None), {DOUBLED, TWICE}),
    "agent: death is confirmed": (patch.object(Executor, "carry_out", report_exit_at_kill), {TWO}),
    "supervisor: intensity": (patch.object(RestartWindow, "failed", lambda *_: 0), {UNESCALATED}),
    "supervisor: back-off": (patch.object(Supervisor, "_restart_together", regroup_at_once), {UNESCALATED}),
    "supervisor: escalation": (patch.object(Supervisor, "_escalate", give_up_quietly), {UNANSWERED}),
    "supervisor: deadline of a stop": (patch.object(Supervisor, "_enter", enter_without_deadline), {OVERDUE}),
    "supervisor: beats of who waits": (patch.object(Supervisor, "_hang_timeout_s", forever_when_waiting), {OVERDUE}),
    "gang: generations": (patch.object(RoleNode, "generation", ONE_GENERATION, create=True), {MIXED}),
    "gang: all or none": (
        patch.object(RoleNode, "restarted_with", lambda _, slot: [slot]),
        {STANDSTILL, MIXED, TWO, UNEXPECTED},
    ),
    "nodes: a lease ends what runs there": (patch.object(HeadSession, "left_s", lambda *_: 1e9), {TWO}),
    "nodes: the head is more patient than a lease": (patch.object(table_module, "patience_s", lambda s: s / 2), {TWO}),
    "nodes: orders are numbered": (patch.object(HeadSession, "take", all_orders), {TWO}),
    "nodes: reports are numbered": (patch.object(NodeTable, "report", nothing_known), {UNEXPECTED}),
}


def seeds(kind: str) -> Iterator[int]:
    """Of runs of this kind; of all, if none is named."""
    return (seed for seed in count() if kind in ("", KINDS[seed % len(KINDS)]))


@contextmanager
def without(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(ABLATIONS[name][0])
        yield


@pytest.mark.parametrize("name", ABLATIONS)
def test_a_run_without_a_safeguard_is_found_out(name: str) -> None:
    right = ABLATIONS[name][1]
    seen: set[str] = set()
    for seed in islice(seeds(KIND_OF.get(name, "")), RUNS):
        with without(name):
            seen |= World(seed).play().checker.kinds()
        if seen & right:
            return
    raise AssertionError(f"{RUNS} runs without the safeguard ({name}), and only {sorted(seen)} was found")


def test_nothing_is_found_when_all_safeguards_are_back() -> None:
    """That a patch stayed behind would show here."""
    for seed in range(40):
        assert World(seed).play().checker.findings == []
