"""Time left of a run: of a live one by its own steps, before a start by those of an earlier run."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.cli.runs import resolved_config
from relax_rt.config.job import Pacing, load_job, pacing_of
from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.agent import RunStatus
from relax_rt.observe.events import parse_line
from relax_rt.observe.metrics import METRICS, Tail
from relax_rt.observe.text import duration
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RUN_JSON, machine, read_run
from relax_rt.transport.rpc.errors import RelaxError

HEAD_BYTES, LOOK_BACK_BYTES = 1 << 20, 2 << 20
MAX_RUNS = 50
MAY_DIFFER = ("config_dir", "chosen", "run.name", "run.dir", "run.seed", "algorithm.steps", "supervision", "events")
"""Keys that may differ between two runs whose steps take the same time. `chosen` only gives reasons for settings that
have keys of their own, and a resumed run gives other reasons."""
MIN_STEPS = 3
"""Minimum number of measured steps of an earlier run to estimate from."""
WINDOW = 32
"""The pace is the mean of so many steps: where staleness is allowed, steps come in bursts, and the steps that a
checkpoint or an evaluation slows down must count too."""
FASTEST_FIRST, FASTEST_LATER = 0.75, 0.15
"""Weight of the fastest steps in the pace, at the first step and from WINDOW steps on. Chosen on four runs of the
quickstart's job, two of them in bfloat16: after the fifth step the time left was at most 28% too long with it and 45%
without. A fifth run in bfloat16 was 41% too long there, and 29% after its eighth step."""
CONTENDED = 8
"""The evaluation before training slows down at most so many steps; only these are corrected for it."""
SETTLED = 3
"""After this many measured steps, measurements from before a restart are discarded."""
MAX_REPEATED = 64


class Estimate(msgspec.Struct, frozen=True):
    """Time left of a run.

    Attributes:
        step, steps: the last step done, and the target.
        step_s: seconds of one step; None until one is done.
        left_s: seconds until the run has ended, work after its last step included; None until a step is done.
        measured: steps that `step_s` is based on, after a restart those since. 0: the pace before the restart.
        since_s: seconds since the last step.
    """

    step: int
    steps: int
    step_s: float | None = None
    left_s: float | None = None
    measured: int = 0
    since_s: float | None = None

    def total_s(self, uptime_s: float) -> float | None:
        """Total duration of this start of the run, if it has taken `uptime_s` so far."""
        return None if self.left_s is None else uptime_s + self.left_s

    def summary(self, uptime_s: float) -> str:
        """``12 s a step, about 24m 10s left, 31m 00s in all``."""
        total_s = self.total_s(uptime_s)
        return str(self) if total_s is None else f"{self}, {duration(total_s)} in all"

    def __str__(self) -> str:
        """``12 s a step, about 24m 10s left``."""
        if self.step_s is None or self.left_s is None:
            return "time left: measured on the first step"
        if self.step >= self.steps:
            return f"about {duration(self.left_s)} left after the last step" if self.left_s else "the last step is done"
        rough = ", a first guess" if self.measured == 1 else ""
        rough = ", by the steps before the restart" if self.measured == 0 else rough
        return f"{duration(self.step_s)} a step, about {duration(self.left_s)} left{rough}"


class Estimator:
    """Estimates the time left from the run's records, in the order written.

    Args:
        steps: the target. kind, key: of the metrics records that count steps.
        pacing: which metrics the time of a step consists of.
    """

    def __init__(self, steps: int, pacing: Pacing, kind: str = "step", key: str = "step") -> None:
        self._steps, self._pacing, self._kind, self._key = steps, pacing, kind, key
        self._by: str | None = None
        self._step = 0
        self._t, self._m = 0.0, 0.0
        self._first_s: float | None = None
        self._before_s: float | None = None
        self._measured: deque[tuple[int, int, float, float]] = deque(maxlen=WINDOW)
        """Each record's step, the steps since the one before, their seconds, and when they were done."""
        self._repeated: dict[tuple[str, str], float] = {}
        self._evaluated_t: float | None = None

    def update(self, record: dict[str, Any]) -> None:
        """Update from one metrics record; most kinds are ignored."""
        kind, step = str(record.get("kind", "")), record.get(self._key)
        if kind == self._kind and isinstance(step, int):
            by, t = str(record.get("by", "")), _seconds(record, "t")
            m = _seconds(record, "m") if "m" in record else t
            if by != self._by or step <= self._step or m < self._m:
                # Another incarnation: the time between is that of a restart, and its first step warms up.
                self._before_s = self._step_s() if self._by is not None else None
                self._first_s = self._first_step_s(record)
                self._measured.clear()
            else:
                self._measured.append((step, step - self._step, m - self._m, t))
            self._by, self._step, self._t, self._m = by, step, t, m
        elif kind in self._pacing.repeated and record.get("when") == "before" and len(self._repeated) < MAX_REPEATED:
            self._repeated[kind, str(record.get("set", ""))] = _seconds(record, "seconds") / self._pacing.contention
            self._evaluated_t = _seconds(record, "t")

    def _first_step_s(self, record: dict[str, Any]) -> float | None:
        """Time of a first step: it did not overlap with the production of its input, as later steps do where that is
        allowed."""
        if not self._pacing.work:
            return None
        wait, ahead = _seconds(record, self._pacing.wait), self._pacing.ahead
        work = sum(_seconds(record, key) for key in self._pacing.work)
        return max(work, wait / (1 + ahead)) if ahead else wait + work

    def _spans(self) -> list[tuple[int, float]]:
        """Steps and their seconds, less the slowdown by an evaluation before training that ran beside them.

        Its record comes when it ends; until then it counts as running. Only the first CONTENDED steps are corrected: a
        longer evaluation gets so little of the cores that it slows nothing down.
        """
        until = self._t if self._evaluated_t is None else self._evaluated_t
        found = []
        for step, steps, seconds, end in self._measured:
            contended = min(seconds, max(0.0, until - (end - seconds))) if step <= CONTENDED else 0.0
            found.append((steps, seconds - contended + contended / self._pacing.contention))
        return found

    def _step_s(self) -> float | None:
        spans = self._spans()
        measured, seconds = sum(n for n, _ in spans), sum(s for _, s in spans)
        if self._before_s is not None and measured < SETTLED:
            return (seconds + (SETTLED - measured) * self._before_s) / SETTLED
        if not measured:
            return self._first_s
        mean_s, ahead = seconds / measured, self._pacing.ahead
        if self._first_s is not None:
            # The first step counts as well, but not for more than the slowest of the others: it may have warmed up.
            first_s = min(self._first_s, max(s / n for n, s in spans))
            mean_s = (first_s + seconds) / (1 + measured)
            if measured <= ahead:
                # The input of the first ones after it was made while it waited for its own.
                return max(self._first_s, mean_s)
        # The first steps are slower: kernels are made on first use, and untrained models write long completions.
        # So the fastest burst of steps counts too, at first for most of the pace.
        bursts = [spans[at : at + ahead + 1] for at in range(max(1, len(spans) - ahead))]
        fastest_s = min(sum(s for _, s in burst) / sum(n for n, _ in burst) for burst in bursts)
        weight = FASTEST_LATER + (FASTEST_FIRST - FASTEST_LATER) * max(0.0, 1 - measured / WINDOW)
        return weight * min(mean_s, fastest_s) + (1 - weight) * mean_s

    def estimate(self, now: float) -> Estimate:
        """The estimate at wall-clock time `now` (s)."""
        step_s = self._step_s()
        if step_s is None:
            return Estimate(self._step, self._steps)
        since, after_s = max(0.0, now - self._t), sum(self._repeated.values())
        left = self._steps - self._step
        # A step that takes longer than expected, or a trainer that is away, does not bring the end nearer.
        left_s = left * step_s - min(since, step_s) + after_s if left > 0 else max(0.0, after_s - since)
        measured = sum(n for _, n, _, _ in self._measured)
        return Estimate(
            self._step,
            self._steps,
            step_s,
            left_s,
            measured + (self._before_s is None and self._first_s is not None),
            since,
        )


