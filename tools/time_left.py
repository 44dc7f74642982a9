"""How wrong the time left was at each step of a run that has finished: `python tools/time_left.py RUN_DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

from relax_rt.cli.runs import resolved_config
from relax_rt.cli.time_left import Estimator
from relax_rt.config.job import load_job, pacing_of
from relax_rt.observe.metrics import read_metrics
from relax_rt.observe.text import duration
from relax_rt.supervision.rundir import read_run


def errors(run_dir: Path) -> list[tuple[int, float, float]]:
    """Step, time left as it was estimated then, and as it was (s), of the steps since the run's last start."""
    config, run = resolved_config(run_dir), read_run(run_dir) or {}
    if run.get("status") != "finished":
        sys.exit(
            f"{run_dir}: the run is {run.get('status', 'unknown')}; only one that has done all its steps can be judged"
        )
    estimator = Estimator(load_job(config.run.job).steps(config) or 0, pacing_of(config))
    found = []
    for record in read_metrics(run_dir):
        estimator.update(record)
        if record.get("kind") == "step" and record["t"] >= run["started_at"]:
            estimate = estimator.estimate(record["t"])
            if estimate.left_s is not None:
                found.append((estimate.step, estimate.left_s, run["ended_at"] - record["t"]))
    return found


if __name__ == "__main__":
    for step, estimated, true in errors(Path(sys.argv[1])):
        off = f"{estimated / true - 1:+.0%}" if true > 0 else ""
        print(f"step {step}: {duration(estimated)} left, truly {duration(true)}  {off}")
