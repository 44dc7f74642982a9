"""Side by side in one run: the addition job as a system of processes, the same GRPO in one plain process, and TRL's.

    python tools/bench/end_to_end.py [--quick] [--target 0.3] [--max-staleness N] [--json]
    python tools/bench/end_to_end.py --accuracy FOLDER [--seeds 1,2,3] [--steps 40] [--at-most N]

Prints seconds a step, tokens generated, tokens and samples trained a second, and the training time to the same held-out
accuracy. The plain process is measured with one and with two threads for a few steps; the faster one runs to the
target. TRL's GRPOTrainer (in the peers' environment: `make peer-env`) is likewise measured in the settings that may be
its best on a CPU: bfloat16 and float32, threads, samples of one backward pass; whole batches are generated at once,
without gradient checkpointing. The peers' time in evaluation is not counted; the system's evaluator runs beside the
training on the same cores and is counted.

Goals: 95% of the plain process's samples a second; a quarter of TRL's time to the accuracy, and no more than the plain
process's. A goal is not shown if the peer is missing or never comes to the accuracy. The exit status is 0 if all goals
hold, 1 if one is missed or not shown. --quick takes no time to accuracy, and judges the samples a second alone.

The accuracy after as many steps is printed, of one seed, and not judged: --accuracy does that over several seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import end_to_end_accuracy
import msgspec
from end_to_end_runs import Trial, run_plain, run_system, run_trl, write_job

SKIP = 3
"""First steps left out of the medians: loading and first touches of memory."""
LIKE_PLAIN, LIKE_TRL = 0.95, 0.25
"""To reach: this share of the plain process's samples a second, and of TRL's time to the accuracy."""


class Goal(msgspec.Struct, frozen=True):
    """What is to be reached beside a peer. holds: None, not shown, and `why` says what is missing."""

    what: str
    holds: bool | None
    why: str = ""


def best_of_trl(job: Path, *, quick: bool) -> tuple[Trial | None, dict[Trial, float]]:
    """The settings with which a step of TRL takes least, and what it takes with each that was tried."""
    seen: dict[Trial, float] = {}

    def attempt(trial: Trial) -> None:
        steps = [r["step_s"] for r in run_trl(job, trial, 3, 0, 2.0, 1) if r["kind"] == "step"]
        if len(steps) > 1:
            # The first one touches all memory for the first time.
            seen[trial] = statistics.median(steps[1:])

    for dtype, threads in itertools.product(("bfloat16", "float32"), (2,) if quick else (1, 2)):
        attempt((dtype, threads, 16))
    if seen and not quick:
        dtype, threads, _ = min(seen, key=lambda trial: seen[trial])
        for micro_batch in (8, 32, 96):
            attempt((dtype, threads, micro_batch))
    return min(seen, key=lambda trial: seen[trial], default=None), seen


def system_figures(records: list[dict[str, Any]]) -> dict[str, float]:
    """Rates over the steps after the first few, from the wall-clock of the step records."""
    steps = [r for r in records if r["kind"] == "step"]
    gaps = [b["t"] - a["t"] for a, b in itertools.pairwise(steps)][SKIP:]
    counted = steps[SKIP + 1 :]
    found = rates(gaps, [s["tokens"] for s in counted], [len(s["keys"]) for s in counted])
    return {**found, "generated_per_s": generated(records, steps[SKIP]["t"], steps[-1]["t"])}


def generated(records: list[dict[str, Any]], begin: float, end: float) -> float:
    """Tokens that all rollouts sampled a second between two times, those never trained on included."""
    total = 0.0
    for by in {r["by"] for r in records if r["kind"] == "rollout"}:
        own = [r for r in records if r["kind"] == "rollout" and r["by"] == by and begin <= r["t"] <= end]
        if len(own) > 1:
            total += (own[-1]["tokens"] - own[0]["tokens"]) / (own[-1]["t"] - own[0]["t"])
    return total


def plain_figures(records: list[dict[str, Any]], batch: int) -> dict[str, float]:
    """The same of one process, which trains on all that it generates."""
    steps = [r for r in records if r["kind"] == "step"]
    skip = SKIP if len(steps) > 2 * SKIP else 1
    found = rates([s["step_s"] for s in steps][skip:], [s["tokens"] for s in steps][skip:], [batch] * len(steps[skip:]))
    return {**found, "generated_per_s": found["tokens_per_s"]}


def rates(gaps: list[float], tokens: list[int], samples: list[int]) -> dict[str, float]:
    """Median seconds a step; tokens and samples trained on a second."""
    return {
        "step_s": statistics.median(gaps),
        "tokens_per_s": sum(tokens) / sum(gaps),
        "samples_per_s": sum(samples) / sum(gaps),
    }


def time_to(records: list[dict[str, Any]], target: float) -> float | None:
    """Training seconds until the weights that first reach the target existed; None if none did."""
    at = {r["step"]: r["elapsed_s"] for r in records if r["kind"] == "step"}
    for record in records:
        if record["kind"] == "evaluation" and record["step"] in at and record["exact"] >= target:
            return float(at[record["step"]])
    return None


def exact_after(records: list[dict[str, Any]], step: int) -> float | None:
    """Held-out accuracy of the weights of a step."""
    return next((float(r["exact"]) for r in records if r["kind"] == "evaluation" and r["step"] == step), None)


def last_common(all_records: list[list[dict[str, Any]]]) -> int:
    """The last step after which each was evaluated; 0: there is none."""
    evaluated = [{r["step"] for r in records if r["kind"] == "evaluation"} for records in all_records]
    return max(set.intersection(*evaluated) - {0}, default=0)


def goal_of(what: str, ours: float | None, most_or_least: float | None, better: str, lack: str) -> Goal:
    """Ours against a bound that a peer sets; without one nothing is shown, also where ours is none."""
    if most_or_least is None:
        return Goal(what, None, lack)
    return Goal(what, ours is not None and (ours <= most_or_least if better == "lower" else ours >= most_or_least))


def goals_of(name: str, ours: float | None, peers: Mapping[str, float | None], missing: frozenset[str]) -> list[Goal]:
    """The goals of a row, of each peer that sets one."""
    goals: list[Goal] = []
    for peer, theirs in peers.items():
        trl = peer.startswith("TRL")
        lack = f"{peer} was not measured" if peer in missing else f"{peer} did not reach it"
        if name.startswith("time"):
            share = LIKE_TRL if trl else 1.0
            bound = None if theirs is None else share * theirs
            goals.append(goal_of(f"at most {share:g} of {peer}", ours, bound, "lower", lack))
        elif name == "samples trained" and not trl:
            bound = None if theirs is None else LIKE_PLAIN * theirs
            goals.append(goal_of(f"at least {LIKE_PLAIN} of {peer}", ours, bound, "higher", lack))
    return goals


def row(
    name: str,
    unit: str,
    better: str,
    ours: float | None,
    peers: Mapping[str, float | None],
    missing: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """One row of the machine-readable result. `missing`: peers that could not be measured."""
    goals = goals_of(name, ours, peers, missing)
    shown = {goal.holds for goal in goals}
    return {
        "name": name,
        "unit": unit,
        "better": better,
        "ours": ours,
        "peers": dict(peers),
        "limit": None,
        "goal": "; ".join(goal.what for goal in goals) or None,
        "holds": False if False in shown else True if shown == {True} else None,
        "missed": [goal.what for goal in goals if goal.holds is False],
        "not_shown": [f"{goal.what}: {goal.why}" for goal in goals if goal.holds is None],
    }


def show(rows: list[dict[str, Any]], missing: frozenset[str]) -> None:
    """The table for people, and what became of the goals."""
    peers = list(rows[0]["peers"])
    print(f"{'':34} {'relax-rt':>12} " + " ".join(f"{p:>26}" for p in peers))
    for r in rows:
        cells = " ".join(f"{'not measured' if p in missing else told(r['peers'][p]):>26}" for p in peers)
        print(f"{r['name'] + ' (' + r['unit'] + ')':34} {told(r['ours']):>12} {cells}{judged(r)}")


def judged(row: dict[str, Any]) -> str:
    """What became of a row's goals, in words; empty: it has none."""
    if row["holds"]:
        return f"   {row['goal']}: yes"
    return "".join([f"   MISSED: {what}" for what in row["missed"]] + [f"   NOT SHOWN: {w}" for w in row["not_shown"]])


