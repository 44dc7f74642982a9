"""Latency of an echo: our message layer side by side with what it is built on, each server in a process of its own.

    python tools/bench/rpc_echo.py [--quick] [--json]

All variants run on uvloop and are measured in turns, in the same rounds, so that a busy machine slows all of them.
The raw variants frame bytes and nothing else: no types, deadlines, cancellation, bounds or errors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import uvloop
import zmq
import zmq.asyncio

from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcClient, RpcServer, idempotent, make_hello

RUN_ID = "bench000"
SIZES = {"64 B": 64, "64 KiB": 64 * 1024}
OURS_UNIX, OURS_ZMQ, RAW_ZMQ, RAW_STREAM = "ours, unix", "ours, zmq ipc", "raw zmq.asyncio ipc", "raw uvloop stream"
VARIANTS = (OURS_UNIX, OURS_ZMQ, RAW_ZMQ, RAW_STREAM)
MIN_FOR_P99 = 200
LENGTH = struct.Struct("<I")

Echo = Callable[[bytes], Awaitable[bytes]]


class EchoApi(Protocol):
    @idempotent
    async def echo(self, data: bytes) -> bytes: ...


class EchoImpl:
    async def echo(self, data: bytes) -> bytes:
        return data


async def serve(variant: str, path: str) -> None:
    """Serve until killed; the socket file appears when it is ready."""
    if variant in (OURS_UNIX, OURS_ZMQ):
        server = RpcServer(make_hello(RUN_ID, Incarnation("echo/0", 1)))
        server.offer(EchoApi, EchoImpl())
        await server.listen(address_of(variant, path))
        await asyncio.Event().wait()
    elif variant == RAW_ZMQ:
        sock = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        sock.bind(f"ipc://{path}")
        while True:
            await sock.send_multipart(await sock.recv_multipart())
    else:
        raw = await asyncio.start_unix_server(echo_stream, path)
        await raw.serve_forever()


def address_of(variant: str, path: str) -> str:
    return f"{'ipc' if variant == OURS_ZMQ else 'unix'}://{path}"


async def echo_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            header = await reader.readexactly(LENGTH.size)
            data = await reader.readexactly(LENGTH.unpack(header)[0])
            writer.write(header + data)
            await writer.drain()


@contextlib.asynccontextmanager
async def connected(variant: str, path: str) -> AsyncIterator[Echo]:
    """An echo function on one standing connection."""
    if variant in (OURS_UNIX, OURS_ZMQ):
        client = RpcClient(address_of(variant, path), make_hello(RUN_ID, Incarnation("bench/0", 2)))
        yield client.bind(EchoApi, timeout_s=30.0).echo
        await client.close()
    elif variant == RAW_ZMQ:
        sock = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        sock.connect(f"ipc://{path}")

        async def over_zmq(data: bytes) -> bytes:
            await sock.send(data)
            answer: bytes = await sock.recv()
            return answer

        yield over_zmq
        sock.close(linger=0)
    else:
        reader, writer = await asyncio.open_unix_connection(path)

        async def over_stream(data: bytes) -> bytes:
            writer.write(LENGTH.pack(len(data)) + data)
            return await reader.readexactly(LENGTH.unpack(await reader.readexactly(LENGTH.size))[0])

        yield over_stream
        writer.close()


async def measure(paths: dict[str, str], rounds: int, calls: int) -> dict[tuple[str, str], list[float]]:
    """Microseconds of every call, by variant and size."""
    took: dict[tuple[str, str], list[float]] = {(v, s): [] for v in VARIANTS for s in SIZES}
    async with contextlib.AsyncExitStack() as stack:
        echoes = {v: await stack.enter_async_context(connected(v, paths[v])) for v in VARIANTS}
        for label, size in SIZES.items():
            data = os.urandom(size)
            for variant in VARIANTS:
                for _ in range(100):
                    assert await echoes[variant](data) == data
            for _ in range(rounds):
                for variant in VARIANTS:
                    times, echo = took[variant, label], echoes[variant]
                    for _ in range(calls):
                        start = time.perf_counter_ns()
                        await echo(data)
                        times.append((time.perf_counter_ns() - start) / 1000)
    return took


def p99(times: list[float]) -> float | None:
    return statistics.quantiles(times, n=100)[98] if len(times) >= MIN_FOR_P99 else None


def table(took: dict[tuple[str, str], list[float]]) -> str:
    lines = [f"{'echo':<22}{'size':>8}{'count':>8}{'median µs':>12}{'p99 µs':>10}"]
    for (variant, size), times in took.items():
        tail = p99(times)
        last = f"{tail:>10.1f}" if tail is not None else f"{'max ' + format(max(times), '.1f'):>10}"
        lines.append(f"{variant:<22}{size:>8}{len(times):>8}{statistics.median(times):>12.1f}{last}")
    return "\n".join(lines)


def rows(took: dict[tuple[str, str], list[float]]) -> list[dict[str, Any]]:
    """What is claimed of the layer, for each carrier and size."""
    claims = {
        OURS_UNIX: (1.0, "on a node: no slower than bare zmq.asyncio, which has no types, deadlines or cancellation"),
        OURS_ZMQ: (2.0, "between nodes: at most twice bare zmq.asyncio"),
    }
    out = []
    for size in SIZES:
        medians = {v: round(statistics.median(took[v, size]), 1) for v in VARIANTS}
        for variant, (factor, goal) in claims.items():
            limit = round(factor * medians[RAW_ZMQ], 1)
            out.append(
                {
                    "name": f"rpc echo {size}, {variant}, median",
                    "unit": "µs",
                    "better": "lower",
                    "ours": medians[variant],
                    "peers": {peer: medians[peer] for peer in (RAW_ZMQ, RAW_STREAM)},
                    "limit": limit,
                    "goal": goal,
                    "holds": medians[variant] <= limit,
                }
            )
    return out


@contextlib.contextmanager
def servers(directory: str) -> Any:
    """One server process for each variant; ended with the block."""
    paths = {variant: f"{directory}/{number}.sock" for number, variant in enumerate(VARIANTS)}
    processes = [subprocess.Popen([sys.executable, __file__, "--serve", v, paths[v]]) for v in VARIANTS]
    try:
        deadline = time.monotonic() + 60
        while not all(pathlib.Path(path).exists() for path in paths.values()):
            if time.monotonic() > deadline or any(p.poll() is not None for p in processes):
                raise SystemExit("an echo server did not come up within 60 s")
            time.sleep(0.05)
        yield paths
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls")
    parser.add_argument("--json", action="store_true", help="last line: the rows as JSON")
    parser.add_argument("--serve", nargs=2, metavar=("VARIANT", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(*options.serve))
        return
    with tempfile.TemporaryDirectory(prefix="rpc-echo-") as directory, servers(directory) as paths:
        took = uvloop.run(measure(paths, rounds=5 if options.quick else 50, calls=100))
    print(table(took))
    if options.json:
        print(json.dumps(rows(took), ensure_ascii=False))


if __name__ == "__main__":
    main()
