"""Is what is learned under chaos the same as what is learned undisturbed? Declared beforehand, with negative controls.

    python tools/soak/equivalence.py [--seeds 1,2,3,4] [--mean-s 5] [--steps 600] [--side-by-side 2] [--json]

For each seed the tiny model is trained three times to the same step: undisturbed; with a process killed every 5 s on
average, every kind of role alike, registry and queue included; and, as a negative control, undisturbed with rewards
drawn by lot. The second control is the undisturbed run at half of its steps: learning of which half was lost. Runs of
the same seed are paired (same prompts in the same order, same held-out items, same seeds of their samples).

equivalent: at least 3 seeds and 500 held-out items, the 90% interval of the difference under chaos lies inside ±0.08,
each control is told apart, every run reached its target with no promise broken, and every kind of role was killed at
least twice in each disturbed run. Else: not shown, with the reasons. See equivalence_statistics.py for the interval.
The exit status is 0 for equivalent. With the standard settings it takes about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toys"))

from equivalence_statistics import MARGIN, MAX_SEEDS, Conclusion, Interval, Pair, Score, conclude, interval
from toy_run import ToyRun

from relax_rt.chaos.evidence import Evidence, read_evidence
from relax_rt.chaos.faults import FAULTS, ScheduledFault, parse_roles, poisson
from relax_rt.chaos.injector import Injector, run_schedule
from relax_rt.chaos.timeline import ettr
from relax_rt.chaos.verdict import count_by_role, run_checks, violations

JOB = Path(__file__).resolve().parent / "equivalence_job" / "roles.toml"
UNDISTURBED, CHAOS, BY_LOT = "undisturbed", "chaos", "rewards by lot"
ARMS = (UNDISTURBED, CHAOS, BY_LOT)
HALF = "half of the steps"
KILLS_OF_EACH = 2
BLOCK = 18
"""Strikes of a block; within each, every kind of role gets its two."""
READY_S, RUN_S = 600.0, 3600.0


class Ran(msgspec.Struct, kw_only=True):
    """One run and what it has learned.

    Attributes:
        before, half, after: held-out accuracy at the beginning, in the middle and at the end; None: not measured.
        half_step: the step at which the middle was measured. redone: steps thrown away by falls back.
        kills: by kind of role. problems: why it is not what it was to be.
    """

    seed: int
    arm: str
    before: Score | None = None
    half: Score | None = None
    half_step: int = 0
    after: Score | None = None
    steps: int = 0
    redone: int = 0
    wall_s: float = 0.0
    kills: dict[str, int] = {}
    problems: list[str] = []
    step_records: list[dict[str, Any]] = []


class Runs:
    """All runs of the comparison, some side by side.

    Args:
        folder: for the run directories. overrides: of the job, for all arms.
    """

    def __init__(self, folder: Path, overrides: dict[str, Any], mean_s: float) -> None:
        self._folder, self._overrides, self._mean_s = folder, overrides, mean_s
        self._living: set[ToyRun] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def make(self, seeds: Sequence[int], side_by_side: int) -> list[Ran]:
        """Carry all of them out, and end them all if this is interrupted."""
        todo = list(itertools.product(seeds, ARMS))
        with ThreadPoolExecutor(side_by_side) as pool:
            try:
                return list(pool.map(lambda one: self._one(*one), todo))
            finally:
                self._stop()

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            living = list(self._living)
        for run in living:
            run.__exit__()

    def _one(self, seed: int, arm: str) -> Ran:
        ran = Ran(seed=seed, arm=arm)
        folder = self._folder / f"{seed}-{arm.replace(' ', '-')}"
        folder.mkdir(parents=True)
        run = ToyRun(folder, JOB, self._overrides | overrides_of(seed, arm))
        with self._lock:
            if self._stopped:
                return ran
            self._living.add(run)
        try:
            with run:
                self._follow(run, ran)
            self._judge(run, ran)
        except (Exception, SystemExit) as error:  # noqa: BLE001 one run that fails must not hide the others
            ran.problems.append(str(error) or repr(error))
        finally:
            with self._lock:
                self._living.discard(run)
            shutil.rmtree(run.run_dir / "checkpoints", ignore_errors=True)
        print(line(ran), file=sys.stderr, flush=True)
        return ran

    def _follow(self, run: ToyRun, ran: Ran) -> None:
        status = run.ready(READY_S)
        if ran.arm == CHAOS:
            strikes = schedule(ran.seed, self._mean_s, [slot.slot for slot in status.slots])
            with Injector(run.run_dir, ran.seed) as injector:
                run_schedule(run.run_dir, injector, list(strikes), recovery_s=0.0, defer=True)
        if code := run.process.wait(RUN_S):
            ran.problems.append(f"`up` ended with {code}: {run.output.read_text()[-1000:]}")

    def _judge(self, run: ToyRun, ran: Ran) -> None:
        evidence = read_evidence(run.run_dir)
        take(ran, evidence)
        ran.problems += [f"{breach.check}: {breach.what}" for breach in violations(run_checks(evidence))]


def overrides_of(seed: int, arm: str) -> dict[str, Any]:
    """What tells the runs apart."""
    found: dict[str, Any] = {"run.seed": seed}
    if arm == BY_LOT:
        found["reward.function"] = json.dumps("reward.py:by_lot")
    return found


def schedule(seed: int, mean_s: float, slots: Sequence[str]) -> Iterator[ScheduledFault]:
    """Kills for as long as a run may take, in blocks within which every kind of role gets its share."""
    roles, begin_s, number = parse_roles("", slots), 0.0, 0
    block_s = max(BLOCK, 3 * len(roles)) * mean_s
    for block in itertools.count():
        if begin_s > RUN_S:
            return
        for strike in poisson(seed * 1000 + block, mean_s, block_s, [FAULTS["kill"]], roles):
            number += 1
            yield replace(strike, number=number, at_s=round(begin_s + strike.at_s, 3))
        begin_s += block_s


def take(ran: Ran, evidence: Evidence) -> None:
    """What a run's records say."""
    ran.steps = evidence.last_step
    ran.step_records = evidence.steps
    ran.redone = len(evidence.steps) - len({int(record["step"]) for record in evidence.steps})
    ran.kills = {role: counts.get("kill", 0) for role, counts in count_by_role(evidence).items()}
    times = [float(record["m"]) for record in evidence.steps]
    ran.wall_s = max(times) - min(times) if times else 0.0
    target = evidence.target or 0
    for record in evidence.evaluations:
        score, step = Score(round(record["exact"] * record["items"]), int(record["items"])), int(record["step"])
        if record["when"] == "before":
            ran.before = score
        elif record["when"] == "after" and step == target:
            # A trainer that died behind its last step may have taken it again: the last word counts.
            ran.after = score
        elif record["when"] == "during" and ran.half is None:
            ran.half, ran.half_step = score, step
    if not evidence.reached or ran.after is None:
        ran.problems.append(f"it ended as {evidence.status!r} at step {ran.steps} of {target}")
    if ran.arm == CHAOS:
        seldom = [f"{role} {count}" for role, count in ran.kills.items() if count < KILLS_OF_EACH]
        if seldom or not ran.kills:
            ran.problems.append(f"not every kind of role was killed twice: {', '.join(seldom) or 'no kills'}")
    elif any(ran.kills.values()):
        ran.problems.append(f"it was to be undisturbed: {ran.kills}")