def told(value: float | None) -> str:
    """A figure, for people."""
    return "not reached" if value is None else f"{value:.2f}"


def all_hold(rows: list[dict[str, Any]]) -> bool:
    """Whether every goal was reached, and shown to be; there must be one."""
    held = [r["holds"] for r in rows if r["goal"] is not None]
    return bool(held) and all(holds is True for holds in held)


def table(
    system: list[dict[str, Any]], peers: dict[str, list[dict[str, Any]]], target: float | None
) -> list[dict[str, Any]]:
    """All rows.

    Args:
        peers: their records by name; none of one that could not be measured. target: held-out accuracy to which time is
            taken; None: it is not.
    """
    batch = max(len(r["keys"]) for r in system if r["kind"] == "step")
    ours, missing = system_figures(system), missing_of(peers)
    theirs = {name: {} if name in missing else plain_figures(records, batch) for name, records in peers.items()}
    shown = (
        ("step, median", "s", "lower", "step_s"),
        ("tokens generated", "1/s", "higher", "generated_per_s"),
        ("tokens trained", "1/s", "higher", "tokens_per_s"),
        ("samples trained", "1/s", "higher", "samples_per_s"),
    )
    rows = [
        row(name, unit, better, ours[key], {peer: found.get(key) for peer, found in theirs.items()}, missing)
        for name, unit, better, key in shown
    ]
    if target is not None:
        reached = {name: time_to(records, target) for name, records in peers.items()}
        rows.append(row(f"time to {target:.0%} held-out", "s", "lower", time_to(system, target), reached, missing))
        if step := last_common([system, *(records for name, records in peers.items() if name not in missing)]):
            exact = {name: exact_after(records, step) for name, records in peers.items()}
            name = f"one seed, exact after step {step}"
            rows.append(row(name, "share", "higher", exact_after(system, step), exact, missing))
    return rows


