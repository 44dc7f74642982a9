"""Do on-policy, near-on-policy and asynchronous training learn the same? Declared beforehand, with a negative control.

    python tools/bench/convergence.py FOLDER [--seeds 1,2,3] [--steps 800] [--items 1000] [--plot docs/convergence.png]

The tiny model learns to add, with max_staleness 0, 1 and 4; and, as a negative control, with samples up to 32 updates
old and no correction for it (importance ratio and clipping left out, a trainer slow enough that the queue is full).
Runs of a seed are paired: same prompts in the same order, same held-out items, same seeds of their samples. The
learning rate goes down to 0 over the run, so that arms are compared where they have settled and not on their way.

equivalent: at least 3 seeds and 500 held-out items, for 1 and for 4 the 90% interval of the difference to max_staleness
0 in held-out accuracy lies inside ±0.08, the control is told apart, and every run reached its target. Else: not shown,
with the reasons. The interval is that of tools/soak/equivalence_statistics.py. The exit status is 0 for equivalent.

Each finished run is kept in FOLDER as one file; what is there already is not run again, so that this can be ended at
any time and taken up later, or be made in pieces (--at-most 1). Files of other settings are refused. A run takes two to
eight minutes on two cores. Draws reward by step and by time, mean over the seeds
with their range, and the ages of the samples that were trained on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "soak"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toys"))

from convergence_plot import Curve, draw
from equivalence_statistics import MARGIN, MAX_SEEDS, Conclusion, Interval, Pair, Score, conclude, interval
from toy_run import ToyRun

from relax_rt.chaos.injector import StepFollower
from relax_rt.observe.metrics import read_metrics
from relax_rt.supervision.control import find_run

HERE = Path(__file__).resolve().parent
JOB = HERE.parent / "soak" / "equivalence_job" / "roles.toml"
ON_POLICY, CONTROL = "max_staleness 0", "32, uncorrected"
ARMS: dict[str, dict[str, Any]] = {
    ON_POLICY: {"algorithm.max_staleness": 0},
    "max_staleness 1": {"algorithm.max_staleness": 1},
    "max_staleness 4": {"algorithm.max_staleness": 4},
    CONTROL: {
        "algorithm.max_staleness": 32,
        "roles.trainer.target": json.dumps(f"{HERE / 'convergence_roles.py'}:UncorrectedTrainer"),
        # Its engines are as far ahead as they may be.
        "roles.rollout.groups_in_flight": 32,
    },
}
COMPARED = ("max_staleness 1", "max_staleness 4")
RUN_S = 7200.0
TOLD_EVERY_S = 30.0


class Ran(msgspec.Struct, kw_only=True):
    """One run and what it has learned.

    Attributes:
        settings: what it ran with, beside the job's file.
        before, half, after: held-out accuracy, at half of the steps in between; None: not measured.
        rewards, seconds: of each step, mean reward and the time since the trainer began.
        ages: samples by staleness when they were trained on, updates.
        problems: why it is not what it was to be.
    """

    seed: int
    arm: str
    settings: dict[str, Any]
    before: Score | None = None
    half: Score | None = None
    after: Score | None = None
    rewards: list[float] = []
    seconds: list[float] = []
    ages: dict[str, int] = {}
    problems: list[str] = []


def settings_of(seed: int, arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a run is given beside the job's file."""
    return {
        "run.seed": seed,
        "algorithm.steps": options.steps,
        "algorithm.learning_rate_schedule": "linear",
        "evaluation.every_steps": 0,
        "evaluation.items": options.items,
        # It takes a step's worth of room for each that may be waiting.
        "queue.capacity_mib": 64,
        **ARMS[arm],
    }


def place(folder: Path, seed: int, arm: str) -> Path:
    """The file of a finished run."""
    return folder / f"{seed}-{arm.replace(', ', '-').replace(' ', '-')}.json"


def known(folder: Path, seed: int, arm: str, settings: dict[str, Any]) -> Ran | None:
    """A run that was made before.

    Raises:
        SystemExit: its file is damaged or of other settings.
    """
    path = place(folder, seed, arm)
    if not path.exists():
        return None
    try:
        ran = msgspec.json.decode(path.read_bytes(), type=Ran)
    except msgspec.MsgspecError as error:
        raise SystemExit(f"{path} is no finished run: {error}; remove it to run it again") from None
    keys = {*ran.settings, *settings} - {"roles.trainer.target"}
    if other := sorted(key for key in keys if ran.settings.get(key) != settings.get(key)):
        told = "; ".join(f"{key} was {ran.settings.get(key)}, is {settings.get(key)}" for key in other)
        raise SystemExit(f"{path} was made with other settings ({told}); take another folder, or remove it")
    return ran


