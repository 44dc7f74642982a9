"""A run in a few lines, before it starts: what will run, how much of the machine and of time it takes, where it
goes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from relax_rt.cli.time_left import expected
from relax_rt.config.job import load_job
from relax_rt.config.schema import MIB, Chosen, RunConfig
from relax_rt.supervision.rundir import SHM_ROOT, read_run


def brief(config: RunConfig) -> list[str]:
    """The short plan of a run; `relax-rt plan` has the long one."""
    run_dir = Path(config.run.dir)
    before = read_run(run_dir)
    resumed = f"resumes the run there, last {before.get('status', 'unknown')}" if before else "new"
    if before and (at := load_job(config.run.job).resumes_at(run_dir)) is not None:
        resumed += f", from the checkpoint of step {at}" if at else ", from the beginning: it has no checkpoint"
    roles = {kind: settings for kind, settings in config.roles.items() if settings.count}
    processes = sum(settings.count for settings in roles.values())
    threads = sum(settings.count * settings.threads for settings in roles.values())
    cores = len(os.sched_getaffinity(0))
    job_bytes = load_job(config.run.job).shm_bytes(config)
    need = config.queue.capacity_mib + job_bytes // MIB
    free = shutil.disk_usage(SHM_ROOT).free // MIB
    gpus = sum(settings.count * settings.gpus for settings in roles.values())
    return [
        f"{config.run.name}  {run_dir} ({resumed})",
        "  roles   " + ", ".join(f"{kind} x{s.count}" if s.count != 1 else kind for kind, s in roles.items()),
        f"  takes   {processes} processes, {threads} compute threads on {cores} cores"
        + (f", {gpus:g} GPUs" if gpus else "")
        + f", {need:,} MiB of shared memory ({free:,} MiB are free)",
        *choices(config.chosen),
        *([f"  time    {time_left}"] if (time_left := expected(config)) else []),
    ]


def choices(chosen: Mapping[str, Chosen]) -> list[str]:
    """Settings that were chosen for the user, a line for each value and reason: ``dtype float32 (rollout): why``."""
    roles: dict[tuple[str, str, str], list[str]] = {}
    for key, one in chosen.items():
        role, _, setting = key.removeprefix("roles.").rpartition(".")
        roles.setdefault((setting, one.value, one.why), []).append(role)
    return [f"  {setting:<7} {value} ({', '.join(who)}): {why}" for (setting, value, why), who in roles.items()]
