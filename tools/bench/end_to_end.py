"""Side by side in one run: the quickstart job as a system of processes, the same GRPO in one plain process, and TRL's.

    python tools/bench/end_to_end.py [--quick] [--target 0.3] [--json]

Prints seconds a step, tokens generated, tokens and samples trained a second, and the training time to the same held-out
accuracy. The plain process is measured with one and with two threads for a few steps; the faster one runs to the
target. TRL's GRPOTrainer (in the peers' environment: `make peer-env`) is likewise measured in the settings that may be
its best on a CPU: bfloat16 and float32, threads, samples of one backward pass; whole batches are generated at once,
without gradient checkpointing. The peers' time in evaluation is not counted; the system's evaluator runs beside the
training on the same cores and is counted.
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

import peer_env

from relax_rt.config.loader import load_config
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.roles.sections import RLConfig

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent.parent / "examples/quickstart/roles.toml"
SYSTEM_TIMEOUT_S = 1800
PLAIN_TIMEOUT_S = 3600
TRL_TIMEOUT_S = 10_800
SKIP = 3
"""First steps left out of the medians: loading and first touches of memory."""
LIKE_PLAIN, LIKE_TRL = 0.95, 0.25
"""To reach: this share of the plain process's samples a second, and of TRL's time to the accuracy."""
EQUIVALENT = 0.08
"""What is learned from as many samples is the same if held-out accuracy is not further below a peer's than this."""
Trial = tuple[str, int, int]
"""TRL's dtype, threads, and samples of one backward pass."""