def missing_of(peers: Mapping[str, list[dict[str, Any]]]) -> frozenset[str]:
    """Peers without a step."""
    return frozenset(name for name, records in peers.items() if not any(r["kind"] == "step" for r in records))


def compare(options: argparse.Namespace) -> int:
    """All of them in one run; answers with the exit status."""
    quick, target = options.quick, options.target
    steps, every, items = (12, 0, 32) if quick else (60, 10, 512)
    staleness = {} if options.max_staleness is None else {"algorithm.max_staleness": int(options.max_staleness)}
    system = run_system(steps, every, items, staleness)
    batch = max(len(r["keys"]) for r in system if r["kind"] == "step")
    trials = {n: run_plain(n, 6, 0, 2.0, items) for n in (1, 2)}
    plain_s = {n: plain_figures(records, batch)["step_s"] for n, records in trials.items()}
    best = min(plain_s, key=lambda n: plain_s[n])
    plain = trials[best] if quick else run_plain(best, steps, every, target, items)
    peers = {f"plain, {best} thread{'s' * (best > 1)}": plain}
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        job = Path(folder) / "job.json"
        write_job(job, steps)
        trial, trl_s = best_of_trl(job, quick=quick)
        if trial is None:
            peers["TRL"] = []
        else:
            most = (3, 0, 2.0, 1) if quick else (steps, every, target, items)
            name = f"TRL, {trial[0]}, {trial[1]} thread{'s' * (trial[1] > 1)}"
            peers[name] = run_trl(job, trial, *most)
    rows = table(system, peers, None if quick else target)
    show(rows, missing_of(peers))
    print("plain process, s a step: " + ", ".join(f"{n} thread(s) {s:.2f}" for n, s in plain_s.items()))
    tried = ", ".join(f"{d} {n} thread(s) {m} at once {s:.2f}" for (d, n, m), s in trl_s.items())
    print(f"TRL, s a step: {tried or 'not measured'}")
    if options.json:
        print(json.dumps(rows))
    return 0 if all_hold(rows) else 1


def main() -> int:
    """Entry point; answers with the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="few steps, no time to accuracy")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON on the last line")
    parser.add_argument("--target", type=float, default=0.3, help="held-out exact match to reach")
    parser.add_argument(
        "--max-staleness", help="of the system, if not the job's; with --accuracy a comma-separated list (0,1)"
    )
    end_to_end_accuracy.add_options(parser)
    options = parser.parse_args()
    # So that what was started is ended as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.accuracy is not None:
        if problem := end_to_end_accuracy.refused(options):
            parser.error(problem)
        return end_to_end_accuracy.main(options)
    if options.max_staleness is not None and not options.max_staleness.isdecimal():
        parser.error(f"--max-staleness {options.max_staleness}: one number, as --accuracy FOLDER is not given")
    for name in ("seeds", "steps", "items", "dtype", "late", "threads", "at_most"):
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} is of --accuracy FOLDER, which is not given")
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