def _seconds(record: dict[str, Any], key: str) -> float:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def estimate_of(status: RunStatus) -> Estimate | None:
    """Time left of a live run; None if its number of steps is not known or it has ended."""
    if status.ended:
        return None
    run_dir = Path(status.run_dir)
    try:
        config = resolved_config(run_dir)
        return _measured(run_dir, load_job(config.run.job).steps(config), pacing_of(config))
    except RelaxError:
        return None


def expected(config: RunConfig) -> str:
    """Describe how long a run will take, as far as known before it starts."""
    job = load_job(config.run.job)
    steps = job.steps(config)
    if steps is None:
        return ""
    own, pacing = Path(config.run.dir), pacing_of(config)
    before = _measured(own, steps, pacing)
    at = job.resumes_at(own)
    if at is None:
        at = 0 if before is None else before.step
    if at >= steps:
        return f"all {steps} steps are done"
    remaining = steps - at
    todo = f"the {remaining} steps left from step {at}" if at else f"{steps} steps"
    if before is not None and before.step_s and before.measured >= MIN_STEPS and _on_this_machine(own):
        pace = duration(before.step_s)
        return f"about {duration(remaining * before.step_s)} for {todo}, at its last start's {pace} a step"
    for run_dir in _similar_runs(config):
        found = _measured(run_dir, steps, pacing)
        if found is not None and found.step_s is not None and found.measured >= MIN_STEPS:
            long, pace = duration(remaining * found.step_s), duration(found.step_s)
            like = f"the {pace} a step that {run_dir.name} took on this machine with these settings"
            return f"about {long} for {todo}, at {like}"
    return f"{todo}; the time left is estimated after the first and updated with each step"


