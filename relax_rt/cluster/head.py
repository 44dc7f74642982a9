"""The head agent's process: ``python -m relax_rt.cluster.head``, started by the keeper."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import structlog

from relax_rt.cluster.nodes.fleet import NodeFleet
from relax_rt.config.job import load_job
from relax_rt.config.loader import read_resolved
from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.agent import RunStatus
from relax_rt.observe.logs import open_log, setup_logging
from relax_rt.observe.text import clip
from relax_rt.supervision.agent import run_agent
from relax_rt.supervision.plan import plan_roles
from relax_rt.supervision.protocol import RunDone
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RunPaths, write_json

SUMMARY = "summary.json"
REASON, SHOWN_LINES = 160, 12


def main(argv: list[str] | None = None) -> int:
    """Run the agent; returns the run's exit code."""
    parser = argparse.ArgumentParser(prog="relax_rt.cluster.head", description="Internal process of `relax-rt up`.")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--keeper-pid", type=int, default=0)
    parser.add_argument("--screen", default="", help="module:function(config, run_dir) that makes the observer")
    parser.add_argument("--system", default="", help="the system roles to run, with commas between them")
    options = parser.parse_args(argv)
    paths = RunPaths(options.run_id, options.run_dir)
    paths.logs.mkdir(parents=True, exist_ok=True)
    with open_log(paths.log("agent")) as log:
        setup_logging(os.environ.get("RELAX_LOG_LEVEL", "info"), log)
        config = read_resolved(paths.run_dir / RESOLVED_CONFIG)
        plans = plan_roles(config, [kind for kind in options.system.split(",") if kind])
        screen: RunScreen | None = None
        if options.screen:
            module, _, name = options.screen.partition(":")
            make: Callable[[RunConfig, Path], RunScreen] = getattr(importlib.import_module(module), name)
            screen = make(config, paths.run_dir)
        done = run_agent(config, paths, plans, NodeFleet(config, paths), keeper_pid=options.keeper_pid, on_state=screen)
        lines = [*_finish_job(config, paths.run_dir), *describe(done)]
        if screen is None:
            # stderr may be a file on a full disk; the exit code must still be the run's.
            with suppress(OSError):
                sys.stderr.write("\n".join(lines) + "\n")
        else:
            screen.close(lines)
    return done.exit_code


class RunScreen(Protocol):
    """Shows a running run; `close` restores the terminal and prints the last lines."""

    def __call__(self, status: RunStatus) -> None: ...

    def close(self, summary_lines: Sequence[str]) -> None: ...


def describe(done: RunDone) -> list[str]:
    """Lines that describe the end of a run."""
    # A diagnosis has the cause in full.
    reason = done.reason if done.diagnosis is None else clip(done.reason, REASON)
    lines = [f"the run has ended: {reason} (exit code {done.exit_code})"]
    if done.diagnosis is not None:
        lines.append(f"  {done.diagnosis}")
        lines += [f"    {line}" for line in done.diagnosis.evidence(SHOWN_LINES, SHOWN_LINES)]
    if done.first is not None:
        lines.append(f"  earlier, the first failure: {done.first}")
    return lines


def _finish_job(config: RunConfig, run_dir: Path) -> list[str]:
    """Run the job's last step, after a failed run too; its failure does not change how the run ended.

    Returns:
        The job's closing lines.
    """
    try:
        job = load_job(config.run.job)
        summary: dict[str, Any] = job.finish(run_dir, config)
        if summary:
            write_json(run_dir / SUMMARY, json.loads(json.dumps(summary, default=str)))
            return job.closing(summary)
    except Exception as error:  # noqa: BLE001 code of the job
        structlog.get_logger().exception("the job's last step failed")
        return [f"relax-rt: the summary of the run could not be made: {error!r}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