def compare(ran: Sequence[Ran]) -> dict[str, Interval | None]:
    """The interval of each arm, and of the middle of the undisturbed runs, against their ends."""
    after = {(one.seed, one.arm): one.after for one in ran}
    pairs: dict[str, list[Pair]] = {CHAOS: [], BY_LOT: [], HALF: []}
    for one in ran:
        base = after.get((one.seed, UNDISTURBED))
        other = one.half if one.arm == UNDISTURBED else one.after
        if base is not None and other is not None:
            pairs[HALF if one.arm == UNDISTURBED else one.arm].append(Pair(one.seed, base, other))
    return {name: interval(found) for name, found in pairs.items()}


def line(one: Ran) -> str:
    """A run, for people."""
    shares = [f"{'-' if s is None else format(s.share, '.3f'):>8}" for s in (one.before, one.half, one.after)]
    kills = "/".join(str(count) for count in one.kills.values()) if any(one.kills.values()) else "-"
    told = f"{one.seed:>4}  {one.arm:16}{one.steps:>6}{''.join(shares)}{one.redone:>8}{one.wall_s:>8.0f}  {kills}"
    return told + "".join(f"\n      PROBLEM: {what}" for what in one.problems)


def compared(one: Interval) -> str:
    """An interval, for people."""
    bounds = f"[{one.low:+.3f}, {one.high:+.3f}]"
    is_it = f"inside ±{MARGIN}" if one.inside else "apart" if one.apart else "open"
    return (
        f"{one.seeds:>6}{one.items:>7}{one.mean:>+8.3f}{bounds:>18}{one.seeds_se:>10.4f}{one.items_se:>8.4f}  {is_it}"
    )


