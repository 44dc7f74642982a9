"""The agent's side of the keeper: when it dies, a stand-in below the agent takes its place."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from relax_rt.supervision.executor import EmitEvent
from relax_rt.supervision.local import LocalExecutor
from relax_rt.supervision.rundir import RunPaths

AGAIN_S = 1.0


class KeeperWatch:
    """Watches the keeper above us by pidfd, and after it the stand-ins, each started when the one before is dead."""

    def __init__(self, paths: RunPaths, local: LocalExecutor, emit: EmitEvent) -> None:
        self._paths, self._local, self._emit = paths, local, emit
        self._log = structlog.get_logger()
        self._tasks: set[asyncio.Task[Any]] = set()

    def watch(self, keeper_pid: int) -> None:
        """Begin with the keeper that started us."""
        # If it died before we could look, our parent is another by now.
        if os.getppid() != keeper_pid:
            self._died(0)
        else:
            on_death(keeper_pid, self._died)

    def close(self) -> None:
        """Start no more stand-ins."""
        for task in self._tasks:
            task.cancel()

    def _died(self, pid: int) -> None:
        self._log.warning("the keeper is dead; starting a stand-in", pid=pid)
        self._emit("keeper_died", pid=pid)
        self._background(self._start())

    async def _start(self) -> None:
        argv = [sys.executable, "-m", "relax_rt.supervision.keeper"]
        argv += ["--run-id", self._paths.run_id, "--run-dir", str(self._paths.run_dir), "--watch", str(os.getpid())]
        env = {name: value for name, value in os.environ.items() if name != "RELAX_RUN_ID"}
        child = await self._local.helper(argv, env, self._paths.log("keeper"))
        self._emit("keeper_started", pid=child.pid)

        def died(pid: int) -> None:
            child.wait()
            self._local.helper_gone(pid)
            self._emit("keeper_died", pid=pid)
            self._background(self._again())

        on_death(child.pid, died)

    async def _again(self) -> None:
        await asyncio.sleep(AGAIN_S)
        await self._start()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def on_death(pid: int, callback: Callable[[int], None]) -> None:
    """Call back when the process has ended. It must not have been waited for before this call."""
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(pid)

    def died() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        callback(pid)

    loop.add_reader(pidfd, died)
