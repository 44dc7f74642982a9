"""What the gateway costs: many episodes of several turns against a scripted engine whose latency has a long tail, and
beside it a plain proxy (FastAPI + httpx, in the peers' environment: `make peer-env`) with the same clients.

    python tools/bench/agentic.py [--quick] [--json]      # 1,000 episodes x 8 turns

Clients, what stands in between, and the engine are a process each. The gateway has its router, which reaches the
engine as in a run; the proxy reaches it by HTTP; "direct" are the same clients at the engine's HTTP, with nothing in
between: what they and the machine cost themselves. A conversation grows with each turn; each episode has a connection.

Two loads: *roomy*, with a slot for every episode, and *tight*, with half as many. Overhead of a call is what its client
waits (from the write to the answer's last byte) less the time in which the call had its slot; it is told of the roomy
load, in which nobody waits for a slot. All episodes begin at once, so that first calls wait for each other: "later" are
calls after an episode's first. Busy is the part of the slots' time in which they had a call, from the first call until
fewer episodes are left than slots. CPU is that of the process in between, without its start.

It exits with 1 if its goal is missed: in the tight load the gateway keeps at least 95% of the slots busy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import peer_env
import psutil
import uvloop
from peers.slots import SIGMA, TOKEN

from relax_rt.roles.gateway.access import Keys

HERE = Path(__file__).resolve().parent
OURS, PROXY, DIRECT = "gateway", "FastAPI + httpx", "direct"
BUSY = 0.95
"""Share of the engine's slots that the gateway is to keep busy while there is enough to do."""
LAG_S = 0.02
"""How often the clients' loop looks how late it is."""
MAX_LAG_S, MAX_CLIENT = 0.01, 0.8
"""Beyond these the clients may have been the bottleneck."""
Log = Sequence[tuple[str, float, float]]
"""Of each call that had a slot: its name, and from when to when (monotonic seconds)."""


class Server:
    """A process that serves until it is told to end."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._watched = psutil.Process(self.process.pid)
        self.url = str(self._line()["url"])
        self.start_cpu_s = self.cpu_s()
        self.counted: dict[str, int] = {}
        """What it has counted until its end."""

    def cpu_s(self) -> float:
        """Processor time until now."""
        times = self._watched.cpu_times()
        return float(times.user + times.system)

    def rss_mib(self) -> float:
        """Memory now."""
        return float(self._watched.memory_info().rss) / 2**20

    def end(self) -> Log:
        """What it has logged."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        told = self._line()
        self.counted = told.get("counted", {})
        log = [(str(name), float(began), float(ended)) for name, began, ended in told["log"]]
        self.process.wait(30)
        return log

    def kill(self) -> None:
        """Whatever happened."""
        self.process.kill()
        self.process.wait()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"{self.process.args!r:.200} ended with {self.process.wait(30)}")
        return dict(json.loads(line))


@contextlib.contextmanager
def servers(way: str, slots: int, episodes: int, median_s: float) -> Iterator[list[Server]]:
    """The engine, and before it what clients speak to."""
    load = [str(slots), str(median_s)]
    peer = [str(peer_env.interpreter()), str(HERE / "peers/fastapi_proxy.py")]
    ours = [sys.executable, str(HERE / "agentic_servers.py")]
    begun: list[Server] = []
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        path = f"{folder}/engine.sock"
        try:
            if way == OURS:
                begun.append(Server([*ours, "engine", path, *load]))
                begun.insert(0, Server([*ours, "gateway", path, str(episodes)]))
            else:
                begun.append(Server([*peer, "engine", *load]))
                if way == PROXY:
                    begun.insert(0, Server([*peer, "proxy", begun[0].url]))
            yield begun
        finally:
            for server in begun:
                server.kill()


# --- the episodes


class Caller(asyncio.Protocol):
    """One connection, one call after the other. No client package: the same few lines for everyone, and cheap."""

    def __init__(self, host: str, key: str) -> None:
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        )
        self._got = bytearray()
        self._transport: asyncio.WriteTransport
        self._answer: asyncio.Future[tuple[bytes, float]]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are none of asyncio's classes.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._got += data
        if (end := self._got.find(b"\r\n\r\n")) < 0:
            return
        head = bytes(self._got[:end])
        found = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
        assert found is not None, head
        if len(self._got) < end + 4 + int(found[1]):
            return
        body, self._got = bytes(self._got[end + 4 :]), bytearray()
        if not head.startswith(b"HTTP/1.1 200 "):
            self._answer.set_exception(SystemExit(f"{head!r}: {body!r:.500}"))
        else:
            self._answer.set_result((body, time.monotonic()))

    def connection_lost(self, exc: Exception | None) -> None:
        if hasattr(self, "_answer") and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"the server has hung up: {exc}"))

    async def call(self, messages: list[dict[str, str]]) -> tuple[str, float]:
        """The answer's words, and how long they took, seconds."""
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        self._answer = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        self._transport.write(f"{self._head}{len(body)}\r\n\r\n".encode() + body)
        told, at = await self._answer
        return str(json.loads(told)["choices"][0]["message"]["content"]), at - began

    def close(self) -> None:
        """Disconnect."""
        self._transport.close()


