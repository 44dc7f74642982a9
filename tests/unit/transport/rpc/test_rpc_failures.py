"""What a caller sees when the far end dies, is replaced, is someone else, or talks nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import random
import signal
import socket
import stat
from collections.abc import AsyncIterator

import msgspec
import pytest
from eventually import eventually
from rpc_far_end import FarEnd, FarEndImpl, calling, hello, serving, spawn

from relax_rt.transport.rpc.backoff import BackoffPolicy
from relax_rt.transport.rpc.channel import AddressError
from relax_rt.transport.rpc.errors import ActorDied, ProtocolError, Unreachable
from relax_rt.transport.rpc.rpc import CurveKeys, RpcClient, RpcServer
from relax_rt.transport.rpc.wire import PROTOCOL, HelloFrame, ReplyFrame, RequestFrame, encode_frame, encode_message


async def working(far: FarEnd, client: RpcClient) -> None:
    """Return once the calls sent before this one are in their handlers: frames are served in order."""
    await far.nothing()
    assert client.statistics().inflight > 0


@pytest.mark.parametrize("carrier", ["unix", "tcp", "curve"])
async def test_killed_in_mid_call(carrier: str, tmp_path: pathlib.Path) -> None:
    """SIGKILL under two calls: the idempotent one is answered by the successor, the other says ActorDied."""
    curve = CurveKeys.make() if carrier == "curve" else None
    address = f"unix://{tmp_path}/q.sock" if carrier == "unix" else "tcp://127.0.0.1:0"
    first, real = await spawn(address, "hold", curve)
    second = None
    try:
        async with calling(real, 60.0, curve=curve) as (client, far):
            again, once = asyncio.create_task(far.hold("k")), asyncio.create_task(far.hold_once("k"))
            await asyncio.sleep(0)
            await working(far, client)
            first.send_signal(signal.SIGKILL)
            await first.wait()
            with pytest.raises(ActorDied, match=r"FarEnd\.hold_once at queue/0#3.*may have been carried out"):
                await once
            assert not again.done()
            second, same = await spawn(real, "answer", curve)
            assert same == real
            assert await again == second.pid
            assert (client.counters.reconnects, client.statistics().resent) == (1, 1)
    finally:
        for process in (first, second):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()


async def test_a_stopped_process_is_unreachable_not_slow(tmp_path: pathlib.Path) -> None:
    process, real = await spawn(f"unix://{tmp_path}/q.sock", "hold")
    try:
        async with calling(real) as (client, far):
            await far.nothing()
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(Unreachable, match="though the connection stands"):
                await client.bind(FarEnd, timeout_s=0.3).nothing()
            process.send_signal(signal.SIGCONT)
            assert await far.echo(b"awake") == b"awake"
            assert (client.statistics().unanswered, client.counters.reconnects) == (1, 0)
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
async def test_a_server_that_closes_leaves_no_call_in_doubt(carrier: str, tmp_path: pathlib.Path) -> None:
    """Calls that must not be repeated go on through five servers, one after the other at the same address."""
    address = f"unix://{tmp_path}/q.sock" if carrier == "unix" else "tcp://127.0.0.1:0"
    done = 0
    over = asyncio.Event()

    async def caller(far: FarEnd) -> None:
        nonlocal done
        while not over.is_set():
            await far.hold_once("k")
            done += 1

    async with contextlib.AsyncExitStack() as stack:
        async with serving(address, answers=True) as (_, real, _impl):
            client, far = await stack.enter_async_context(calling(real))
            callers = [asyncio.create_task(caller(far)) for _ in range(8)]
            await eventually(lambda: done > 100)
        for _ in range(4):
            before = done
            async with serving(real, answers=True):
                await eventually(lambda: done > before + 100)  # noqa: B023
        over.set()
        async with serving(real, answers=True):
            await asyncio.gather(*callers)
        assert client.counters.reconnects == 5


async def test_a_server_that_closes_answers_what_is_at_work_and_turns_away_the_rest(tmp_path: pathlib.Path) -> None:
    address = f"unix://{tmp_path}/q.sock"
    impl = FarEndImpl()
    server = RpcServer(hello("queue/0"), max_calls=1)
    server.offer(FarEnd, impl)
    await server.listen(address)
    async with calling(address) as (_, far):
        at_work, held = asyncio.create_task(far.hold_once("a")), asyncio.create_task(far.hold_once("b"))
        await impl.until_working(1)
        closing = asyncio.create_task(server.close(60.0))
        await asyncio.sleep(0.1)
        impl.release.set()
        assert await at_work > 0
        await closing
        assert not held.done()
        async with serving(address, answers=True):
            assert await held > 0


async def test_idempotent_calls_wait_for_a_server_that_is_not_there_yet(tmp_path: pathlib.Path) -> None:
    address = f"unix://{tmp_path}/q.sock"
    async with calling(address) as (client, far):
        early = [asyncio.create_task(far.echo(bytes([i]))) for i in range(10)]
        await eventually(lambda: client.statistics().failed_dials >= 2)
        async with serving(address):
            assert await asyncio.gather(*early) == [bytes([i]) for i in range(10)]
        assert client.counters.reconnects == 0


async def test_nothing_there_until_the_deadline(tmp_path: pathlib.Path) -> None:
    for address in (f"unix://{tmp_path}/q.sock", "tcp://127.0.0.1:1"):
        async with calling(address, 0.3) as (client, far):
            with pytest.raises(Unreachable, match=r"not connected for 0\.3 s: .+"):
                await far.nothing()
            await far_idle(client)


async def far_idle(client: RpcClient) -> None:
    """The dialing ends with its last caller: nothing goes on in the background."""
    await asyncio.sleep(0)
    before = client.statistics().failed_dials
    await asyncio.sleep(0.3)
    assert client.statistics().failed_dials == before


async def test_attempts_can_be_limited(tmp_path: pathlib.Path) -> None:
    policy = BackoffPolicy(base_s=0.001, cap_s=0.002, max_attempts=3)
    async with calling(f"unix://{tmp_path}/q.sock", backoff=policy, rng=random.Random(1)) as (client, far):
        with pytest.raises(Unreachable, match="3 attempts failed"):
            await far.nothing()
        assert client.statistics().failed_dials == 4


async def test_the_address_is_asked_for_at_every_connect(tmp_path: pathlib.Path) -> None:
    where = [f"unix://{tmp_path}/a.sock"]

    async def find() -> str:
        return where[0]

    client = RpcClient(find, hello())
    far = client.bind(FarEnd, timeout_s=60)
    async with serving(f"unix://{tmp_path}/a.sock"):
        await far.nothing()
    where[0] = f"unix://{tmp_path}/b.sock"
    async with serving(f"unix://{tmp_path}/b.sock") as (server, _, _):
        await far.nothing()
        assert server.statistics().requests == 1
    await client.close()


async def test_who_is_not_expected_at_an_address_is_not_spoken_to(tmp_path: pathlib.Path) -> None:
    """A port that was found may have gone to another process since."""
    here, there = f"unix://{tmp_path}/other.sock", f"unix://{tmp_path}/q.sock"
    found = [here, here, there]

    async def find() -> str:
        return found.pop(0) if len(found) > 1 else found[0]

    other, right = RpcServer(hello("reward/0")), RpcServer(hello("queue/0"))
    far = FarEndImpl()
    for server, address in ((other, here), (right, there)):
        server.offer(FarEnd, far)
        await server.listen(address)
    client = RpcClient(find, hello("trainer/0"), slot="queue/0")
    try:
        await client.bind(FarEnd, timeout_s=60.0).nothing()
        assert client.peer is not None and client.peer.who.slot == "queue/0"
        assert other.statistics().requests == 0
        stubborn = RpcClient(here, hello("trainer/0"), slot="queue/0")
        with pytest.raises(Unreachable, match=r"reward/0#.* answers there, not queue/0"):
            await stubborn.bind(FarEnd, timeout_s=0.3).nothing()
        await stubborn.close()
    finally:
        await client.close()
        await other.close()
        await right.close()


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
async def test_other_protocol_other_run(carrier: str, tmp_path: pathlib.Path) -> None:
    address = f"unix://{tmp_path}/q.sock" if carrier == "unix" else "tcp://127.0.0.1:0"
    async with serving(address) as (server, real, _):
        newer = RpcClient(real, hello(protocol=PROTOCOL + 1))
        with pytest.raises(
            ProtocolError, match=rf"speaks protocol version {PROTOCOL}, this process version {PROTOCOL + 1}"
        ):
            await newer.bind(FarEnd, timeout_s=60).nothing()
        other = RpcClient(real, hello(run_id="beef0002"))
        with pytest.raises(ProtocolError, match=r"queue/0#3 belongs to run cafe0001, this process to run beef0002"):
            await other.bind(FarEnd, timeout_s=60).nothing()
        assert server.statistics().requests == 0
        async with calling(real) as (_, far):
            await far.nothing()
        await newer.close()
        await other.close()


async def test_a_greeting_of_a_later_shape_still_tells_its_version(tmp_path: pathlib.Path) -> None:
    async with serving(f"unix://{tmp_path}/q.sock") as (server, _, _):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "q.sock"))
        writer.write(encode_frame(msgspec.msgpack.encode({"protocol": 99, "who": {"name": "new"}})))
        answer = msgspec.msgpack.decode((await asyncio.wait_for(reader.read(), 120))[4:])
        assert answer["protocol"] == PROTOCOL
        assert server.statistics().protocol_errors == 1
        writer.close()


GREETING = encode_frame(
    encode_message(HelloFrame(protocol=PROTOCOL, run_id="cafe0001", who=hello().who, pid=1, max_message_bytes=1 << 20))
)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        encode_frame(b""),
        encode_frame(b"\xc1\xc1\xc1"),
        encode_frame(b"\x93\x01\x02\x03"),
        GREETING + encode_frame(b"\x93\x63\x02\x03"),
        GREETING + encode_frame(b"\xc1"),
        GREETING + b"\xff\xff\xff\xff",
        GREETING + GREETING,
        random.Random(5).randbytes(5000),
    ],
    ids=range(10),
)
async def test_garbage_ends_its_connection_and_nothing_else(garbage: bytes, tmp_path: pathlib.Path) -> None:
    async with serving(f"unix://{tmp_path}/q.sock") as (server, real, _), calling(real) as (client, far):
        await far.nothing()
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "q.sock"))
        writer.write(garbage)
        await asyncio.wait_for(reader.read(), 120)
        writer.close()
        await far.nothing()
        assert client.counters.reconnects == 0
        assert server.statistics().requests == 2


async def test_a_silent_connection_is_closed_and_connections_are_bounded(tmp_path: pathlib.Path) -> None:
    async with serving(f"unix://{tmp_path}/q.sock", hello_timeout_s=1.0, max_connections=2) as (server, _, _):
        opened = [await asyncio.open_unix_connection(str(tmp_path / "q.sock")) for _ in range(3)]
        for reader, writer in opened:
            assert await asyncio.wait_for(reader.read(), 120) == b""
            writer.close()
        assert server.statistics().connections_refused == 1
        assert server.statistics().protocol_errors == 2


async def test_a_client_that_minds_no_bound_is_not_read(tmp_path: pathlib.Path) -> None:
    """Back-pressure: requests beyond the bound stay in the socket, then all are served."""
    total = 400
    async with serving(f"unix://{tmp_path}/q.sock", max_inflight=4) as (server, _, implementation):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "q.sock"), limit=1 << 20)
        writer.write(GREETING)
        for number in range(total):
            args = msgspec.Raw(msgspec.msgpack.encode((f"{number}" + "x" * 5000,)))
            writer.write(encode_frame(encode_message(RequestFrame(number, "FarEnd", "hold", 30.0, args))))
        await implementation.until_working(4)
        await asyncio.sleep(0.1)
        assert server.statistics().requests == 4
        # Two megabytes were written; the server took no more than a few chunks of them.
        assert server.statistics().bytes_in < 1_000_000
        implementation.release.set()
        answers = 0
        async with asyncio.timeout(120):
            await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))
            while answers < total:
                await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))
                answers += 1
        assert implementation.peak == 4
        writer.close()


async def test_a_peer_that_does_not_read_is_disconnected(tmp_path: pathlib.Path) -> None:
    async with serving(f"unix://{tmp_path}/q.sock", write_timeout_s=0.2) as (server, _, _):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "q.sock"), limit=1000)
        writer.write(GREETING)
        args = msgspec.Raw(msgspec.msgpack.encode((b"x" * 900_000,)))
        for number in range(12):
            writer.write(encode_frame(encode_message(RequestFrame(number, "FarEnd", "echo", 30.0, args))))
        await eventually(lambda: server.statistics().connections_total == 1 and not server.connections)
        writer.transport.abort()
        assert not reader.at_eof()


@contextlib.asynccontextmanager
async def scripted_server(path: pathlib.Path, *frames: bytes) -> AsyncIterator[None]:
    """Greets, then answers every message with the next frame, whatever was asked; then closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for frame in frames:
            await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))
            writer.write(frame)
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        yield


