"""Calls, one-way messages and streams of an actor: ours in a real run, side by side with Ray's and with the limits.

    python tools/bench/actors.py [--quick] [--json]

Ours, bare ZeroMQ (DEALER/ROUTER) and bare uvloop streams are measured in turns, in the same rounds, so that a busy
machine slows all of them; each server is a process of its own. The bare ones frame bytes and nothing else: no types,
deadlines, cancellation, bounds, credit or errors. Ray is measured right after, with `make peer-env` or
RELAX_PEER_PYTHON. Both actors have at most 64 calls at work, and 64 are under way for the rate of calls. What is not
the same: Ray's one-way messages are calls whose result nobody asks for, all of them submitted at once, and its streams
know no credit, where ours have a window of 64 items. Messages carry 64 bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import peer_env
import uvloop
from actor_cases import (
    AT_ONCE,
    Caller,
    in_run,
    over_curve,
    over_stream,
    over_zmq,
    serve_curve,
    serve_stream,
    serve_zmq,
)

from relax_rt.transport.rpc.rpc import CurveKeys

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "toys"))

from toy_run import ToyRun  # noqa: E402

SLOT, ROLE, CURVE, ZMQ, STREAM, RAY = (
    "ours, by slot",
    "ours, by role",
    "ours, tcp + CURVE",
    "raw ZeroMQ ipc",
    "raw uvloop stream",
    "Ray",
)
OURS, LIMITS = (SLOT, ROLE, CURVE), (ZMQ, STREAM)
MIN_FOR_P99 = 200
ROUND_TRIP_US, TOLD_PER_S = 150.0, 30_000.0
RAY_TIMEOUT_S = 600
ROLES = f"""
[run]
name = "actors"
job = "toys"
dir = "{{dir}}"
[roles.scorer]
target = "{HERE / "actor_cases.py"}:Scorer"
"""

Found = dict[str, dict[str, list[float]]]


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[dict[str, str]]:
    """A server process for each variant that is not in the run; ended with the block. By variant, where it is."""
    key = folder / "key"
    key.touch(mode=0o600)
    keys = CurveKeys.make()
    key.write_bytes(keys.public + keys.secret)
    places = {variant: str(folder / f"{n}.sock") for n, variant in enumerate((CURVE, ZMQ, STREAM))}
    command = [sys.executable, __file__, "--serve"]
    processes = [subprocess.Popen([*command, variant, place, str(key)]) for variant, place in places.items()]
    try:
        end = time.monotonic() + 60
        while not all(Path(place).exists() for place in places.values()):
            if time.monotonic() > end or any(p.poll() is not None for p in processes):
                raise SystemExit("a server did not come up within 60 s")
            time.sleep(0.05)
        yield {**places, CURVE: Path(places[CURVE]).read_text()}
    finally:
        for process in processes:
            process.kill()
            process.wait()


def read_keys(path: str) -> CurveKeys:
    both = Path(path).read_bytes()
    return CurveKeys(both[:40], both[40:])


async def serve(variant: str, place: str, key: str) -> None:
    """Serve until killed."""
    if variant == CURVE:
        await serve_curve(read_keys(key), Path(place))
    elif variant == ZMQ:
        await serve_zmq(place)
    else:
        await serve_stream(place)


async def measure(run_dir: Path, places: dict[str, str], key: str, rounds: int, calls: int, many: int) -> Found:
    """By variant: microseconds of each call, and rates of each round."""
    data = os.urandom(64)
    found: Found = {}
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        callers: dict[str, Caller] = {
            SLOT: await enter(in_run(run_dir, "scorer/0")),
            ROLE: await enter(in_run(run_dir, "scorer")),
            CURVE: await enter(over_curve(read_keys(key), places[CURVE])),
            ZMQ: await enter(over_zmq(places[ZMQ])),
            STREAM: await enter(over_stream(places[STREAM])),
        }
        for variant, caller in callers.items():
            found[variant] = {"round_trip_us": [], "calls_per_s": [], "told_per_s": [], "items_per_s": []}
            for _ in range(100):
                await caller.call(data)
        for _ in range(rounds):
            for variant, caller in callers.items():
                await one_round(caller, found[variant], data, calls, many, at_once=variant in OURS)
    return found


async def one_round(
    caller: Caller, found: dict[str, list[float]], data: bytes, calls: int, many: int, *, at_once: bool
) -> None:
    for _ in range(calls):
        start = time.perf_counter_ns()
        await caller.call(data)
        found["round_trip_us"].append((time.perf_counter_ns() - start) / 1000)
    if at_once:
        found["calls_per_s"].append(await rate(many, lambda: calls_at_once(caller, many, data)))
    found["told_per_s"].append(await rate(many, lambda: caller.tell_many(many, data)))
    found["items_per_s"].append(await rate(many, lambda: caller.stream(many, data)))


async def calls_at_once(caller: Caller, many: int, data: bytes) -> None:
    async def some() -> None:
        for _ in range(many // AT_ONCE):
            await caller.call(data)

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


async def rate(many: int, work: Callable[[], Awaitable[None]]) -> float:
    start = time.perf_counter()
    await work()
    return many / (time.perf_counter() - start)


def ray(rounds: int, calls: int, many: int) -> dict[str, list[float]] | None:
    """Ray on the same cases; None where it is not installed."""
    out = peer_env.run("ray_actor.py", [str(n) for n in (rounds, calls, many, AT_ONCE)], timeout_s=RAY_TIMEOUT_S)
    return json.loads(out.splitlines()[-1]) if out else None


def p99(times: list[float]) -> float | None:
    return round(statistics.quantiles(times, n=100)[98], 1) if len(times) >= MIN_FOR_P99 else None


def table(found: Found) -> str:
    heads = ("calls", "p50 µs", "p99 µs", "calls/s", "one-way/s", "items/s")
    lines = [f"{'actor':<20}" + "".join(f"{head:>12}" for head in heads)]
    for variant, figures in found.items():
        times = figures["round_trip_us"]
        tail = p99(times)
        cells = [f"{len(times)}", f"{statistics.median(times):.1f}", f"{tail}" if tail else f"max {max(times):.0f}"]
        for rates in (figures["calls_per_s"], figures["told_per_s"], figures["items_per_s"]):
            cells.append(f"{statistics.median(rates):,.0f}" if rates else "")
        lines.append(f"{variant:<20}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def rows(found: Found) -> list[dict[str, Any]]:
    """What is claimed."""
    out = []
    for key, name, unit, better, goal in (
        ("round_trip_us", "actor call, round trip, p50", "µs", "lower", ROUND_TRIP_US),
        ("calls_per_s", f"actor calls, {AT_ONCE} at once", "1/s", "higher", None),
        ("told_per_s", "actor one-way messages", "1/s", "higher", TOLD_PER_S),
        ("items_per_s", "actor stream items", "1/s", "higher", None),
    ):
        medians = {v: round(statistics.median(f[key]), 1) for v, f in found.items() if f[key]}
        for variant in OURS:
            ours = medians[variant]
            goal_here = goal if variant == SLOT else None
            holds = None if goal_here is None else (ours <= goal_here if better == "lower" else ours >= goal_here)
            out.append(
                {
                    "name": f"{name}, {variant.removeprefix('ours, ')}",
                    "unit": unit,
                    "better": better,
                    "ours": ours,
                    "peers": {v: m for v, m in medians.items() if v not in OURS},
                    "limit": goal_here,
                    "goal": f"{'at most' if better == 'lower' else 'at least'} {goal:,.0f} {unit}"
                    if goal_here
                    else None,
                    "holds": holds,
                }
            )
    tails = {v: p99(f["round_trip_us"]) for v, f in found.items()}
    for variant in OURS:
        peers = {v: t for v, t in tails.items() if v not in OURS and t is not None}
        out.append(
            {
                "name": f"actor call, round trip, p99, {variant.removeprefix('ours, ')}",
                "unit": "µs",
                "better": "lower",
                "ours": tails[variant],
                "peers": peers,
                "limit": None,
                "goal": None,
                "holds": None,
            }
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    parser.add_argument("--json", action="store_true", help="last line: the rows as JSON")
    parser.add_argument("--serve", nargs=3, metavar=("VARIANT", "PLACE", "KEY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(*options.serve))
        return
    sizes = (3, 100, 3_200) if options.quick else (20, 200, 12_800)
    with tempfile.TemporaryDirectory(prefix="actors-") as name:
        folder = Path(name)
        with ToyRun(folder, ROLES, system=("registry",)) as run, servers(folder) as places:
            run.ready()
            found = uvloop.run(measure(run.run_dir, places, str(folder / "key"), *sizes))
            run.end()
    if (peer := ray(*sizes)) is not None:
        found[RAY] = peer
    print(table(found))
    if options.json:
        print(json.dumps(rows(found), ensure_ascii=False))


if __name__ == "__main__":
    main()
