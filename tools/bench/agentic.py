"""What the gateway costs: many episodes of several turns against a scripted engine whose latency has a long tail, and
beside it a plain proxy (starlette + httpx) in front of the same engine.

    python tools/bench/agentic.py            # 1,000 episodes x 8 turns
    python tools/bench/agentic.py --quick

Two loads of each: *roomy*, with a slot for every episode, so that whatever a call takes longer than the engine's own
time is overhead; and *tight*, with half as many slots, where the share of slots that are busy is what counts. The
engine of the gateway lies in its process, that of the proxy behind HTTP. The clients are plain sockets, in a process of
their own. CPU is that of the process in between. Busy: from two latencies after the start until fewer episodes are left
than slots.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

TOKEN = "bench-bench-bench-bench-bench-bench"
ANSWER = "I think that it is forty-two, but I may be wrong."
SIGMA = 0.9
"""Of the logarithm of latencies: the longest percent takes eight times the median."""

# --- the engine


class Engine:
    """Slots in which calls sleep as long as their name says."""

    def __init__(self, slots: int, median_s: float) -> None:
        self.slots, self._median_s = slots, median_s
        self._room = asyncio.Semaphore(slots)
        self.waiting = self.busy = 0
        self.log: list[tuple[str, float, float]] = []

    async def work(self, name: str) -> None:
        """Be at work on the call of this name."""
        self.waiting += 1
        try:
            await self._room.acquire()
        finally:
            self.waiting -= 1
        self.busy += 1
        began = time.monotonic()
        try:
            await asyncio.sleep(self._median_s * random.Random(name).lognormvariate(0, SIGMA))
        finally:
            self.log.append((name, began, time.monotonic()))
            self.busy -= 1
            self._room.release()


def name_of(text: str) -> str:
    """The call's name stands in the last message: ``call <name>.``"""
    return text.rpartition("call ")[2].partition(".")[0]


# --- what stands in between


async def gateway(slots: int, median_s: float, stack: AsyncExitStack) -> tuple[Any, Engine]:
    """The gateway with the engine in its process."""
    from relax_rt.roles.agentic.tokens import ChatTemplate, TokenLedger
    from relax_rt.roles.gateway.admission import Load, Marks
    from relax_rt.roles.gateway.api import SessionLimits
    from relax_rt.roles.gateway.app import Bounds, Gateway
    from relax_rt.roles.gateway.gate import Gate
    from relax_rt.roles.gateway.keys import Keys
    from relax_rt.roles.gateway.service import Service, Terms
    from relax_rt.roles.gateway.sessions import Sessions
    from relax_rt.roles.models.tiny import character_tokenizer
    from relax_rt.roles.models.tokenizer import ChatTokenizer
    from relax_rt.roles.router.core import Deliver
    from relax_rt.roles.router.requests import Outcome, Wanted
    from relax_rt.transport.queue.api import VersionSpan

    engine = Engine(slots, median_s)
    tokenizer = ChatTokenizer(character_tokenizer(), Path())
    template = ChatTemplate(tokenizer)
    answer = [*tokenizer.encode(ANSWER), *tokenizer.stop_ids]

    class Tokens:
        async def generate(self, wanted: Wanted) -> Outcome:
            await engine.work(name_of(tokenizer.spell(wanted.prompt[-64:])))
            spans = [VersionSpan(0, len(answer), 1, 1)]
            return Outcome(
                kind="done", finish_reason="stop", tokens=answer, logprobs=[-1.0] * len(answer), versions=spans
            )

        async def stream(self, wanted: Wanted) -> AsyncIterator[Deliver]:
            done = await self.generate(wanted)
            yield Deliver(0, 0, done.tokens, done.logprobs, done.versions)

    def load() -> Load:
        return Load(room=slots - engine.busy, stalled=engine.waiting, kv_used=0.0)

    gate = await stack.enter_async_context(Gate(Marks(), load))
    service = Service(Tokens(), tokenizer, gate, Terms(models=("policy",), new_tokens=64, context=1 << 16))
    sessions = Sessions(
        lambda name, tokens: TokenLedger(template, max_tokens=tokens, session=name),
        tokens=1 << 16,
        most=1 << 14,
        idle_s=600.0,
        now=time.monotonic,
    )
    keys = Keys(TOKEN)
    for number in range(1 << 13):
        sessions.open(f"e{number}", SessionLimits())
    return Gateway(service, sessions, keys, Bounds()).application(), engine


