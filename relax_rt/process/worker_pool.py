"""A pool of worker processes for user code: start, ask by framed messages, kill and replace.

Reward functions (roles/rewards/workers.py) and environments (roles/agentic/workers.py) run in such workers:

- A worker is `python -m MODULE FD` under a guard of its own (sandbox_guard.py). The guard limits processes and memory
  of the worker with everything it starts, limits what they print, and kills all of them at the end.
- Each message on its socket is a length and a msgpack body. The first one, the setup, has it load the user's code; its
  first reply says whether that worked.
- `Worker.request` carries out one request at a time, each with its own deadline, and passes replies on in the order in
  which the worker completes them. A worker that hangs is killed. Callers that multiplex requests themselves use
  `send`, `receive` and `kill` instead.
- User code can write anything to the socket. Nothing that is read from it is trusted beyond its type.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import msgspec

from relax_rt.process.sandbox import Level, read_guard_report, start_guard
from relax_rt.process.worker import LENGTH
from relax_rt.transport.rpc.errors import RelaxError

START_S = 120.0
"""Time for a worker to import what its user's code needs."""
EXIT_REPORT_S = 10.0
"""Time for a guard to report how its worker ended, after the worker's socket was closed."""
FOREIGN_BYTES = "its user code, or a process that this started, wrote to its socket"


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of a pool run, and their limits.

    Attributes:
        name: of a worker, in errors.
        module: run as a script, with the number of the socket as its argument.
        setup: the first message.
        processes, memory_mib: limits for a worker with all its descendants; memory is what they do not share.
        processes_key, memory_key: config keys of these limits, for errors.
        max_reply_bytes: largest message that a worker may send.
    """

    name: str
    module: str
    setup: bytes
    processes: int
    memory_mib: int | None = None
    processes_key: str
    memory_key: str
    max_reply_bytes: int


class WorkerDied(RelaxError):
    """A worker's process ended, or sent what it may not send.

    Attributes:
        how: exit code, signal or limit, in words.
        over_limit: it exceeded a limit of its spec.
    """

    how = ""
    over_limit = False


class WorkerNotStarted(WorkerDied):
    """A worker's guard could not start its process at all, as where namespaces are not permitted."""


class WorkerTimeout(RelaxError):
    """A request was not answered in time: the worker was killed."""


class WorkerKilled(RelaxError):
    """A worker was killed because of another request, before it was this one's turn."""


class Worker:
    """One worker process under its guard. Whoever starts it kills it.

    Attributes:
        ended: why it was killed or died; empty while it lives.
        load: what is assigned to it, for `WorkerPool.least_loaded`.
    """

    def __init__(self, spec: WorkerSpec, level: Level) -> None:
        self.spec, self._level = spec, level
        self.ended, self.load = "", 0
        self._turn = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self._killing: asyncio.Task[None] | None = None
        self._guard: Process
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> bytes:
        """Start the process, send it the setup and return its first reply. It is killed if anything fails. Raises
        WorkerNotStarted: the guard could not start it. WorkerDied: it died, or did not load in time."""
        name = self.spec.name
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                self._reader, self._writer = await asyncio.open_connection(sock=ours)
                fd = theirs.fileno()
                order = {
                    "kind": "worker",
                    "level": self._level,
                    # -P: no file of the current folder may shadow a module.
                    "argv": [sys.executable, "-P", "-m", self.spec.module, str(fd)],
                    "env": dict(os.environ),
                    "folder": os.getcwd(),  # noqa: PTH109 - a plain text
                    "fds": [fd],
                    "limits": {"processes": self.spec.processes, "total_mib": self.spec.memory_mib},
                }
                self._guard = await self._stack.enter_async_context(start_guard(order, fds=[fd], talk=True))
            try:
                async with asyncio.timeout(START_S):
                    report = await read_guard_report(self._guard)
                    if "started" not in report:
                        why = str(report.get("refused") or "its guard was killed")
                        raise WorkerNotStarted(name, why=f"it could not be started: {why}")
                    await self.send(LENGTH.pack(len(self.spec.setup)) + self.spec.setup)
                    return await self.receive()
            except TimeoutError:
                why = f"it did not load its user's code within {START_S:g} s"
                raise WorkerDied(name, why=why, hint="see the log") from None
        except BaseException as error:
            await self.kill(str(error) or type(error).__name__)
            raise

    def write(self, frame: bytes) -> None:
        """Send a frame without waiting for room."""
        if not self.ended:
            assert self._writer is not None
            self._writer.write(frame)

    async def send(self, frame: bytes) -> None:
        """Send a frame. Raises WorkerDied: the process ended."""
        assert self._writer is not None
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except ConnectionError:
            raise await self._died() from None

    async def receive(self) -> bytes:
        """Return the body of the next message. Raises WorkerDied: the process ended, or announced a message that is too
        large."""
        try:
            (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if size > self.spec.max_reply_bytes:
                raise self.garbage(f"{size} bytes were announced")
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._died() from None

    def garbage(self, detail: str = "") -> WorkerDied:
        """Return the error for a message that the worker's own code would not send."""
        error = WorkerDied(self.spec.name, why=FOREIGN_BYTES + (f": {detail}" if detail else ""))
        error.how = error.why
        return error

    async def request(self, frame: bytes, timeout_s: float, take: Callable[[bytes], bool], where: str) -> None:
        """Send a request and pass its replies to `take`, in order of completion, until it returns True.

        Requests are carried out one after the other; the deadline starts when it is this one's turn. A cancelled
        request kills the worker: its replies could be taken for those of the next one.

        Args:
            where: names the request in errors.

        Raises:
            WorkerTimeout: too late; the worker was killed. WorkerDied: it ended. WorkerKilled: it was killed before.
        """
        async with self._turn:
            if self.ended:
                raise WorkerKilled(where, why=self.ended)
            try:
                async with asyncio.timeout(timeout_s):
                    await self.send(frame)
                    while not take(await self.receive()):
                        pass
            except TimeoutError:
                await self.kill(f"another request of its process was stuck {where}")
                why = f"it did not return within {timeout_s:g} s: its process was killed"
                raise WorkerTimeout(where, why=why) from None
            except WorkerDied as error:
                await self.kill(f"its process ended {where}: {error.how}")
                raise
            except BaseException:
                await self.kill(f"a request was cancelled {where}")
                raise

    async def _died(self) -> WorkerDied:
        """Return how the process ended, as its guard reports."""
        report: dict[str, Any] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_REPORT_S):
                report = await read_guard_report(self._guard)
        spec, code = self.spec, report.get("code")
        over = {
            "processes": f"it had more than {spec.processes} processes ({spec.processes_key})",
            "memory": f"it took more than {spec.memory_mib} MiB ({spec.memory_key})",
        }.get(str(report.get("ended")), "")
        how = over or "killed, its guard does not say how"
        if not over and isinstance(code, int):
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
        error = WorkerDied(spec.name, why=f"its process ended: {how}", hint="see the log")
        error.how, error.over_limit = how, bool(over)
        return error

    async def kill(self, why: str) -> None:
        """Kill the process with everything it started. It is dead on return, also for a second caller."""
        self.ended = self.ended or why
        if self._writer is not None:
            self._writer.close()
        if self._killing is None:
            # In a task of its own: a caller that is cancelled must not leave the process half killed.
            self._killing = asyncio.create_task(self._stack.aclose())
            self._killing.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(self._killing)


