"""A run of real processes under test: brought up as a user would, watched through its event log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_rt.observe.events import EventFollower
from relax_rt.process import procfs
from relax_rt.supervision import control
from relax_rt.supervision.rundir import RunPaths, members_of_run, read_run

TOYS = Path(__file__).parent
WAIT_S = 120.0
"""How long a test waits for what must come to pass; nothing is expected to take that long."""


def until(what: str, probe: Callable[[], Any], over: Callable[[], Any] = lambda: False) -> Any:
    """Wait until the probe answers with something true; in vain when it is over before."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if found := probe():
            return found
        if over():
            break
        time.sleep(0.02)
    raise AssertionError(f"waited in vain: {what}")


def environment() -> dict[str, str]:
    """Ours, with the toys' entry points on the path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOYS), os.environ.get("PYTHONPATH", "")])}


class LiveRun:
    """`up` on a config; call it as a context manager, so that nothing stays behind when a test fails."""

    def __init__(
        self, tmp_path: Path, roles: str, tables: str = "", *, system: tuple[str, ...] = (), job: str = "toy"
    ) -> None:
        self.run_dir = tmp_path / "run"
        self.system = system
        self.prefix: list[str] = []
        """Put in front of the command: how to run it on another node."""
        self.toml = tmp_path / "roles.toml"
        self.toml.write_text(f'[run]\nname = "toy"\njob = "{job}"\ndir = "{self.run_dir}"\n{tables}\n{roles}\n')
        self.events: list[dict[str, Any]] = []
        self._follower = EventFollower(self.run_dir)
        self._looked = 0
        self.run_ids: set[str] = set()

    def start(self) -> LiveRun:
        """Bring it up; its process is the keeper."""
        self.process = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "supervision_up", str(self.toml), *self.system],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self

    def __enter__(self) -> LiveRun:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        run_id = (read_run(self.run_dir) or {}).get("run_id")
        if run_id:
            self.run_ids.add(run_id)
        agent = (read_run(self.run_dir) or {}).get("agent") or {}
        for pid in (self.process.pid, int(agent.get("pid", 0))):
            if pid and procfs.start_time(pid):
                os.kill(pid, signal.SIGKILL)
        for run_id in self.run_ids:
            procfs.kill_until_none(lambda run_id=run_id: members_of_run(run_id), reap=False)  # type: ignore[misc]
            RunPaths(run_id, self.run_dir).remove_private()
        self.process.wait()
        self._follower.close()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.record["run_id"], self.run_dir)

    @property
    def record(self) -> dict[str, Any]:
        return read_run(self.run_dir) or {}

    @property
    def agent_pid(self) -> int:
        return int(self.record["agent"]["pid"])

    def poll(self) -> list[dict[str, Any]]:
        self.events += self._follower.poll()
        return self.events

    def event(self, kind: str, nth: int = 0, **fields: Any) -> dict[str, Any]:
        """The nth event of that kind with those fields; waits for it."""

        def probe() -> dict[str, Any] | None:
            found = [e for e in self.poll() if e["kind"] == kind and fields.items() <= e.items()]
            return found[nth] if len(found) > nth else None

        try:
            never_began = lambda: self.process.poll() == 2 and not self.events  # noqa: E731
            return until(f"event {kind} {fields}", probe, never_began)  # type: ignore[no-any-return]
        except AssertionError as error:
            log = "\n".join(map(str, self.events))
            output = "" if self.process.poll() is None or self.process.stdout is None else self.process.stdout.read()
            raise AssertionError(f"{error}\n{log}\n{output}") from None

    def ready(self, *slots: str) -> LiveRun:
        for slot in slots:
            self.event("slot_ready", slot=slot)
        return self

    def pid(self, slot: str) -> int:
        """Of a slot's process. Never 0: a signal to that would reach the tests' own group."""
        pid = next(s.pid for s in control.status(self.run_dir).slots if s.slot == slot)
        assert pid > 0, f"{slot} has no process now"
        return pid

    def ends(self) -> int:
        """Exit code of `up`."""
        return self.process.wait(WAIT_S)

    def left(self) -> list[str]:
        """What of the run is still there."""
        self.run_ids.add(self.paths.run_id)
        rest = [f"process {pid}" for pid in members_of_run(self.paths.run_id)]
        return rest + [str(d) for d in (self.paths.socket_dir, self.paths.shm_dir) if d.exists()]

    def is_gone(self) -> bool:
        """Wait until nothing of the run is left."""
        return bool(until("nothing left of the run", lambda: not self.left()))
