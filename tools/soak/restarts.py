"""Restart everything, again and again, and see whether anything grows: descriptors, threads, tasks, memory, the log.

    python tools/soak/restarts.py --minutes 60 --restarts 200 [--seed 1] [--json]
    python tools/soak/restarts.py --minutes 2 --restarts 20

A run of roles without a model (producers, a consumer that trains and falls back) is killed slot by slot, registry and
queue included, by a seeded schedule. Meanwhile the agent, its keeper, the zygotes, the registry and the queue are
measured; a measure that could not be taken often enough is a failure. For each measure the slope over the process's
life is estimated (Theil-Sen, 95% interval by Sen's method; lives of the same slot are pooled after their means are
taken out). It grows if the interval lies above zero and the growth over the whole soak is more than is allowed. The
exit status is 0 when nothing grows, nothing is left, and no promise was broken.
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

from toy_run import ToyRun

from relax_rt.chaos.evidence import read_evidence
from relax_rt.chaos.faults import FAULTS, parse_roles, poisson
from relax_rt.chaos.injector import Injector
from relax_rt.chaos.verdict import run_checks, violations

MIB = 1 << 20
CONFIG = """\
[run]
name = "soak"
job = "toys"
dir = "{dir}"
[supervision.restart]
max_restarts = 100
period_s = 900.0
[queue]
capacity_mib = 16
slab_mib = 1
lease_s = 10
keep_steps = 100
[events]
segment_mib = 1
keep_segments = 3
role_log_mib = 1
[roles.idler]
[roles.maker]
count = 2
pause_s = 0.1
[roles.eater]
pause_s = 1.0
"""
LOG_LIMIT_BYTES = (3 + 1) * MIB + MIB // 2
WATCHED = ("agent", "keeper", "zygotes", "registry/0", "queue/0")
WITHOUT_TASKS = ("keeper", "zygotes")
ALLOWED = {"descriptors": 3.0, "threads": 3.0, "tasks": 3.0, "anonymous MiB": 4.0}
"""Growth over the whole soak that nobody minds."""
MIN_POINTS = 8


class Point(msgspec.Struct, frozen=True):
    """One look at one process: seconds since the beginning, and the measures."""

    who: str
    pid: int
    at: float
    values: dict[str, float]


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """How a measure of a process goes. slope, low, high: an hour, with the 95% interval. growth: over the soak."""

    who: str
    measure: str
    points: int
    median: float
    slope: float
    low: float
    high: float
    growth: float
    allowed: float
    grows: bool


def look(who: str, pid: int, began: float, counts: Path) -> Point | None:
    """Measure a process; None when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 names only
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "RssAnon" not in fields:
        return None
    values = {
        "descriptors": float(descriptors),
        "threads": float(fields["Threads"]),
        "anonymous MiB": int(fields["RssAnon"].split()[0]) / 1024,
    }
    tasks = counted(pid, fields, counts)
    return Point(who, pid, time.monotonic() - began, values | ({"tasks": tasks} if tasks is not None else {}))


def counted(pid: int, fields: dict[str, str], counts: Path) -> float | None:
    """The number of asyncio tasks that the process told since the last look; asks it for the next one."""
    # Only of a process that catches the signal: it would end any other.
    if int(fields["SigCgt"], 16) >> (signal.SIGUSR2 - 1) & 1:
        try:
            os.kill(pid, signal.SIGUSR2)
            return float((counts / str(pid)).read_text())
        except (OSError, ValueError):
            return None
    return None


def theil_sen(points: list[tuple[int, float, float]]) -> tuple[float, float, float]:
    """Median slope of all pairs within a life (life, x, y), with its 95% interval by Sen's method."""
    slopes = sorted(
        (b[2] - a[2]) / (b[1] - a[1])
        for n, a in enumerate(points)
        for b in points[n + 1 :]
        if a[0] == b[0] and b[1] > a[1]
    )
    if not slopes:
        return 0.0, 0.0, 0.0
    sizes = [sum(p[0] == life for p in points) for life in {p[0] for p in points}]
    spread = 1.96 * math.sqrt(sum(n * (n - 1) * (2 * n + 5) for n in sizes) / 18)
    count = len(slopes)
    low = slopes[max(0, int((count - spread) / 2))]
    high = slopes[min(count - 1, math.ceil((count + spread) / 2))]
    return statistics.median(slopes), low, high


def trends(points: list[Point], settle_s: float, total_s: float) -> list[Trend]:
    """Of each measure of each watched slot. The first `settle_s` of each life are left out: caches fill up."""
    found = []
    for who in WATCHED:
        mine = [p for p in points if p.who == who]
        born = {p.pid: min(q.at for q in mine if q.pid == p.pid) for p in mine}
        mine = [p for p in mine if p.at - born[p.pid] >= settle_s]
        for measure, allowed in ALLOWED.items():
            pairs = [(p.pid, p.at, p.values[measure]) for p in mine if measure in p.values]
            if len(pairs) < MIN_POINTS:
                continue
            slope, low, high = theil_sen(pairs)
            growth = slope * total_s
            found.append(
                Trend(
                    who=who,
                    measure=measure,
                    points=len(pairs),
                    median=statistics.median(p[2] for p in pairs),
                    slope=slope * 3600,
                    low=low * 3600,
                    high=high * 3600,
                    growth=growth,
                    allowed=allowed,
                    grows=low > 0 and growth > allowed,
                )
            )
    return found


def missing(found: list[Trend]) -> list[str]:
    """Measures that nothing can be said of: what was not measured has not been shown to stay."""
    have = {(trend.who, trend.measure) for trend in found}
    wanted = [(who, m) for who in WATCHED for m in ALLOWED if not (m == "tasks" and who in WITHOUT_TASKS)]
    return [f"{who}: {m} could not be measured {MIN_POINTS} times" for who, m in wanted if (who, m) not in have]


