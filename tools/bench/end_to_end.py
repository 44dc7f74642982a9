"""Side by side in one run: the quickstart job as a system of processes, and the same GRPO in one plain process.

Prints generated and trained tokens a second, seconds a step, and the training time to the same held-out accuracy. The
plain process is measured with one and with two threads for a few steps; the faster one runs to the target. Its time in
evaluation is not counted; the system's evaluator runs beside the training on the same cores and is counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent.parent / "examples/quickstart/roles.toml"
SYSTEM_TIMEOUT_S = 1800
PLAIN_TIMEOUT_S = 3600
SKIP = 3
"""First steps left out of the medians: loading and first touches of memory."""


def read_lines(text: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run_system(steps: int, every: int, items: int) -> list[dict[str, Any]]:
    """metrics.jsonl of a run of the system."""
    folder = Path(tempfile.mkdtemp(prefix="relax-bench-"))
    sets = {
        "run.dir": json.dumps(str(folder / "run")),
        "algorithm.steps": steps,
        "evaluation.every_steps": every,
        "evaluation.items": items,
        "evaluation.during_items": items,
    }
    command = [str(Path(sys.executable).with_name("relax-rt")), "up", str(CONFIG)]
    command += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SYSTEM_TIMEOUT_S, check=False)
        if done.returncode:
            raise SystemExit(f"the run failed with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return read_lines((folder / "run" / "metrics.jsonl").read_text())
    finally:
        shutil.rmtree(folder)


def run_plain(threads: int, steps: int, every: int, target: float, items: int) -> list[dict[str, Any]]:
    """Records of the plain process."""
    command = [sys.executable, str(HERE / "plain_grpo.py"), str(CONFIG), f"--threads={threads}", f"--steps={steps}"]
    command += [f"--evaluate-every={every}", f"--target={target}", f"--items={items}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PLAIN_TIMEOUT_S, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(f"the plain process failed with {done.returncode}:\n{done.stderr[-3000:]}")
    return read_lines(done.stdout)


def system_figures(records: list[dict[str, Any]]) -> dict[str, float]:
    """Rates over the steps after the first few, from the wall-clock of the step records."""
    steps = [r for r in records if r["kind"] == "step"]
    gaps = [b["t"] - a["t"] for a, b in itertools.pairwise(steps)][SKIP:]
    tokens = [s["tokens"] for s in steps][SKIP + 1 :]
    return rates(gaps, tokens)


def plain_figures(records: list[dict[str, Any]]) -> dict[str, float]:
    """The same of the plain process."""
    steps = [r for r in records if r["kind"] == "step"]
    skip = SKIP if len(steps) > 2 * SKIP else 0
    return rates([s["step_s"] for s in steps][skip:], [s["tokens"] for s in steps][skip:])


def rates(gaps: list[float], tokens: list[int]) -> dict[str, float]:
    """Median seconds a step, and sampled tokens a second: each is generated once and trained once."""
    return {"step_s": statistics.median(gaps), "tokens_per_s": sum(tokens) / sum(gaps)}


def time_to(records: list[dict[str, Any]], target: float) -> float | None:
    """Training seconds until the weights that first reach the target existed; None if none did."""
    at = {r["step"]: r["elapsed_s"] for r in records if r["kind"] == "step"}
    for record in records:
        if record["kind"] == "evaluation" and record["step"] in at and record["exact"] >= target:
            return float(at[record["step"]])
    return None


def row(name: str, unit: str, better: str, ours: float | None, peers: dict[str, float | None]) -> dict[str, Any]:
    """One row of the machine-readable result."""
    known = [p for p in peers.values() if p is not None]
    holds = ours is not None and all(ours >= p if better == "higher" else ours <= p for p in known)
    return {
        "name": name,
        "unit": unit,
        "better": better,
        "ours": ours,
        "peers": peers,
        "limit": None,
        "goal": "at least the faster plain process",
        "holds": holds,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The table for people."""
    peers = list(rows[0]["peers"])
    print(f"{'':34} {'relax-rt':>12} " + " ".join(f"{p:>20}" for p in peers))
    for r in rows:
        cells = " ".join(
            f"{'not reached' if r['peers'][p] is None else format(r['peers'][p], '.2f'):>20}" for p in peers
        )
        ours = "not reached" if r["ours"] is None else f"{r['ours']:.2f}"
        print(f"{r['name'] + ' (' + r['unit'] + ')':34} {ours:>12} {cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, no time to accuracy")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON on the last line")
    parser.add_argument("--target", type=float, default=0.3, help="held-out exact match to reach")
    args = parser.parse_args()
    steps, every, items = (12, 0, 32) if args.quick else (60, 10, 512)
    system = run_system(steps, every, items)
    trials = {n: plain_figures(run_plain(n, 6, 0, 2.0, items)) for n in (1, 2)}
    best = min(trials, key=lambda n: trials[n]["step_s"])
    ours, name = system_figures(system), f"plain, {best} thread{'s' * (best > 1)}"
    rows = []
    if args.quick:
        plain = trials[best]
    else:
        records = run_plain(best, steps, every, args.target, items)
        plain = plain_figures(records)
        reached = {name: time_to(records, args.target)}
        rows.append(row(f"time to {args.target:.0%} held-out", "s", "lower", time_to(system, args.target), reached))
    rows.insert(0, row("step, median", "s", "lower", ours["step_s"], {name: plain["step_s"]}))
    rows.insert(
        1, row("tokens generated and trained", "1/s", "higher", ours["tokens_per_s"], {name: plain["tokens_per_s"]})
    )
    show(rows)
    print("plain process, s a step: " + ", ".join(f"{n} thread(s) {t['step_s']:.2f}" for n, t in trials.items()))
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