def reply(number: int, value: object) -> bytes:
    return encode_frame(encode_message(ReplyFrame(number, msgspec.Raw(msgspec.msgpack.encode(value)))))


async def test_late_and_foreign_replies_are_dropped(tmp_path: pathlib.Path) -> None:
    frames = (GREETING, reply(99, b"not yours") + reply(1, b"one") + reply(1, b"again"), reply(2, b"two"))
    async with scripted_server(tmp_path / "q.sock", *frames), calling(f"unix://{tmp_path}/q.sock") as (client, far):
        assert [await far.echo(b""), await far.echo(b"")] == [b"one", b"two"]
        assert client.statistics().late_replies == 2


async def test_a_server_that_talks_nonsense(tmp_path: pathlib.Path) -> None:
    for number, (frames, why) in enumerate(
        (
            ((encode_frame(b"\xc1"),), "it is no greeting"),
            ((GREETING, encode_frame(b"\xc1")), "a message of 1 bytes from a server"),
            ((GREETING, reply(1, "no bytes")), r"result of FarEnd\.echo"),
        )
    ):
        path = tmp_path / f"{number}.sock"
        async with scripted_server(path, *frames), calling(f"unix://{path}") as (_, far):
            with pytest.raises(ProtocolError, match=why):
                await far.echo(b"")
    for number, frames in enumerate(((b"\xff\xff\xff\xff",), (GREETING, b"\xff\xff\xff\xff"), (b"",), (GREETING,))):
        path = tmp_path / f"again{number}.sock"
        async with scripted_server(path, *frames), calling(f"unix://{path}", 0.3) as (client, far):
            with pytest.raises(Unreachable, match="not connected for"):
                await far.echo(b"")
            # It is tried again, with growing pauses, not in a tight loop.
            assert 2 <= client.statistics().failed_dials + client.counters.reconnects < 200


