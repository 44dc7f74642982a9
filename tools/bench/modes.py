"""Colocate, on-policy and asynchronous side by side, at the pace of a GPU cluster, on a machine that has no GPU.

    python tools/bench/modes.py [--quick] [--json] [--factor 50] [--steps 40] [--rounds 2] [--generation-s 128.6]

Whole runs, with the real supervisor, registry, queue, reward, publication and checkpoints. ENGINES AND TRAINER ARE
STAND-INS: they sleep for as long as GPUs would compute, `factor` times shorter. What the runtime itself takes is not
made shorter: it weighs `factor` times more here than there.

- colocate: `mode = "colocate"`, one device in turns: generate, release the engines' memory, train, publish, take the
  memory back. Who has the device is agreed on by the runtime's own code; a run without a turn for each step is refused.
- on-policy: max_staleness 0, engines and trainer on devices of their own; a step's samples are of its weights.
- asynchronous: max_staleness 1 and 4: generation and training at the same time.

The pace is such that colocate and on-policy take what the paper says, if nothing is lost (arXiv 2604.11554: 225.9 and
201.0 s a step). These two do not say how the 201.0 s divide, and the asynchronous 128.6 s are read in two ways, in the
same round: as the generation of a batch alone, with its tail (`tail`), and as a stage that is never idle (`stage`), so
that an ideal asynchronous step takes just as long. Lengths are log-normal, of a sample's own, the same in every mode.
See docs/guides/modes.md for what is concluded from it and what is not.

The ideal pipeline is computed from the same lengths and times, twice: as two stages that are never idle, which no way
of running can beat; and as what the staleness contract allows when nothing else takes any time (modes_times.Pipeline).
The goal over colocate is judged where two such stages can reach it: as `stage` they are at most 1.757 times as fast.

A whole run takes about 17 minutes: in each of 2 rounds colocate 1.8, on-policy 1.6, asynchronous at 1 1.7, at 4 1.3 and
as `stage` 1.9, the start of each run included. --quick takes about 3.
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
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toys"))

from modes_times import PAPER, Pace, Pipeline, Shape, gaps, most_over_colocate, readings, stages
from toy_run import ToyRun

from relax_rt.observe.metrics import read_metrics

HERE = Path(__file__).resolve().parent
JOB = HERE / "modes_job"
TIMEOUT_S = 1800.0
MANY = 4
OURS = f"asynchronous, {MANY}"
OURS_STAGE = f"{OURS}, stage"
OF_IDEAL, OF_COLOCATE = 0.95, 1.76
CONTEXT = 1 << 15


class Mode(NamedTuple):
    """A way to run. `reading`: of the paper's 128.6 s; see modes_times.readings."""

    max_staleness: int
    word: str = "asynchronous"
    reading: str = "tail"


MODES = {
    "colocate": Mode(0, "colocate"),
    "on-policy": Mode(0),
    "asynchronous, 1": Mode(1),
    OURS: Mode(MANY),
    OURS_STAGE: Mode(MANY, reading="stage"),
}


class Case(msgspec.Struct, frozen=True):
    """What a mode is run at, and what the best pipelines would take, seconds of this machine.

    Attributes:
        allowed_s: a step, by the contract. colocate_s: the same of colocate.
        stages_s: generation and training, never idle.
        most: as fast as the paper's colocate can two such stages be, of mean batches.
    """

    shape: Shape
    pace: Pace
    allowed_s: float
    colocate_s: float
    stages_s: tuple[float, float]
    most: float

    @property
    def never_idle_s(self) -> float:
        """The longer stage."""
        return max(self.stages_s)

    @property
    def goal(self) -> float | None:
        """Over colocate; None where no pipeline could reach it."""
        return OF_COLOCATE if self.most >= OF_COLOCATE else None


