"""How long a run still takes: of a living one by its own steps, of one that is to start by those of an earlier one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_rt.cli.runs import resolved_config
from relax_rt.config.job import Pacing, load_job, pacing_of
from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.agent import RunStatus
from relax_rt.observe.estimate import Estimate, Estimator
from relax_rt.observe.events import parse_line
from relax_rt.observe.metrics import METRICS, Tail
from relax_rt.observe.text import duration
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RUN_JSON, machine, read_run
from relax_rt.transport.rpc.errors import RelaxError

HEAD_BYTES, LOOK_BACK_BYTES = 1 << 20, 2 << 20
MAX_RUNS = 50
OTHERWISE = ("config_dir", "chosen", "run.name", "run.dir", "run.seed", "algorithm.steps", "supervision", "events")
"""Keys that may differ between two runs whose steps take the same time. `chosen` says why the settings are what they
are, which a resumed run says otherwise; the settings themselves stand in their own tables."""
ENOUGH = 3
"""Minimum number of measured steps of an earlier run to estimate from."""


def estimate_of(status: RunStatus) -> Estimate | None:
    """How long a living run still takes; None where its number of steps is not known. One that is ending takes less."""
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
    left = steps - at
    todo = f"the {left} steps left from step {at}" if at else f"{steps} steps"
    if before is not None and before.step_s and before.measured >= ENOUGH and _on_this_machine(own):
        pace = duration(before.step_s)
        return f"about {duration(left * before.step_s)} for {todo}, at its last start's {pace} a step"
    for run_dir in _like(config):
        found = _measured(run_dir, steps, pacing)
        if found is not None and found.step_s is not None and found.measured >= ENOUGH:
            long, pace = duration(left * found.step_s), duration(found.step_s)
            like = f"the {pace} a step that {run_dir.name} took on this machine with these settings"
            return f"about {long} for {todo}, at {like}"
    return f"{todo}; the time left is estimated after the first and updated with each step"


def _measured(run_dir: Path, steps: int | None, pacing: Pacing) -> Estimate | None:
    if steps is None:
        return None
    estimator = Estimator(steps, pacing)
    for record in records(run_dir / METRICS):
        estimator.take(record)
    return estimator.estimate(time.time())


def records(path: Path) -> Iterator[dict[str, Any]]:
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


def _like(config: RunConfig) -> Iterator[Path]:
    """Runs next to this one, on this machine, with the same settings except OTHERWISE; the newest first."""
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
    for key in OTHERWISE:
        table, _, name = key.rpartition(".")
        place = config.get(table) if table else config
        if isinstance(place, dict):
            place.pop(name, None)
    return config
