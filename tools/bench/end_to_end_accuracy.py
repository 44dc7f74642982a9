"""Is as much learned from as many samples? The system against one plain process, over seeds, with a negative control.

    python tools/bench/end_to_end.py --accuracy FOLDER [--seeds 1,2,3] [--max-staleness 0,1] [--late] [--at-most N]

For each seed the addition job runs as a system of processes, once for each value of --max-staleness, and as one plain
process (plain_grpo.py), for as many steps and so as many samples: same prompts in the same order, same held-out items.
The learning rate goes down to 0 over the run, so that all are compared where they have settled and not on their way.
The negative control is the plain process at half of its steps: learning of which half was lost.

equivalent: at least 3 seeds and 500 held-out items, for each value the 90% interval of the difference in held-out
accuracy lies inside ±0.08, the control is told apart, and each run was trained on all its samples. Else: not shown,
with the reasons. The interval is that of tools/soak/equivalence_statistics.py. The exit status is 0 for equivalent.

Samples of the plain process are of the weights that they train, those of the system up to max_staleness updates older.
--late has the plain process train on samples one update old as well, which shows what that alone costs, and is not
judged.

Each finished run is kept in FOLDER as one file and not made again, so that this can be ended at any time and taken up
later, or be made in pieces (--at-most 1). A plain run takes some 13 minutes of two quiet cores, or 16 to 22 of one:
with --threads 1 it leaves a core to another of these, for other seeds of the same FOLDER. The system takes 4 to 6.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import convergence
import msgspec
from convergence import MARGIN, MAX_SEEDS, Conclusion, Interval, Pair, Ran, Score, carry_all, conclude, interval
from end_to_end_runs import CONFIG, run_plain

OURS = "max_staleness "
"""What the name of an arm of the system begins with."""
PLAIN, LATE, HALF = "plain", "plain, one update late", "plain, half of the steps"
AGES = "0,1"
"""Values of max_staleness that are compared, if nothing is said."""
SOURCE = "plain_grpo.py"
"""Its digest is kept as one of a plain run's settings: a run of another plain_grpo.py is none of these. What it
imports is not looked at."""
THREADS = 2
"""Of the plain process, if nothing is said: the faster number on two cores. What is learned does not hang on it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is said on the command line of end_to_end.py."""
    about = parser.add_argument_group("accuracy from as many samples, over several seeds")
    about.add_argument("--accuracy", type=Path, metavar="FOLDER", help="compare that alone; finished runs lie there")
    about.add_argument("--seeds", default="1,2,3", help="comma-separated")
    about.add_argument("--steps", type=int, default=40, help="of each run")
    about.add_argument("--items", type=int, default=512, help="held out")
    about.add_argument("--dtype", choices=("float32", "bfloat16"), help="of both sides; default: the job's")
    about.add_argument("--late", action="store_true", help="show a plain process with samples one update old, too")
    about.add_argument("--threads", type=int, default=THREADS, choices=(1, 2), help="of the plain process")
    about.add_argument("--at-most", type=int, metavar="N", help="carry N further runs out now, and judge what is there")


def refused(options: argparse.Namespace) -> str:
    """Why these options are none; empty: they are."""
    try:
        count = len(seeds_of(options))
    except ValueError as error:
        return f"--seeds {options.seeds}: {error}"
    try:
        ages = ages_of(options)
    except ValueError as error:
        return f"--max-staleness {options.max_staleness}: {error}"
    if min(ages) < 0:
        return f"--max-staleness {options.max_staleness}: updates, 0 or more"
    if not 0 < count <= MAX_SEEDS:
        return f"--seeds {options.seeds}: 1 to {MAX_SEEDS} of them"
    if options.steps < 2 or options.steps % 2:
        return f"--steps {options.steps}: an even number, as the control is half of them"
    return "--quick has no seeds to compare: leave one of the two out" if options.quick else ""


def seeds_of(options: argparse.Namespace) -> list[int]:
    """Each once."""
    return sorted({int(word) for word in options.seeds.split(",")})


def ages_of(options: argparse.Namespace) -> list[int]:
    """Values of max_staleness that the system runs with."""
    return sorted({int(word) for word in (options.max_staleness or AGES).split(",")})


def arms_of(options: argparse.Namespace) -> list[str]:
    """What is run for each seed."""
    return [*(f"{OURS}{age}" for age in ages_of(options)), PLAIN, *([LATE] if options.late else [])]


def settings_of(seed: int, arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a run is given beside the job's file."""
    dtypes = {f"roles.{role}.dtype": options.dtype for role in ("trainer", "rollout", "evaluator")}
    source = (Path(__file__).parent / SOURCE).read_bytes()
    return {
        **(dtypes if options.dtype else {}),
        **({} if arm.startswith(OURS) else {SOURCE: hashlib.sha256(source).hexdigest()}),
        "run.seed": seed,
        "algorithm.steps": options.steps,
        "algorithm.learning_rate_schedule": "linear",
        # What is trained on is held against it.
        "algorithm.max_staleness": int(arm.removeprefix(OURS)) if arm.startswith(OURS) else int(arm == LATE),
        "evaluation.every_steps": 0,
        "evaluation.items": options.items,
    }