class Ran(msgspec.Struct, frozen=True):
    """What a run's step records say, seconds of this machine.

    Attributes:
        steps_s: of each step after the first few. wait_s, train_s, publish_s: means, by the trainer's own records; in
            colocate the engines' release is part of train_s, the publication is all of publish_s.
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
    parser.add_argument("--steps", type=int, default=40, help="of asynchronous runs; the others take half of them")
    parser.add_argument("--skip", type=int, default=4, help="first steps left out: loading, an empty pipeline")
    parser.add_argument("--rounds", type=int, default=2, help="the median counts")
    parser.add_argument(
        "--generation-s", type=float, default=PAPER["asynchronous"], help="of a batch alone, read as `tail`"
    )
    parser.add_argument("--sigma", type=float, default=0.7, help="of the logarithm of lengths")
    parser.add_argument(
        "--only", action="append", choices=MODES, help="this mode alone, without a verdict; may be given again"
    )
    parser.add_argument("--keep", type=Path, help="leave the run directories there")
    options = parser.parse_args()
    # So that the run is ended as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.quick:
        options.factor, options.steps, options.skip, options.rounds = 60.0, 12, 3, 1
    try:
        cases = {mode: case(mode, options) for mode in MODES}
    except ValueError as error:
        parser.error(f"{error}: lower --generation-s or --sigma")
    found: dict[str, list[Ran]] = {mode: [] for mode in options.only or MODES}
    for number in range(options.rounds):
        for mode in found:
            ran = run(mode, cases[mode], options, number)
            found[mode].append(ran)
            step_s, load = statistics.fmean(ran.steps_s), os.getloadavg()[0]
            print(f"{time.strftime('%X')} {mode}: {step_s:.3f} s a step, load {load:.1f}", file=sys.stderr, flush=True)
    show(found, cases, options)
    if options.only:
        return 0
    result = rows(found, cases, options.factor)
    if options.json:
        print(json.dumps(result))
    return 0 if all(one["holds"] for one in result if one["goal"] is not None) else 1


def case(mode: str, options: argparse.Namespace) -> Case:
    """Sizes, times and ideals.

    Raises:
        ValueError: the paper's times leave none for training.
    """
    way = MODES[mode]
    shape, whole = readings(options.sigma, options.generation_s)[way.reading]
    pace = whole.scaled(options.factor)

    def ideal_s(name: str) -> float:
        one = MODES[name]
        pipeline = Pipeline(shape, pace, one.max_staleness, colocate=one.word == "colocate")
        return statistics.fmean(gaps(pipeline.steps(steps_of(name, options.steps)), options.skip))

    return Case(
        shape=shape,
        pace=pace,
        allowed_s=ideal_s(mode),
        colocate_s=ideal_s("colocate"),
        stages_s=stages(shape, pace, range(options.skip, options.steps)),
        most=most_over_colocate(shape, whole),
    )


def steps_of(mode: str, steps: int) -> int:
    """Steps of a run. Asynchronous ones have more: what is under way at the first and the last step counted differs."""
    return steps if MODES[mode].max_staleness else steps // 2


def run(mode: str, what: Case, options: argparse.Namespace, number: int) -> Ran:
    """One run of a mode.

    Raises:
        SystemExit: it failed, with its last lines; or it was not run in that mode.
    """
    folder, steps = Path(tempfile.mkdtemp(prefix="relax-bench-")), steps_of(mode, options.steps)
    job = folder / "modes_job"
    toy = ToyRun(folder, job / "roles.toml", settings(mode, what.shape, what.pace, steps))
    try:
        make_job(job)
        for name in ("modes_roles.py", "modes_times.py"):
            shutil.copyfile(HERE / name, folder / name)
        with toy:
            if code := toy.process.wait(TIMEOUT_S):
                raise SystemExit(f"the {mode} run failed with {code}:\n{toy.output.read_text()[-4000:]}")
            turns = Counter(str(event["kind"]) for event in toy.poll())
        if wrong := not_in_turns(turns, what.shape.engines, steps if MODES[mode].word == "colocate" else 0):
            raise SystemExit(f"the {mode} run was not what it was to be: {wrong}")
        records = [record for record in read_metrics(toy.run_dir) if record.get("kind") == "step"]
        if options.keep is not None:
            shutil.copytree(toy.run_dir, options.keep / f"{mode} {number}", ignore=shutil.ignore_patterns("*.sock"))
        return take(records, options.skip)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def not_in_turns(kinds: Mapping[str, int], engines: int, turns: int) -> str:
    """Why these events are not of a run in which the trainer had the device so many times; empty: they are."""
    # An engine that starts late has nothing to give back in the first turn.
    least = {"device_acquired": turns, "engine_memory": max(0, turns - 1) * engines, "engine_not_released": 0}
    most = least | {"engine_memory": turns * engines}
    seen = {kind: kinds.get(kind, 0) for kind in least}
    return ", ".join(
        f"{n} {kind}, not {least[kind]} to {most[kind]}"
        for kind, n in seen.items()
        if not least[kind] <= n <= most[kind]
    )


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
        "algorithm.mode": MODES[mode].word,
        "algorithm.max_staleness": MODES[mode].max_staleness,
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
    if MODES[mode].word == "colocate":
        found |= {"roles.rollout.release_s": pace.release_s, "roles.rollout.resume_s": pace.resume_s}
    return found


def measured(found: dict[str, list[Ran]], mode: str) -> float:
    """Seconds a step, the median of the rounds."""
    return statistics.median(statistics.fmean(ran.steps_s) for ran in found[mode])


def rows(found: dict[str, list[Ran]], cases: Mapping[str, Case], factor: float) -> list[dict[str, Any]]:
    """The machine-readable result. Seconds are the cluster's: measured ones times the factor."""
    table = []

    def row(name: str, unit: str, better: str, ours: float, peers: dict[str, float], limit: float, goal: Any) -> None:
        holds = None if goal is None else ours >= goal
        told = {"name": name, "unit": unit, "better": better, "ours": ours, "peers": peers, "limit": limit}
        table.append({**told, "goal": goal, "holds": holds})

    for mode in found:
        step, allowed = measured(found, mode) * factor, cases[mode].allowed_s * factor
        row(f"step, {mode}", "s of the cluster", "lower", step, {"paper": PAPER[mode.partition(",")[0]]}, allowed, None)
    for mode in (OURS, OURS_STAGE):
        share = cases[mode].never_idle_s / measured(found, mode)
        row(f"{mode}: share of two stages never idle", "", "higher", share, {}, 1.0, OF_IDEAL)
    for mode in found:
        step, allowed = measured(found, mode), cases[mode].allowed_s
        goal = OF_IDEAL if MODES[mode].max_staleness else None
        row(f"{mode}: share of what the contract allows", "", "higher", allowed / step, {}, 1.0, goal)
        # The runtime's own time does not grow with the cluster's.
        row(f"{mode}: added by the runtime", "s a step", "lower", step - allowed, {}, 0.0, None)
    peers = {"paper": PAPER["colocate"] / PAPER["asynchronous"]}
    for mode in (m for m in found if MODES[m].max_staleness):
        one = cases[mode]
        name, limit = f"{mode}: colocate without any loss / this", one.colocate_s / one.never_idle_s
        row(name, "", "higher", one.colocate_s / measured(found, mode), peers, limit, one.goal)
    return table


