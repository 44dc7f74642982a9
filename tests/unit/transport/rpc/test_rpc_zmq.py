"""Between nodes: who is let in, and how peers that vanish are noticed."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib

import pytest
import zmq
import zmq.asyncio
from eventually import eventually
from rpc_far_end import FarEnd, calling, hello, serving

from relax_rt.transport.rpc.channel import AddressError
from relax_rt.transport.rpc.errors import Refused, Unreachable
from relax_rt.transport.rpc.rpc import CurveKeys, RpcClient, RpcServer


async def test_a_peer_without_the_key_gets_nothing() -> None:
    keys, stranger = CurveKeys.make(), CurveKeys.make()
    knows_the_server = dataclasses.replace(stranger, server=keys.public)
    async with serving("tcp://127.0.0.1:0", curve=keys) as (server, real, _):
        for curve in (None, stranger, knows_the_server):
            client = RpcClient(real, hello(), curve=curve, connect_timeout_s=0.5)
            with pytest.raises(Unreachable):
                await client.bind(FarEnd, timeout_s=0.8).nothing()
            assert client.peer is None
            assert client.statistics().bytes_in == 0
            await client.close()
        assert server.statistics().connections_total == 0
        async with calling(real, curve=keys) as (_, far):
            await far.nothing()


async def test_admitted_keys_may_differ_from_the_servers_own() -> None:
    worker = CurveKeys.make()
    server_keys = dataclasses.replace(CurveKeys.make(), clients=frozenset((worker.public,)))
    client_keys = dataclasses.replace(worker, server=server_keys.public)
    async with (
        serving("tcp://127.0.0.1:0", curve=server_keys) as (_, real, _),
        calling(real, curve=client_keys) as (_, far),
    ):
        await far.nothing()


async def test_the_refusal_names_the_key() -> None:
    keys = CurveKeys.make()
    intruder = dataclasses.replace(CurveKeys.make(), server=keys.public)
    async with serving("tcp://127.0.0.1:0", curve=keys) as (_, real, _), calling(real, 1.0, curve=intruder) as (_, far):
        with pytest.raises(Unreachable, match="does not admit this process's key"):
            await far.nothing()


def test_keys_are_checked_and_not_printed() -> None:
    keys = CurveKeys.make()
    assert keys.secret.decode() not in repr(keys)
    with pytest.raises(Refused, match="secret key: it has 3 bytes"):
        CurveKeys(keys.public, b"abc")


async def test_garbage_over_zeromq_ends_its_peer_only() -> None:
    async with serving("tcp://127.0.0.1:0") as (server, real, _), calling(real) as (client, far):
        await far.nothing()
        context = zmq.asyncio.Context()
        intruder = context.socket(zmq.DEALER)
        intruder.connect(real)
        for parts in ([b"GET /"], [b"a", b"b", b"c"], [b""], [b"\xc1" * 1000]):
            await intruder.send_multipart(parts)
        await eventually(lambda: server.statistics().protocol_errors > 0)
        await far.nothing()
        intruder.close(linger=0)
        context.term()
        assert client.counters.reconnects == 0
        assert server.statistics().protocol_errors == 1


async def test_raw_tcp_bytes_do_no_harm() -> None:
    async with serving("tcp://127.0.0.1:0") as (_, real, _), calling(real) as (_, far):
        host, _, port = real.removeprefix("tcp://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x00\xffnot zeromq" * 1000)
        await writer.drain()
        await far.nothing()
        writer.transport.abort()
        await far.nothing()


async def test_a_full_peer_does_not_hold_up_the_others() -> None:
    """One peer that takes no answers fills its own queue; another is served all the same."""
    async with serving("tcp://127.0.0.1:0") as (server, real, _), calling(real) as (_, far):
        async with calling(real) as (lazy, lazy_far):
            await lazy_far.nothing()
            (link,) = lazy.links
            link.channel.pause()
            calls = [asyncio.create_task(lazy_far.echo(b"x" * 100_000)) for _ in range(900)]
            for _ in range(20):
                assert await far.echo(b"y") == b"y"
            link.channel.resume()
            assert {len(answer) for answer in await asyncio.gather(*calls)} == {100_000}
        assert server.statistics().connections_total == 2


async def test_loopback_by_name_and_no_dialing_of_port_0(tmp_path: pathlib.Path) -> None:
    async with serving("tcp://localhost:0") as (_, real, _), calling(real) as (_, far):
        await far.nothing()
    with pytest.raises(AddressError, match="the host is not known"):
        await RpcServer(hello(), curve=CurveKeys.make()).listen("tcp://no.such.host.invalid:0")
    async with calling("tcp://127.0.0.1:0") as (_, far):
        with pytest.raises(AddressError, match="port 0 is for listening"):
            await far.nothing()
    async with serving(f"ipc://{tmp_path}/z.sock") as (_, real, _), calling(real) as (_, far):
        assert await far.echo(b"ipc") == b"ipc"
        assert (tmp_path / "z.sock").stat().st_mode & 0o777 == 0o600