def carry_out(seed: int, arm: str, settings: dict[str, Any], threads: int = THREADS) -> Ran:
    """One run to its end; one that fails has that as its problem."""
    if arm.startswith(OURS):
        return convergence.carry_out(seed, arm, settings, CONFIG)
    ran, steps = Ran(seed=seed, arm=arm, settings=settings), settings["algorithm.steps"]
    try:
        sets = [f"{key}={value}" for key, value in settings.items() if key != SOURCE]
        records = run_plain(threads, steps, steps // 2, 2.0, settings["evaluation.items"], sets, late=arm == LATE)
    except SystemExit as error:
        if not isinstance(error.code, str):  # we are to end
            raise
        ran.problems.append(error.code)
    except subprocess.TimeoutExpired as error:
        ran.problems.append(str(error))
    else:
        take_plain(ran, records)
    return ran


def take_plain(ran: Ran, records: Sequence[dict[str, Any]]) -> None:
    """What the plain process says of itself."""
    steps, ages = ran.settings["algorithm.steps"], Counter[str]()
    for record in records:
        if record["kind"] == "step":
            ran.rewards.append(round(float(record["reward_mean"]), 4))
            ran.seconds.append(round(float(record["elapsed_s"]), 2))
            # The first step has nothing but fresh ones.
            ages[str(int(ran.arm == LATE and record["step"] > 1))] += int(record["samples"])
        elif record["kind"] == "evaluation":
            score = Score(round(record["exact"] * record["items"]), int(record["items"]))
            if record["step"] == steps:
                ran.after = score
            elif record["step"] == steps // 2:
                ran.half = score
    ran.ages = dict(ages)
    if len(ran.rewards) != steps or ran.after is None or ran.half is None:
        ran.problems.append(f"it ended after {len(ran.rewards)} of {steps} steps, or was not evaluated")


def samples_of(ran: Ran) -> int:
    """Trained on."""
    return sum(ran.ages.values())


def compare(found: Sequence[Ran]) -> tuple[dict[str, Interval | None], Conclusion]:
    """The intervals against the plain process, and what may be concluded of the arms of the system."""
    by = {(one.seed, one.arm): one for one in found}
    ours = sorted({one.arm for one in found if one.arm.startswith(OURS)})
    problems = [f"seed {one.seed}, {one.arm}: {what}" for one in found for what in one.problems]
    pairs: dict[str, list[Pair]] = {arm: [] for arm in [*ours, *({LATE} & {one.arm for one in found}), HALF]}
    for seed in sorted({one.seed for one in found}):
        plain = by.get((seed, PLAIN))
        if plain is None or plain.after is None:
            continue
        if plain.half is not None:
            pairs[HALF].append(Pair(seed, plain.after, plain.half))
        for arm in pairs:
            other = by.get((seed, arm))
            if other is None or other.after is None:
                continue
            pairs[arm].append(Pair(seed, plain.after, other.after))
            if samples_of(other) != samples_of(plain):
                counts = f"{samples_of(other)} samples, the plain process {samples_of(plain)}"
                problems.append(f"seed {seed}, {arm}: {counts}")
    intervals = {name: interval(own) for name, own in pairs.items()}
    return intervals, judge(intervals, ours, problems)


def judge(intervals: dict[str, Interval | None], ours: Sequence[str], problems: Sequence[str]) -> Conclusion:
    """Equivalent only if each arm of the system is."""
    control = {HALF: intervals[HALF]}
    reasons = [why for arm in ours for why in conclude(intervals[arm], control, name=arm).reasons]
    none = [] if ours else ["no run of the system"]
    # The control's reasons stand in each.
    reasons = list(dict.fromkeys([*none, *problems, *reasons]))
    return Conclusion("not shown" if reasons else "equivalent", reasons)


def main(options: argparse.Namespace) -> int:
    """Make what is not there yet, and judge; answers with the exit status."""
    arms = itertools.product(seeds_of(options), arms_of(options))
    todo = [(seed, arm, settings_of(seed, arm, options)) for seed, arm in arms]
    run = functools.partial(carry_out, threads=options.threads)
    found = carry_all(options.accuracy, todo, run, options.at_most)
    intervals, conclusion = compare(found)
    show(found, intervals, conclusion)
    if options.json:
        runs = [{k: v for k, v in msgspec.to_builtins(one).items() if k not in ("rewards", "seconds")} for one in found]
        result = {"verdict": conclusion.verdict, "reasons": conclusion.reasons, "margin": MARGIN}
        print(json.dumps({**result, "intervals": msgspec.to_builtins(intervals), "runs": runs}))
    sys.stdout.flush()
    return 0 if conclusion.verdict == "equivalent" else 1


def show(found: Sequence[Ran], intervals: dict[str, Interval | None], conclusion: Conclusion) -> None:
    """The tables and the verdict."""
    print(f"{'seed':>4}  {'':24}{'steps':>6}{'samples':>9}{'before':>8}{'half':>8}{'after':>8}{'s':>8}")
    for one in found:
        shares = (f"{'-' if s is None else format(s.share, '.3f'):>8}" for s in (one.before, one.half, one.after))
        seconds = one.seconds[-1] if one.seconds else 0.0
        print(f"{one.seed:>4}  {one.arm:24}{len(one.rewards):>6}{samples_of(one):>9}{''.join(shares)}{seconds:>8.0f}")
    columns = f"{'seeds':>6}{'items':>7}{'mean':>8}{'90% interval':>18}{'se seeds':>10}{'items':>8}"
    print(f"\n{'against the plain process':26}{columns}")
    for name, one in intervals.items():
        print(f"{name:26}" + (convergence.told(one) if one is not None else "  too few runs"))
    print(f"\nverdict: {conclusion.verdict}" + "".join(f"\n  {reason}" for reason in conclusion.reasons))