def show(ran: Sequence[Ran], found: dict[str, Interval | None], conclusion: Conclusion) -> None:
    """The tables and the verdict."""
    kinds = next((list(one.kills) for one in ran if one.arm == CHAOS), [])
    print(f"seed  arm              steps  before    half   after  redone  wall s  kills of {'/'.join(kinds)}")
    for one in ran:
        print(line(one))
    columns = f"{'seeds':>6}{'items':>7}{'mean':>8}{'90% interval':>18}{'se seeds':>10}{'items':>8}"
    print(f"\n{'against undisturbed':20}{columns}")
    for name, against in found.items():
        print(f"{name:20}" + (compared(against) if against is not None else "  too few runs"))
    for seed in sorted({one.seed for one in ran}):
        quiet, harmed = (next((r for r in ran if (r.seed, r.arm) == (seed, a)), None) for a in (UNDISTURBED, CHAOS))
        if quiet is not None and harmed is not None:
            ratio = ettr(harmed.step_records, quiet.step_records, []).value
            print(f"ETTR of seed {seed}: {'-' if ratio is None else format(ratio, '.1%')}")
    print(f"\nverdict: {conclusion.verdict}" + "".join(f"\n  {reason}" for reason in conclusion.reasons))


def main() -> int:
    """Entry point; answers with the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seeds", default="1,2,3,4", help="comma-separated")
    parser.add_argument("--mean-s", type=float, default=5.0, help="mean time between two kills")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--items", type=int, default=1000, help="held out")
    parser.add_argument("--side-by-side", type=int, default=2, help="runs at a time")
    parser.add_argument("--keep", type=Path, help="leave the run directories there")
    parser.add_argument("--json", action="store_true", help="print everything as JSON on the last line")
    options = parser.parse_args()
    seeds = sorted({int(word) for word in options.seeds.split(",")})
    if not 0 < len(seeds) <= MAX_SEEDS:
        parser.error(f"1 to {MAX_SEEDS} seeds")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    overrides = {
        "algorithm.steps": options.steps,
        "evaluation.every_steps": max(1, options.steps // 2),
        "evaluation.items": options.items,
        "evaluation.during_items": options.items,
    }
    folder = options.keep or Path(tempfile.mkdtemp(prefix="equivalence-"))
    began = time.monotonic()
    try:
        ran = Runs(folder, overrides, options.mean_s).make(seeds, options.side_by_side)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    found = compare(ran)
    problems = [f"seed {one.seed}, {one.arm}: {what}" for one in ran for what in one.problems]
    conclusion = conclude(found[CHAOS], {name: found[name] for name in (BY_LOT, HALF)}, problems)
    show(ran, found, conclusion)
    if options.json:
        rows = [{k: v for k, v in msgspec.to_builtins(one).items() if k != "step_records"} for one in ran]
        told = {"verdict": conclusion.verdict, "reasons": conclusion.reasons, "margin": MARGIN}
        told |= {"intervals": msgspec.to_builtins(found), "runs": rows, "seconds": round(time.monotonic() - began, 1)}
        print(json.dumps(told))
    return 0 if conclusion.verdict == "equivalent" else 1


if __name__ == "__main__":
    sys.exit(main())
