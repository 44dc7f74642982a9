"""Payloads from one node to another: ours side by side with raw chunked ZeroMQ, between two network namespaces.

    python tools/bench/across_nodes.py [--quick] [--json]

Raw ZeroMQ sends chunks of warm memory without a copy and receives them into warm memory: no names, ranges, bounds,
digests, retries or cache. All variants are measured in turns, in the same rounds, so that a busy machine slows all of
them. CURVE encrypts with one thread a connection at each end: on a machine with two cores both ends together use them
up, and the encrypted raw stream is the limit of what ours can reach. Without the right to make namespaces it measures
over loopback, and says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import msgspec
import numpy as np
import zmq
from two_nodes import LOOPBACK, Nodes, NotPermitted, two_nodes

from relax_rt.transport.memory.payload_fetcher import Fetcher
from relax_rt.transport.memory.payload_server import PayloadServer
from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.rpc.identity import CurveKeys

RAW, RAW_CURVE, RAW_CURVE_2 = "raw ZeroMQ, not encrypted", "raw ZeroMQ, CURVE", "raw ZeroMQ, CURVE, 2 links"
OURS, OURS_2, OURS_BARE = "ours, CURVE", "ours, CURVE, 2 links", "ours, CURVE, no digests"
VARIANTS = (RAW, RAW_CURVE, RAW_CURVE_2, OURS, OURS_2, OURS_BARE)
SERVED_BY = {RAW: RAW, RAW_CURVE: RAW_CURVE, RAW_CURVE_2: RAW_CURVE_2, OURS: OURS, OURS_2: OURS, OURS_BARE: OURS}
PORTS = {RAW: 7810, RAW_CURVE: 7812, RAW_CURVE_2: 7814, OURS: 7816}
LARGE, BLOCK, SMALL = "151 MB in 9 blocks", "2 MiB block", "1,000 blocks of 8 KiB"
CASES = {LARGE: (9, 16_777_216), BLOCK: (1, 2 << 20), SMALL: (1000, 8192)}
SLAB, SLAB_BYTES = "bench-0-1-1.slab", 160 << 20
CHUNK_BYTES = 1 << 20
HIGH_WATER = 16
SHARE = 0.7

Transfer = Callable[[int, int], Awaitable[None]]


def serve(variant: str, host: str, keys: CurveKeys, shm_dir: pathlib.Path) -> NoReturn:
    """Serve until killed."""
    if variant == OURS:
        PayloadServer(shm_dir, keys=keys).start(f"tcp://{host}:{PORTS[OURS]}")
        print("ready", flush=True)
        time.sleep(3600)
    context = zmq.Context(2)
    data, control = raw_socket(context, zmq.PUSH, variant, keys), raw_socket(context, zmq.PULL, RAW, keys)
    if variant != RAW:
        data.curve_server = True
    data.bind(f"tcp://{host}:{PORTS[variant]}")
    control.bind(f"tcp://{host}:{PORTS[variant] + 1}")
    memory = np.fromfile(shm_dir / SLAB, np.uint8).data
    print("ready", flush=True)
    while True:
        count, nbytes = msgspec.msgpack.decode(control.recv())
        for i in range(count):
            data.send(memory[i * nbytes : (i + 1) * nbytes], copy=False)


def raw_socket(context: zmq.Context[Any], kind: int, variant: str, keys: CurveKeys) -> zmq.Socket[Any]:
    sock: zmq.Socket[Any] = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER)
    if variant != RAW:
        sock.curve_secretkey, sock.curve_publickey = keys.secret, keys.public
    return sock


def raw_reader(variant: str, host: str, keys: CurveKeys) -> Transfer:
    """Receives what it asks for, in chunks, over one or two connections."""
    context = zmq.Context(2)
    control = context.socket(zmq.PUSH)
    control.connect(f"tcp://{host}:{PORTS[variant] + 1}")
    poller = zmq.Poller()
    for _ in range(2 if variant == RAW_CURVE_2 else 1):
        sock = raw_socket(context, zmq.PULL, variant, keys)
        if variant != RAW:
            sock.curve_serverkey = keys.server_key
        sock.connect(f"tcp://{host}:{PORTS[variant]}")
        poller.register(sock, zmq.POLLIN)
    memory = np.ones(SLAB_BYTES, np.uint8).data

    async def transfer(count: int, nbytes: int) -> None:
        size = min(nbytes, CHUNK_BYTES)
        control.send(msgspec.msgpack.encode((count * nbytes // size, size)))
        got = 0
        while got < count * nbytes:
            for sock, _ in poller.poll():
                got += sock.recv_into(memory[got : got + size])

    return transfer


def our_reader(variant: str, host: str, keys: CurveKeys) -> Transfer:
    """Fetches extents, uses them, and releases the lease."""
    fetcher = Fetcher(
        keys,
        capacity_bytes=2 * SLAB_BYTES,
        segment_bytes=SLAB_BYTES,
        connections=2 if variant == OURS_2 else 1,
        verify=variant != OURS_BARE,
    )
    leases = iter(range(1 << 30))

    async def transfer(count: int, nbytes: int) -> None:
        lease = next(leases)
        wanted = [Extent(SLAB, i * nbytes, nbytes) for i in range(count)]
        await fetcher.fetch(f"tcp://{host}:{PORTS[OURS]}", wanted, lease=lease, deadline_s=120.0)
        fetcher.release(lease)

    return transfer


async def measure(host: str, keys: CurveKeys, servers: dict[str, int], rounds: int) -> list[dict[str, Any]]:
    """Seconds of every transfer, and CPU seconds of both ends, by variant and case."""
    make = {variant: our_reader if SERVED_BY[variant] == OURS else raw_reader for variant in VARIANTS}
    transfers = {variant: make[variant](variant, host, keys) for variant in VARIANTS}
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for number in range(rounds + 1):
        for case, (count, nbytes) in CASES.items():
            for variant in VARIANTS:
                row = out.setdefault((variant, case), {"variant": variant, "case": case, "times": [], "cpu": 0.0})
                server = servers[SERVED_BY[variant]]
                cpu, start = time.process_time() + cpu_s(server), time.perf_counter()
                await transfers[variant](count, nbytes)
                took = time.perf_counter() - start
                # The first round makes connections and warms memory.
                if number:
                    row["times"].append(took)
                    row["cpu"] += time.process_time() + cpu_s(server) - cpu
    return list(out.values())


def cpu_s(pid: int) -> float:
    """CPU time that a process has used so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def megabytes(case: str) -> float:
    count, nbytes = CASES[case]
    return count * nbytes / 1e6


