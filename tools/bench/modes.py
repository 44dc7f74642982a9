"""Colocate, on-policy and asynchronous side by side, at the pace of a GPU cluster, on a machine that has no GPU.

    python tools/bench/modes.py [--quick] [--json] [--factor 50] [--steps 48] [--rounds 2] [--generation-s 128.6]

Whole runs, with the real supervisor, registry, queue, reward, publication and checkpoints. ENGINES AND TRAINER ARE
STAND-INS: they sleep for as long as GPUs would compute, `factor` times shorter. What the runtime itself takes is not
made shorter: it weighs `factor` times more here than there.

- colocate: one device in turns: generate, release the engines' memory, train, publish, take the memory back.
- on-policy: max_staleness 0, engines and trainer on devices of their own; a step's samples are of its weights.
- asynchronous: max_staleness 1 and 4: generation and training at the same time.

The pace is such that colocate and on-policy take what the paper says, if nothing is lost (arXiv 2604.11554: 225.9 and
201.0 s a step). These two do not say how the 201.0 s divide; the asynchronous 128.6 s are taken as the longer stage,
the generation of a batch, with its tail. Lengths are log-normal, of a sample's own, the same in every mode. See
docs/modes.md for what is concluded from it and what is not.

The ideal pipeline is computed from the same lengths and times, twice: as two stages that are never idle, which no way
of running can beat; and as what the staleness contract allows when nothing else takes any time (modes_times.Pipeline).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toys"))

from modes_times import PAPER, Pace, Pipeline, Shape, cluster, gaps, stages
from toy_run import ToyRun

from relax_rt.metrics import read_metrics

HERE = Path(__file__).resolve().parent
JOB = HERE / "modes_job"
TIMEOUT_S = 1800.0
MANY = 4
MODES: dict[str, float] = {"colocate": 0, "on-policy": 0, "asynchronous, 1": 1, f"asynchronous, {MANY}": MANY}
OURS = f"asynchronous, {MANY}"
OF_IDEAL, OF_COLOCATE = 0.95, 1.76
CONTEXT = 1 << 15


class Ran(msgspec.Struct, frozen=True):
    """What a run's step records say, seconds of this machine.

    Attributes:
        steps_s: of each step after the first few. wait_s, train_s, publish_s: means, by the trainer's own records.
        staleness: mean and highest, updates.
    """

    steps_s: list[float]
    wait_s: float
    train_s: float
    publish_s: float
    staleness: tuple[float, int]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of few steps, at a factor of 60")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON on the last line")
    parser.add_argument("--factor", type=float, default=50.0, help="times are so much shorter than the cluster's")
    parser.add_argument("--steps", type=int, default=48, help="of asynchronous runs; the others take half of them")
    parser.add_argument("--skip", type=int, default=4, help="first steps left out: loading, an empty pipeline")
    parser.add_argument("--rounds", type=int, default=2, help="the median counts")
    parser.add_argument("--generation-s", type=float, default=PAPER["asynchronous"], help="of a batch alone")
    parser.add_argument("--sigma", type=float, default=0.7, help="of the logarithm of lengths")
    parser.add_argument("--only", help="this mode alone, without a verdict")
    parser.add_argument("--keep", type=Path, help="leave the run directories there")
    options = parser.parse_args()
    # So that the run is ended as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.quick:
        options.factor, options.steps, options.skip, options.rounds = 60.0, 16, 3, 1
    shape = Shape(sigma=options.sigma)
    pace = cluster(shape, options.generation_s).scaled(options.factor)
    found: dict[str, list[Ran]] = {mode: [] for mode in MODES if options.only in (None, mode)}
    for number in range(options.rounds):
        for mode in found:
            ran = run(mode, shape, pace, options, number)
            found[mode].append(ran)
            print(f"{time.strftime('%X')} {mode}: {statistics.fmean(ran.steps_s):.3f} s a step", file=sys.stderr)
    ideals = {mode: ideal(mode, shape, pace, options) for mode in found}
    never_idle = stages(shape, pace, range(options.skip, options.steps))
    show(found, ideals, never_idle, shape, pace, options)
    if options.json and not options.only:
        print(json.dumps(rows(found, ideals, max(never_idle), options)))
    return 0


def ideal(mode: str, shape: Shape, pace: Pace, options: argparse.Namespace) -> float:
    """Seconds a step that the contract allows."""
    pipeline = Pipeline(shape, pace, MODES[mode], colocate=mode == "colocate")
    return statistics.fmean(gaps(pipeline.steps(steps_of(mode, options)), options.skip))


def steps_of(mode: str, options: argparse.Namespace) -> int:
    """Steps of a run. Asynchronous ones have more: what is under way at the first and the last step counted differs."""
    steps: int = options.steps if MODES[mode] else options.steps // 2
    return steps


def run(mode: str, shape: Shape, pace: Pace, options: argparse.Namespace, number: int) -> Ran:
    """One run of a mode.

    Raises:
        SystemExit: it failed; with its last lines.
    """
    folder = Path(tempfile.mkdtemp(prefix="relax-bench-"))
    job = folder / "modes_job"
    toy = ToyRun(folder, job / "roles.toml", settings(mode, shape, pace, steps_of(mode, options)))
    try:
        make_job(job)
        for name in ("modes_roles.py", "modes_times.py"):
            shutil.copyfile(HERE / name, folder / name)
        with toy:
            if code := toy.process.wait(TIMEOUT_S):
                raise SystemExit(f"the {mode} run failed with {code}:\n{toy.output.read_text()[-4000:]}")
        steps = [record for record in read_metrics(toy.run_dir) if record.get("kind") == "step"]
        if options.keep is not None:
            shutil.copytree(toy.run_dir, options.keep / f"{mode} {number}", ignore=shutil.ignore_patterns("*.sock"))
        return take(steps, options.skip)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def take(steps: list[dict[str, Any]], skip: int) -> Ran:
    """Of the steps after the first few."""
    # A step's end is that of its training: what follows it is hidden behind the next one, or is in that one's wait.
    ends = [record["elapsed_s"] - record["publish_s"] for record in steps]
    counted = steps[skip:]
    stale = [value for record in counted for value in record["staleness"]]
    return Ran(
        steps_s=list(gaps(ends, skip)),
        **{name: statistics.fmean(r[name] for r in counted) for name in ("wait_s", "train_s", "publish_s")},
        staleness=(statistics.fmean(stale), max(stale)),
    )


def make_job(folder: Path) -> None:
    """The job's folder: prompts, and the tiny model's tokenizer with a context that is long enough. Nobody computes
    with the model."""
    from relax_rt.roles.models.resolve import resolve_model

    shutil.copytree(JOB, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(resolve_model("package:tiny", Path()), folder / "model")
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}))
    lines = [json.dumps({"prompt": f"{n} + {n} =", "answer": str(2 * n)}) for n in range(4000)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def settings(mode: str, shape: Shape, pace: Pace, steps: int) -> dict[str, Any]:
    """What tells the modes apart, and the sizes."""
    found: dict[str, Any] = {
        "run.seed": shape.seed,
        "algorithm.steps": steps,
        "algorithm.max_staleness": MODES[mode],
        "algorithm.group_size": shape.group,
        "algorithm.prompts_per_step": shape.groups,
        "sampling.max_new_tokens": shape.most,
        "checkpoint.every_steps": 5,
        "roles.rollout.count": shape.engines,
        "roles.rollout.max_sequences": shape.slots,
        # One group more than is decoded at a time, so that a sequence is there when another ends.
        "roles.rollout.groups_in_flight": math.ceil(shape.slots / shape.group) + 1,
        "roles.rollout.median": shape.median,
        "roles.rollout.sigma": shape.sigma,
        "roles.rollout.most": shape.most,
        "roles.rollout.token_s": pace.token_s,
        "roles.rollout.fetch_s": pace.publish_s,
        "roles.trainer.train_token_s": pace.train_token_s,
    }
    if mode == "colocate":
        found |= {"roles.rollout.resume_s": pace.resume_s, "roles.trainer.release_s": pace.release_s}
    return found


def measured(found: dict[str, list[Ran]], mode: str) -> float:
    """Seconds a step, the median of the rounds."""
    return statistics.median(statistics.fmean(ran.steps_s) for ran in found[mode])


def rows(
    found: dict[str, list[Ran]], ideals: dict[str, float], never_idle: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The machine-readable result. Seconds are the cluster's: measured ones times the factor."""
    table = []

    def row(name: str, unit: str, better: str, ours: float, peers: dict[str, float], limit: float, goal: Any) -> None:
        holds = None if goal is None else ours >= goal
        told = {"name": name, "unit": unit, "better": better, "ours": ours, "peers": peers, "limit": limit}
        table.append({**told, "goal": goal, "holds": holds})

    for mode in MODES:
        paper = PAPER[mode.partition(",")[0]]
        ours, limit = measured(found, mode) * options.factor, ideals[mode] * options.factor
        row(f"step, {mode}", "s of the cluster", "lower", ours, {"paper": paper}, limit, None)
    ours = measured(found, OURS)
    row(f"{OURS}: share of two stages never idle", "", "higher", never_idle / ours, {}, 1.0, OF_IDEAL)
    for mode in MODES:
        goal, step = None if MODES[mode] == 0 else OF_IDEAL, measured(found, mode)
        row(f"{mode}: share of what the contract allows", "", "higher", ideals[mode] / step, {}, 1.0, goal)
        # The runtime's own time does not grow with the cluster's.
        row(f"{mode}: added by the runtime", "s a step", "lower", step - ideals[mode], {}, 0.0, None)
    peers = {"paper": PAPER["colocate"] / PAPER["asynchronous"]}
    for mode in (m for m in MODES if MODES[m]):
        name, limit = f"{mode}: colocate without any loss / this", ideals["colocate"] / never_idle
        row(name, "", "higher", ideals["colocate"] / measured(found, mode), peers, limit, OF_COLOCATE)
    return table


