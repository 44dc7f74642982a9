"""The directories of a run: run directory, private sockets, shared memory; who owns them, and their removal.

Standard library only: the keeper uses it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from relax_rt.config import RESOLVED_CONFIG as RESOLVED_CONFIG
from relax_rt.config.version import RUN_FORMAT, VERSION
from relax_rt.process import procfs

RUN_JSON = "run.json"
LOCK = "lock"
OWNER = "owner.json"
AGENT_SOCKET = "agent.sock"
SOCKET_ROOT = Path("/tmp")
SHM_ROOT = Path("/dev/shm")
PREFIX = "relax-"
RUN_ID = re.compile(r"[0-9a-f]{8}")
FRESH_S = 60.0
GUARD = "relax_rt.process.guard"
GUARDS_TIMEOUT_S = 10.0
"""For guards to end and clean up after their servers; twice what a late resource tracker may take there."""

RUNNING = ("starting", "running", "draining", "joined")
"""Values of `status` in run.json while an agent owns the run, or this node's part of it; all others are final."""


def slot_file(slot: str, suffix: str) -> str:
    """Return the file name of a slot's socket or log: ``rollout/0`` becomes ``rollout-0.log``."""
    return slot.replace("/", "-").replace(":", "-") + suffix


class RunPaths(NamedTuple):
    """The three directories of one run."""

    run_id: str
    run_dir: Path

    @property
    def socket_dir(self) -> Path:
        """Unix sockets; private, and short because the kernel limits a socket's path to 107 bytes."""
        return SOCKET_ROOT / f"{PREFIX}{self.run_id}"

    @property
    def shm_dir(self) -> Path:
        """Shared memory."""
        return SHM_ROOT / f"{PREFIX}{self.run_id}"

    @property
    def logs(self) -> Path:
        """One log a slot, and the agent's and keeper's own."""
        return self.run_dir / "logs"

    def log(self, slot: str) -> Path:
        """A slot's log."""
        return self.logs / slot_file(slot, ".log")

    @property
    def agent_socket(self) -> Path:
        """Where the agent answers."""
        return self.socket_dir / AGENT_SOCKET

    def make_private(self) -> None:
        """Make the socket and shared memory directories, private to this user, and record their owner. Raises OSError:
        they cannot be made, or exist."""
        for directory in (self.socket_dir, self.shm_dir):
            directory.mkdir(mode=0o700)
        self.own(os.getpid())

    def own(self, pid: int) -> None:
        """Record the living process to which these directories belong."""
        write_json(self.socket_dir / OWNER, {**owner_of(pid), "run_dir": str(self.run_dir)})

    def remove_private(self) -> None:
        """Remove the socket and shared memory directories."""
        for directory in (self.socket_dir, self.shm_dir):
            shutil.rmtree(directory, ignore_errors=True)


def members_of_run(run_id: str) -> set[int]:
    """Return the living processes of a run, except ourselves: those that have its id in their environment."""
    return procfs.with_environment(f"RELAX_RUN_ID={run_id}")


def owner_of(pid: int) -> dict[str, Any]:
    """Return what identifies a process: its pid alone is unique only in this namespace, boot and lifetime."""
    return {
        "pid": pid,
        "start": procfs.start_time(pid),
        "boot": procfs.boot_id(),
        "pid_namespace": procfs.pid_namespace(),
    }


def owner_lives(owner: dict[str, Any]) -> bool | None:
    """Return whether the process still lives; None when it is in another pid namespace, where that is unknown."""
    if owner.get("boot") != procfs.boot_id():
        return False
    if owner.get("pid_namespace") != procfs.pid_namespace():
        return None
    start = int(owner.get("start", 0))
    return start != 0 and procfs.start_time(int(owner.get("pid", 0))) == start


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file atomically."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(content, indent=1, default=str) + "\n")
    fresh.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a file; None when it does not exist or is no JSON object."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def read_run(run_dir: Path) -> dict[str, Any] | None:
    """Read run.json of a run directory."""
    return read_json(run_dir / RUN_JSON)


def update_run(run_dir: Path, **fields: Any) -> dict[str, Any]:
    """Change fields of run.json, which is made if there is none; returns the whole."""
    made = {"format": RUN_FORMAT, "version": VERSION}
    content = {**(read_run(run_dir) or made), **fields}
    write_json(run_dir / RUN_JSON, content)
    return content