async def engine_server(slots: int, median_s: float, stack: AsyncExitStack) -> tuple[Any, Engine]:
    """The engine alone behind HTTP: an answer of Chat Completions."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    engine = Engine(slots, median_s)

    async def answer(request: Request) -> JSONResponse:
        asked = await request.json()
        await engine.work(name_of(asked["messages"][-1]["content"]))
        message = {"role": "assistant", "content": ANSWER}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({"id": "x", "object": "chat.completion", "choices": [choice], "model": "policy"})

    return Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])]), engine


async def proxy(upstream: str, stack: AsyncExitStack) -> Any:
    """Reads JSON, sends it on, reads JSON, answers with it: what a gateway without a ledger does."""
    import httpx
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = await stack.enter_async_context(httpx.AsyncClient(base_url=upstream, timeout=600.0, limits=limits))

    async def answer(request: Request) -> JSONResponse:
        asked = await request.json()
        told = await client.post("/v1/chat/completions", json=asked)
        return JSONResponse(told.json(), told.status_code)

    return Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])


async def serve(kind: str, slots: int, median_s: float, upstream: str) -> None:
    """Serve until a line comes on stdin; then say what was measured."""
    from relax_rt.roles.gateway.server import listen, make_server, url_of

    async with AsyncExitStack() as stack:
        engine = None
        if kind == "gateway":
            app, engine = await gateway(slots, median_s, stack)
        elif kind == "engine":
            app, engine = await engine_server(slots, median_s, stack)
        else:
            app = await proxy(upstream, stack)
        listening = listen("127.0.0.1", 0)
        server = make_server(app, connections=1 << 14, head_s=60.0)
        serving = asyncio.create_task(server.serve([listening]))
        print(json.dumps({"url": url_of(listening)}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        used = resource.getrusage(resource.RUSAGE_SELF)
        log = engine.log if engine is not None else []
        print(
            json.dumps({"cpu_s": used.ru_utime + used.ru_stime, "rss_mib": used.ru_maxrss / 1024, "log": log}),
            flush=True,
        )
        server.should_exit = True
        await serving


class Server:
    """A process of this file that serves."""

    def __init__(self, kind: str, slots: int, median_s: float, upstream: str = "") -> None:
        command = [sys.executable, __file__, "--serve", kind, "--slots", str(slots), "--median-s", str(median_s)]
        self.process = subprocess.Popen(
            [*command, "--upstream", upstream], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = str(self._line()["url"])
        self.idle_cpu_s = self._cpu_s()

    def end(self) -> dict[str, Any]:
        """What it has measured; its CPU without that of its start."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        told = self._line()
        self.process.wait(30)
        return told | {"cpu_s": told["cpu_s"] - self.idle_cpu_s}

    def kill(self) -> None:
        """Whatever happened."""
        self.process.kill()
        self.process.wait()

    def _cpu_s(self) -> float:
        import psutil

        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a server ended with {self.process.wait(30)}")
        return dict(json.loads(line))


# --- the episodes


