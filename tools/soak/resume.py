"""Kill the trainer, the queue and the agent at random instants of a run, resume it each time, and make the account.

    python tools/soak/resume.py [--kills 20] [--seeds 1,2,3] [--steps 300] [--items 1000] [--keep FOLDER] [--json]
    python tools/soak/resume.py --judge FOLDER [--sabotage leave-out]

For each seed the tiny model is trained twice to the same step: undisturbed, and with SIGKILLs. Their instants are drawn
from the seed: most fall a random time after a random step, some into the recovery from the one before. A killed agent
takes all its processes along, and `up` is given again. The last steps are left in peace, so that what the kills have
cost shows.

At the end the account is made from the records of trainers and rollouts (resume_account.py): each prompt issued was
trained exactly once on the path of steps that leads to the end, dropped by a stated rule, or is pending; the queue's
account must say the same, and the checker of `relax-rt chaos` must find nothing.

Whether as much was learned is declared beforehand: equivalent, with at least 3 seeds and 500 held-out items, if the 90%
interval of the difference of held-out accuracy over the seeds lies inside ±0.08, and the negative control, the
undisturbed runs at half of their steps, is told apart; otherwise: not shown (equivalence_statistics.py).

`--keep` leaves a folder of each seed, and what lies there already is not run again, so that seeds may be run one after
the other. `--judge` makes the account of what was kept, `--sabotage` with a breach planted in its records, which has to
be found. The exit status is 0 when no account is wrong and, unless `--alone`, equivalence is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toys"))

from equivalence_statistics import MAX_SEEDS, Conclusion, Interval, Pair, Score, conclude, interval
from resume_account import SABOTAGES, Job, account
from toy_run import ToyRun

from relax_rt.chaos.evidence import Evidence, read_evidence
from relax_rt.chaos.faults import ScheduledFault
from relax_rt.chaos.injector import Injector, StepFollower
from relax_rt.chaos.verdict import run_checks, violations
from relax_rt.supervision.rundir import RESOLVED_CONFIG, read_json, read_run

JOB = Path(__file__).resolve().parent / "equivalence_job" / "roles.toml"
KINDS = ("trainer/0", "queue/0", "agent")
UNDISTURBED, KILLED = "undisturbed", "killed"
HALF = "half of the steps"
STRUCK = "struck.json"
"""What was done to a run: written when it has come to its end."""
PEACE = 30
"""Steps at the end in which nothing is killed: more than are between two checkpoints, which is what a kill undoes."""
HASTY = 0.2
"""Share of the kills that do not wait for a step: they fall into the recovery from the one before."""
LONGEST_PAUSE_S = 3.0
STARTED_S, STEP_S, RUN_S, GONE_S = 600.0, 1200.0, 7200.0, 60.0
RETRY_S = 0.05


class Instant(msgspec.Struct, frozen=True):
    """A kill: of whom, so long after this step was first recorded; step 0: after the kill before."""

    victim: str
    step: int
    pause_s: float


class Struck(msgspec.Struct, kw_only=True):
    """What was done to a run: kills by victim, `up`s, seconds, and what went wrong on the way."""

    kills: dict[str, int] = {}
    ups: int = 1
    seconds: float = 0.0
    wrong: list[str] = []


def instants(seed: int, kills: int, steps: int) -> list[Instant]:
    """Kills in the order in which they fall; each victim gets its share."""
    dice = random.Random(seed)
    victims = [KINDS[n % len(KINDS)] for n in range(kills)]
    dice.shuffle(victims)
    last = max(2, steps - PEACE)
    at = sorted(dice.randrange(1, last) for _ in range(kills))
    hasty = [n > 0 and dice.random() < HASTY for n in range(kills)]
    return [
        Instant(victim, 0 if soon else step, round(dice.uniform(0.0, LONGEST_PAUSE_S), 3))
        for victim, step, soon in zip(victims, at, hasty, strict=True)
    ]


def agent_of(run: ToyRun) -> int:
    """The agent's pid while it leads the run, else 0."""
    record = read_run(run.run_dir) or {}
    return int(record["agent"]["pid"]) if record.get("agent") and record.get("status") in ("starting", "running") else 0


def kill_agent(run: ToyRun, struck: Struck) -> None:
    """Kill it, wait until nothing of the run is left, and give `up` again."""
    os.kill(run.until("an agent", lambda: agent_of(run), STARTED_S), signal.SIGKILL)
    end = time.monotonic() + GONE_S
    while run.leftovers() and time.monotonic() < end:
        time.sleep(RETRY_S)
    if left := run.leftovers():
        struck.wrong.append(f"{GONE_S:.0f} s after the agent's death there was still {left[:5]}")
    run.process.wait(GONE_S)
    run.start()
    struck.ups += 1


def kill_slot(run: ToyRun, number: int, slot: str, seed: int) -> None:
    """Kill the process of a slot as soon as it has one."""

    def hit() -> bool:
        status = run.status()
        if status is None or not any(one.slot == slot and one.pid for one in status.slots):
            return False
        with Injector(run.run_dir, seed) as injector:
            return not injector.inject(ScheduledFault(number=number, fault="kill", slot=slot), may_retry=True).skipped

    run.until(f"a process of {slot}", hit, STARTED_S)


