"""The bond between head and node as state machines: leases and fencing, orders and reports that are sent again."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.cluster.nodes.api import (
    BindRendezvous,
    Item,
    NodeFacts,
    NodeMembership,
    SlotAddress,
)
from relax_rt.cluster.nodes.session import HeadSession
from relax_rt.cluster.nodes.table import AGENT_START_S, PAUSE_S, STOP_S, TICK_S, NodeTable, patience_s
from relax_rt.interfaces.agent import Diagnosis
from relax_rt.supervision.protocol import SlotExited, SlotProgress, SlotReady, SlotSpawned, Stop
from relax_rt.transport.rpc.errors import Refused, StaleEpoch

LEASE_S = 10.0


def facts(name: str = "b", **fields: int) -> NodeFacts:
    return NodeFacts(name=name, host="10.0.0.2", **fields)  # type: ignore[arg-type]


def head_with(name: str = "b") -> tuple[NodeTable, NodeMembership]:
    head = NodeTable("run1", LEASE_S, 0.0)
    membership, new = head.join(facts(name), "t", 0.0)
    assert new
    return head, membership


def ticks(head: NodeTable, since: float, until: float) -> list[tuple[float, str]]:
    lost, now = [], since
    while now < until:
        now = min(now + TICK_S, until)
        lost += [(now, gone.membership.node) for gone in head.tick(now)]
    return lost


def test_the_same_attempt_may_ask_twice_and_another_of_the_name_may_not() -> None:
    head, membership = head_with()
    assert head.join(facts(), "t", 1.0) == (membership, False)
    with pytest.raises(Refused, match=r"node b#1 is here, last seen 1\.0 s ago"):
        head.join(facts(), "u", 2.0)
    assert head.join(facts("c"), "u", 2.0)[0].epoch == 2


@pytest.mark.parametrize("name", ["", "head", "a b", "x" * 41, "../x", "ü"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(Refused, match="choose"):
        NodeTable("run1", LEASE_S, 0.0).join(facts(name), "t", 0.0)


def test_other_versions_are_refused() -> None:
    with pytest.raises(Refused, match="same version of relax-rt"):
        NodeTable("run1", LEASE_S, 0.0).join(facts(protocol=99), "t", 0.0)


def test_a_silent_node_is_lost_fenced_and_may_join_anew() -> None:
    head, membership = head_with()
    assert head.renew(membership, 2.0) and not head.renew(membership, 3.0)
    ((at, name),) = ticks(head, 0.0, 20.0)
    assert name == "b" and at == pytest.approx(3.0 + patience_s(LEASE_S), abs=2 * TICK_S)
    for call in (
        lambda: head.renew(membership, 20.0),
        lambda: head.orders(membership, 0, 0),
        lambda: head.report(membership, 1, 1),
    ):
        with pytest.raises(StaleEpoch, match="silent for"):
            call()
    assert not head.order("b", Stop("x/0"))
    again, new = head.join(facts(), "u", 21.0)
    assert new and again.epoch > membership.epoch
    with pytest.raises(StaleEpoch, match="node b#2 has taken its place"):
        head.renew(membership, 21.0)
    assert head.leave(membership, "late word") is None
    head.renew(again, 21.0)


def test_a_node_whose_agent_has_not_begun_yet_has_more_time() -> None:
    head, _ = head_with()
    ((at, name),) = ticks(head, 0.0, 100.0)
    assert name == "b" and at == pytest.approx(AGENT_START_S, abs=2 * TICK_S)


def test_a_seat_of_an_earlier_run_is_fenced() -> None:
    head, membership = head_with()
    with pytest.raises(StaleEpoch, match="run run0 is over"):
        head.renew(NodeMembership("run0", membership.node, membership.epoch), 0.0)


def test_a_pause_of_the_head_loses_nobody() -> None:
    head, membership = head_with()
    assert head.tick(100.0) == []
    assert ticks(head, 100.0, 100.0 + patience_s(LEASE_S) - TICK_S) == []
    head.renew(membership, 100.0 + LEASE_S)
    assert ticks(head, 100.0 + LEASE_S, 100.0 + LEASE_S + patience_s(LEASE_S) - TICK_S) == []


def test_orders_are_given_again_until_they_are_confirmed_and_taken_once() -> None:
    head, membership = head_with()
    session = HeadSession(LEASE_S, 0.0)
    head.order("b", Stop("x/0"))
    head.order("b", Stop("x/1"))
    first = head.orders(membership, 0, 1)
    assert first is not None and first.first == 1
    assert session.take(first) == [Stop("x/0"), Stop("x/1")]
    head.order("b", BindRendezvous("x/2", 1))
    # The answer is sent a second time, with what has come since.
    again = head.orders(membership, 0, 1)
    assert again is not None and session.take(again) == [BindRendezvous("x/2", 1)]
    assert session.take(again) == []
    assert head.orders(membership, session.since, 1) is None


def test_places_go_out_when_they_change() -> None:
    head, membership = head_with()
    session = HeadSession(LEASE_S, 0.0)
    head.set_address("queue/0", "tcp://10.0.0.1:7")
    answer = head.orders(membership, 0, session.addresses_version)
    assert answer is not None and session.take(answer) == []
    assert session.addresses == {"queue/0": "tcp://10.0.0.1:7"}
    assert head.orders(membership, 0, session.addresses_version) is None
    head.set_address("queue/0", "tcp://10.0.0.1:7")
    assert head.orders(membership, 0, session.addresses_version) is None
    head.set_address("queue/0", "")
    answer = head.orders(membership, 0, session.addresses_version)
    assert answer is not None and answer.addresses == {}


def test_reports_are_sent_again_until_confirmed_and_counted_once() -> None:
    head, membership = head_with()
    session = HeadSession(LEASE_S, 0.0)
    session.add(SlotSpawned("x/0", 3, 77, "b"))
    session.add(SlotAddress("x/0", "unix:///x", "tcp://h:1"))
    first, items = session.report()
    assert (first, len(items)) == (1, 2) and head.report(membership, first, len(items)) == 0
    session.add(SlotReady("x/0"))
    # The answer was lost: the same again.
    assert session.report() == (first, items) and head.report(membership, first, len(items)) == 2
    session.reported(head.reported(membership))
    first, items = session.report()
    assert first == 3 and list(items) == [SlotReady("x/0")]
    session.reported(3)
    assert session.nothing_to_report
    with pytest.raises(Refused, match="has not come"):
        head.report(membership, 9, 1)


def test_progress_that_was_not_sent_gives_way_to_newer_one_of_its_slot() -> None:
    session = HeadSession(LEASE_S, 0.0)
    session.add(SlotProgress("x/0", 1, extend_s=5.0))
    session.add(SlotProgress("y/0", 1))
    session.add(SlotProgress("x/0", 2, extend_s=1.0))
    session.add(SlotReady("x/0"))
    session.add(SlotProgress("x/0", 3))
    _, items = session.report()
    assert list(items) == [
        SlotProgress("x/0", 2, extend_s=6.0),
        SlotProgress("y/0", 1),
        SlotReady("x/0"),
        SlotProgress("x/0", 3),
    ]


def test_events_cross_the_wire_whole() -> None:
    died = SlotExited("x/0", Diagnosis(slot="x/0", epoch=3, kind="oom", cause="memory", last_lines=["a"]))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([died]), type=list[Item]) == [died]


@given(st.integers(0, 2**32), st.sampled_from([0.6, 2.0, 10.0]))
def test_no_node_is_lost_before_its_processes_are_dead(seed: int, lease_s: float) -> None:
    """Whatever is delayed or lost: the head takes a node for lost only after that node's own deadline, and the time
    it has to kill, have passed. Clocks differ in their zero and by 2% in their speed."""
    rng = random.Random(seed)
    zero, speed = rng.uniform(-1e5, 1e5), rng.uniform(0.98, 1.02)
    own = lambda t: zero + t * speed  # noqa: E731
    head = NodeTable("run1", lease_s, 0.0)
    membership, _ = head.join(facts(), "t", 0.0)
    session = HeadSession(lease_s, own(0.0))
    calls: list[tuple[float, float]] = []  # (arrives at the head, was made)
    answers: list[tuple[float, float]] = []
    now, tick_at, dead_at = 0.0, TICK_S, None
    for _ in range(600):
        now += rng.uniform(0.0, lease_s / 20)
        if dead_at is None and session.left_s(own(now)) <= 0:
            dead_at = now + rng.uniform(0.0, 0.8 * STOP_S)
        if dead_at is None and rng.random() < 0.5:
            delay = rng.expovariate(1 / (lease_s * rng.choice([0.001, 0.1, 2.0])))
            if rng.random() < 0.7:
                calls.append((now + delay, now))
        for call in [c for c in calls if c[0] <= now]:
            calls.remove(call)
            head.renew(membership, now)
            if rng.random() < 0.8:
                answers.append((now + rng.expovariate(1 / (lease_s * 0.1)), call[1]))
        for answer in [a for a in answers if a[0] <= now]:
            answers.remove(answer)
            session.renew(own(answer[1]))
        if rng.random() < 0.01:
            now += rng.uniform(0.0, 3 * PAUSE_S)  # the head stood still
        if now >= tick_at:
            tick_at = now + TICK_S
            if head.tick(now):
                assert dead_at is not None and dead_at <= now
                return