def table(measured: list[dict[str, Any]], label: str) -> str:
    lines = [label, f"{'':<28}{'':<24}{'median ms':>11}{'MB/s':>8}{'best MB/s':>11}{'CPU s/GB':>10}"]
    for case in CASES:
        for row in (row for row in measured if row["case"] == case):
            size, median, best = megabytes(case), statistics.median(row["times"]), min(row["times"])
            cpu = row["cpu"] / (size * len(row["times"]) / 1000)
            speeds = f"{median * 1000:>11.2f}{size / median:>8.0f}{size / best:>11.0f}"
            lines.append(f"{row['variant']:<28}{case:<24}{speeds}{cpu:>10.2f}")
    return "\n".join(lines)


def rows(measured: list[dict[str, Any]], label: str) -> list[dict[str, Any]]:
    """What is claimed: a share of raw ZeroMQ with the same encryption, and nothing of ZeroMQ without it."""
    out = []
    for case in CASES:
        speed = {
            row["variant"]: round(megabytes(case) / statistics.median(row["times"]))
            for row in measured
            if row["case"] == case
        }
        limit = round(SHARE * max(speed[RAW_CURVE], speed[RAW_CURVE_2]))
        out.append(
            {
                "name": f"payload across nodes, {case}, {label}",
                "unit": "MB/s",
                "better": "higher",
                "ours": speed[OURS],
                "peers": {peer: speed[peer] for peer in (RAW_CURVE, RAW_CURVE_2, RAW)},
                "limit": limit,
                "goal": f"at least {SHARE:.0%} of raw chunked ZeroMQ with CURVE, the better of one and two connections",
                "holds": speed[OURS] >= limit,
            }
        )
    return out


def run(nodes: Nodes, rounds: int) -> list[dict[str, Any]]:
    """Servers on the first node, the reader on the second, each a process of its own."""
    keys = CurveKeys.make()
    environment = {**os.environ, "BENCH_KEYS": f"{keys.public.decode()} {keys.secret.decode()}"}
    with tempfile.TemporaryDirectory(prefix="relax-bench-", dir="/dev/shm") as shm_dir:
        (pathlib.Path(shm_dir) / SLAB).write_bytes(os.urandom(SLAB_BYTES))
        processes: dict[str, subprocess.Popen[str]] = {}
        try:
            for variant in PORTS:
                command = [*nodes.first, sys.executable, __file__, "--serve", variant, nodes.host, shm_dir]
                processes[variant] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            for variant, process in processes.items():
                assert process.stdout is not None
                if process.stdout.readline() != "ready\n":
                    raise SystemExit(f"the server of {variant} did not come up")
            servers = json.dumps({variant: process.pid for variant, process in processes.items()})
            command = [*nodes.second, sys.executable, __file__, "--read", nodes.host, servers, str(rounds)]
            answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    measured: list[dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds")
    parser.add_argument("--json", action="store_true", help="last line: the rows as JSON")
    parser.add_argument("--serve", nargs=3, metavar=("VARIANT", "HOST", "SHM_DIR"), help=argparse.SUPPRESS)
    parser.add_argument("--read", nargs=3, metavar=("HOST", "SERVERS", "ROUNDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve or options.read:
        public, secret = os.environ["BENCH_KEYS"].encode().split()
        keys = CurveKeys(public, secret)
        if options.serve:
            serve(options.serve[0], options.serve[1], keys, pathlib.Path(options.serve[2]))
        host, servers, rounds = options.read
        print(json.dumps(asyncio.run(measure(host, keys, json.loads(servers), int(rounds)))))
        return
    rounds = 5 if options.quick else 20
    try:
        with two_nodes() as nodes:
            label, measured = nodes.label, run(nodes, rounds)
    except NotPermitted as error:
        print(f"no network namespaces here, measuring over loopback: {error}")
        label, measured = LOOPBACK.label, run(LOOPBACK, rounds)
    print(table(measured, label))
    if options.json:
        print(json.dumps(rows(measured, label), ensure_ascii=False))


if __name__ == "__main__":
    main()
