"""What a call does on a connection that stands, over every carrier."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec
import pytest
import rpc_far_end
import uvloop
from eventually import eventually
from rpc_far_end import FarEnd, FarEndImpl, Point, calling, hello, serving

from relax_rt.transport.rpc.errors import DeadlineExceeded, ProtocolError, Refused, RemoteError, StaleEpoch, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import CurveKeys, RpcClient, RpcServer, caller, eager, idempotent, make_hello, tell
from relax_rt.transport.rpc.wire import PROTOCOL, CancelFrame, HelloFrame, RequestFrame, encode_frame, encode_message

CARRIERS = ("unix", "tcp", "curve")


@contextlib.asynccontextmanager
async def pair(
    carrier: str, directory: pathlib.Path, timeout_s: float = 10.0, **options: object
) -> AsyncIterator[tuple[RpcServer, FarEndImpl, RpcClient, FarEnd]]:
    curve = CurveKeys.make() if carrier == "curve" else None
    address = f"unix://{directory}/q.sock" if carrier == "unix" else "tcp://127.0.0.1:0"
    async with (
        serving(address, curve=curve, **options) as (server, real, implementation),
        calling(real, timeout_s, curve=curve) as (client, proxy),
    ):
        yield server, implementation, client, proxy


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_arguments_and_results_keep_their_types(carrier: str, tmp_path: pathlib.Path) -> None:
    async with pair(carrier, tmp_path) as (server, _, client, far):
        assert await far.move(Point(1)) == Point(2, 0.5, ("none",))
        assert await far.move(Point(1, 2.0, ("a",)), 5, label="b") == Point(6, 2.0, ("a", "b"))
        assert await far.move(by=2, label="c", point=Point(0)) == Point(2, 0.5, ("c",))
        assert await far.nothing() is None
        assert await far.who() == Incarnation("rollout/0", 7)
        assert client.peer is not None
        assert client.peer.who == Incarnation("queue/0", 3)
        assert (server.statistics().replies, client.statistics().calls) == (5, 5)


async def test_calls_share_one_connection_and_do_not_wait_for_each_other(carrier: str, tmp_path: pathlib.Path) -> None:
    async with pair(carrier, tmp_path) as (server, implementation, client, far):
        held = asyncio.create_task(far.hold("a"))
        await implementation.until_working(1)
        payloads = [bytes([i]) * i * 500 for i in range(50)]
        assert await asyncio.gather(*(far.echo(p) for p in payloads)) == payloads
        implementation.release.set()
        await held
        assert server.statistics().connections_total == 1
        assert client.statistics().inflight == 0


async def test_errors_of_a_handler_reach_the_caller(carrier: str, tmp_path: pathlib.Path) -> None:
    async with pair(carrier, tmp_path) as (_, _, _, far):
        with pytest.raises(RemoteError) as plain:
            await far.fail("plain")
        assert (plain.value.kind, plain.value.message) == ("KeyError", "'spelling'")
        assert plain.value.where == "queue/0#3 FarEnd.fail"
        assert 'raise KeyError("spelling")' in plain.value.trace
        with pytest.raises(StaleEpoch) as stale:
            await far.fail("stale")
        assert (stale.value.what, stale.value.why, stale.value.hint) == (
            "rollout/0#1",
            "rollout/0#2 holds the slot",
            "exit",
        )
        assert "queue/0#3 FarEnd.fail" in stale.value.__notes__[0]
        with pytest.raises(rpc_far_end.TooHot, match=r"451 degrees: too hot \(wait\)"):
            await far.fail("own")
        with pytest.raises(RemoteError, match="cancelled by its own process"):
            await far.fail("cancel")


async def test_a_handler_is_cancelled_at_the_deadline(carrier: str, tmp_path: pathlib.Path) -> None:
    async with pair(carrier, tmp_path, 1.5) as (server, implementation, _, far):
        with pytest.raises(DeadlineExceeded, match=r"FarEnd\.hold.*not finished in"):
            await far.hold("late")
        assert implementation.cancelled == ["late"]
        assert server.statistics().expired == 1


async def test_wait_s_extends_the_deadline(tmp_path: pathlib.Path) -> None:
    async with pair("unix", tmp_path, 1.5) as (_, _, _, far):
        assert await far.poll(1.8) == "waited"


async def test_cancelling_the_caller_cancels_the_handler(carrier: str, tmp_path: pathlib.Path) -> None:
    async with pair(carrier, tmp_path) as (server, implementation, client, far):
        call = asyncio.create_task(far.hold("dropped"))
        await implementation.until_working(1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await far.nothing()
        await eventually(lambda: implementation.cancelled == ["dropped"])
        assert server.statistics().cancelled == 1
        assert client.statistics().inflight == 0


async def test_closing_the_client_cancels_its_handlers(carrier: str, tmp_path: pathlib.Path) -> None:
    async with pair(carrier, tmp_path) as (server, implementation, client, far):
        call = asyncio.create_task(far.hold("orphan"))
        await implementation.until_working(1)
        await client.close()
        with pytest.raises(Unreachable, match="closed"):
            await call
        await eventually(lambda: implementation.cancelled == ["orphan"] and server.statistics().connections == 0)


async def test_tell_returns_before_the_handler_and_hides_its_error(
    carrier: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(carrier, tmp_path) as (server, implementation, _, far):
        await far.note("bad")
        await far.note("good")
        await asyncio.wait_for(implementation.noted.wait(), 120)
        assert implementation.notes == ["bad", "good"]
        assert (server.statistics().tells, server.statistics().faults) == (2, 1)
    assert "no one hears this" in caplog.text


async def test_unknown_names_are_refused_with_a_suggestion(tmp_path: pathlib.Path) -> None:
    class FarEndd(FarEnd): ...

    async with pair("unix", tmp_path) as (_, _, client, far):
        with pytest.raises(Refused, match="did you mean 'FarEnd'"):
            await client.bind(FarEndd, timeout_s=60).nothing()
        with pytest.raises(AttributeError, match="did you mean 'nothing'"):
            await far.nothin()  # type: ignore[attr-defined]

        class Newer(FarEnd):
            async def ecko(self) -> None: ...

        Newer.__name__ = "FarEnd"
        with pytest.raises(Refused, match=r"no method ecko \(did you mean 'echo'"):
            await client.bind(Newer, timeout_s=60).ecko()


async def test_wrong_types_are_named(tmp_path: pathlib.Path) -> None:
    async with pair("unix", tmp_path) as (_, _, _, far):
        with pytest.raises(Refused, match=r"arguments of FarEnd\.move: Expected `int`, got `str` - at `by`"):
            await far.move(Point(1), "two")  # type: ignore[arg-type]
        with pytest.raises(Refused, match=r"arguments of FarEnd\.echo: cannot be sent"):
            await far.echo(object())  # type: ignore[arg-type]
        with pytest.raises(ProtocolError, match=r"result of FarEnd\.wrong: Expected `int`, got `str`"):
            await far.wrong()
        with pytest.raises(TypeError):
            await far.echo()  # type: ignore[call-arg]
        assert await far.echo(b"still here") == b"still here"


async def test_oversize_messages_name_method_size_and_limit(carrier: str, tmp_path: pathlib.Path) -> None:
    class Big:
        async def make(self, size: int) -> bytes:
            return b"x" * size

    async with pair(carrier, tmp_path, max_message_bytes=100_000) as (server, _, client, far):
        server.offer(Big, Big())
        with pytest.raises(ProtocolError, match=r"FarEnd\.echo: its message has 1000\d\d bytes.* is 100000"):
            await far.echo(b"x" * 100_000)
        with pytest.raises(ProtocolError, match=r"result of Big\.make: it has 2000\d\d bytes; the limit is 100000"):
            await client.bind(Big, timeout_s=60).make(200_000)
        # Neither costs the connection.
        assert await far.echo(b"x" * 90_000) == b"x" * 90_000
        assert client.counters.reconnects == 0


async def test_handlers_are_bounded(carrier: str, tmp_path: pathlib.Path) -> None:
    async with pair(carrier, tmp_path, max_inflight=4) as (_, implementation, _, far):
        calls = [asyncio.create_task(far.hold(str(i))) for i in range(20)]
        await implementation.until_working(4)
        # A cancellation gets through although the connection is full.
        calls[0].cancel()
        await eventually(lambda: implementation.cancelled == ["0"])
        implementation.release.set()
        await asyncio.gather(*calls[1:])
        assert implementation.peak == 4


async def test_a_call_without_room_fails_with_the_reason(tmp_path: pathlib.Path) -> None:
    async with pair("unix", tmp_path, max_inflight=1) as (_, implementation, client, far):
        held = asyncio.create_task(far.hold("first"))
        await implementation.until_working(1)
        with pytest.raises(DeadlineExceeded, match="1 calls are at work there already"):
            await client.bind(FarEnd, timeout_s=0.2).nothing()
        implementation.release.set()
        await held


async def test_interfaces_that_cannot_cross_are_refused_at_once(tmp_path: pathlib.Path) -> None:
    class NotAsync:
        def get(self) -> int:
            return 1

    class Untyped:
        async def get(self, key) -> int:  # type: ignore[no-untyped-def]
            return 1

    class Starred:
        async def get(self, *keys: int) -> int:
            return 1

    class Answering:
        @tell
        async def get(self) -> int:
            return 1

    server = RpcServer(hello())
    for api, why in (
        (NotAsync, "NotAsync.get: it is not `async def`"),
        (Untyped, "parameter key has no annotation"),
        (Starred, "it takes"),
        (Answering, "a one-way method has no result"),
        (tuple, "no public"),
    ):
        with pytest.raises(Refused, match=why):
            server.offer(api, api())
    with pytest.raises(Refused, match="has no method echo"):
        server.offer(FarEnd, object())  # type: ignore[arg-type]
    with pytest.raises(Refused, match="not a positive number"):
        RpcClient("unix:///x", hello()).bind(FarEnd, timeout_s=0)
    with pytest.raises(Refused, match="was not called by a remote peer"):
        caller()


async def test_a_server_that_closes_lets_its_handlers_finish(tmp_path: pathlib.Path) -> None:
    async with pair("unix", tmp_path) as (server, implementation, _, far):
        call = asyncio.create_task(far.hold("last"))
        await implementation.until_working(1)
        closing = asyncio.create_task(server.close(grace_s=10))
        await asyncio.sleep(0)
        implementation.release.set()
        assert await call > 0
        await closing
        assert not (tmp_path / "q.sock").exists()


def test_the_same_on_uvloop(tmp_path: pathlib.Path) -> None:
    async def scenario(carrier: str) -> None:
        async with pair(carrier, tmp_path, max_inflight=8) as (server, implementation, _, far):
            # Far more than the write buffers hold, in both directions at once.
            big = [bytes([i]) * 3_000_000 for i in range(16)]
            assert await asyncio.gather(*(far.echo(b) for b in big)) == big
            with pytest.raises(RemoteError, match="spelling"):
                await far.fail("plain")
            call = asyncio.create_task(far.hold("x"))
            await implementation.until_working(1)
            call.cancel()
            await eventually(lambda: implementation.cancelled == ["x"])
            assert server.statistics().inflight == 0

    for carrier in CARRIERS:
        uvloop.run(scenario(carrier))


async def test_control_comes_through_while_requests_wait_for_room(carrier: str, tmp_path: pathlib.Path) -> None:
    """More calls than there is room for: the cancellation behind them is seen, and so is a cancelled one of them."""
    async with pair(carrier, tmp_path) as (server, implementation, _, far):
        server.max_calls = 2
        calls = [asyncio.create_task(far.hold(str(i))) for i in range(12)]
        await implementation.until_working(2)
        await eventually(lambda: server.held)
        calls[0].cancel(), calls[5].cancel()
        await eventually(lambda: implementation.cancelled == ["0"])
        await eventually(lambda: server.statistics().cancelled == 2)
        implementation.release.set()
        await asyncio.gather(*(call for call in calls if call not in (calls[0], calls[5])))
        # The one that had not begun never did.
        assert server.statistics().requests == 11 and not server.held and implementation.peak == 2


async def test_the_deadline_of_a_request_that_waits_for_room_runs_from_its_arrival(
    carrier: str, tmp_path: pathlib.Path
) -> None:
    async with pair(carrier, tmp_path) as (server, implementation, client, far):
        server.max_calls = 1
        first = asyncio.create_task(far.hold("first"))
        await implementation.until_working(1)
        late = asyncio.create_task(client.bind(FarEnd, timeout_s=2.0).hold("late"))
        second = asyncio.create_task(client.bind(FarEnd, timeout_s=4.0).hold("second"))
        with pytest.raises(DeadlineExceeded, match=r"not begun in the (2|1\.[0-9]*) s that its caller gave it"):
            await late
        # Half of its four seconds are over when it begins.
        from_its_begin = asyncio.create_task(asyncio.sleep(4.0))
        first.cancel()
        with pytest.raises(DeadlineExceeded, match=r"not finished in the"):
            await second
        assert implementation.cancelled == ["first", "second"]
        assert not from_its_begin.done()
        from_its_begin.cancel()


async def test_what_was_told_stays_told_though_there_was_no_room(carrier: str, tmp_path: pathlib.Path) -> None:
    async with pair(carrier, tmp_path) as (server, implementation, client, far):
        server.max_calls = 1
        async with calling(server._listeners[0].address, 10.0, curve=client._curve) as (_, other):
            first = asyncio.create_task(other.hold("first"))
            await implementation.until_working(1)
            for n in range(5):
                await far.note(str(n))
            await eventually(lambda: server.held)
            await asyncio.sleep(0.05)
            await client.close()
            await eventually(lambda: len(server.connections) == 1)
            assert implementation.notes == []
            implementation.release.set()
            await first
            await eventually(lambda: implementation.notes == [str(n) for n in range(5)])


async def test_a_lost_connection_takes_what_waits_for_room_along(carrier: str, tmp_path: pathlib.Path) -> None:
    async with pair(carrier, tmp_path) as (server, implementation, client, far):
        server.max_calls = 1
        calls = [asyncio.create_task(far.hold(str(i))) for i in range(5)]
        await implementation.until_working(1)
        await eventually(lambda: server.held)
        await client.close()
        await eventually(lambda: not server.connections and not server.held and not server.calls)
        assert implementation.cancelled == ["0"] and server.statistics().requests == 1
        await asyncio.gather(*calls, return_exceptions=True)


class Gate(Protocol):
    @idempotent
    async def enter(self, name: str, wait_s: float) -> str: ...


class EagerGate:
    """Answers at once, or waits until it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.tasks: list[bool] = []
        self.left: list[str] = []

    @eager
    async def enter(self, name: str, wait_s: float) -> str:
        who = caller().who.slot
        self.tasks.append(asyncio.current_task() is not None)
        if name == "bad":
            raise StaleEpoch(name, why="not let in")
        try:
            if wait_s:
                await self.opened.wait()
        finally:
            self.left.append(name)
        return f"{who}: {name}, {caller().who.slot}"


