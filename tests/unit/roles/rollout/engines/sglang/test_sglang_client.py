"""The client of a server that closes connections (idle, in use, all), and streams of events of any size."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from relax_rt.roles.rollout.engines.sglang import client
from relax_rt.roles.rollout.engines.sglang.client import SglangClient
from relax_rt.transport.rpc.errors import ProtocolError, Unreachable

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
UVICORN_S = 5.0


class Server:
    """Answers requests with an empty object, counts them and connections, and ends a connection below a request.

    Args:
        takes: requests of a connection that it answers; the next one ends it.
        stream: what it answers with in place of an object, in these pieces.
    """

    def __init__(self, takes: int = 1 << 30, stream: list[bytes] | None = None) -> None:
        self.takes, self.stream = takes, stream
        self.connections = self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        left = self.takes
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            length = next((int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-l")), 0)
            await reader.readexactly(length)
            self.asked += 1
            if not left:
                return
            left -= 1
            if self.stream is None:
                writer.write(ANSWER)
                await writer.drain()
                continue
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            for piece in self.stream:
                writer.write(piece)
                await writer.drain()
            return


@asynccontextmanager
async def talking_to(server: Server) -> AsyncIterator[SglangClient]:
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await server.serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    http = SglangClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", "key")
    try:
        yield http
    finally:
        await http.close()
        listening.close()
        await asyncio.gather(*tasks)
        await listening.wait_closed()


async def ask_twice(between_s: float, path: str = "/weights_checker", server: Server | None = None) -> Server:
    server = server or Server()
    async with talking_to(server) as http:
        await http.call(path, {"n": 1}, timeout_s=10.0)
        await asyncio.sleep(between_s)
        await http.call(path, {"n": 2}, timeout_s=10.0)
    return server


async def test_an_idle_connection_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.IDLE_S < UVICORN_S / 2
    monkeypatch.setattr(client, "IDLE_S", 0.05)
    assert (await ask_twice(0.2)).connections == 2


async def test_a_connection_in_use_is_kept() -> None:
    assert (await ask_twice(0.0)).connections == 1


async def test_an_idempotent_call_is_repeated_on_a_new_connection() -> None:
    server = await ask_twice(0.0, server=Server(takes=1))
    assert (server.asked, server.connections) == (3, 2)


async def test_other_calls_always_have_a_new_connection() -> None:
    server = await ask_twice(0.0, "/release_memory_occupation", Server(takes=1))
    assert (server.asked, server.connections) == (2, 2)


@pytest.mark.parametrize(("path", "asked"), [("/weights_checker", 2), ("/release_memory_occupation", 1)])
async def test_a_server_that_closes_every_connection_is_unreachable(path: str, asked: int) -> None:
    server = Server(takes=0)
    async with talking_to(server) as http:
        with pytest.raises(Unreachable, match=path):
            await http.call(path, {}, timeout_s=10.0)
    assert server.asked == asked


def event(name: str, rows: str = "") -> bytes:
    return b"data: " + json.dumps({"output_ids": [7], "meta_info": {"id": name, "routed_experts": rows}}).encode()


@pytest.mark.parametrize("large", [1, 1 << 20])
async def test_events_are_complete_however_they_are_split(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LARGE_BYTES", large)
    threads: set[int] = set()
    events_of = client._events_of

    def noted(pieces: list[bytes]) -> list[client.StreamEvent]:
        threads.add(threading.get_ident())
        return events_of(pieces)

    monkeypatch.setattr(client, "_events_of", noted)
    sent = b"\n\n".join([event("a"), event("b", "x" * 300_000), event("c"), b"data: [DONE]", b""])
    cuts = [0, 3, len(event("a")) + 1, 90_000, 200_000, len(sent) - 20, len(sent)]
    pieces = [sent[start:end] for start, end in itertools.pairwise(cuts)]
    async with talking_to(Server(stream=pieces)) as http:
        told = [event.meta_info async for event in http.generate({})]
    assert [meta.id for meta in told if meta] == ["a", "b", "c"]
    assert [len(bytes(meta.routed_experts)) for meta in told if meta] == [2, 300_002, 2]
    assert (threads == {threading.get_ident()}) is (large > 1)


async def test_a_line_that_is_no_event_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with talking_to(Server(stream=[b'data: {"output_ids": "x"}\n\n'])) as http:
        with pytest.raises(ProtocolError, match="output_ids"):
            [event async for event in http.generate({})]
    monkeypatch.setattr(client, "MAX_EVENT_BYTES", 1000)
    async with talking_to(Server(stream=[b"data: " + b"x" * 2000])) as http:
        with pytest.raises(ProtocolError, match="longer than 1000"):
            [event async for event in http.generate({})]