async def test_a_stale_socket_is_replaced_and_is_private(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "q.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with serving(f"unix://{path}") as (_, real, _):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with calling(real) as (_, far):
            await far.nothing()
        with pytest.raises(AddressError, match="another process serves there"):
            await RpcServer(hello()).listen(f"unix://{path}")
    assert not path.exists()


async def test_a_server_does_not_remove_its_successors_socket(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "q.sock"
    async with serving(f"unix://{path}"):
        path.unlink()
        path.write_text("the successor's")
    assert path.exists()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("unix:///{d}/no/q.sock", "does not exist"),
        ("unix:///{d}/file", "a file that is no socket"),
        ("unix:///{d}/" + "x" * 120, "the kernel allows 107"),
        ("unix://relative", "not absolute"),
        ("http://x", "not an address"),
        ("unix:///sys/q.sock", "[Nn]ot permitted|[Dd]enied|[Rr]ead-only"),
        ("tcp://127.0.0.1", "no host and port"),
        ("tcp://127.0.0.1:70000", "not a number from 0 to 65535"),
        ("tcp://0.0.0.0:0", "no CURVE keys"),
        ("tcp://127.0.0.1:{port}", "Address already in use"),
        ("tcp://192.0.2.1:0", "no CURVE keys"),
    ],
)
async def test_listening_fails_in_words(address: str, why: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        text = address.format(d=str(tmp_path).lstrip("/"), port=taken.getsockname()[1])
        with pytest.raises(AddressError, match=why):
            await RpcServer(hello()).listen(text)


async def test_several_addresses_at_once(tmp_path: pathlib.Path) -> None:
    async with serving(f"unix://{tmp_path}/q.sock") as (server, first, _):
        second = await server.listen("tcp://127.0.0.1:0")
        assert not second.endswith(":0")
        for address in (first, second):
            async with calling(address) as (_, far):
                await far.nothing()
        assert server.statistics().by_method == {"FarEnd.nothing": 2}
