"""Whether a run fits on this machine: cores, GPUs, shared memory, files, interpreters, room in its directory."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from pydantic import BaseModel

from relax_rt.cli.doctor.finding import GIB, MIB, Finding, judged, size
from relax_rt.cli.doctor.machine import cgroup_limits, check_memory
from relax_rt.cli.doctor.software import Gpu
from relax_rt.config.job import load_job
from relax_rt.config.schema import RoleSettings, RunConfig
from relax_rt.supervision.rundir import SHM_ROOT

FILES_OF_A_ROLE = 16
FILES_OF_THE_AGENT = 64
GOOD_DISK = 2 * GIB
IMPORT_TIMEOUT_S = 60.0

Roles = dict[str, RoleSettings]


def check_fit(config: RunConfig, gpus: Sequence[Gpu]) -> list[Finding]:
    """Everything about one run on this machine."""
    roles: Roles = {kind: settings for kind, settings in config.roles.items() if settings.count}
    return [
        _cores(roles, cgroup_limits()),
        _gpus(roles, gpus),
        _shared_memory(config),
        _memory(roles),
        _files(roles),
        _run_dir(Path(config.run.dir)),
        *_affinity(roles),
        *_interpreters(roles),
        *_ports(config),
    ]


def _cores(roles: Roles, limits: dict[str, float]) -> Finding:
    cores = min(float(len(os.sched_getaffinity(0))), limits.get("cores", float("inf")))
    threads = sum(settings.count * settings.threads for settings in roles.values())
    processes = sum(settings.count for settings in roles.values())
    many = threads > 4 * cores
    warn = "more than four threads a core: lower count or threads of roles" if many else ""
    return judged("run", "cores", f"{processes} processes with {threads} threads on {cores:g} cores", warn=warn)


def _gpus(roles: Roles, gpus: Sequence[Gpu]) -> Finding:
    need = {kind: settings.count * settings.gpus for kind, settings in roles.items() if settings.gpus}
    total = sum(need.values())
    value = f"{total:g} wanted, {len(gpus)} here" + (
        f" ({', '.join(f'{k} {n:g}' for k, n in need.items())})" if need else ""
    )
    joined = any(settings.node for settings in roles.values())
    few = total > len(gpus)
    advice = "let other nodes join (`up --join`), or lower count or gpus of roles"
    return judged("run", "gpus", value, fail=advice if few and not joined else "", warn=advice if few else "")


def _shared_memory(config: RunConfig) -> Finding:
    need = config.queue.capacity_mib * MIB + load_job(config.run.job).shm_bytes(config)
    free = shutil.disk_usage(SHM_ROOT).free
    fail = "lower queue.capacity_mib, or make /dev/shm larger (in a container: --shm-size)" if need > free else ""
    return judged("run", "shared memory", f"{size(need)} of {size(free)} free", fail=fail)


def _memory(roles: Roles) -> Finding:
    bounded = sum(settings.count * (settings.memory_mib or 0) for settings in roles.values()) * MIB
    free = check_memory(cgroup_limits()).value
    if not bounded:
        return judged("run", "memory", f"{free}; no role has memory_mib: `relax-rt plan` estimates the need")
    over = bounded > psutil.virtual_memory().total
    warn = "the limits of all roles together are more than the machine has" if over else ""
    return judged("run", "memory", f"{size(bounded)} allowed to the roles together; {free}", warn=warn)


def _files(roles: Roles) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = FILES_OF_THE_AGENT + FILES_OF_A_ROLE * sum(settings.count for settings in roles.values())
    fail = f"ulimit -n {2 * need}" if 0 <= soft < need else ""
    return judged(
        "run", "open files", f"about {need} in the agent, {'no limit' if soft < 0 else f'{soft} allowed'}", fail=fail
    )


def _run_dir(run_dir: Path) -> Finding:
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    free = shutil.disk_usage(there).free
    warn = "checkpoints may fill the disk: choose another run.dir" if free < GOOD_DISK else ""
    fail = "" if os.access(there, os.W_OK) else "no permission to write there: choose another run.dir"
    return judged("run", "run.dir", f"{run_dir}, {size(free)} free", fail=fail, warn=warn)


def _affinity(roles: Roles) -> Iterator[Finding]:
    usable = os.sched_getaffinity(0)
    for kind, settings in roles.items():
        missing = sorted(set(settings.cpus or ()) - usable)
        if missing:
            value = f"cpus = {settings.cpus}"
            yield Finding("run", f"roles.{kind}", "fail", value, f"cores {missing} may not be used by this process")


def _interpreters(roles: Roles) -> Iterator[Finding]:
    for python in sorted({settings.python for settings in roles.values() if settings.python}):
        kinds = ", ".join(kind for kind, settings in roles.items() if settings.python == python)
        why = _cannot_import(python)
        fail = f"relax_rt cannot be imported there ({why}): pip install relax-rt into it" if why else ""
        yield judged("run", f"python of {kinds}", python, fail=fail)


def _cannot_import(python: str) -> str:
    try:
        command = [python, "-c", "import relax_rt.hosting.host"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip().splitlines() or ["no word"])[-1] if done.returncode else ""


def _ports(config: RunConfig) -> Iterator[Finding]:
    """Every port that a setting names must be free to listen on."""
    for name, port in sorted(_named_ports(config.model_dump())):
        try:
            with socket.create_server(("127.0.0.1", port)):
                fail = ""
        except OSError as error:
            fail = f"{error.strerror}: end what listens there, or choose another"
        yield judged("run", name, str(port), fail=fail)


def _named_ports(table: Any, at: str = "") -> Iterator[tuple[str, int]]:
    for key, value in table.items() if isinstance(table, dict) else ():
        name = f"{at}.{key}" if at else str(key)
        if isinstance(value, BaseModel):
            value = value.model_dump()
        if isinstance(value, dict):
            yield from _named_ports(value, name)
        elif isinstance(value, int) and (key == "port" or str(key).endswith("_port")) and value > 0:
            yield name, value