def harm(run: ToyRun, plan: Sequence[Instant], seed: int, struck: Struck) -> None:
    """Carry the kills out, each at its instant."""
    watch, newest = StepFollower(run.run_dir), 0
    try:
        for number, instant in enumerate(plan, 1):

            def there(step: int = instant.step) -> bool:
                nonlocal newest
                newest = max(newest, watch.newest())
                return newest >= step

            run.until(f"step {instant.step}", there, STEP_S)
            time.sleep(instant.pause_s)
            if instant.victim == "agent":
                kill_agent(run, struck)
            else:
                kill_slot(run, number, instant.victim, seed)
            struck.kills[instant.victim] = struck.kills.get(instant.victim, 0) + 1
            when = f"{instant.pause_s:.2f} s after " + (f"step {instant.step}" if instant.step else "the last one")
            print(
                f"{time.strftime('%X')} {number}/{len(plan)} killed {instant.victim} {when}",
                file=sys.stderr,
                flush=True,
            )
    finally:
        watch.close()


def carry_out(folder: Path, overrides: dict[str, Any], plan: Sequence[Instant], seed: int) -> Struck:
    """One run to its end, killed as planned; its run directory is left in `folder`."""
    folder.mkdir(parents=True)
    struck, began = Struck(), time.monotonic()
    run = ToyRun(folder, JOB, overrides)
    try:
        run.start()
        run.ready(STARTED_S)
        harm(run, plan, seed, struck)
        if code := run.process.wait(RUN_S):
            struck.wrong.append(f"the last `up` ended with {code}: {run.output.read_text()[-2000:]}")
    except SystemExit as error:
        if not isinstance(error.code, str):  # we are to end
            raise
        struck.wrong.append(error.code)
    finally:
        run.__exit__()
    struck.seconds = round(time.monotonic() - began, 1)
    (folder / STRUCK).write_bytes(msgspec.json.encode(struck))
    return struck


def job_of(run_dir: Path) -> Job:
    """What the run was to do, of its resolved config."""
    table = (read_json(run_dir / RESOLVED_CONFIG) or {})["algorithm"]
    return Job(
        steps=table["steps"],
        prompts_per_step=table["prompts_per_step"],
        group_size=table["group_size"],
        max_staleness=int(table["max_staleness"]),
    )


def score(evidence: Evidence, when: str) -> Score | None:
    """Held-out accuracy; of a trainer that took its last step again, the last word."""
    found = [record for record in evidence.evaluations if record["when"] == when]
    return Score(round(found[-1]["exact"] * found[-1]["items"]), int(found[-1]["items"])) if found else None


def judge(folder: Path, sabotage: str = "") -> dict[str, Any]:
    """The account of a seed's killed run, and its accuracy beside those of the undisturbed one, if it is there."""
    run_dir = folder / KILLED / "run"
    struck = msgspec.json.decode((folder / KILLED / STRUCK).read_bytes(), type=Struck)
    evidence, job = read_evidence(run_dir), job_of(run_dir)
    if sabotage:
        SABOTAGES[sabotage](evidence)
    found = account(evidence, job)
    wrong = [*struck.wrong, *found.wrong]
    wrong += [f"{breach.check}: {breach.what}" for breach in violations(run_checks(evidence))]
    result: dict[str, Any] = {
        **msgspec.to_builtins(struck),
        "steps": found.steps,
        "steps_redone": found.redone,
        "trainer_lives": found.falls + 1,
        "prompts_issued": found.issued,
        "prompts_trained": len(found.trained),
        "prompts_dropped": len(found.dropped),
        "prompts_pending": len(found.pending),
        "before": accuracy(score(evidence, "before")),
        "after": accuracy(score(evidence, "after")),
    }
    if (folder / UNDISTURBED / "run").exists():
        quiet = read_evidence(folder / UNDISTURBED / "run")
        ends = {KILLED: score(evidence, "after"), UNDISTURBED: score(quiet, "after"), HALF: score(quiet, "during")}
        wrong += [f"no accuracy was measured: {name}" for name, one in ends.items() if one is None]
        result |= {"after_undisturbed": accuracy(ends[UNDISTURBED]), "scores": msgspec.to_builtins(ends)}
    return {**result, "ok": not wrong, "wrong": wrong}


def compare(results: Mapping[int, dict[str, Any]]) -> tuple[dict[str, Interval | None], Conclusion]:
    """The intervals over the seeds, of the killed runs and of the control, and what they show.

    Args:
        results: of `judge`, by seed.
    """
    pairs: dict[str, list[Pair]] = {KILLED: [], HALF: []}
    for seed, result in results.items():
        ends = {name: msgspec.convert(one, Score) for name, one in result.get("scores", {}).items() if one is not None}
        for name, found in pairs.items():
            if UNDISTURBED in ends and name in ends:
                found.append(Pair(seed, ends[UNDISTURBED], ends[name]))
    spans = {name: interval(found) for name, found in pairs.items()}
    wrong = [f"seed {seed}: the account is wrong" for seed, result in results.items() if not result["ok"]]
    return spans, conclude(spans[KILLED], {HALF: spans[HALF]}, wrong, name="killed and resumed")


