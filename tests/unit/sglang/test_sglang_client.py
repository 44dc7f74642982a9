"""Requests to a server that ends connections which are idle."""

from __future__ import annotations

import asyncio

import pytest

from relax_rt.roles.engines.sglang import client
from relax_rt.roles.engines.sglang.client import Client

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
UVICORN_S = 5.0


class Server:
    """Answers every request with an empty object, and counts connections."""

    def __init__(self) -> None:
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            length = next((int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-l")), 0)
            await reader.readexactly(length)
            writer.write(ANSWER)
            await writer.drain()


async def ask_twice(between_s: float) -> int:
    """Connections of two calls."""
    server = Server()
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await server.serve(reader, writer)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    http = Client(f"http://127.0.0.1:{port}", "key")
    try:
        await http.call("/update", {"n": 1}, timeout_s=10.0)
        await asyncio.sleep(between_s)
        await http.call("/update", {"n": 2}, timeout_s=10.0)
    finally:
        await http.close()
        listening.close()
        await asyncio.gather(*tasks)
        await listening.wait_closed()
    return server.connections


async def test_an_idle_connection_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.IDLE_S < UVICORN_S / 2
    monkeypatch.setattr(client, "IDLE_S", 0.05)
    assert await ask_twice(0.2) == 2


async def test_a_connection_in_use_is_kept() -> None:
    assert await ask_twice(0.0) == 1
