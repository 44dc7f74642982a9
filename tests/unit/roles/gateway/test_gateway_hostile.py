"""Hostile clients: each gets a clear error in bounded memory, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import tracemalloc
from typing import Any

import openai
import pytest
from gateway_world import TOKEN, Running, ask, client, echo, running, until

from relax_rt.roles.gateway.app import HttpLimits
from relax_rt.roles.rollout.router.admission import AdmissionLimits, FleetLoad

CHAT = "/v1/chat/completions"


class Raw:
    """A connection of which each byte is ours."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.head = b""

    @classmethod
    async def to(cls, world: Running) -> Raw:
        host, port = world.url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, Any]:
        """Status and body."""
        async with asyncio.timeout(120):
            self.head = head = await self.reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            body = await self.reader.readexactly(int(length[1])) if length else b""
        return int(head.split()[1]), json.loads(body) if body else None

    async def closed(self) -> bool:
        """Whether the far end closes it."""
        async with asyncio.timeout(120):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass
        return True

    def close(self) -> None:
        self.writer.close()


def head(length: int | None, key: str = TOKEN, more: str = "") -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{size}\r\n{more}\r\n".encode()


async def still_serves(world: Running) -> None:
    async with client(world) as api:
        answer = await api.chat.completions.create(model="policy", messages=ask("well?"))
        assert answer.choices[0].message.content == "You said well?."
    assert world.gateway.memory.held == 0


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_100_mb_is_refused_while_it_arrives(chunked: bool) -> None:
    chunk = b"x" * (1 << 20)
    async with running(echo, bounds=HttpLimits(body_bytes=1 << 20)) as world:
        tracemalloc.start()
        try:
            raw = await Raw.to(world)
            await raw.send(head(None if chunked else 100 << 20))
            try:
                for _ in range(100):
                    await raw.send((b"100000\r\n" + chunk + b"\r\n") if chunked else chunk)
            except ConnectionError:
                pass
            status, body = await raw.answer()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert status == 413 and body["error"]["code"] == "body_too_large"
        assert peak < 16 << 20
        assert await raw.closed()
        raw.close()
        await still_serves(world)


async def test_the_client_package_gets_the_refusal() -> None:
    async with running(echo, bounds=HttpLimits(body_bytes=1 << 16)) as world, client(world) as api:
        with pytest.raises(openai.APIStatusError, match="the bound is 65536") as caught:
            await api.chat.completions.create(model="policy", messages=ask("x" * (8 << 20)))
        assert caught.value.status_code == 413
        await still_serves(world)


ODD_BODIES = [
    (b"{", "no JSON"),
    (b"\xff\xfe\x00", "no JSON"),
    (b"[" * 100_000, ""),
    (b"null", "Expected `object`"),
    (b'{"model": "policy"}', "missing required field `messages`"),
    (b'{"model": "policy", "messages": 3}', "messages"),
    (b'{"model": "policy", "messages": [{}]}', "role"),
    (b'{"model": "policy", "messages": [{"role": "user", "content": 3}]}', "content"),
    (b'{"model": "policy", "messages": [{"role": "user", "content": [3]}]}', "content"),
    (b'{"model": "policy", "messages": [{"role": "assistant", "tool_calls": [7]}]}', "tool_calls"),
    (b'{"model": "policy", "messages": [{"role": "user", "content": "x"}], "n": 1e99}', "n"),
    (b'{"model": "policy", "messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "tools"),
]


async def test_an_invalid_request_is_a_400_that_names_the_field() -> None:
    async with running(echo) as world:
        raw = await Raw.to(world)
        for body, said in ODD_BODIES:
            await raw.send(head(len(body)) + body)
            status, told = await raw.answer()
            assert status == 400 and said in told["error"]["message"], body[:100]
            assert told["error"]["type"] == "invalid_request_error"
        raw.close()
        await still_serves(world)


async def test_without_a_key_nothing_is_read() -> None:
    async with running(echo) as world:
        raw = await Raw.to(world)
        await raw.send(head(1 << 40, "wrong"))
        status, told = await raw.answer()
        assert status == 401 and told["error"]["code"] == "invalid_api_key"
        raw.close()
        other = await Raw.to(world)
        await other.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        assert (await other.answer())[0] == 401
        other.close()
        await still_serves(world)


@pytest.mark.parametrize("nbytes", [100, 12 << 20])
async def test_an_image_bomb_is_not_decoded(nbytes: int) -> None:
    data = "A" * nbytes
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    async with running(echo, bounds=HttpLimits(body_bytes=32 << 20)) as world, client(world) as api:
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "look"}, part]}]
        with pytest.raises(openai.APIStatusError) as caught:
            await api.chat.completions.create(model="policy", messages=messages)
        assert caught.value.status_code == (400 if nbytes == 100 else 413)
        assert "image" in caught.value.message and len(caught.value.message) < 300
        await still_serves(world)


async def test_a_slow_or_missing_head_closes_the_connection() -> None:
    async with running(echo, head_s=1.0) as world:
        silent, slow = await Raw.to(world), await Raw.to(world)
        await slow.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n".encode())

        async def drip() -> None:
            for number in range(10_000):
                await slow.send(f"X-{number}: y\r\n".encode())
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        for one in (silent, slow):
            status, told = await one.answer()
            assert status == 408 and told["error"]["code"] == "head_timeout"
            assert await one.closed()
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        for one in (silent, slow):
            one.close()
        await still_serves(world)


