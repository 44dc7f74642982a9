"""The head's listener over real sockets: joining, orders, reports, silence, fencing, and keys that do not fit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from waiting import eventually

from relax_rt.cluster.nodes.api import (
    HELLO_NAME,
    BindRendezvous,
    EndNode,
    HeadApi,
    JoinReply,
    LeaveRequested,
    NameTaken,
    NodeFacts,
    Orders,
    RendezvousBound,
    SlotAddress,
)
from relax_rt.cluster.nodes.fleet import NodeFleet, NodeListener
from relax_rt.cluster.nodes.join_key import FILE, curve_keys, make_key, read_key
from relax_rt.config.schema import NodesTable, RunConfig, SupervisionTable
from relax_rt.interfaces.agent import Diagnosis
from relax_rt.supervision.executor import GangRendezvous, StartOrder
from relax_rt.supervision.placement import Node
from relax_rt.supervision.protocol import DrainRequested, Event, NodeJoined, NodeLost, SlotExited, SlotSpawned, Stop
from relax_rt.supervision.rundir import RunPaths
from relax_rt.transport.rpc.errors import Refused, RelaxError, StaleEpoch, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import CurveKeys, RpcClient, make_hello

T = TypeVar("T")
LEASE_S = 0.3


class Head:
    """A fleet and its listener, and what they tell the agent."""

    def __init__(self, tmp_path: Path) -> None:
        self.paths = RunPaths("cafe0001", tmp_path)
        self.keys = curve_keys(read_key(make_key(tmp_path)))
        self.posted: list[Event] = []
        self.heard: list[Event] = []
        self.addresses: dict[str, str] = {}
        self.ended: list[tuple[str, int]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        table = NodesTable(listen="127.0.0.1:0", lease_s=LEASE_S)
        config = RunConfig.model_construct(supervision=SupervisionTable(nodes=table))
        self.fleet = NodeFleet(config, self.paths)
        self.fleet.attach(None, self, self.emit)  # type: ignore[arg-type]
        assert self.fleet.table is not None
        self.listener = NodeListener(self.fleet, self.fleet.table, config="{}", system=["registry"], keys=self.keys)

    def emit(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))

    def post(self, event: Event) -> None:
        self.posted.append(event)

    def on_event(self, event: Event) -> None:
        self.heard.append(event)

    def on_address(self, slot: str, address: str, remote: str) -> None:
        self.addresses[slot] = remote

    def on_gone(self, slot: str, epoch: int, reason: str) -> None:
        self.ended.append((slot, epoch))


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[Head]:
    (tmp_path / "events").mkdir()
    head = Head(tmp_path)
    await head.listener.open("tcp://127.0.0.1:0")
    try:
        yield head
    finally:
        await head.listener.close()


@asynccontextmanager
async def node(head: Head, keys: CurveKeys | None = None, timeout_s: float = 60.0) -> AsyncIterator[HeadApi]:
    client = RpcClient(head.listener.address, make_hello(HELLO_NAME, Incarnation("b/0", 0)), curve=keys or head.keys)
    try:
        yield client.bind(HeadApi, timeout_s=timeout_s)
    finally:
        await client.close()


async def joined(api: HeadApi, token: str = "t") -> JoinReply:
    return await api.join(NodeFacts(name="b", host="10.0.0.2", cores=3, gpus=1), token)


async def test_a_node_joins_takes_orders_and_reports(tmp_path: Path) -> None:
    async with opened(tmp_path) as head, node(head) as api:
        membership = (await joined(api)).membership
        assert (await joined(api)).membership == membership
        assert head.posted == [], "its agent is yet to begin"
        await api.orders(membership, 0, 1, 0.0)
        await api.orders(membership, 0, 1, 0.0)
        assert head.posted == [NodeJoined(Node("b", 3, 1))]
        with pytest.raises(NameTaken):
            await joined(api, "another")
        executor = head.fleet.executor("b")
        assert executor is not None and head.fleet.executor("c") is None
        waiting = asyncio.create_task(api.orders(membership, 0, 1, 4.0))
        await asyncio.sleep(0.05)
        executor.carry_out(StartOrder(slot="x/0", epoch=7, node="b"))
        answer = await waiting
        assert answer.items == [StartOrder(slot="x/0", epoch=7, node="b")]
        events = [SlotSpawned("x/0", 7, 99, "b"), SlotAddress("x/0", "unix:///x", "tcp://10.0.0.2:5")]
        assert await api.report(membership, 1, events) == 2
        assert await api.report(membership, 1, events) == 2
        assert head.heard == [SlotSpawned("x/0", 7, 99, "b")] and head.addresses == {"x/0": "tcp://10.0.0.2:5"}
        meeting = asyncio.create_task(executor.rendezvous("x/0", 2))
        assert (await api.orders(membership, 1, 1, 4.0)).items == [BindRendezvous("x/0", 2)]
        await api.report(membership, 3, [RendezvousBound("x/0", 2, "10.0.0.2", 4711)])
        assert await meeting == GangRendezvous("10.0.0.2", 4711)
        # Of slots that were not started there nothing is believed.
        await api.report(membership, 4, [SlotSpawned("y/0", 1, 1, "b"), SlotSpawned("x/0", 6, 1, "b")])
        assert len(head.heard) == 1


async def test_a_silent_node_is_lost_fenced_and_told_so(tmp_path: Path) -> None:
    async with opened(tmp_path) as head, node(head) as api:
        membership = (await joined(api)).membership
        await api.orders(membership, 0, 1, 0.0)
        executor = head.fleet.executor("b")
        assert executor is not None
        executor.carry_out(StartOrder(slot="x/0", epoch=7, node="b"))
        await eventually(lambda: head.ended)
        assert head.ended == [("x/0", 7)]
        assert isinstance(head.posted[-1], NodeLost) and not head.posted[-1].keep
        assert head.fleet.executor("b") is None
        clean = Diagnosis(slot="x/0", epoch=7, kind="clean", cause="finished")
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: api.orders(membership, 0, 1, 0.0),
            lambda: api.report(membership, 1, [SlotExited("x/0", clean)]),
        ]
        for call in calls:
            with pytest.raises(StaleEpoch, match="declared lost, or left: silent"):
                await call()
        assert head.heard == [] and head.events[-1][0] == "node_fenced"
        await api.leave(membership, "late")
        assert (await joined(api, "again")).membership.epoch == membership.epoch + 1


async def test_a_node_that_wants_to_leave_may_go_when_nothing_runs_there(tmp_path: Path) -> None:
    async with opened(tmp_path) as head, node(head) as api:
        membership = (await joined(api)).membership
        executor = head.fleet.executor("b")
        assert executor is not None
        executor.carry_out(StartOrder(slot="x/0", epoch=7, node="b"))
        await api.report(membership, 1, [LeaveRequested("SIGTERM")])
        assert head.posted[-1] == DrainRequested("b")
        executor.carry_out(Stop("x/0"))
        clean = Diagnosis(slot="x/0", epoch=7, kind="clean", cause="finished")
        await api.report(membership, 2, [SlotExited("x/0", clean)])
        orders: Orders = await api.orders(membership, 0, 1, 4.0)
        assert orders.items[1] == Stop("x/0") and isinstance(orders.items[2], EndNode)
        await api.leave(membership, "done")
        assert isinstance(head.posted[-1], NodeLost) and head.ended == []


async def test_the_end_of_the_run_ends_the_nodes_and_lets_nobody_in(tmp_path: Path) -> None:
    async with opened(tmp_path) as head, node(head) as api:
        membership = (await joined(api)).membership
        ending = asyncio.create_task(head.fleet.close(3, "all is done"))
        assert (await api.orders(membership, 0, 1, 4.0)).items == [EndNode(3, "all is done")]
        assert not ending.done()
        await api.leave(membership, "all is done")
        await ending
        with pytest.raises(Refused, match="the run is over"):
            await joined(api, "late")


async def test_another_key_gets_no_answer(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with opened(tmp_path) as head, AsyncExitStack() as stack:
        strange = curve_keys(read_key(make_key(tmp_path / "other")))
        api = await stack.enter_async_context(node(head, strange, timeout_s=1.0))
        with pytest.raises(Unreachable):
            await joined(api)
        assert head.posted == [] and head.events == []


def test_keys_are_for_their_owner_alone_and_kept(tmp_path: Path) -> None:
    path = make_key(tmp_path)
    assert path == tmp_path / FILE and path.stat().st_mode & 0o777 == 0o600
    text = read_key(path)
    assert len(text) == 64 and read_key(make_key(tmp_path)) == text
    assert curve_keys(text) == curve_keys(text + "\n")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = make_key(tmp_path)
    path.chmod(mode)
    with pytest.raises(RelaxError, match=f"its mode is {mode:04o}.*chmod 600"):
        make_key(tmp_path)
    with pytest.raises(RelaxError, match=f"its mode is {mode:04o}.*chmod 600"):
        read_key(path)
    path.chmod(0o600)
    assert make_key(tmp_path) == path and read_key(path)


@pytest.mark.parametrize("text", ["", "abc", "zz" * 32, "ab" * 31, "ab" * 33])
def test_what_is_no_key(tmp_path: Path, text: str) -> None:
    (tmp_path / "k").write_text(text)
    with pytest.raises(RelaxError, match=f"{tmp_path}/k is no key"):
        read_key(tmp_path / "k")
    with pytest.raises(RelaxError, match=r"copy join\.key"):
        read_key(tmp_path / "nothing")