def append_event(run_dir: Path, by: str, kind: str, **fields: Any) -> None:
    """Append a line to the event log, for processes that use the standard library only."""
    line = json.dumps({"t": time.time(), "m": time.monotonic(), "by": by, "kind": kind, **fields}, default=str)
    path = run_dir / "events" / "current.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return
    try:
        os.write(fd, line.encode() + b"\n")
    except OSError:
        pass
    finally:
        os.close(fd)


def kill_run(find: Callable[[], set[int]], *, reap: bool) -> None:
    """Kill the processes that `find` returns; servers under a guard are first left to it.

    A guard ends its server when the server's owner dies, and then removes the shared memory that only the server had
    mapped. Nobody else knows which segments these are, so a guard that is killed first leaks them. What has not
    ended by GUARDS_TIMEOUT_S is killed all the same.

    Args:
        reap: as in `procfs.kill_until_none`.
    """
    deadline = time.monotonic() + GUARDS_TIMEOUT_S

    def unguarded() -> set[int]:
        found = find()
        guards = {pid for pid in found if procfs.runs_module(pid, GUARD)}
        if not guards or time.monotonic() > deadline:
            return found
        return found - guards - set().union(*procfs.descendants_of_each(guards).values())

    while not procfs.kill_until_none(unguarded, reap=reap) and find():
        time.sleep(0.01)


def end_run(paths: RunPaths, by: str, cause: str) -> None:
    """Clean up after an agent: kill every process of the run, remove its directories, record the end in run.json.

    An agent that ended in order has recorded its end itself.
    """
    kill_run(lambda: (procfs.descendants(os.getpid()) | members_of_run(paths.run_id)) - {os.getpid()}, reap=True)
    paths.remove_private()
    _record_death(paths, cause, by)


def _record_death(paths: RunPaths, cause: str, by: str = "") -> None:
    """Record in run.json, and as an event of `by`, that the agent died; not if it has recorded its end itself."""
    run = read_run(paths.run_dir) or {}
    if run.get("run_id") == paths.run_id and run.get("status") in RUNNING:
        if by:
            append_event(paths.run_dir, by, "agent_died", cause=cause)
        update_run(paths.run_dir, status="agent died", exit_code=1, reason=cause, ended_at=time.time())


def stale_runs() -> list[RunPaths]:
    """Return runs of this user that left something behind and whose agent is dead."""
    found: dict[str, RunPaths] = {}
    for root in (SOCKET_ROOT, SHM_ROOT):
        for directory in root.glob(f"{PREFIX}*"):
            run_id = directory.name.removeprefix(PREFIX)
            # Other programs may use a similar name: what is no run's must not be removed.
            if RUN_ID.fullmatch(run_id) and run_id not in found and _is_stale(run_id):
                owner = read_json(SOCKET_ROOT / directory.name / OWNER) or {}
                found[run_id] = RunPaths(run_id, Path(owner.get("run_dir", "/nonexistent")))
    return list(found.values())


def _is_stale(run_id: str) -> bool:
    paths = RunPaths(run_id, Path())
    directories = [d for d in (paths.socket_dir, paths.shm_dir) if d.is_dir() and not d.is_symlink()]
    try:
        stats = [d.stat() for d in directories]
    except FileNotFoundError:
        return False
    if not stats or any(s.st_uid != os.getuid() for s in stats):
        return False
    owner = read_json(paths.socket_dir / OWNER)
    if owner is not None:
        return owner_lives(owner) is False
    # Without an owner it is being made right now, or is left of a removal.
    return time.time() - max(s.st_mtime for s in stats) > FRESH_S and not members_of_run(run_id)


def clean_stale_runs() -> list[str]:
    """Kill and remove what dead runs of this user left behind; return their ids."""
    cleaned = []
    for paths in stale_runs():
        kill_run(partial(members_of_run, paths.run_id), reap=False)
        paths.remove_private()
        _record_death(paths, "found dead by the next run")
        cleaned.append(paths.run_id)
    return cleaned


def machine() -> str:
    """Return a name of this machine for comparing step times: host name, cores, CPU model."""
    model = procfs.cpuinfo_field(procfs.CPU_MODEL) or os.uname().machine
    return f"{os.uname().nodename}, {os.cpu_count()} x {model}"