@dataclass
class Played:
    """What the clients saw: seconds on the monotonic clock, and durations.

    Attributes:
        waited: of each call, by name. ends: of episodes, in order. lags: how late their loop was. cpu_s: of their own.
    """

    began: float = 0.0
    waited: dict[str, float] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    async def look(self) -> None:
        """How late the loop is, for as long as it runs."""
        while True:
            due = time.monotonic() + LAG_S
            await asyncio.sleep(LAG_S)
            self.lags.append(time.monotonic() - due)


async def play(url: str, episodes: int, turns: int) -> Played:
    """All episodes at once."""
    played, keys, loop = Played(), Keys(TOKEN), asyncio.get_running_loop()
    host, port = url.removeprefix("http://").split(":")
    callers = [Caller(host, keys.of_session(f"e{number}")) for number in range(episodes)]
    for caller in callers:
        await loop.create_connection(lambda caller=caller: caller, host, int(port))

    async def episode(number: int, caller: Caller) -> None:
        messages: list[dict[str, str]] = []
        for turn in range(turns):
            name = f"{number}-{turn}"
            messages.append({"role": "user", "content": f"Here is what happened next, it is call {name}."})
            answer, played.waited[name] = await caller.call(messages)
            messages.append({"role": "assistant", "content": answer})
        played.ends.append(time.monotonic())
        caller.close()

    spent = time.process_time()
    looking = asyncio.create_task(played.look())
    played.began = time.monotonic()
    await asyncio.gather(*(episode(number, caller) for number, caller in enumerate(callers)))
    looking.cancel()
    played.cpu_s = time.process_time() - spent
    return played


# --- the figures


def busy_share(log: Log, slots: int, begin: float, end: float) -> float:
    """Part of the slots' time from begin to end in which they had a call; NaN: that is no time."""
    worked = sum(max(0.0, min(ended, end) - max(began, begin)) for _, began, ended in log)
    return worked / (slots * (end - begin)) if end > begin else float("nan")


def enough_until(ends: Sequence[float], slots: int) -> float:
    """When fewer episodes were left than there are slots, of at least as many."""
    return sorted(ends)[len(ends) - slots]


def quantile(values: Sequence[float], q: float) -> float:
    """Of at least one value; the highest, of fewer than two hundred for a q beyond the median."""
    values = sorted(values)
    return values[-1 if q > 0.5 and len(values) < 200 else min(len(values) - 1, int(q * len(values)))]