def _measured(run_dir: Path, steps: int | None, pacing: Pacing) -> Estimate | None:
    if steps is None:
        return None
    estimator = Estimator(steps, pacing)
    for record in read_ends(run_dir / METRICS):
        estimator.update(record)
    return estimator.estimate(time.time())


def read_ends(path: Path) -> Iterator[dict[str, Any]]:
    """Read the beginning and the end of a run's metrics: what was evaluated first, and the last steps."""
    try:
        with path.open("rb") as file:
            yield from filter(None, map(parse_line, file.read(HEAD_BYTES).split(b"\n")))
            size = path.stat().st_size
    except OSError:
        return
    if size <= HEAD_BYTES:
        return
    tail = Tail(path, last_bytes=min(LOOK_BACK_BYTES, size - HEAD_BYTES), read_bytes=LOOK_BACK_BYTES + 1)
    try:
        yield from tail.poll()
    finally:
        tail.close()


def _on_this_machine(run_dir: Path) -> bool:
    return (read_run(run_dir) or {}).get("machine") == machine()


def _similar_runs(config: RunConfig) -> Iterator[Path]:
    """Runs beside this one, on this machine, with the same settings except MAY_DIFFER; the newest first."""
    own = Path(config.run.dir)
    found = [path for path in own.parent.glob(f"*/{RUN_JSON}") if path.parent != own]
    ours = _settings(json.loads(json.dumps(config.model_dump(mode="json"))))
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[:MAX_RUNS]:
        try:
            theirs = json.loads((path.parent / RESOLVED_CONFIG).read_text())
        except (OSError, ValueError):
            continue
        if isinstance(theirs, dict) and _settings(theirs) == ours and _on_this_machine(path.parent):
            yield path.parent


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    for key in MAY_DIFFER:
        table, _, name = key.rpartition(".")
        place = config.get(table) if table else config
        if isinstance(place, dict):
            place.pop(name, None)
    return config