def show(
    found: dict[str, list[Ran]],
    ideals: dict[str, float],
    never_idle: tuple[float, float],
    shape: Shape,
    pace: Pace,
    options: argparse.Namespace,
) -> None:
    """The table for people."""
    factor, whole = options.factor, pace.scaled(1 / options.factor)
    print(f"stand-ins for GPUs sleep; all times of the cluster are {factor:g} times shorter here")
    print(
        f"{shape.groups} groups of {shape.group} on {shape.engines} engines of {shape.slots} slots, lengths log-normal "
        f"(median {shape.median}, sigma {shape.sigma:g}, at most {shape.most}); of the cluster: "
        f"{1 / whole.token_s:.0f} tokens/s a sequence, training {never_idle[1] * factor:.1f} s a step, publication "
        f"{whole.publish_s:g} s, release {whole.release_s:.1f} s, return {whole.resume_s:.1f} s"
    )
    print(f"{'':18}{'step s':>8}{'cluster s':>11}{'paper s':>9}{'contract s':>12}{'of it':>7}{'of stages':>11}", end="")
    print(f"{'added s':>9}{'waits':>8}{'trains':>8}{'held':>7}{'staleness':>12}")
    for mode, rans in found.items():
        step, best = measured(found, mode), ideals[mode]
        wait, train, held = (
            statistics.median(getattr(ran, name) for ran in rans) for name in ("wait_s", "train_s", "publish_s")
        )
        stale = max(ran.staleness for ran in rans)
        print(
            f"{mode:18}{step:>8.3f}{step * factor:>11.1f}{PAPER[mode.partition(',')[0]]:>9.1f}{best * factor:>12.1f}"
            f"{best / step:>7.1%}{max(never_idle) / step:>11.1%}{step - best:>+9.3f}"
            f"{wait:>8.3f}{train:>8.3f}{held:>7.3f}{stale[0]:>7.2f} ≤{stale[1]:>2}"
        )
    print(f"two stages never idle: generation {never_idle[0] * factor:.1f} s, training {never_idle[1] * factor:.1f} s")
    if not options.only:
        ours = measured(found, OURS)
        print(
            f"{OURS}: {max(never_idle) / ours:.1%} of stages never idle (goal {OF_IDEAL:.0%}), "
            f"{ideals['colocate'] / ours:.2f}x colocate without loss (goal {OF_COLOCATE}x), "
            f"{measured(found, 'colocate') / ours:.2f}x colocate as measured"
        )
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    sys.exit(main())
