"""Processes around one queue folder, really killed, and nothing of them left behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import transfer_queue_far_end

from relax_rt.transport.base.folder import SHM_PREFIX, SHM_ROOT
from relax_rt.transport.base.liveness import NODE_ENV

T = TypeVar("T")
_POLLS = 6000


async def settled(ask: Callable[[], Awaitable[T]], good: Callable[[T], bool]) -> T:
    """What is asked for, as soon as it is good; an assertion says what it was in the end if it never is."""
    for _ in range(_POLLS):
        found = await ask()
        if good(found):
            return found
        await asyncio.sleep(0.005)
    raise AssertionError(f"it stayed {found}")


class Process:
    """Another process; what it says comes line by line, as JSON."""

    def __init__(self, command: list[str], log: Path, settings: dict[str, str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
        with log.open("wb") as errors:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        self._log = log
        self.pid = self._popen.pid

    def line(self) -> str:
        """What it says next."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, f"it ended with {self._popen.wait()}: {self._log.read_text()}"
        return line.rstrip("\n")

    def told(self) -> Any:
        """What it tells next."""
        return json.loads(self.line())

    def tell(self, line: str = "") -> None:
        """A line to its standard input."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(line + "\n")
        self._popen.stdin.flush()

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        """With SIGKILL. It must have lived."""
        assert self.alive, f"it ended by itself with {self._popen.wait()}: {self._log.read_text()}"
        self.end(signal.SIGKILL)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end; answers with its exit status."""
        if self.alive:
            self._popen.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        status = self._popen.wait(60)
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()
        return status


class World:
    """The processes of one test. `folder` is the queue's."""

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self.folder = tmp_path / "queue"
        self._started: list[Process] = []

    def start(self, *command: str, before: Sequence[str] = (), node: str = "") -> Process:
        """A Python process. before: what runs it. node: where it thinks it is."""
        log = self._tmp_path / f"process-{len(self._started)}.err"
        process = Process([*before, sys.executable, *command], log, {NODE_ENV: node} if node else {})
        self._started.append(process)
        return process

    def broker(self, *options: str, folder: Path | None = None) -> Process:
        """``python -m relax_rt.transport.queue FOLDER OPTIONS``, once it listens."""
        process = self.start("-m", "relax_rt.transport.queue", str(folder or self.folder), *options)
        assert process.line().startswith("queue ")
        return process

    def far(self, function: str, *arguments: str, before: Sequence[str] = (), node: str = "") -> Process:
        """A function of transfer_queue_far_end in another process."""
        command = (transfer_queue_far_end.__file__, function, str(self.folder), *arguments)
        return self.start(*command, before=before, node=node)

    def shm(self) -> Path | None:
        """Where the payloads are, or were."""
        known = self.folder / "memory"
        name = known.read_text() if known.exists() else ""
        return SHM_ROOT / f"{SHM_PREFIX}{name}" if name not in ("", "disk") else None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.end(signal.SIGKILL)
        shm = self.shm()
        if shm is not None:
            shutil.rmtree(shm, ignore_errors=True)