async def test_a_slow_body_times_out() -> None:
    async with running(echo, bounds=HttpLimits(body_s=1.0)) as world:
        raw = await Raw.to(world)
        await raw.send(head(1000) + b'{"model"')
        status, told = await raw.answer()
        assert status == 408 and "8 bytes of it were" in told["error"]["message"]
        assert await raw.closed()
        raw.close()
        await still_serves(world)


async def test_an_endless_head_and_invalid_http_are_refused() -> None:
    async with running(echo) as world:
        endless, odd = await Raw.to(world), await Raw.to(world)
        await endless.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nX: ".encode() + b"y" * (1 << 17))
        await odd.send(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        for one in (endless, odd):
            status, told = await one.answer()
            assert status == 400 and told["error"]["code"] == "invalid_http"
            one.close()
        await still_serves(world)


async def test_surplus_connections_are_rejected_and_idle_ones_closed() -> None:
    async with running(echo, connections=4) as world:
        open_ = [await Raw.to(world) for _ in range(4)]
        await asyncio.sleep(0.05)
        more = await Raw.to(world)
        status, told = await more.answer()
        assert status == 503 and "4 connections are open" in told["error"]["message"]
        # One of them has its answer and rests: it makes room.
        await open_[0].send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await open_[0].answer())[0] == 200
        await still_serves(world)
        assert await open_[0].closed()
        for one in [*open_, more]:
            one.close()


async def test_requests_in_progress_share_one_memory_budget() -> None:
    async with running(echo, bounds=HttpLimits(held_bytes=3000)) as world:
        first = await Raw.to(world)
        await first.send(head(4000) + b" " * 2000)
        await until(lambda: world.gateway.memory.held == 2000)
        second = await Raw.to(world)
        await second.send(head(2000) + b" " * 2000)
        status, told = await second.answer()
        assert status == 503 and told["error"]["code"] == "busy"
        first.close()
        second.close()
        await until(lambda: world.gateway.memory.held == 0)
        await still_serves(world)


async def test_a_client_that_does_not_read_loses_its_answer() -> None:
    async with running(lambda p, w: "x" * 190, send_s=1.0) as world:
        host, port = world.url.removeprefix("http://").split(":")
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
        deaf.setblocking(False)
        await asyncio.get_running_loop().sock_connect(deaf, (host, int(port)))
        prompt = "y" * 4000
        body = json.dumps({"model": "policy", "prompt": prompt, "n": 100, "echo": True, "max_tokens": 50})
        request = head(len(body)).replace(b"/chat", b"") + body.encode()
        await asyncio.get_running_loop().sock_sendall(deaf, request)
        await until(lambda: world.gateway.service.answered)
        await until(lambda: world.gateway.memory.held == 0)
        # His connection has ended, with no more than what lay in its buffers.
        got = 0
        with deaf, contextlib.suppress(ConnectionError):
            while part := await asyncio.get_running_loop().sock_recv(deaf, 1 << 16):
                got += len(part)
        assert got < 100 * len(prompt)
        await until(lambda: not world.gateway.service.admission.core.running)
        world.engine.script = echo
        await still_serves(world)


async def test_surplus_calls_wait_and_the_rest_get_retry_after() -> None:
    limits = AdmissionLimits(first=1, most=1, waiting=1)
    async with running(echo, limits=limits, load=lambda: FleetLoad(0, 0, 0.5)) as world, client(world) as api:
        world.engine.gate.clear()
        calls = [
            asyncio.create_task(api.chat.completions.with_raw_response.create(model="policy", messages=ask(str(n))))
            for n in range(3)
        ]
        core = world.gateway.service.admission.core
        await until(lambda: core.counts["rejected"])
        assert core.running == 1 and core.waiting == 1
        world.engine.gate.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, openai.RateLimitError)]
        assert len(refused) == 1 and int(refused[0].response.headers["retry-after"]) >= 1
        assert sum(not isinstance(one, BaseException) for one in answers) == 2


@pytest.mark.parametrize("n", [1, 3])
async def test_a_preempted_call_restarts_unseen(n: int) -> None:
    load = [FleetLoad(0, 0, 0.5)]
    limits = AdmissionLimits(first=2 * n, most=2 * n, every_s=0.01)
    async with running(echo, limits=limits, load=lambda: load[0]) as world, client(world, world.episode()) as api:
        world.engine.gate.clear()
        calls = [
            asyncio.create_task(api.chat.completions.create(model="policy", messages=ask(text), n=n)) for text in "ab"
        ]
        await until(lambda: len(world.engine.orders) == 2 * n)
        load[0] = FleetLoad(0, 0, 0.95)
        await until(lambda: world.engine.ended_early == n)
        load[0] = FleetLoad(5, 0, 0.5)
        world.engine.gate.set()
        answers = await asyncio.gather(*calls)
        assert [a.choices[-1].message.content for a in answers] == ["You said a.", "You said b."]
        assert world.gateway.service.admission.core.counts["preempted"] == 1
        trained = sum(sum(branch.loss_mask) for branch in world.sessions.close("episode-1").episode.branches)
        assert trained == sum(len(made.tokens) for made in world.engine.made)


async def test_unknown_paths_and_methods_are_refused() -> None:
    async with running(echo) as world:
        for line in ("GET /v1/chat/completions", "POST /v1/embeddings", "GET /", "DELETE /v1/models"):
            raw = await Raw.to(world)
            await raw.send(f"{line} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
            status, told = await raw.answer()
            missing = line in ("POST /v1/embeddings", "GET /")
            assert status == (404 if missing else 405) and "POST /v1/responses, " in told["error"]["message"]
            assert told["error"]["code"] == ("no_such_endpoint" if missing else "method_not_allowed")
            assert (b"\r\nallow: " in raw.head) != missing
            raw.close()