class Soak:
    """One soak in a folder of its own."""

    def __init__(self, folder: Path, minutes: float, restarts: int, seed: int) -> None:
        self.folder, self.total_s, self.restarts, self.seed = folder, minutes * 60, restarts, seed
        self.points: list[Point] = []
        self.killed: dict[str, int] = {}
        self.log_bytes = 0
        self.wrong: list[str] = []

    def play(self) -> None:
        """Run, kill, measure, end."""
        counts = self.folder / "counts"
        counts.mkdir()
        with ToyRun(self.folder, CONFIG, env={"RELAX_COUNT_TASKS": str(counts)}) as run:
            run.ready()
            with Injector(run.run_dir, self.seed) as injector:
                self._harm(run, injector, counts)
            run.ready()
            code = run.end()
            self.wrong += [f"the run ended with {code}"] if code else []
            # Its end is written before the last process is gone.
            deadline = time.monotonic() + 5
            while (left := run.leftovers()) and time.monotonic() < deadline:
                time.sleep(0.05)
            self.wrong += left
            found = violations(run_checks(read_evidence(run.run_dir)))
            self.wrong += [f"{breach.check}: {breach.what}" for breach in found]

    def _harm(self, run: ToyRun, injector: Injector, counts: Path) -> None:
        status = run.ready()
        slots = parse_roles("", [slot.slot for slot in status.slots])
        strikes = poisson(self.seed, self.total_s / self.restarts, self.total_s * 10, [FAULTS["kill"]], slots)
        every_s = max(0.5, self.total_s / 400)
        began = said = time.monotonic()
        looked = 0.0
        done = 0
        while (now := time.monotonic()) - began < self.total_s or done < self.restarts:
            if strikes[0].at_s <= now - began and done < self.restarts:
                outcome = injector.inject(strikes.pop(0))
                if not outcome.skipped:
                    done += 1
                    self.killed[outcome.fault.slot] = self.killed.get(outcome.fault.slot, 0) + 1
            if now - looked >= every_s:
                looked = now
                self._look(run, began, counts)
            if now - said >= 60:
                said = now
                print(f"{now - began:6.0f} s, {done} restarts", file=sys.stderr, flush=True)
            if run.process.poll() is not None:
                raise SystemExit(f"the run ended:\n{run.output.read_text()[-3000:]}")
            time.sleep(0.02)

    def _look(self, run: ToyRun, began: float, counts: Path) -> None:
        status = run.status()
        if status is None:
            return
        pids = {slot.slot: slot.pid for slot in status.slots if slot.state == "ready"} | {"agent": status.agent_pid}
        watched = [(who, pids[who]) for who in WATCHED if pids.get(who)] + [("keeper", run.process.pid)]
        # All that ever were: those that are gone are not found.
        watched += [("zygotes", e["pid"]) for e in run.poll() if e["kind"] == "zygote_ready"]
        for who, pid in watched:
            if point := look(who, pid, began, counts):
                self.points.append(point)
        files = (run.run_dir / "events").glob("*.jsonl")
        self.log_bytes = max(self.log_bytes, sum(path.stat().st_size for path in files))

    def report(self) -> dict[str, Any]:
        """The verdict."""
        settle_s = min(30.0, self.total_s / self.restarts)
        found = trends(self.points, settle_s, self.total_s)
        wrong = [
            *self.wrong,
            *missing(found),
            *(f"{t.who}: {t.measure} grow by {t.growth:.1f}" for t in found if t.grows),
        ]
        if self.log_bytes > LOG_LIMIT_BYTES:
            wrong.append(f"the event log had {self.log_bytes} bytes, its bound is {LOG_LIMIT_BYTES}")
        return {
            "ok": not wrong,
            "minutes": self.total_s / 60,
            "restarts": sum(self.killed.values()),
            "by_slot": dict(sorted(self.killed.items())),
            "trends": msgspec.to_builtins(found),
            "event_log_bytes_max": self.log_bytes,
            "event_log_bytes_bound": LOG_LIMIT_BYTES,
            "wrong": wrong,
        }


def show(report: dict[str, Any]) -> None:
    """For people."""
    print(f"{report['restarts']} restarts in {report['minutes']:g} minutes: {report['by_slot']}")
    print(f"{'':26}{'median':>10}{'an hour':>12}{'95% interval':>26}{'here':>10}{'allowed':>9}")
    for t in report["trends"]:
        interval = f"[{t['low']:.2f}, {t['high']:.2f}]"
        cells = f"{t['median']:>10.1f}{t['slope']:>12.2f}{interval:>26}{t['growth']:>10.2f}{t['allowed']:>9g}"
        print(f"{t['who']:12}{t['measure']:14}{cells}{'  GROWS' if t['grows'] else ''}")
    print(f"event log at most {report['event_log_bytes_max']:,} bytes, bound {report['event_log_bytes_bound']:,}")
    for what in report["wrong"]:
        print(f"WRONG: {what}")
    print("verdict: nothing grows, nothing is left" if report["ok"] else "verdict: NOT clean")


def main() -> int:
    """Entry point; answers with the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="empty folder for the run and the points, which are kept")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = options.keep or Path(tempfile.mkdtemp(prefix="restarts-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(folder.resolve(), options.minutes, options.restarts, options.seed)
    try:
        soak.play()
        report = soak.report()
        if options.keep is not None:
            (folder / "points.json").write_bytes(msgspec.json.encode(soak.points))
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report, indent=1)) if options.json else show(report)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
