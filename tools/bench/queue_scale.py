"""A million samples through the TransferQueue: thousands of producer sessions, four consumer tasks, one broker.

    python tools/bench/queue_scale.py [--samples N] [--sessions N] [--quick] [--json]

A session is an asyncio task that puts a sample, awaits the acknowledgement, and puts the next. Each of the four tasks
sees every sample; a consumer takes batches, checks id and payload of each sample, and says that it is done. Checked at
the end, for each task and by id: every acknowledged sample was finished, and none twice. Exits with 1 if that does not
hold; speed never fails it.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from queue_broker import broker, journal_bytes, stop

HERE = Path(__file__).resolve().parent
TASKS = ("reward", "reference", "advantage", "train")
FIELDS = ("id", "data")
WARM_UP = 10_000
LOOK_S = 0.1
TELL_S = 5.0
STUCK_S = 60.0
"""Without any progress for this long the run is given up, and what is missing counts as lost."""
RATE_KEPT = 0.8
MEMORY_FACTOR = 1.25
"""Memory counts as bounded if its peak in the second half is at most this many times that in the first."""


@dataclass(frozen=True)
class Look:
    """What was seen at one instant: totals since the start."""

    at_s: float
    put: int
    finished: int
    cpu_s: float
    rss: int
    journal: int
    foreign_s: float
    """CPU seconds that processes other than ours used: on a machine that is not quiet the rate says little."""


@dataclass(frozen=True)
class Window:
    """Between two totals of finished samples."""

    first: int
    last: int
    rate: float
    cpu_us: float
    rss: int


class Course:
    """All looks at a run, in order."""

    def __init__(self) -> None:
        self.looks: list[Look] = []

    def foreign_cores(self, first: int, last: int) -> float:
        """Cores that other processes used meanwhile."""
        looks = [look for look in self.looks if first <= look.finished <= last] or self.looks[-1:]
        return (looks[-1].foreign_s - looks[0].foreign_s) / max(looks[-1].at_s - looks[0].at_s, 1e-9)

    def at(self, finished: int) -> tuple[float, float]:
        """Time and CPU seconds when so many samples were finished by every task, interpolated between looks."""
        i = bisect.bisect_left(self.looks, finished, key=lambda look: look.finished)
        after = self.looks[min(i, len(self.looks) - 1)]
        before = self.looks[max(i - 1, 0)]
        part = (finished - before.finished) / max(after.finished - before.finished, 1)
        return before.at_s + part * (after.at_s - before.at_s), before.cpu_s + part * (after.cpu_s - before.cpu_s)

    def window(self, first: int, last: int) -> Window:
        (start_s, start_cpu), (end_s, end_cpu) = self.at(first), self.at(last)
        samples, seconds = max(last - first, 1), max(end_s - start_s, 1e-9)
        rss = max((look.rss for look in self.looks if first <= look.finished <= last), default=self.looks[-1].rss)
        return Window(first, last, samples / seconds, (end_cpu - start_cpu) / samples * 1e6, rss)

    def finished_at(self, put: int) -> int:
        """Samples that every task had finished when so many were put."""
        return next((look.finished for look in self.looks if look.put >= put), self.looks[-1].finished)

    def peak(self, first: int, last: int) -> int:
        """Largest resident memory of the broker while between so many samples were finished."""
        return max((look.rss for look in self.looks if first <= look.finished <= last), default=0)


class Crew:
    """Producer and consumer processes, and their counters: a file of int64 that each writes its own places of."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.results = Path(tempfile.mkdtemp(prefix="queue-scale-", dir=folder))
        self._producers, self._samples = options.producers, options.samples
        path = self.results / "counters"
        self._counters = np.memmap(path, dtype=np.int64, mode="w+", shape=(options.producers + len(TASKS),))
        given = {
            "queue": str(folder),
            "results": str(self.results),
            "samples": options.samples,
            "sessions": options.sessions,
            "producers": options.producers,
            "bytes": options.bytes,
            "batch": options.batch,
            "tasks": TASKS,
            "places": len(self._counters),
        }
        halves = [TASKS[0::2], TASKS[1::2]]
        parts = [{"consume": tasks, **given} for tasks in halves]
        parts += [{"produce": i, **given} for i in range(options.producers)]
        worker = str(HERE / "queue_scale_worker.py")
        self.processes = [subprocess.Popen([sys.executable, worker, json.dumps(part)]) for part in parts]
        self._used: dict[int, float] = {}
        self._seen = [psutil.Process(process.pid) for process in self.processes]

    @property
    def put(self) -> int:
        return int(self._counters[: self._producers].sum())

    @property
    def finished(self) -> int:
        """Samples that every task has finished, at least."""
        return int(self._counters[self._producers :].min())

    @property
    def failed(self) -> bool:
        return any(process.poll() not in (None, 0) for process in self.processes)

    @property
    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def cpu_s(self) -> float:
        """Of all its processes; one that has ended counts with what it was last seen to have used."""
        for process in self._seen:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._used[process.pid] = max(times.user + times.system, self._used.get(process.pid, 0.0))
        return sum(self._used.values())

    def counts(self) -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
        """How often each task finished each sample; zeros if it did not get to say so."""
        found = {}
        for task in TASKS:
            path = self.results / f"{task}.npy"
            found[task] = np.load(path) if path.exists() else np.zeros(self._samples, np.uint8)
        return found

    def close(self) -> None:
        for process in self.processes:
            stop(process)