def carry_out(seed: int, arm: str, settings: dict[str, Any], job: Path = JOB) -> Ran:
    """Run it to its end; one that fails has that as its problem."""
    ran = Ran(seed=seed, arm=arm, settings=settings)
    folder = Path(tempfile.mkdtemp(prefix="relax-bench-"))
    run = ToyRun(folder, job, settings)
    try:
        with run:
            if code := wait(run, f"seed {seed}, {arm}"):
                ran.problems.append(f"`up` ended with {code}: {run.output.read_text()[-1000:]}")
        take(ran, list(read_metrics(run.run_dir)), str(find_run(run.run_dir).record.get("status", "")))
    except SystemExit as error:
        if not isinstance(error.code, str):  # we are to end
            raise
        ran.problems.append(error.code)
    except Exception as error:  # noqa: BLE001 one run that fails must not hide the others
        ran.problems.append(str(error) or repr(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ran


def wait(run: ToyRun, name: str) -> int:
    """The exit code of a run, once it has ended; meanwhile where it stands is told now and then."""
    watch, end = StepFollower(run.run_dir), time.monotonic() + RUN_S
    told = time.monotonic()
    try:
        while run.process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
            step = watch.newest()
            if time.monotonic() - told > TOLD_EVERY_S:
                told = time.monotonic()
                print(f"{time.strftime('%X')} {name}: step {step}", file=sys.stderr, flush=True)
        return run.process.wait(0)
    finally:
        watch.close()


def take(ran: Ran, records: Sequence[dict[str, Any]], status: str) -> None:
    """What a run's records say."""
    ages: Counter[int] = Counter()
    for record in records:
        if record.get("kind") == "step":
            ran.rewards.append(round(float(record["reward_mean"]), 4))
            ran.seconds.append(round(float(record["elapsed_s"]), 2))
            ages.update(int(age) for age in record["staleness"])
        elif record.get("kind") == "evaluation" and record["when"] in ("before", "after"):
            score = Score(round(record["exact"] * record["items"]), int(record["items"]))
            if record["when"] == "before":
                ran.before = score
            else:
                ran.after = score
    ran.ages = {str(age): ages[age] for age in sorted(ages)}
    steps, target = len(ran.rewards), ran.settings["algorithm.steps"]
    if status != "finished" or steps != target or ran.after is None:
        ran.problems.append(f"it ended as {status!r} with {steps} of {target} steps")
    over = [age for age in ages if age > ran.settings["algorithm.max_staleness"]]
    if over:
        ran.problems.append(f"samples of staleness {max(over)} were trained on")


def make(folder: Path, seeds: Sequence[int], options: argparse.Namespace) -> list[Ran]:
    """All runs, seed by seed."""
    todo = [(seed, arm, settings_of(seed, arm, options)) for seed, arm in itertools.product(seeds, ARMS)]
    return carry_all(folder, todo, carry_out, options.at_most)


def carry_all(
    folder: Path,
    todo: Sequence[tuple[int, str, dict[str, Any]]],
    carry: Callable[[int, str, dict[str, Any]], Ran],
    at_most: int | None,
) -> list[Ran]:
    """Runs by seed, arm and settings, with a line for each: those of before, and at most so many new ones."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Ran] = []
    spent: list[float] = []
    for number, (seed, arm, settings) in enumerate(todo, 1):
        ran, began = known(folder, seed, arm, settings), time.monotonic()
        if ran is None:
            if at_most is not None and len(spent) >= at_most:
                continue
            ran = carry(seed, arm, settings)
            spent.append(time.monotonic() - began)
            if not ran.problems:
                path = place(folder, seed, arm)
                path.with_suffix(".new").write_bytes(msgspec.json.encode(ran))
                path.with_suffix(".new").rename(path)
        left = f", about {sum(spent) / len(spent) * (len(todo) - number) / 60:.0f} min left" if spent else ""
        print(f"{time.strftime('%X')} {number}/{len(todo)} {line(ran)}{left}", file=sys.stderr, flush=True)
        found.append(ran)
    return found


def compare(found: Sequence[Ran]) -> dict[str, Interval | None]:
    """The interval of each arm against max_staleness 0."""
    after = {(one.seed, one.arm): one.after for one in found}
    pairs: dict[str, list[Pair]] = {arm: [] for arm in ARMS if arm != ON_POLICY}
    for arm, own in pairs.items():
        for seed in sorted({one.seed for one in found}):
            base, other = after.get((seed, ON_POLICY)), after.get((seed, arm))
            if base is not None and other is not None:
                own.append(Pair(seed, base, other))
    return {arm: interval(own) for arm, own in pairs.items()}


def judge(found: Sequence[Ran], intervals: dict[str, Interval | None]) -> Conclusion:
    """Equivalent only if each of the two is, and the control is told apart."""
    problems = [f"seed {one.seed}, {one.arm}: {what}" for one in found for what in one.problems]
    control = {CONTROL: intervals[CONTROL]}
    single = [conclude(intervals[arm], control, name=arm) for arm in COMPARED]
    # The control's reasons stand in both.
    reasons = list(dict.fromkeys([*problems, *itertools.chain.from_iterable(one.reasons for one in single)]))
    return Conclusion("not shown" if reasons else "equivalent", reasons)


def line(one: Ran) -> str:
    """A run, for people."""
    shares = [f"{'-' if s is None else format(s.share, '.3f'):>8}" for s in (one.before, one.after)]
    samples = sum(one.ages.values())
    mean = sum(int(age) * count for age, count in one.ages.items()) / max(samples, 1)
    seconds = one.seconds[-1] if one.seconds else 0.0
    told = f"{one.seed:>4}  {one.arm:16}{len(one.rewards):>6}{''.join(shares)}{mean:>10.2f}{seconds:>8.0f}"
    return told + "".join(f"\n      PROBLEM: {what}" for what in one.problems)


def show(found: Sequence[Ran], intervals: dict[str, Interval | None], conclusion: Conclusion) -> None:
    """The tables and the verdict."""
    print(f"{'seed':>4}  {'arm':16}{'steps':>6}{'before':>8}{'after':>8}{'mean age':>10}{'s':>8}")
    for one in found:
        print(line(one))
    print("\nages of the samples trained on, updates: share of samples")
    for arm in ARMS:
        ages = ages_of(found, arm)
        total = sum(ages.values())
        print(f"{arm:18}" + "  ".join(f"{age}: {count / total:.1%}" for age, count in sorted(ages.items())))
    columns = f"{'seeds':>6}{'items':>7}{'mean':>8}{'90% interval':>18}{'se seeds':>10}{'items':>8}"
    print(f"\n{'against ' + ON_POLICY:24}{columns}")
    for arm, one in intervals.items():
        print(f"{arm:24}" + (told(one) if one is not None else "  too few runs"))
    print(f"\nverdict: {conclusion.verdict}" + "".join(f"\n  {reason}" for reason in conclusion.reasons))


def told(one: Interval) -> str:
    """An interval, for people."""
    bounds = f"[{one.low:+.3f}, {one.high:+.3f}]"
    is_it = f"inside ±{MARGIN}" if one.inside else "apart" if one.apart else "open"
    return (
        f"{one.seeds:>6}{one.items:>7}{one.mean:>+8.3f}{bounds:>18}{one.seeds_se:>10.4f}{one.items_se:>8.4f}  {is_it}"
    )


def ages_of(found: Sequence[Ran], arm: str) -> Counter[int]:
    """Samples by staleness, of all seeds."""
    return sum((Counter({int(a): n for a, n in one.ages.items()}) for one in found if one.arm == arm), Counter())


def plot(found: Sequence[Ran], path: Path) -> None:
    """Reward by step and by time, and the ages."""
    curves = [
        Curve(arm, [(one.seconds, one.rewards) for one in found if one.arm == arm and one.rewards], ages_of(found, arm))
        for arm in ARMS
    ]
    draw([curve for curve in curves if curve.runs], path)


def main() -> int:
    """Entry point; answers with the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folder", type=Path, help="finished runs, one file each")
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--items", type=int, default=1000, help="held out")
    parser.add_argument(
        "--at-most", type=int, metavar="N", help="carry N further runs out now, and judge what is there"
    )
    parser.add_argument("--plot", type=Path, help="write the picture there (default: into the folder)")
    parser.add_argument(
        "--quick", action="store_true", help="2 seeds of 20 steps: shows that it works, and nothing else"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON on the last line")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.items = "1,2", 20, 64
    seeds = sorted({int(word) for word in options.seeds.split(",")})
    if not 0 < len(seeds) <= MAX_SEEDS:
        parser.error(f"1 to {MAX_SEEDS} seeds")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found = make(options.folder, seeds, options)
    intervals = compare(found)
    conclusion = judge(found, intervals)
    show(found, intervals, conclusion)
    plot(found, options.plot or options.folder / "convergence.png")
    if options.json:
        runs = [{k: v for k, v in msgspec.to_builtins(one).items() if k not in ("rewards", "seconds")} for one in found]
        result = {"verdict": conclusion.verdict, "reasons": conclusion.reasons, "margin": MARGIN}
        print(json.dumps({**result, "intervals": msgspec.to_builtins(intervals), "runs": runs}))
    return 0 if conclusion.verdict == "equivalent" else 1


if __name__ == "__main__":
    sys.exit(main())