def read_lines(text: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines; a trainer may print dictionaries of its own."""
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"')]


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


def write_job(path: Path, steps: int) -> None:
    """The job as peers/trl_grpo.py reads it: it cannot import what this package has."""
    config = load_config(CONFIG)
    assert isinstance(config, RLConfig)
    folder, base = resolve_model(config.model.path, Path(config.config_dir)), Path(config.config_dir)
    tokenizer, table = load_tokenizer(folder), config.algorithm
    source = PromptSource.load(config.data, tokenizer, seed=config.run.seed, config_dir=base)

    def told(item: Any) -> dict[str, Any]:
        return {"prompt": tokenizer.text(item.messages), "tokens": list(item.tokens), "answer": item.answer}

    names = ("group_size", "prompts_per_step", "learning_rate", "adam_betas", "weight_decay", "max_grad_norm")
    job = {
        "model": str(folder),
        "reward": str(base / config.reward.function),
        "seed": config.run.seed,
        "temperature": config.sampling.temperature,
        "max_new_tokens": config.sampling.max_new_tokens,
        "train": [told(source.prompt(index)) for index in range(steps * table.prompts_per_step)],
        "held_out": [told(item) for item in source.held_out],
        **{name: getattr(table, name) for name in (*names, "clip_low", "clip_high", "normalise_std")},
    }
    path.write_text(json.dumps(job))


def run_trl(job: Path, trial: Trial, steps: int, every: int, target: float, items: int) -> list[dict[str, Any]]:
    """Records of TRL's trainer; none if it cannot be run, which is told on the standard error."""
    dtype, threads, micro_batch = trial
    options = [f"--dtype={dtype}", f"--threads={threads}", f"--micro-batch={micro_batch}", f"--steps={steps}"]
    options += [f"--evaluate-every={every}", f"--target={target}", f"--items={items}"]
    out = peer_env.run("trl_grpo.py", [str(job), *options], timeout_s=TRL_TIMEOUT_S)
    return read_lines(out) if out is not None else []


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


def row(name: str, unit: str, better: str, ours: float | None, peers: dict[str, float | None]) -> dict[str, Any]:
    """One row of the machine-readable result."""
    goals: list[tuple[str, bool]] = []
    for peer, theirs in peers.items():
        if name.startswith("held-out") and theirs is not None:
            met = ours is not None and ours >= theirs - EQUIVALENT
            goals.append((f"at most {EQUIVALENT:g} below {peer}", met))
        share = LIKE_TRL if peer.startswith("TRL") else 1.0
        if name.startswith("time") and theirs is not None:
            goals.append((f"at most {share:g} of {peer}", ours is not None and ours <= share * theirs))
        elif name == "samples trained" and not peer.startswith("TRL") and theirs is not None:
            goals.append((f"at least {LIKE_PLAIN} of {peer}", ours is not None and ours >= LIKE_PLAIN * theirs))
    return {
        "name": name,
        "unit": unit,
        "better": better,
        "ours": ours,
        "peers": peers,
        "limit": None,
        "goal": "; ".join(what for what, _ in goals),
        "holds": all(holds for _, holds in goals),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The table for people."""
    peers = list(rows[0]["peers"])
    print(f"{'':34} {'relax-rt':>12} " + " ".join(f"{p:>26}" for p in peers))
    for r in rows:
        cells = " ".join(f"{told(r['peers'][p]):>26}" for p in peers)
        missed = "" if r["holds"] else f"   MISSED: {r['goal']}"
        print(f"{r['name'] + ' (' + r['unit'] + ')':34} {told(r['ours']):>12} {cells}{missed}")


def told(value: float | None) -> str:
    """A figure, for people."""
    return "not reached" if value is None else f"{value:.2f}"


def table(
    system: list[dict[str, Any]], peers: dict[str, list[dict[str, Any]]], target: float | None
) -> list[dict[str, Any]]:
    """All rows.

    Args:
        peers: their records by name. target: held-out accuracy to which time is taken; None: it is not.
    """
    batch = max(len(r["keys"]) for r in system if r["kind"] == "step")
    ours = system_figures(system)
    theirs = {name: plain_figures(records, batch) for name, records in peers.items()}
    shown = (
        ("step, median", "s", "lower", "step_s"),
        ("tokens generated", "1/s", "higher", "generated_per_s"),
        ("tokens trained", "1/s", "higher", "tokens_per_s"),
        ("samples trained", "1/s", "higher", "samples_per_s"),
    )
    rows = [
        row(name, unit, better, ours[key], {peer: found[key] for peer, found in theirs.items()})
        for name, unit, better, key in shown
    ]
    if target is not None:
        reached = {name: time_to(records, target) for name, records in peers.items()}
        rows.append(row(f"time to {target:.0%} held-out", "s", "lower", time_to(system, target), reached))
        if step := last_common([system, *peers.values()]):
            exact = {name: exact_after(records, step) for name, records in peers.items()}
            rows.append(row(f"held-out exact, step {step}", "share", "higher", exact_after(system, step), exact))
    return rows


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, no time to accuracy")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON on the last line")
    parser.add_argument("--target", type=float, default=0.3, help="held-out exact match to reach")
    args = parser.parse_args()
    steps, every, items = (12, 0, 32) if args.quick else (60, 10, 512)
    system = run_system(steps, every, items)
    batch = max(len(r["keys"]) for r in system if r["kind"] == "step")
    trials = {n: run_plain(n, 6, 0, 2.0, items) for n in (1, 2)}
    plain_s = {n: plain_figures(records, batch)["step_s"] for n, records in trials.items()}
    best = min(plain_s, key=lambda n: plain_s[n])
    plain = trials[best] if args.quick else run_plain(best, steps, every, args.target, items)
    peers = {f"plain, {best} thread{'s' * (best > 1)}": plain}
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder:
        job = Path(folder) / "job.json"
        write_job(job, steps)
        trial, trl_s = best_of_trl(job, quick=args.quick)
        if trial is not None:
            most = (3, 0, 2.0, 1) if args.quick else (steps, every, args.target, items)
            name = f"TRL, {trial[0]}, {trial[1]} thread{'s' * (trial[1] > 1)}"
            peers[name] = run_trl(job, trial, *most)
    rows = table(system, peers, None if args.quick else args.target)
    show(rows)
    print("plain process, s a step: " + ", ".join(f"{n} thread(s) {s:.2f}" for n, s in plain_s.items()))
    tried = ", ".join(f"{d} {n} thread(s) {m} at once {s:.2f}" for (d, n, m), s in trl_s.items())
    print(f"TRL, s a step: {tried or 'not measured'}")
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
