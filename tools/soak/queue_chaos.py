"""Kill everything around a TransferQueue for some minutes, and see whether it keeps its word.

    python tools/soak/queue_chaos.py --seconds 300 --mean-s 3 --seed 1 [--json]

A broker, three producers, two reward consumers and a trainer that writes checkpoints and falls back, each a process of
its own, are killed with SIGKILL at random moments and started again; they are also stopped until their lease is over,
and producers and consumers go on after a newer one took their place. Every process keeps its own records, and a
checker holds them against the queue's journal. The exit status is 0 when nothing is wrong.

``--sabotage journal|fence|pins`` switches off a safeguard of the broker: then it is 0 when the checker finds out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import queue_chaos_check as checking
from queue_chaos_fleet import BROKER, CONSUMERS, PRODUCERS, TICK_S, TRAINER, Fleet, Watcher, memory_of, slabs_in
from queue_chaos_journal import Story, Teller
from queue_chaos_records import Step, now, read_life, read_lives, record_file
from queue_chaos_sabotage import EXPECTED
from queue_chaos_worker import LIMITS, POLICY

from relax_rt.transport.base.journal import Journal

SHOWN = 12
IDLE_S = 6.0
"""Without a step for so long nothing more can be trained on; longer than the wait for stragglers."""
RARER = {"kill": 1, "stop": 5, "overtake": 7}
"""How much rarer than kills the faults are."""


class Settings(msgspec.Struct, frozen=True):
    """Of a run.

    Attributes:
        seconds: how long there are faults. mean_s: between kills. seed: of all choices.
        sabotage: a safeguard to switch off. stall_s: longest time without a step that is allowed; 0: any.
        last_steps: to be made after the last fault. patience_s: for each part of the beginning and the end.
    """

    seconds: float = 300.0
    mean_s: float = 3.0
    seed: int = 1
    sabotage: str = ""
    stall_s: float = 60.0
    last_steps: int = 5
    patience_s: float = 120.0


class Report(msgspec.Struct):
    """What came of it: numbers for the table, and what is wrong."""

    numbers: dict[str, int | float | str]
    violations: list[checking.Violation]


class Run:
    """One run in a folder of its own."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        for name in ("records", "logs", "checkpoints", "archive"):
            (folder / name).mkdir()
        self.fleet = Fleet(folder, settings.seed, settings.sabotage)
        self.watcher = Watcher(folder, self.fleet)
        self.account: dict[str, int] = {}
        self.slabs: set[str] = set()
        self.wrong: list[str] = []
        self.begin = self.end = 0.0

    async def play(self) -> None:
        """Start, do harm, let it settle, end."""
        watching: asyncio.Task[None] | None = None
        try:
            for slot in (BROKER, TRAINER, *PRODUCERS, *CONSUMERS):
                self.fleet.start(slot)
            await self._until("the first step", lambda: self._steps_now() > 0)
            watching = asyncio.create_task(self.watcher.watch())
            self.begin = now()
            await self._faults()
            self.end = now()
            await self._settle()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self.fleet.end((BROKER,), self.settings.patience_s)
        finally:
            if watching is not None:
                watching.cancel()
            memory = memory_of(self.folder)
            await self.watcher.close()
            self.fleet.kill_all()
            if memory.exists():
                self.wrong.append(f"{memory} is left over")
                shutil.rmtree(memory, ignore_errors=True)
        self.wrong += self.fleet.left_over()

    async def _faults(self) -> None:
        dice, mean_s = random.Random(self.settings.seed), self.settings.mean_s
        due = {what: now() + dice.expovariate(1 / (mean_s * each)) for what, each in RARER.items()}
        said = self.begin
        while now() < self.begin + self.settings.seconds:
            for what in [what for what, at in due.items() if at <= now()]:
                due[what] = now() + dice.expovariate(1 / (mean_s * RARER[what]))
                self._harm(what, dice)
            if now() >= said + 10:
                said = now()
                _say(f"{said - self.begin:4.0f} s: {self.watcher.now}; {dict(sorted(self.fleet.faults.items()))}")
            await self._tick()

    def _harm(self, what: str, dice: random.Random) -> None:
        slot = dice.choice([BROKER, TRAINER, dice.choice(PRODUCERS), dice.choice(CONSUMERS)])
        if what == "kill":
            if slot == BROKER:
                self.watcher.broker_killed()
            self.fleet.kill(slot)
        elif what == "stop":
            self.fleet.stop(slot, LIMITS.lease_s * (1.2 + dice.random()))
        else:
            self.fleet.overtake(dice.choice(PRODUCERS + CONSUMERS), dice)

    async def _settle(self) -> None:
        """No more faults: some steps more, then everybody is asked to stop, producers first."""
        _say("the faults are over")
        patience_s = self.settings.patience_s
        await self._until("overtaken processes end", lambda: not self.fleet.overtaken)
        steps = self._steps_now()
        await self._until("the last steps", lambda: self._steps_now() >= steps + self.settings.last_steps)
        await self.fleet.end(PRODUCERS, patience_s)
        # What is there can still be trained on; what lacks a member never can.
        await self._until("the rest is trained on", self._is_idle)
        await self.fleet.end((TRAINER, *CONSUMERS), patience_s)
        self.account, wrong = await self.watcher.settled(patience_s / 4)
        self.wrong += wrong
        self.slabs = slabs_in(self.folder)

    def _is_idle(self) -> bool:
        last = max((one.at for one in self._trainer_now() if isinstance(one, Step)), default=self.end)
        return now() > last + IDLE_S

    def _trainer_now(self) -> list[object]:
        trainer = self.fleet.running[TRAINER]
        path = record_file(self.folder / "records", trainer.slot, trainer.number)
        return list(read_life(path).records) if path.exists() else []

    def _steps_now(self) -> int:
        """Of the trainer that runs now."""
        return sum(isinstance(one, Step) for one in self._trainer_now())

    async def _until(self, what: str, done: Callable[[], bool]) -> None:
        deadline = now() + self.settings.patience_s
        while not done():
            if now() > deadline:
                self.wrong.append(f"{what}: not within {self.settings.patience_s:.0f} s; {self.watcher.now}")
                return
            for _ in range(4):
                await self._tick()

    async def _tick(self) -> None:
        self.fleet.look()
        self.watcher.link_journal()
        await asyncio.sleep(TICK_S)

    def evidence(self) -> checking.Evidence:
        """What the checker looks at."""
        story = self._story()
        wrong = [*self.wrong]
        if not story.error:
            wrong += [f"file {name} holds nothing and is still there" for name in sorted(self.slabs - story.live_slabs)]
        return checking.Evidence(
            lives=read_lives(self.folder / "records"),
            story=story,
            account=self.account,
            max_staleness=POLICY.max_staleness,
            group_size=POLICY.group_size,
            groups_per_step=POLICY.prompts_per_step,
            crashes=self.fleet.crashes,
            leftovers=wrong,
            begin=self.begin,
            end=self.end,
            stall_s=self.settings.stall_s,
        )

    def _story(self) -> Story:
        """From the archived journal, and from the one that the broker left: they must tell the same."""
        archive = Journal(self.watcher.archive)
        whole, teller = archive.recover(), Teller()
        archive.close()
        story = teller.tell(whole.records)
        if not story.error:
            left = Journal(self.folder / "queue" / "journal")
            story.audit += teller.compare(left.recover())
            left.close()
        return story

    def numbers(self, evidence: checking.Evidence) -> dict[str, int | float | str]:
        """For the table."""
        watcher, outages = self.watcher, sorted(self.watcher.outages)
        faults = {what.replace(" ", "_"): n for what, n in sorted(self.fleet.faults.items())}
        return {
            "seconds": round(self.end - self.begin, 1),
            "seed": self.settings.seed,
            **faults,
            **checking.numbers(evidence),
            **checking.steps_between(evidence, self.fleet.killed_at),
            "broker_outages": len(outages),
            "broker_outage_median_s": round(statistics.median(outages), 3) if outages else 0.0,
            "broker_outage_max_s": round(outages[-1], 3) if outages else 0.0,
            "journal_records": evidence.story.records,
            "journal_bytes_max": watcher.journal_bytes,
            "memory_bytes_max": watcher.shm_bytes,
            **{f"rss_bytes_max_{role}": rss for role, rss in sorted(watcher.rss.items())},
            **{f"seen_waiting_for {reason}": n for reason, n in sorted(watcher.waits.items())},
        }