W = TypeVar("W", bound=Worker)


class WorkerPool(Generic[W]):
    """Up to `size` workers; those that died are replaced when they are needed.

    Use `lease` for a worker of one's own, or `least_loaded` to share workers.

    Args:
        make: creates a worker, which the pool starts.

    Attributes:
        workers: those that were started and not yet replaced.
        level: how they are isolated: with limits only, once namespaces turned out not to be permitted.
        replaced: workers that died and were replaced.
    """

    def __init__(self, size: int, make: Callable[[Level], W]) -> None:
        self._size, self._make = size, make
        self.level: Level = "namespaces"
        self.workers: list[W] = []
        self.replaced = 0
        self._filling = asyncio.Lock()
        self._places = asyncio.Semaphore(size)
        self._idle: list[W] = []

    @property
    def alive(self) -> list[W]:
        """The workers that have not ended."""
        return [worker for worker in self.workers if not worker.ended]

    async def fill(self, count: int | None = None) -> None:
        """Replace dead workers, so that `count` (by default `size`) are alive. Raises RelaxError: one cannot be
        started."""
        async with self._filling:
            self._forget_dead()
            missing = (self._size if count is None else count) - len(self.workers)
            for result in await asyncio.gather(*(self._start() for _ in range(missing)), return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result

    async def _start(self) -> W:
        level = self.level
        worker = self._make(level)
        try:
            await worker.start()
        except WorkerNotStarted:
            if level == "limits":
                raise
            self.level = "limits"
            return await self._start()
        # At once, not after gather: if its caller is cancelled while others start, this one would be leaked.
        self.workers.append(worker)
        return worker

    async def least_loaded(self) -> W:
        """Return the worker with the smallest load, after replacing dead ones. Raises RelaxError: one cannot be
        started."""
        if len(self.alive) < self._size:
            await self.fill()
        return min(self.workers, key=lambda worker: worker.load)

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[W]:
        """Wait for an exclusive worker; one is started if none is idle. Raises RelaxError: it cannot be started."""
        async with self._places:
            while self._idle and self._idle[-1].ended:
                self._idle.pop()
            if self._idle:
                worker = self._idle.pop()
            else:
                self._forget_dead()
                worker = await self._start()
            try:
                yield worker
            finally:
                if not worker.ended:
                    self._idle.append(worker)

    def _forget_dead(self) -> None:
        alive = self.alive
        self.replaced += len(self.workers) - len(alive)
        self.workers = alive

    async def close(self, why: str = "the pool was closed") -> None:
        """Kill all workers and what they started."""
        await asyncio.gather(*(worker.kill(why) for worker in self.workers), return_exceptions=True)
