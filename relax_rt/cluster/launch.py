"""Starts a run: refuses what can be refused, makes the run's directories, and starts the keeper and the agent.

Used by `relax-rt up` and relax_rt.runtime.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from relax_rt.cluster.nodes.checks import check_nodes
from relax_rt.cluster.nodes.join_key import FILE as JOIN_KEY
from relax_rt.cluster.nodes.join_key import make_key, read_key, write_key
from relax_rt.config.job import load_job
from relax_rt.config.loader import SYSTEM_ROLES, config_digest, load_config, write_resolved
from relax_rt.config.schema import RunConfig
from relax_rt.supervision import control
from relax_rt.supervision.plan import plan_roles
from relax_rt.supervision.rundir import (
    LOCK,
    RESOLVED_CONFIG,
    RUN_JSON,
    SHM_ROOT,
    RunPaths,
    clean_stale_runs,
    machine,
    read_run,
    update_run,
)
from relax_rt.transport.rpc.errors import RelaxError

MIB = 1 << 20
MAX_SHOWN, MAX_NAMED = 5, 25
LOCATION_KEYS = ("config_dir", "chosen", "run.dir", "supervision.nodes.listen")
"""Keys, and prefixes of keys, that may differ when a run is resumed."""
OUTPUT = "up"
"""Log for the output of a run without a terminal."""


class PreparedRun:
    """A run that may start: its config, its directories, and the lock on its run directory."""

    def __init__(self, config: RunConfig, paths: RunPaths, lock_fd: int) -> None:
        self.config, self.paths, self.lock_fd = config, paths, lock_fd

    def rollback(self) -> None:
        """Undo what was made outside the run directory."""
        self.paths.remove_private()
        os.close(self.lock_fd)


def up(
    config_path: Path,
    overrides: Sequence[str] = (),
    *,
    screen: str = "",
    system: Sequence[str] = SYSTEM_ROLES,
) -> NoReturn:
    """Start a run: this process execs its keeper and does not return.

    Exit codes of the keeper: 0 finished, or stopped by `down`; 1 failed; 2 a role found its configuration wrong; 130
    Ctrl-C, 143 SIGTERM, 129 the terminal was closed; 137 the agent was killed.

    Args:
        config_path: roles.toml.
        overrides: ``a.b=c`` pairs put over it.
        screen: ``module:function``; the agent calls it with (config, run_dir), calls the result with each RunStatus,
            and calls its `close` at the end.
        system: the system roles; empty for a supervised tree on its own.

    Raises:
        RelaxError: the run must not start, and which setting is why. Nothing was started.
    """
    run = prepare(load_config(config_path, list(overrides)), config_path, overrides, system)
    command = _command(run, screen, system)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, command)
    finally:
        run.rollback()


def start(
    config_path: Path, overrides: Sequence[str] = (), *, screen: str = "", system: Sequence[str] = SYSTEM_ROLES
) -> tuple[RunPaths, subprocess.Popen[bytes]]:
    """Start a run that is independent of this process and its terminal; its output goes to ``logs/up.log``.

    Returns:
        The run's directories, and its keeper.

    Raises:
        RelaxError: the run must not start.
    """
    run = prepare(load_config(config_path, list(overrides)), config_path, overrides, system)
    try:
        run.paths.logs.mkdir(parents=True, exist_ok=True)
        with run.paths.log(OUTPUT).open("ab") as out:
            keeper = subprocess.Popen(
                _command(run, screen, system),
                pass_fds=[run.lock_fd],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
    except BaseException:
        run.rollback()
        raise
    os.close(run.lock_fd)
    return run.paths, keeper


def _command(run: PreparedRun, screen: str, system: Sequence[str]) -> list[str]:
    """The keeper's command line, which ends with the agent's. It inherits the lock on the run directory."""
    keeper = [sys.executable, "-m", "relax_rt.supervision.keeper"]
    keeper += ["--run-id", run.paths.run_id, "--run-dir", str(run.paths.run_dir)]
    agent = [sys.executable, "-m", "relax_rt.cluster.head", *keeper[3:]]
    agent += ["--screen", screen] if screen else []
    agent += ["--system", ",".join(system)]
    os.set_inheritable(run.lock_fd, True)
    return [*keeper, "--", *agent]


def check_start(config: RunConfig) -> None:
    """Refuse a run that cannot start in its directory or on this machine, before the slow checks.

    `prepare` repeats these checks under the lock; this function creates no files.

    Raises:
        RelaxError: its run is alive, the directory is another config's, or /dev/shm is too small.
    """
    run_dir = Path(config.run.dir)
    with suppress(control.NoRun):
        found = control.find_run(run_dir)
        if found.alive:
            raise RelaxError(
                f"run.dir = {str(run_dir)!r} belongs to a run that is alive",
                why=f"run {found.paths.run_id}, status {found.record['status']}",
                hint="`relax-rt attach` shows it; end it with `relax-rt down`, or choose another run.name or run.dir",
            )
    _check_same_config(run_dir, config_digest(config), config)
    # Runs that died may have left shared memory behind.
    clean_stale_runs()
    check_shared_memory(config)


def prepare(config: RunConfig, config_path: Path, overrides: Sequence[str], system: Sequence[str]) -> PreparedRun:
    """Check everything and make the run's directories. Raises RelaxError: the run must not start."""
    check_nodes(config, plan_roles(config, system))
    run_dir = Path(config.run.dir)
    lock_fd = lock_run_dir(run_dir)
    try:
        digest = config_digest(config)
        _check_same_config(run_dir, digest, config)
        clean_stale_runs()
        check_shared_memory(config)
        paths = RunPaths(secrets.token_hex(4), run_dir)
        paths.make_private()
        if config.supervision.nodes.listen:
            write_key(paths.socket_dir / JOIN_KEY, read_key(make_key(run_dir)))
    except BaseException:
        os.close(lock_fd)
        raise
    write_resolved(config, run_dir / RESOLVED_CONFIG)
    if config_path.suffix == ".toml":
        shutil.copyfile(config_path, run_dir / "roles.toml")
    update_run(
        run_dir,
        run_id=paths.run_id,
        name=config.run.name,
        config=str(config_path.resolve()),
        overrides=list(overrides),
        config_digest=digest,
        chosen={key: one.model_dump() for key, one in config.chosen.items()},
        status="starting",
        machine=machine(),
        started_at=time.time(),
        **dict.fromkeys(("ended_at", "exit_code", "reason", "diagnosis", "first", "agent")),
    )
    return PreparedRun(config, paths, lock_fd)


