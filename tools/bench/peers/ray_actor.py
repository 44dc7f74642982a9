"""Ray's actor on the cases of tools/bench/actors.py: a call's round trip, calls under way at once, calls whose result
nobody asks for, and a generator's items.

Run by the interpreter of the peers' environment; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray


@ray.remote(num_cpus=0)
class Scorer:
    """As ours: async methods that do nothing."""

    def __init__(self) -> None:
        self.heard = 0

    async def score(self, text: bytes) -> float:
        return float(len(text))

    async def note(self, text: bytes) -> None:
        self.heard += 1

    async def count(self) -> int:
        return self.heard

    async def tokens(self, n: int, text: bytes):  # type: ignore[no-untyped-def]
        for _ in range(n):
            yield text


async def calls_at_once(scorer, many: int, at_once: int, data: bytes) -> None:  # type: ignore[no-untyped-def]
    """As ours: each of so many tasks has one call under way."""

    async def some() -> None:
        for _ in range(many // at_once):
            await scorer.score.remote(data)

    await asyncio.gather(*(some() for _ in range(at_once)))


def main(rounds: int, calls: int, many: int, at_once: int) -> None:
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    scorer = Scorer.options(max_concurrency=at_once).remote()
    data = os.urandom(64)
    for _ in range(100):
        ray.get(scorer.score.remote(data))
    found: dict[str, list[float]] = {"round_trip_us": [], "calls_per_s": [], "told_per_s": [], "items_per_s": []}
    for _ in range(rounds):
        for _ in range(calls):
            start = time.perf_counter_ns()
            ray.get(scorer.score.remote(data))
            found["round_trip_us"].append((time.perf_counter_ns() - start) / 1000)
        start = time.perf_counter()
        asyncio.run(calls_at_once(scorer, many, at_once, data))
        found["calls_per_s"].append(many / (time.perf_counter() - start))
        wanted = ray.get(scorer.count.remote()) + many
        start = time.perf_counter()
        for _ in range(many):
            scorer.note.remote(data)
        while ray.get(scorer.count.remote()) < wanted:
            time.sleep(0.001)
        found["told_per_s"].append(many / (time.perf_counter() - start))
        start = time.perf_counter()
        for item in scorer.tokens.options(num_returns="streaming").remote(many, data):
            ray.get(item)
        found["items_per_s"].append(many / (time.perf_counter() - start))
    print(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