@contextlib.asynccontextmanager
async def gate(directory: pathlib.Path) -> AsyncIterator[tuple[EagerGate, RpcServer, Gate]]:
    server, real = RpcServer(make_hello("run", Incarnation("queue/0", 1))), EagerGate()
    server.offer(Gate, real)
    address = await server.listen(f"unix://{directory}/gate.sock")
    client = RpcClient(address, make_hello("run", Incarnation("rollout/0", 1)))
    yield real, server, client.bind(Gate, timeout_s=10.0)
    await client.close()
    await server.close()


async def test_an_eager_handler_that_does_not_wait_runs_without_a_task(tmp_path: pathlib.Path) -> None:
    async with gate(tmp_path) as (real, server, far):
        assert await far.enter("a", 0.0) == "rollout/0: a, rollout/0"
        with pytest.raises(StaleEpoch, match="not let in"):
            await far.enter("bad", 0.0)
        assert real.tasks == [False, False]
        known = server.statistics()
        assert (known.requests, known.replies, known.faults, known.inflight, known.peak_inflight) == (2, 1, 1, 0, 0)


async def test_an_eager_handler_that_waits_goes_on_in_a_task(tmp_path: pathlib.Path) -> None:
    async with gate(tmp_path) as (real, server, far):
        waiting = [asyncio.create_task(far.enter(name, 5.0)) for name in ("a", "b")]
        await eventually(lambda: server.statistics().inflight == 2)
        assert await far.enter("c", 0.0) == "rollout/0: c, rollout/0"
        waiting[1].cancel()
        await eventually(lambda: real.left == ["c", "b"])
        real.opened.set()
        assert await waiting[0] == "rollout/0: a, rollout/0"
        known = server.statistics()
        assert (known.requests, known.replies, known.cancelled, known.inflight) == (3, 2, 1, 0)


