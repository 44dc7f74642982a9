"""A run of toys, or of any roles.toml, brought up and watched by a tool; nothing of it stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_rt.interfaces.agent import RunStatus
from relax_rt.observe.events import EventFollower
from relax_rt.process import procfs
from relax_rt.supervision import control
from relax_rt.supervision.rundir import RunPaths, members_of_run, read_run
from relax_rt.transport.rpc.errors import RelaxError

HERE = Path(__file__).resolve().parent
UP = """import sys; from pathlib import Path; from relax_rt.cluster.launch import up
sys.exit(up(Path(sys.argv[1]), sys.argv[3:], system=[word for word in sys.argv[2].split(",") if word]))"""


class ToyRun:
    """`relax-rt up` of a config, as a context manager.

    Args:
        folder: gets the run directory ``run``.
        config: a roles.toml, or the text of one; {dir} in it becomes the run directory.
        overrides: put over it. system: the system roles. env: beside ours.
    """

    def __init__(
        self,
        folder: Path,
        config: Path | str,
        overrides: dict[str, Any] | None = None,
        *,
        system: tuple[str, ...] = ("registry", "queue"),
        env: dict[str, str] | None = None,
    ) -> None:
        self.run_dir = folder / "run"
        self.output = folder / "up.out"
        if isinstance(config, str):
            self.config = folder / "roles.toml"
            self.config.write_text(config.replace("{dir}", str(self.run_dir)))
        else:
            self.config = config
            overrides = {"run.dir": json.dumps(str(self.run_dir)), **(overrides or {})}
        self.overrides = [f"{key}={value}" for key, value in (overrides or {}).items()]
        self.system, self.env = system, env or {}
        self.events: list[dict[str, Any]] = []
        self._follower = EventFollower(self.run_dir)
        self.process: subprocess.Popen[bytes]

    def start(self) -> ToyRun:
        """Bring it up."""
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-c", UP, str(self.config), ",".join(self.system), *self.overrides]
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __enter__(self) -> ToyRun:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        record = read_run(self.run_dir) or {}
        run_id, agent = record.get("run_id"), int((record.get("agent") or {}).get("pid", 0))
        for pid in (self.process.pid, agent):
            if pid and procfs.start_time(pid) and (pid == self.process.pid or control.find_run(self.run_dir).alive):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if run_id:
            procfs.kill_until_none(lambda: members_of_run(run_id), reap=False)
            RunPaths(run_id, self.run_dir).remove_private()
        self._follower.close()

    def poll(self) -> list[dict[str, Any]]:
        """All events so far."""
        self.events += self._follower.poll()
        return self.events

    def status(self) -> RunStatus | None:
        """How it does; None while it cannot be asked."""
        try:
            return control.status(self.run_dir)
        except RelaxError:
            return None

    def until(self, what: str, probe: Callable[[], Any], limit_s: float = 120.0) -> Any:
        """What the probe answers once it is true.

        Raises:
            SystemExit: the run ended before, or it took too long.
        """
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if found := probe():
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise SystemExit(f"waited in vain for {what}:\n{self.output.read_text()[-3000:]}")

    def ready(self, limit_s: float = 120.0) -> RunStatus:
        """Once every slot is ready."""

        def probe() -> RunStatus | None:
            found = self.status()
            return found if found is not None and found.slots and all(s.state == "ready" for s in found.slots) else None

        return self.until("every slot to be ready", probe, limit_s)  # type: ignore[no-any-return]

    def end(self, wait_s: float = 60.0) -> int:
        """Drain it; its exit code."""
        if self.process.poll() is None:
            control.stop(self.run_dir, wait_s=wait_s)
        return self.process.wait(wait_s)

    def leftovers(self) -> list[str]:
        """What of the run is still there."""
        run_id = (read_run(self.run_dir) or {}).get("run_id", "")
        paths = RunPaths(run_id, self.run_dir)
        left = [f"process {pid}" for pid in members_of_run(run_id)] if run_id else []
        return left + [str(d) for d in (paths.socket_dir, paths.shm_dir) if run_id and d.exists()]