def watch(crew: Crew, process: psutil.Process, folder: Path, samples: int) -> Course:
    """Look at the run until it ends, or makes no progress any more."""
    course, start, last = Course(), time.monotonic(), (0, 0)
    while not crew.put and not crew.ended and not crew.failed and time.monotonic() - start < STUCK_S:
        # Starting the processes does not count.
        time.sleep(LOOK_S / 10)
    start = moved = told = time.monotonic()
    while True:
        now, times = time.monotonic(), process.cpu_times()
        look = Look(
            now - start,
            crew.put,
            crew.finished,
            times.user + times.system,
            process.memory_info().rss,
            journal_bytes(folder) if now - told >= TELL_S else 0,
            busy_s() - crew.cpu_s() - times.user - times.system - sum(os.times()[:2]),
        )
        course.looks.append(look)
        if (look.put, look.finished) != last:
            moved, last = now, (look.put, look.finished)
        if now - told >= TELL_S:
            told = now
            tell(course, samples)
        if crew.ended or crew.failed or now - moved > STUCK_S:
            return course
        time.sleep(LOOK_S)


def busy_s() -> float:
    """CPU seconds of all processes of the machine since it started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def tell(course: Course, samples: int) -> None:
    look = course.looks[-1]
    done = look.finished / samples
    left = f", {look.at_s / done - look.at_s:.0f} s left" if done > 0.01 else ""
    text = f"{done:4.0%}  put {look.put:,}, finished {look.finished:,}, broker {look.rss >> 20} MiB, "
    print(text + f"journal {look.journal >> 20} MiB{left}", file=sys.stderr, flush=True)


def check(crew: Crew, samples: int) -> list[str]:
    """What is wrong with the outcome, in words; empty if nothing was lost and nothing done twice."""
    wrong = [f"{crew.put:,} of {samples:,} samples were put"] if crew.put != samples else []
    for task, counts in crew.counts().items():
        missing, twice = np.flatnonzero(counts == 0), np.flatnonzero(counts > 1)
        if len(missing):
            wrong.append(f"{task}: {len(missing):,} samples lost, first {missing[:5].tolist()}")
        if len(twice):
            wrong.append(f"{task}: {len(twice):,} samples finished twice, first {twice[:5].tolist()}")
    return wrong


def tenths(samples: int) -> Iterator[tuple[int, int]]:
    for i in range(10):
        yield samples * i // 10, samples * (i + 1) // 10


def show(course: Course, samples: int) -> None:
    """The course of the run by tenths of its samples."""
    heads = f"{'finished by all tasks':>24}{'samples/s':>12}{'broker CPU µs':>15}{'broker MiB':>12}{'put ahead':>11}"
    print(heads + f"{'cores of others':>17}")
    for first, last in tenths(samples):
        window = course.window(first, last)
        ahead = max((look.put - look.finished for look in course.looks if first <= look.finished <= last), default=0)
        span, others = f"{first:,} - {last:,}", course.foreign_cores(first, last)
        print(f"{span:>24}{window.rate:>12,.0f}{window.cpu_us:>15.1f}{window.rss >> 20:>12}{ahead:>11,}{others:>17.2f}")


def row(name: str, unit: str, better: str, ours: float, limit: float | None, goal: str, held: bool) -> dict[str, Any]:
    return {
        "name": name,
        "unit": unit,
        "better": better,
        "ours": ours,
        "peers": {},
        "limit": limit,
        "goal": goal,
        "holds": held,
    }


def rows_of(course: Course, samples: int, sessions: int, wrong: list[str]) -> list[dict[str, Any]]:
    """The first window lies after the warm-up; the last one ends before the first session runs out of samples."""
    begin, size = min(WARM_UP, samples // 10), max(2 * WARM_UP, samples // 25)
    end = max(course.finished_at(samples - sessions), min(begin + size, samples))
    early, late = course.window(begin, min(begin + size, end)), course.window(max(end - size, begin), end)
    whole = course.window(0, samples)
    first, second = course.peak(0, samples // 2), course.peak(samples // 2, samples)
    kept = late.rate / early.rate
    return [
        row(
            f"samples lost or done twice, {samples:,} put by {sessions:,} sessions, read by {len(TASKS)} tasks",
            "findings",
            "lower",
            float(len(wrong)),
            0.0,
            "none",
            not wrong,
        ),
        row("rate, whole run", "1/s", "higher", round(whole.rate, 1), None, "", True),
        row(f"rate from {early.first:,} to {early.last:,}", "1/s", "higher", round(early.rate, 1), None, "", True),
        row(
            f"rate from {late.first:,} to {late.last:,}",
            "1/s",
            "higher",
            round(late.rate, 1),
            round(early.rate, 1),
            f"at least {RATE_KEPT:.0%} of that from {early.first:,}",
            kept >= RATE_KEPT,
        ),
        row(
            f"broker CPU per sample (a put, {len(TASKS)} takes, {len(TASKS)} dones)",
            "µs",
            "lower",
            round(whole.cpu_us, 2),
            None,
            "",
            True,
        ),
        row(
            f"broker CPU per sample from {late.first:,}",
            "µs",
            "lower",
            round(late.cpu_us, 2),
            round(early.cpu_us, 2),
            f"at most 1/{RATE_KEPT:g} of that from {early.first:,}",
            late.cpu_us <= early.cpu_us / RATE_KEPT,
        ),
        row(
            "broker resident memory, peak of the second half",
            "MiB",
            "lower",
            round(second / 2**20, 1),
            round(first / 2**20, 1),
            f"at most {MEMORY_FACTOR:g}x that of the first half",
            second <= MEMORY_FACTOR * first,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--sessions", type=int, default=8192)
    parser.add_argument("--producers", type=int, default=2, help="processes that the sessions are spread over")
    parser.add_argument("--bytes", type=int, default=512, help="payload of a sample")
    parser.add_argument("--capacity-mib", type=int, default=4, help="payload from which on producers wait")
    parser.add_argument("--batch", type=int, default=512, help="samples that a consumer takes at once")
    parser.add_argument("--quick", action="store_true", help="50,000 samples of 1,024 sessions")
    parser.add_argument("--json", action="store_true", help="last line: the rows as JSON")
    options = parser.parse_args()
    if options.quick:
        options.samples, options.sessions = min(options.samples, 50_000), min(options.sessions, 1024)
    with (
        broker(dict.fromkeys(TASKS, FIELDS), capacity_mib=options.capacity_mib) as (folder, process),
        contextlib.closing(Crew(folder, options)) as crew,
    ):
        course = watch(crew, process, folder, options.samples)
        wrong = check(crew, options.samples)
        if crew.failed or not crew.finished:
            print("\n".join(["a process of the benchmark failed; what it wrote is above", *wrong]), file=sys.stderr)
            return 1
    peak = max(look.journal for look in course.looks)
    print(f"{options.samples:,} samples of {options.bytes} bytes in {course.looks[-1].at_s:.1f} s, ", end="")
    print(f"journal at most {peak >> 20} MiB, load {os.getloadavg()[0]:.1f}")
    show(course, options.samples)
    rows = rows_of(course, options.samples, options.sessions, wrong)
    for each in rows:
        verdict = f"  {each['goal']}: {'yes' if each['holds'] else 'NO'}" if each["goal"] else ""
        print(f"{each['name']}: {each['ours']:,} {each['unit']}{verdict}")
    for text in wrong:
        print(f"WRONG: {text}")
    if options.json:
        print(json.dumps(rows, ensure_ascii=False))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