def run(settings: Settings, folder: Path) -> Report:
    """One run in an empty folder; its processes and its shared memory are gone afterwards."""
    one = Run(folder, settings)
    asyncio.run(one.play())
    evidence = one.evidence()
    return Report(one.numbers(evidence), checking.check(evidence))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(report: Report) -> None:
    for name, value in report.numbers.items():
        print(f"{name.replace('_', ' '):44} {value:>14,}" if not isinstance(value, str) else f"{name:44} {value:>14}")
    by_check: dict[str, list[str]] = {}
    for violation in report.violations:
        by_check.setdefault(violation.check, []).append(violation.what)
    for check in checking.CHECKS:
        found = by_check.get(check, [])
        print(f"check {check:38} {'ok' if not found else f'{len(found)} VIOLATIONS':>14}")
        for what in found[:SHOWN]:
            print(f"    {what}")
        if len(found) > SHOWN:
            print(f"    and {len(found) - SHOWN} more")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="how long there are faults (default 300)")
    parser.add_argument("--mean-s", type=float, default=3.0, help="mean time between kills (default 3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stall-s", type=float, default=60.0, help="longest time without a step that is allowed")
    parser.add_argument("--sabotage", choices=sorted(EXPECTED), default="", help="switch off a safeguard")
    parser.add_argument("--keep", type=Path, help="empty folder for the records and logs, which are kept")
    parser.add_argument("--json", action="store_true", help="numbers and violations as JSON")
    return parser.parse_args()


def main() -> int:
    """Entry point; answers with the exit status."""
    options = _options()
    settings = Settings(
        seconds=options.seconds,
        mean_s=options.mean_s,
        seed=options.seed,
        sabotage=options.sabotage,
        stall_s=options.stall_s,
        # What a missing safeguard breaks may never get right.
        patience_s=20.0 if options.sabotage else 120.0,
    )
    # As for an interrupt: nothing is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        report = run(settings, options.keep.absolute())
    else:
        with tempfile.TemporaryDirectory(prefix="queue-chaos-") as folder:
            report = run(settings, Path(folder))
    if options.json:
        print(json.dumps(msgspec.to_builtins(report), indent=1))
    else:
        _show(report)
    fired = {violation.check for violation in report.violations}
    if options.sabotage:
        found = bool(fired & EXPECTED[options.sabotage])
        _say(f"sabotage '{options.sabotage}' was {'found' if found else 'NOT FOUND'} by {sorted(fired)}")
        return 0 if found else 1
    return 1 if fired else 0


if __name__ == "__main__":
    sys.exit(main())
