"""Engines killed, stopped and hung in mid-generation and at every step of a publication, and a verdict.

    python tools/soak/engine_chaos.py --minutes 10 [--seed 1] [--json]
    python tools/soak/engine_chaos.py --minutes 1.5 --keep folder

The tiny job runs with three rollouts; callers get sequences through a router beside it. A seeded schedule goes round
through all combinations of a way (kill, stop, hang) and a moment: in mid-generation, or one of the steps of a
publication at an engine, at which it strikes itself (engine_chaos_rollout.py). What engines, callers, registry and
queue recorded is held together afterwards (engine_chaos_check.py), and the run is judged as by `relax-rt chaos`. The
exit status is 0 when no promise was broken, every combination fell and the reward rose; what a short soak has no time
for is told as not shown. ``--sabotage`` breaks something on purpose (engine_chaos_sabotage.py): then it is 0 when the
checks find out.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toys"))

import engine_chaos_check as judge
import engine_chaos_sabotage as sabotage
from engine_chaos_rollout import STEPS, WAYS
from toy_run import ToyRun

from relax_rt.chaos.evidence import read_evidence
from relax_rt.chaos.faults import ScheduledFault
from relax_rt.chaos.injector import Injector, wait_recovered
from relax_rt.chaos.verdict import run_checks, violations
from relax_rt.cluster import discovery
from relax_rt.observe.events import read_events
from relax_rt.observe.metrics import read_metrics
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.rollout.router import GenerationRequest, NotGenerated, Outcome, Router, RouterLimits
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import RelaxError

HERE = Path(__file__).resolve().parent
TINY = HERE.parents[1] / "tests/tiny_job/roles.toml"
ROLLOUTS, CALLERS, EVERY_TOKENS, LEARNING_RATE = 3, 6, 1, 3e-4
LENGTHS = (12, 24, 24, 48, 96)
START_S = 300.0
LIMITS = RouterLimits(losses=30)
"""Engines are lost here all the time, and not because of what callers want."""
MOMENTS = ("generating", *STEPS)
OVERRIDES: dict[str, Any] = {
    "algorithm.steps": 1_000_000,
    "algorithm.max_staleness": 2,
    # A step takes about a second, and versions are as far apart.
    "algorithm.prompts_per_step": 24,
    "algorithm.learning_rate": LEARNING_RATE,
    "checkpoint.every_steps": 25,
    "evaluation.items": 16,
    "sampling.max_new_tokens": 12,
    "queue.lease_s": 3,
    "queue.capacity_mib": 32,
    "publication.ack_timeout_s": 4,
    "supervision.restart": "{ max_restarts = 1000, period_s = 3600, backoff_max_s = 0.3 }",
    "events.keep_segments": 1000,
    "roles.rollout.count": ROLLOUTS,
    "roles.rollout.hang_after_s": 4,
    "roles.rollout.journal_every_tokens": EVERY_TOKENS,
    "roles.rollout.target": json.dumps(f"{HERE / 'engine_chaos_rollout.py'}:StruckRollout"),
}


class Callers:
    """Want sequences through a router all the while, and note what they get."""

    def __init__(self, router: Router, seed: int) -> None:
        self.router, self.over = router, asyncio.Event()
        self.asked: list[judge.Asked] = []
        self._seeds = itertools.count(seed << 32)

    async def one(self, number: int) -> None:
        dice = random.Random(number)
        while not self.over.is_set():
            seed, lag = next(self._seeds), dice.choice((0, 1, 1))
            wanted = GenerationRequest(
                prompt=tuple(dice.randrange(4, 20) for _ in range(6)),
                seed=seed,
                max_new_tokens=dice.choice(LENGTHS),
                timeout_s=90.0,
                lag=lag,
                session=dice.choice(("", f"session {number}")),
            )
            try:
                self._note(seed, lag, await self.router.generate(wanted))
            except NotGenerated as error:
                self._note(seed, lag, error.outcome)

    def _note(self, seed: int, lag: int, outcome: Outcome) -> None:
        spans = [(s.start, s.end, s.version, s.kv_version) for s in outcome.versions]
        self.asked.append(judge.Asked(seed, lag, outcome.kind, len(outcome.tokens), spans))


class Soak:
    """One soak in a folder of its own."""

    def __init__(self, folder: Path, minutes: float, seed: int, pause_s: float, sabotaged: str = "") -> None:
        self.folder, self.total_s, self.seed, self.pause_s = folder, minutes * 60, seed, pause_s
        self.sabotaged = sabotaged
        self.orders = folder / "orders"
        self.asked: list[judge.Asked] = []
        self.records: list[VersionRecord] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.struck: Counter[str] = Counter()

    def play(self) -> None:
        """Run, harm, end."""
        self.orders.mkdir()
        sabotage.apply(self.sabotaged)
        resolve_model("package:tiny", Path())
        env = {"ENGINE_CHAOS": str(self.orders), "ENGINE_CHAOS_SABOTAGE": self.sabotaged}
        with ToyRun(self.folder, TINY, OVERRIDES, env=env) as run:
            run.ready(START_S)
            run.until("a step", lambda: any(r["kind"] == "step" for r in read_metrics(run.run_dir)), START_S)
            asyncio.run(self._harm(run))
            if not wait_recovered(run.run_dir, 60.0):
                self.wrong.append("the run did not recover: a slot is not ready")
            code = run.end()
            # Asked to end, it drains: 130 is the exit status of that.
            if code not in (0, 130):
                self.wrong.append(f"the run ended with {code}: {run.output.read_text()[-1500:]}")
            deadline = time.monotonic() + 5
            while (left := run.leftovers()) and time.monotonic() < deadline:
                time.sleep(0.05)
            self.wrong += left

    async def _harm(self, run: ToyRun) -> None:
        async with discovery.connect(run.run_dir, name="callers") as found, Router(found, limits=LIMITS) as router:
            callers = Callers(router, self.seed)
            tasks = [asyncio.create_task(callers.one(n)) for n in range(CALLERS)]
            await asyncio.to_thread(self._strike_all, run)
            callers.over.set()
            await asyncio.gather(*tasks)
            self.asked, self.counts = callers.asked, Counter(router.core.counts)
            self.records = await found.registry.versions()

    def _strike_all(self, run: ToyRun) -> None:
        """Go round through all combinations, in an order drawn anew each round, with pauses to recover."""
        dice, ends, number = random.Random(self.seed), time.monotonic() + self.total_s, 0
        with Injector(run.run_dir, self.seed) as injector:
            while True:
                for moment, way in dice.sample(sorted(itertools.product(MOMENTS, WAYS)), len(MOMENTS) * len(WAYS)):
                    if time.monotonic() > ends:
                        return
                    if run.process.poll() is not None:
                        raise SystemExit(f"the run ended:\n{run.output.read_text()[-3000:]}")
                    number += 1
                    if moment == "generating":
                        self._in_generation(injector, number, f"rollout/{dice.randrange(ROLLOUTS)}", way)
                    else:
                        self._order(injector, dice, f"{moment} {way}", ends)
                    self._pause(injector, dice.expovariate(1 / self.pause_s))

    def _order(self, injector: Injector, dice: random.Random, order: str, ends: float) -> None:
        """To a slot that has carried out its last one: others are away, or wait for the next publication."""
        paths = [self.orders / f"rollout-{n}.order" for n in range(ROLLOUTS)]
        while not (free := [path for path in paths if not path.exists()]):
            if time.monotonic() > ends:
                return
            self._pause(injector, 0.1)
        path = dice.choice(free)
        # Whole at once: its reader may look at any moment.
        draft = path.with_suffix(".draft")
        draft.write_text(order)
        draft.rename(path)

    def _in_generation(self, injector: Injector, number: int, slot: str, way: str) -> None:
        fault = {"kill": "kill", "stop": "stop", "hang": "hang_loop"}[way]
        seconds = {"kill": 0.0, "stop": 2.0 if number % 2 else 8.0, "hang": 6.0}[way]
        outcome = injector.inject(ScheduledFault(number=number, fault=fault, slot=slot, seconds=seconds))
        if not outcome.skipped:
            self.struck[f"generating {way}"] += 1

    def _pause(self, injector: Injector, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            injector.undo(time.monotonic())
            time.sleep(0.02)

    def engines(self) -> list[judge.Incarnation]:
        """What the engines recorded; a last line that was cut by a death is left out."""
        found = []
        for path in sorted(self.orders.glob("*.jsonl")):
            slot, _, epoch = path.stem.rpartition("-")
            lines = []
            for raw in path.read_text().splitlines():
                try:
                    lines.append(json.loads(raw))
                except ValueError:
                    continue
            found.append(judge.Incarnation(slot.replace("-", "/"), int(epoch), lines))
        return found

    def report(self) -> dict[str, Any]:
        """The verdict."""
        run_dir, engines = self.folder / "run", self.engines()
        for incarnation in engines:
            for line in incarnation.of("order"):
                self.struck[f"{line['step']} {line['way']}"] += 1
        committed = judge.Committed(read_events(run_dir), self.records)
        handed, lost, figures = judge.lost(engines, EVERY_TOKENS)
        steps = judge.on_the_path(r for r in read_metrics(run_dir) if r["kind"] == "step")
        rewarded, not_rising, not_shown, thirds = judge.rising([r["reward_mean"] for r in steps])
        checks = {
            "versions": judge.versions(engines, self.asked, committed),
            "weights": judge.weights(engines, self.records),
            "routed": judge.routed(engines, self.asked, committed),
            "outcomes": judge.outcomes(self.asked, self.counts["submitted"], self.counts["tokens"]),
            "marks": (handed, lost),
            "reward": (rewarded, not_rising),
        }
        evidence = read_evidence(run_dir)
        chaos = [f"{b.check}: {b.what}" for b in violations(run_checks(evidence))]
        missing = [f"{m} {w}" for m, w in itertools.product(MOMENTS, WAYS) if not self.struck[f"{m} {w}"]]
        # A round takes longer than its pauses: orders wait for engines that are back.
        round_s = 2 * self.pause_s * len(MOMENTS) * len(WAYS)
        wrong = [*self.wrong, *(f"{name}: {w}" for name, (_, found) in checks.items() for w in found[:5]), *chaos[:10]]
        wrong += [f"{name}: nothing was looked at" for name, (looked, _) in checks.items() if not looked]
        if handed and not figures["had_due"]:
            not_shown.append("what is due when an engine dies: nothing was")
        if missing and self.total_s > 1.5 * round_s:
            wrong.append(f"never struck: {', '.join(missing)}")
        elif missing:
            not_shown.append(f"never struck, there was no time for a whole round: {', '.join(missing)}")
        return {
            "ok": not wrong,
            "broken": sorted(name for name, (_, found) in checks.items() if found),
            "minutes": round(self.total_s / 60, 2),
            "struck": dict(sorted(self.struck.items())),
            "incarnations": len(engines),
            "steps": len(steps),
            "versions": len(committed.all),
            "reward_thirds": [round(t, 3) for t in thirds],
            "looked_at": {name: looked for name, (looked, _) in checks.items()},
            "router": dict(sorted(self.counts.items())),
            "marks": figures,
            "not_shown": not_shown,
            "wrong": wrong,
        }


def show(report: dict[str, Any]) -> None:
    """For people."""
    print(f"{sum(report['struck'].values())} strikes in {report['minutes']:g} minutes: {report['struck']}")
    print(f"{report['incarnations']} incarnations, {report['steps']} steps, {report['versions']} versions")
    print(f"reward by thirds: {report['reward_thirds']}; looked at: {report['looked_at']}")
    print(f"router: {report['router']}\ntokens lost with an engine, of a member: {report['marks']}")
    for what in report["not_shown"]:
        print(f"not shown: {what}")
    for what in report["wrong"]:
        print(f"WRONG: {what}")
    print("verdict: every promise was kept" if report["ok"] else "verdict: NOT kept")


def main() -> int:
    """Entry point; answers with the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=3.0, help="mean seconds between two strikes")
    parser.add_argument("--keep", type=Path, help="empty folder for the run and the records, which are kept")
    parser.add_argument("--sabotage", choices=sorted(sabotage.EXPECTED), default="", help="break it on purpose")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="engine-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(folder.resolve(), options.minutes, options.seed, options.pause, options.sabotage)
    try:
        try:
            soak.play()
        except RelaxError as error:
            soak.wrong.append(f"the soak could not go on: {error}")
        report = soak.report()
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report, indent=1)) if options.json else show(report)
    if options.sabotage:
        found = bool(sabotage.EXPECTED[options.sabotage] & set(report["broken"]))
        told = "found" if found else "NOT FOUND"
        print(f"sabotage '{options.sabotage}' was {told} by {report['broken']}", file=sys.stderr)
        return 0 if found else 1
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