def lock_run_dir(run_dir: Path) -> int:
    """Make a run directory and lock it. Keeper and agent inherit the lock, which ends with the last of them.

    Returns:
        The descriptor that holds the lock.

    Raises:
        RelaxError: the directory cannot be written, is in use, or has another format.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        fd = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RelaxError(
            f"run.dir = {str(run_dir)!r} cannot be used", why=str(error), hint="choose a folder that you may write to"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        run = read_run(run_dir) or {}
        raise RelaxError(
            f"run.dir = {str(run_dir)!r} belongs to a run that is alive",
            why=f"run {run.get('run_id', '?')}, status {run.get('status', '?')}",
            hint="end it with `relax-rt down`, or choose another run.name or run.dir",
        ) from error
    try:
        if (found := read_run(run_dir)) is not None:
            control.check_format(run_dir, found)
    except control.NoRun:
        os.close(fd)
        raise
    return fd


def _check_same_config(run_dir: Path, digest: str, config: RunConfig) -> None:
    run = read_run(run_dir)
    if run is None:
        if (run_dir / RUN_JSON).exists():
            raise RelaxError(f"{run_dir / RUN_JSON} cannot be read", hint="move the run directory away")
        return
    control.check_format(run_dir, run)
    if run.get("config_digest", digest) != digest:
        changed = _changed(run_dir / RESOLVED_CONFIG, config)
        job = load_job(config.run.job)
        may_change = job.changeable
        if changed and all(key in may_change for key, _, _ in changed):
            reasons = job.past(run_dir)
            for key, was, have in changed:
                if key in reasons:
                    raise RelaxError(
                        f"{key} was {_as_text(was)}, is {_as_text(have)}: it has no effect in this run any more",
                        why=reasons[key],
                        hint=f"set {key} back to {_as_text(was)}, or choose another run.name",
                    )
            return
        other = [one for one in changed if one[0] not in may_change]
        rest = [key for key, _, _ in other[MAX_SHOWN:MAX_NAMED]]
        more = f"; and so are {', '.join(rest)}{', …' if len(other) > MAX_NAMED else ''}" if rest else ""
        shown = [f"{key} was {_as_text(was)}, is {_as_text(have)}" for key, was, have in other[:MAX_SHOWN]]
        differences = f": {'; '.join(shown)}{more}" if other else ""
        back = "set these back, " if other else ""
        raise RelaxError(
            f"run.dir = {str(run_dir)!r} belongs to a run with another config",
            why=f"run {run.get('run_id', '?')} was started from {run.get('config', '?')} with other settings"
            f"{differences}",
            hint=f"choose another run.name or run.dir, {back}or move the old directory away",
        )


def _changed(path: Path, config: RunConfig) -> list[tuple[str, Any, Any]]:
    """The keys whose values differ from those of a resolved config: key, old and new value, without LOCATION_KEYS.
    Empty if the file cannot be read."""
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    now = json.loads(json.dumps(config.model_dump(mode="json")))
    return [found for found in _differences(before, now) if not found[0].startswith(LOCATION_KEYS)]


def _differences(before: Any, now: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    if not (isinstance(before, dict) and isinstance(now, dict)):
        if before != now:
            yield at, before, now
        return
    for key in dict.fromkeys([*before, *now]):
        yield from _differences(before.get(key), now.get(key), f"{at}.{key}" if at else key)


def _as_text(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"


def check_shared_memory(config: RunConfig) -> None:
    """Refuse a run that does not fit into /dev/shm. Raises RelaxError: which setting asks for too much."""
    job_bytes = load_job(config.run.job).shm_bytes(config)
    need = config.queue.capacity_mib * MIB + job_bytes
    free = shutil.disk_usage(SHM_ROOT).free
    if need > free:
        raise RelaxError(
            f"queue.capacity_mib = {config.queue.capacity_mib} does not fit into {SHM_ROOT}",
            why=f"the run needs {need // MIB} MiB ({job_bytes // MIB} MiB for the job), {free // MIB} MiB are free",
            hint="lower queue.capacity_mib, or make /dev/shm larger (in a container: --shm-size)",
        )
