"""Memory of processes on other nodes: who reads it over the network, and what ends with its owner."""

from __future__ import annotations

from ledger_driver import AGENT, JUDGE, TRAINER, Driver, free_policy, policy

from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.messages import RowPut, SampleKey
from relax_rt.transport.rpc.identity import Incarnation

FAR, OTHER, THERE = Incarnation("far/0", 20), Incarnation("other/0", 21), Incarnation("there/0", 22)


def join(d: Driver, who: Incarnation, node: str, payloads: str) -> None:
    d.apply(ev.JoinQueue(node, payloads, issued=True), who)


def far_driver() -> Driver:
    d = Driver(free_policy())
    d.own(ev.OpenRun("run-1", "here", "tcp://here:1"))
    join(d, FAR, "far", "tcp://far:1")
    join(d, OTHER, "far", "tcp://far:2")
    join(d, THERE, "here", "")
    return d


def test_payload_is_fetched_from_where_it_is() -> None:
    d = far_driver()
    for who in (FAR, OTHER, THERE):
        d.offer(who, 1)
    far, other, there = "far-0-20", "other-0-21", "there-0-22"
    # Two processes of one node that serve their own memory do not share it.
    wanted = {
        FAR: {other: "tcp://far:2", there: "tcp://here:1"},
        OTHER: {far: "tcp://far:1", there: "tcp://here:1"},
        THERE: {far: "tcp://far:1", other: "tcp://far:2"},
        # One that did not join is on the broker's node.
        JUDGE: {far: "tcp://far:1", other: "tcp://far:2"},
    }
    for who, remote in wanted.items():
        batch = d.take(who, "a", samples=3)
        assert len(batch) == 3 and batch.remote == remote
        d.call(who, ev.ReleaseLease(batch.lease, "next"))
    d.check_replay()


def test_samples_end_with_the_memory_that_they_need() -> None:
    d = far_driver()
    d.offer(FAR, 2)
    d.offer(THERE, 1)
    # Columns in memory of another process count as well, and so do blobs.
    batch = d.take(OTHER, "a", samples=1)
    assert [info.key for info in batch.infos()] == [SampleKey(1, 0)]
    d.complete(OTHER, batch, d.rows(OTHER, [RowPut(SampleKey(1, 0), 0)], "label"))
    put = d.rows(FAR, [RowPut(SampleKey(0, 0), 0)], blobs=[d.blob(FAR, "image")])
    d.call(FAR, ev.PutGroups([put], [1]))
    put = d.rows(THERE, [RowPut(SampleKey(0, 0), 0)], blobs=[d.blob(THERE, "image")])
    d.call(THERE, ev.PutGroups([put], [1]))
    assert d.ledger.account()["samples_issued"] == 5
    d.gone(OTHER)
    account = d.ledger.account()
    assert account["failed"] == 1 and account["ready"] == 4
    d.gone(FAR)
    # What is left is what THERE put first: its second sample's image was kept with FAR's.
    account = d.ledger.account()
    assert account["failed"] == 4 and account["ready"] == 1
    assert d.ledger.audit() == []
    d.gone(THERE)
    # Slabs of the broker's node outlive their owner.
    assert d.ledger.account()["ready"] == 1
    d.check_replay()


def test_members_whose_payload_is_gone_are_made_again() -> None:
    d = Driver(policy())
    d.own(ev.OpenRun("run-1", "here", "tcp://here:1"))
    join(d, FAR, "far", "tcp://far:1")
    version = d.rollback(TRAINER, 0, 0, changed=True)
    (ticket,) = d.admit(FAR, version).tickets
    d.put(FAR, SampleKey(ticket.group, 0), version)
    join(d, OTHER, "far", "tcp://far:2")
    d.call(AGENT, ev.ProcessExited(FAR, "silent"))
    (again,) = d.admit(OTHER, version).tickets
    assert (again.prompt, again.wanted()) == (ticket.prompt, [0, 1])
    assert d.ledger.audit() == []
    d.check_replay()