def accuracy(one: Score | None) -> float | None:
    """As a share, for people and JSON."""
    return None if one is None else round(one.share, 4)


def show(seed: int, result: dict[str, Any]) -> None:
    """The result of a seed, for people."""
    kills = ", ".join(f"{victim} {n}" for victim, n in sorted(result["kills"].items()))
    total = sum(result["kills"].values())
    print(f"seed {seed}: {total} kills ({kills}), {result['ups']} times `up`, {result['seconds']:.0f} s")
    print(f"{result['steps']} steps, {result['steps_redone']} further ones undone and taken again")
    ends = ", ".join(f"{result[f'prompts_{end}']} {end}" for end in ("trained", "dropped", "pending"))
    print(f"{result['prompts_issued']} prompts were issued: {ends}")
    if "after_undisturbed" in result:
        print(f"held out: {result['before']} -> {result['after']}, undisturbed {result['after_undisturbed']}")
    counts = Counter(result["wrong"])
    print("\n".join(f"WRONG: {what}" for what in counts) or "each prompt once; nothing is wrong")


def show_comparison(spans: Mapping[str, Interval | None], verdict: Conclusion) -> None:
    """What the seeds show together, for people."""
    for name, one in spans.items():
        if one is not None:
            print(f"{name} less undisturbed: {one.mean:+.3f}, 90% interval [{one.low:+.3f}, {one.high:+.3f}]")
    print(f"verdict: {verdict.verdict}" + "".join(f"\n  {reason}" for reason in verdict.reasons))


def folder_of(folder: Path, seed: int) -> Path:
    """Of a seed's runs."""
    return folder / f"seed-{seed}"


def make(options: argparse.Namespace, folder: Path, seed: int) -> None:
    """Both runs of a seed, the undisturbed one first; those that are there already are left as they are."""
    overrides = {
        "run.seed": seed,
        "algorithm.steps": options.steps,
        "evaluation.every_steps": 0,
        "evaluation.at_steps": [] if options.alone else [options.steps // 2],
        "evaluation.items": options.items,
        "evaluation.during_items": options.items,
    }
    plan = instants(seed, options.kills, options.steps)
    if not options.alone and not (folder / UNDISTURBED / STRUCK).exists():
        shutil.rmtree(folder / UNDISTURBED, ignore_errors=True)
        quiet = carry_out(folder / UNDISTURBED, overrides, [], seed)
        if quiet.wrong:
            (folder / UNDISTURBED / STRUCK).unlink()
            raise SystemExit(f"the undisturbed run of seed {seed} failed: {quiet.wrong}")
        print(f"{time.strftime('%X')} seed {seed} undisturbed: {quiet.seconds:.0f} s", file=sys.stderr, flush=True)
    if not (folder / KILLED / STRUCK).exists():
        shutil.rmtree(folder / KILLED, ignore_errors=True)
        carry_out(folder / KILLED, overrides, plan, seed)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="in each killed run")
    parser.add_argument("--seeds", default="1,2,3", help="of the runs and of the kills")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--items", type=int, default=1000, help="held out")
    parser.add_argument("--alone", action="store_true", help="without the undisturbed runs")
    parser.add_argument("--keep", type=Path, help="leave the run directories there")
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help="run nothing: judge what --keep has left there")
    parser.add_argument("--sabotage", choices=sorted(SABOTAGES), default="", help="plant a breach in the records")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    options = parser.parse_args(arguments)
    if options.steps < 2 * PEACE:
        parser.error(f"--steps: at least {2 * PEACE}; the last {PEACE} are left in peace")
    try:
        options.seeds = list(dict.fromkeys(int(seed) for seed in options.seeds.split(",")))
    except ValueError:
        parser.error(f"--seeds {options.seeds}: numbers with commas between them, as 1,2,3")
    if len(options.seeds) > MAX_SEEDS:
        parser.error(f"--seeds: at most {MAX_SEEDS}")
    if options.judge is not None:
        options.seeds = sorted(int(one.name.removeprefix("seed-")) for one in options.judge.glob("seed-*"))
        if not options.seeds:
            parser.error(f"--judge {options.judge}: there is no folder seed-* of a kept run")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; answers with the exit status."""
    options = parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = options.judge or options.keep or Path(tempfile.mkdtemp(prefix="resume-"))
    results: dict[int, dict[str, Any]] = {}
    try:
        for seed in options.seeds:
            if options.judge is None:
                make(options, folder_of(folder, seed), seed)
            results[seed] = judge(folder_of(folder, seed), options.sabotage)
            show(seed, results[seed])
    finally:
        if options.judge is None and options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    told: dict[str, Any] = {"seeds": results}
    right = all(result["ok"] for result in results.values())
    if any("scores" in result for result in results.values()):
        spans, verdict = compare(results)
        show_comparison(spans, verdict)
        told |= {"intervals": msgspec.to_builtins(spans), "verdict": msgspec.to_builtins(verdict)}
        right = right and not verdict.reasons
    if options.json:
        print(json.dumps(told))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