def busy_machine_s() -> float:
    """Seconds in which the machine's cores were at work, all together."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def measure(way: str, slots: int, episodes: int, turns: int, median_s: float) -> dict[str, Any]:
    """One load of one way."""
    with servers(way, slots, episodes, median_s) as begun:
        machine = busy_machine_s()
        played = uvloop.run(play(begun[0].url, episodes, turns))
        machine = busy_machine_s() - machine
        spent = [server.cpu_s() - server.start_cpu_s for server in begun]
        rss_mib = begun[0].rss_mib()
        log = [server.end() for server in begun][-1]
    took = {name: ended - began for name, began, ended in log}
    over = {name: 1000 * (waited - took[name]) for name, waited in played.waited.items()}
    later = [value for name, value in over.items() if not name.endswith("-0")]
    seconds, until = played.ends[-1] - played.began, enough_until(played.ends, slots)
    calls = episodes * turns
    return {
        "way": way,
        "slots": slots,
        "seconds": seconds,
        "over_p50_ms": quantile(list(over.values()), 0.5),
        "over_p99_ms": quantile(list(over.values()), 0.99),
        "later_p99_ms": quantile(later, 0.99),
        "cpu_ms": 1000 * spent[0] / calls,
        "busy": busy_share(log, slots, played.began, until),
        "again": len(log) - calls,
        "rss_mib": rss_mib,
        "counted": begun[0].counted,
        "client": played.cpu_s / seconds,
        "client_lag_s": quantile(played.lags, 0.99),
        "others": max(0.0, machine - played.cpu_s - sum(spent)) / seconds,
    }


def rows(found: dict[tuple[str, bool], dict[str, Any]], episodes: int) -> list[dict[str, Any]]:
    """The machine-readable result, of what was measured by way and whether the load was tight."""
    table = []

    def row(name: str, unit: str, better: str, what: str, *, tight: bool, limit: float | None, goal: str) -> None:
        values = {way: values[what] for (way, load), values in found.items() if load == tight}
        ours = values.pop(OURS)
        holds = ours >= BUSY if goal else None
        told = {"name": name, "unit": unit, "better": better, "ours": ours, "peers": values, "limit": limit}
        table.append({**told, "goal": goal, "holds": holds})

    goal = f"at least {BUSY:.0%}"
    loads = [(False, "a slot for every episode"), (True, f"{found[OURS, True]['slots']} slots for {episodes} episodes")]
    row("overhead of a call, p50", "ms", "lower", "over_p50_ms", tight=False, limit=0.0, goal="")
    row("overhead of a call, p99", "ms", "lower", "over_p99_ms", tight=False, limit=0.0, goal="")
    row("overhead of a call after the first, p99", "ms", "lower", "later_p99_ms", tight=False, limit=0.0, goal="")
    for tight, load in loads:
        row(f"CPU of a call, {load}", "ms", "lower", "cpu_ms", tight=tight, limit=None, goal="")
    for tight, load in loads:
        name = f"slots busy, {load}"
        row(name, "share", "higher", "busy", tight=tight, limit=1.0, goal=goal if tight else "")
    row("memory with all episodes", "MiB", "lower", "rss_mib", tight=False, limit=None, goal="")
    return table


def show(found: dict[tuple[str, bool], dict[str, Any]]) -> None:
    """The table for people."""
    print(f"{'':16}{'slots':>6}{'seconds':>9}{'over p50':>11}{'p99':>11}{'later p99':>11}{'CPU/call':>10}", end="")
    print(f"{'busy':>7}{'again':>6}{'RSS':>9}{'clients':>9}{'late p99':>10}{'others':>8}")
    for (way, tight), row in found.items():
        over = [
            f"{'-' if tight else f'{row[what]:.1f}ms':>11}" for what in ("over_p50_ms", "over_p99_ms", "later_p99_ms")
        ]
        cpu = "-" if way == DIRECT else f"{row['cpu_ms']:.2f}ms"
        print(f"{way:16}{row['slots']:6}{row['seconds']:9.1f}{''.join(over)}{cpu:>10}", end="")
        print(f"{row['busy']:7.1%}{row['again']:6}{row['rss_mib']:6.0f}MiB", end="")
        print(f"{row['client']:9.0%}{1000 * row['client_lag_s']:8.1f}ms{row['others']:8.2f}")
        if row["counted"]:
            print(f"  {', '.join(f'{name} {count}' for name, count in row['counted'].items())}")
        if row["client"] > MAX_CLIENT or row["client_lag_s"] > MAX_LAG_S:
            print(f"  the clients were late themselves: what {way} shows above is partly theirs")
    print("again: calls begun anew; clients: share of a core that they took; late: how late their loop was; ", end="")
    print("others: cores that other processes took")


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--median-s", type=float, default=2.0, help="of the engine's latencies")
    parser.add_argument("--quick", action="store_true", help="200 episodes x 6 turns, of half a second")
    parser.add_argument("--ours", action="store_true", help="the gateway alone")
    parser.add_argument("--json", action="store_true", help="last line: the rows as JSON")
    asked = parser.parse_args()
    episodes, turns, median_s = (200, 6, 0.5) if asked.quick else (asked.episodes, asked.turns, asked.median_s)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    ways = [(OURS, False), (OURS, True)]
    if not asked.ours and peer_env.interpreter() is None:
        print(peer_env.MISSING, file=sys.stderr)
    elif not asked.ours:
        ways = [(OURS, False), (PROXY, False), (DIRECT, False), (OURS, True), (PROXY, True)]
    print(f"{episodes} episodes x {turns} turns, latency median {median_s:g} s, log-normal with sigma {SIGMA:g}")
    found = {
        (way, tight): measure(way, episodes // 2 if tight else episodes, episodes, turns, median_s)
        for way, tight in ways
    }
    show(found)
    table = rows(found, episodes)
    for each in table:
        if each["goal"]:
            print(f"{each['name']}: {each['ours']:.1%}, goal {each['goal']}: {'yes' if each['holds'] else 'NO'}")
    if asked.json:
        print(json.dumps(table, ensure_ascii=False))
    return int(any(each["holds"] is False for each in table))


if __name__ == "__main__":
    sys.exit(main())