class Caller:
    """One connection, one call after the other."""

    def __init__(self, url: str, key: str) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port, self._key = int(port), key
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> None:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    async def call(self, messages: list[dict[str, str]]) -> str:
        """The answer's words."""
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._key}\r\n"
        self._writer.write(
            f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(int(line[15:]) for line in lines if line.lower().startswith("content-length:"))
        told = await self._reader.readexactly(length)
        if " 200 " not in lines[0]:
            raise SystemExit(f"{lines[0]}: {told.decode()[:500]}")
        return str(json.loads(told)["choices"][0]["message"]["content"])

    def close(self) -> None:
        """Disconnect."""
        self._writer.close()


async def play(url: str, key_of: Callable[[str], str], episodes: int, turns: int) -> dict[str, Any]:
    """All episodes; latency of each call and when each episode ended, on the monotonic clock."""
    latency: dict[str, float] = {}
    ends: list[float] = []

    async def episode(number: int) -> None:
        caller = Caller(url, key_of(f"e{number}"))
        await caller.open()
        messages: list[dict[str, str]] = []
        for turn in range(turns):
            name = f"{number}-{turn}"
            messages.append({"role": "user", "content": f"Here is what happened next, it is call {name}."})
            began = time.monotonic()
            answer = await caller.call(messages)
            latency[name] = time.monotonic() - began
            messages.append({"role": "assistant", "content": answer})
        ends.append(time.monotonic())
        caller.close()

    began = time.monotonic()
    waits: list[Awaitable[None]] = [episode(number) for number in range(episodes)]
    await asyncio.gather(*waits)
    return {"latency": latency, "ends": sorted(ends), "began": began}


def busy_share(log: list[tuple[str, float, float]], slots: int, begin: float, end: float) -> float:
    """Part of the slots' time from begin to end in which they worked."""
    worked = sum(max(0.0, min(ended, end) - max(began, begin)) for _, began, ended in log)
    return worked / (slots * (end - begin)) if end > begin else float("nan")


def quantile(values: list[float], q: float) -> float:
    """Of at least one value."""
    values = sorted(values)
    return values[min(len(values) - 1, int(q * len(values)))]


def measure(kind: str, slots: int, episodes: int, turns: int, median_s: float) -> dict[str, Any]:
    """One load of one way."""
    from relax_rt.roles.gateway.keys import Keys

    keys = Keys(TOKEN)
    servers = []
    try:
        if kind == "gateway":
            servers = [Server("gateway", slots, median_s)]
        else:
            servers = [Server("engine", slots, median_s)]
            servers.append(Server("proxy", slots, median_s, servers[0].url))
        played = uvloop.run(play(servers[-1].url, keys.of_session, episodes, turns))
        told = [server.end() for server in reversed(servers)]
    finally:
        for server in servers:
            server.kill()
    log = told[-1]["log"]
    took = {name: ended - began for name, began, ended in log}
    extra = [1000 * (latency - took[name]) for name, latency in played["latency"].items()]
    last = played["ends"][max(0, episodes - slots)] if episodes > slots else played["ends"][0]
    calls = episodes * turns
    return {
        "way": kind,
        "slots": slots,
        "calls": calls,
        "seconds": played["ends"][-1] - played["began"],
        "over_p50_ms": quantile(extra, 0.5),
        "over_p99_ms": quantile(extra, 0.99) if calls >= 200 else max(extra),
        "cpu_ms_a_call": 1000 * told[0]["cpu_s"] / calls,
        "rss_mib": told[0]["rss_mib"],
        "busy": busy_share(log, slots, played["began"] + 2 * median_s, last),
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--median-s", type=float, default=2.0)
    parser.add_argument("--quick", action="store_true", help="200 episodes x 4 turns, of half a second")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--slots", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--upstream", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16, hard)
    )
    if asked.serve:
        uvloop.run(serve(asked.serve, asked.slots, asked.median_s, asked.upstream))
        return
    episodes, turns, median_s = (200, 4, 0.5) if asked.quick else (asked.episodes, asked.turns, asked.median_s)
    rows = [
        measure(kind, slots, episodes, turns, median_s)
        for slots in (episodes, episodes // 2)
        for kind in ("gateway", "proxy")
    ]
    if asked.json:
        print(json.dumps(rows))
        return
    print(f"{episodes} episodes x {turns} turns, latency median {median_s:g} s, log-normal with sigma {SIGMA:g}")
    print(f"{'':8} {'slots':>6} {'seconds':>8} {'over p50':>9} {'over p99':>9} {'CPU/call':>9} {'busy':>6} {'RSS':>8}")
    for row in rows:
        roomy = row["slots"] >= episodes
        over = f"{row['over_p50_ms']:7.1f}ms {row['over_p99_ms']:7.1f}ms" if roomy else f"{'-':>9} {'-':>9}"
        busy = "     -" if roomy else f"{row['busy']:6.1%}"
        tail = f"{row['cpu_ms_a_call']:7.2f}ms {busy} {row['rss_mib']:5.0f}MiB"
        print(f"{row['way']:8} {row['slots']:6} {row['seconds']:8.1f} {over} {tail}")


if __name__ == "__main__":
    main()