async def test_an_eager_handler_that_waits_too_long_is_cancelled(tmp_path: pathlib.Path) -> None:
    async with gate(tmp_path) as (real, server, _):
        client = RpcClient(f"unix://{tmp_path}/gate.sock", make_hello("run", Incarnation("rollout/0", 2)))
        with pytest.raises(DeadlineExceeded, match="not finished in"):
            await client.bind(Gate, timeout_s=0.05).enter("a", 0.01)
        assert real.left == ["a"] and server.statistics().expired == 1
        await client.close()


@pytest.mark.parametrize("end", ["cancel", "eof"])
async def test_an_eager_handler_sees_a_cancellation_that_comes_with_its_request(
    tmp_path: pathlib.Path, end: str
) -> None:
    async with gate(tmp_path) as (real, server, _):
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "gate.sock"))
        greeting = HelloFrame(protocol=PROTOCOL, run_id="run", who=hello().who, pid=1, max_message_bytes=1 << 20)
        args = msgspec.Raw(msgspec.msgpack.encode(("a", 5.0)))
        frames = [
            greeting,
            RequestFrame(1, "Gate", "enter", 30.0, args),
            *([CancelFrame(1)] if end == "cancel" else []),
        ]
        # One write: the server reads the request and its end in one turn of its loop.
        writer.write(b"".join(encode_frame(encode_message(frame)) for frame in frames))
        if end == "eof":
            writer.close()
        await eventually(lambda: server.statistics().requests == 1 and server.statistics().inflight == 0)
        assert real.left == ["a"]
        writer.close()