def show(found: dict[str, list[Ran]], cases: Mapping[str, Case], options: argparse.Namespace) -> None:
    """The table for people."""
    factor = options.factor
    print(f"stand-ins for GPUs sleep; all times of the cluster are {factor:g} times shorter here")
    for mode in (OURS, OURS_STAGE):
        print(described(MODES[mode].reading, cases[mode], factor))
    print(f"{'':23}{'step s':>8}{'cluster s':>11}{'paper s':>9}{'contract s':>12}{'of it':>7}{'of stages':>11}", end="")
    print(f"{'added s':>9}{'waits':>8}{'trains':>8}{'held':>7}{'staleness':>12}")
    for mode, rans in found.items():
        step, one = measured(found, mode), cases[mode]
        wait, train, held = (
            statistics.median(getattr(ran, name) for ran in rans) for name in ("wait_s", "train_s", "publish_s")
        )
        stale = max(ran.staleness for ran in rans)
        print(
            f"{mode:23}{step:>8.3f}{step * factor:>11.1f}{PAPER[mode.partition(',')[0]]:>9.1f}"
            f"{one.allowed_s * factor:>12.1f}{one.allowed_s / step:>7.1%}{one.never_idle_s / step:>11.1%}"
            f"{step - one.allowed_s:>+9.3f}{wait:>8.3f}{train:>8.3f}{held:>7.3f}{stale[0]:>7.2f} ≤{stale[1]:>2}"
        )
    if not options.only:
        for mode in (OURS, OURS_STAGE):
            print(verdict(mode, measured(found, mode), measured(found, "colocate"), cases[mode]))
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def described(reading: str, one: Case, factor: float) -> str:
    """What is replayed, in seconds of the cluster."""
    shape, whole = one.shape, one.pace.scaled(1 / factor)
    generation, training = (seconds * factor for seconds in one.stages_s)
    return (
        f"{reading}: {shape.groups} groups of {shape.group} on {shape.engines} engines of {shape.slots} slots, lengths "
        f"log-normal (median {shape.median}, sigma {shape.sigma:g}, at most {shape.most}); of the cluster: "
        f"{1 / whole.token_s:.0f} tokens/s a sequence, publication {whole.publish_s:g} s, "
        f"release {whole.release_s:.1f} s, return {whole.resume_s:.1f} s; two stages never idle: "
        f"generation {generation:.1f} s, training {training:.1f} s, at most {one.most:.3f}x colocate"
    )


def verdict(mode: str, ours: float, colocate: float, one: Case) -> str:
    """A mode against its goals, for people. `colocate`: as measured, of the reading `tail`."""
    goal = "out of reach here, not judged" if one.goal is None else f"goal {one.goal}x"
    return (
        f"{mode}: {one.never_idle_s / ours:.1%} of stages never idle (goal {OF_IDEAL:.0%}), "
        f"{one.colocate_s / ours:.2f}x colocate without loss ({goal}), {colocate / ours:.2f}x colocate as measured"
    )


if __name__ == "__main__":
    sys.exit(main())
