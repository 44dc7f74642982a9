"""Worker processes of a slot: environments whose methods block, killed with all that they started when one is late.

Each is under a guard of its own, as reward functions are, and has other limits: environments keep programs, browsers
and much memory for as long as they play.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, ClassVar

import msgspec

from relax_rt.roles.agentic.frames import LENGTH, MOST_BYTES, Answer, Call, Op, Spec, frame
from relax_rt.roles.agentic.interface import Observation, Reply, Step, Task
from relax_rt.roles.agentic.settings import EnvSettings
from relax_rt.roles.rewards.box.run import Level, guard, read_report
from relax_rt.transport.rpc.errors import RelaxError

START_S = 120.0
"""A worker that has not loaded the environment by then is given up."""
CLOSE_S = 5.0
OVER = {
    "processes": "it had more than {processes} processes (roles.env.worker_processes)",
    "memory": "it took more than {total_mib} MiB (roles.env.worker_memory_mib)",
}


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker may have with all that it starts: processes, and memory of their own; None: no bound."""

    processes: int = 1024
    total_mib: int | None = None


class NotGuarded(RelaxError):
    """A worker's process did not even begin."""


class Stuck(RelaxError):
    """A call of an environment did not return in time; its process was killed."""


class Broken(RelaxError):
    """An environment raised an error, or its process ended in a call."""


class OverLimit(Broken):
    """A program was ended, or failed, because it took more than it may have."""


class Lost(RelaxError):
    """An episode is gone through no fault of its own: its process was killed because of another one."""


class Worker:
    """One process, with calls done one after the other."""

    module: ClassVar[str] = "relax_rt.roles.agentic.worker"

    def __init__(self, spec: Spec, limits: WorkerLimits, level: Level) -> None:
        self._spec, self._limits, self._level = spec, limits, level
        self.episodes: set[int] = set()
        self._turn = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._stack = AsyncExitStack()
        self._killing: asyncio.Task[None] | None = None
        self._guard: Process
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self.ended = ""
        """Why it is no more."""

    async def start(self) -> None:
        """Start the process and have it load the environment.

        Raises:
            NotGuarded: its guard could not begin. RelaxError: it cannot.
        """
        what = f"a worker of {self._spec.target}"
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            order = self._order(theirs.fileno())
            self._guard = await self._stack.enter_async_context(guard(order, fds=[theirs.fileno()], talk=True))
        try:
            async with asyncio.timeout(START_S):
                said = await read_report(self._guard)
                if "started" not in said:
                    raise NotGuarded(what, why=str(said.get("refused") or "its guard was killed"))
                answer = await self._answer()
            if answer is None or answer.error:
                why = (
                    answer.error
                    if answer
                    else f"its process ended while it loaded the environment: {await self._how()}"
                )
                raise RelaxError(what, why=why, hint="see the log")
        except TimeoutError:
            await self.kill("it did not load the environment in time")
            raise RelaxError(what, why=f"it did not load within {START_S:g} s", hint="see the log") from None
        except BaseException:
            await self.kill("it could not load the environment")
            raise

    def _order(self, fd: int) -> dict[str, object]:
        return {
            "kind": "worker",
            "level": self._level,
            # Without the current folder on its path: nothing there may shadow a module.
            "argv": [sys.executable, "-P", "-m", self.module, str(fd), msgspec.json.encode(self._spec).decode()],
            "env": dict(os.environ),
            "folder": os.getcwd(),  # noqa: PTH109 the plain text is wanted
            "fds": [fd],
            "limits": msgspec.to_builtins(self._limits),
        }

    async def call(self, episode: int, op: Op, data: bytes, timeout_s: float, where: str) -> bytes:
        """Have an episode's environment do something; the deadline runs from the moment it is its turn.

        Cancelling it leaves the call to itself: its process goes on with the others' calls behind it.

        Raises:
            Stuck: it was late; the process is killed, and with it all its episodes.
            Broken: it raised an error, or the process ended.
            Lost: the process was killed before it was its turn.
        """
        task = asyncio.create_task(self._call(episode, op, data, timeout_s, where))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _call(self, episode: int, op: Op, data: bytes, timeout_s: float, where: str) -> bytes:
        async with self._turn:
            if self.ended:
                raise Lost(where, why=self.ended)
            try:
                async with asyncio.timeout(timeout_s):
                    self._writer.write(frame(Call(next(self._numbers), episode, op, data)))
                    await self._writer.drain()
                    answer = await self._answer()
            except TimeoutError:
                await self.kill(f"another episode of its process was stuck {where}")
                raise Stuck(where, why=f"it did not return within {timeout_s:g} s: its process was killed") from None
            except ConnectionError:
                answer = None
            if answer is None:
                how = await self._how()
                await self.kill(f"its process ended {where}: {how}")
                raise Broken(where, why=f"the process ended: {how}")
            if answer.error:
                raise Broken(where, why=answer.error)
            return answer.data

    async def _answer(self) -> Answer | None:
        body = await self._body()
        return None if body is None else msgspec.msgpack.decode(body, type=Answer)

    async def _body(self) -> bytes | None:
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return None if length > MOST_BYTES else await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def _how(self) -> str:
        """How the process ended, as its guard says."""
        said: dict[str, object] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                said = await read_report(self._guard)
        reason, code = str(said.get("ended", "")), said.get("code")
        if reason in OVER:
            return OVER[reason].format(**msgspec.to_builtins(self._limits))
        if not isinstance(code, int):
            return "nobody says how"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    async def kill(self, why: str) -> None:
        """End it, and all that it started; it is gone then, whoever began with it."""
        self.ended = self.ended or why
        self._writer.close()
        if self._killing is None:
            self._killing = asyncio.create_task(self._stack.aclose())
            self._killing.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(self._killing)


class RemoteEnvironment:
    """An environment in a worker, as episodes use it. Its calls raise Stuck, Broken and Lost."""

    def __init__(self, worker: Worker, number: int, timeout_s: float, name: str) -> None:
        self._worker, self._number, self._timeout_s, self._name = worker, number, timeout_s, name
        self._turns = 0
        worker.episodes.add(number)

    async def reset(self, task: Task) -> Observation | str:
        """See Environment."""
        found = await self._call("reset", msgspec.msgpack.encode(task), f"in reset of {self._name}")
        return msgspec.msgpack.decode(found, type=Observation | str)

    async def step(self, reply: Reply) -> Step:
        """See Environment."""
        self._turns += 1
        where = f"in step {self._turns} of {self._name}"
        return msgspec.msgpack.decode(await self._call("step", msgspec.msgpack.encode(reply), where), type=Step)

    async def close(self) -> None:
        """See Environment."""
        self._worker.episodes.discard(self._number)
        if not self._worker.ended:
            await self._call("close", b"", f"in close of {self._name}")

    async def _call(self, op: Op, data: bytes, where: str) -> bytes:
        return await self._worker.call(self._number, op, data, self._timeout_s, where)


class Pool:
    """As many workers as a slot has; use it as an async context manager.

    Args:
        timeout_s: of each call.
        kind: makes a worker, if it is another than for methods that block.
    """

    def __init__(
        self,
        spec: Spec,
        size: int,
        timeout_s: float,
        limits: WorkerLimits | None = None,
        kind: Callable[[Spec, WorkerLimits, Level], Worker] | None = None,
    ) -> None:
        self._spec, self._size, self._timeout_s = spec, size, timeout_s
        self._limits = limits or WorkerLimits()
        self.level: Level = "namespaces"
        """How workers are guarded: where namespaces are not permitted, with limits only."""
        self._workers: list[Worker] = []
        self._kind = kind or Worker
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()
        self.killed = 0
        """Workers that had to be replaced."""

    async def __aenter__(self) -> Pool:
        try:
            await self._fill()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(worker.kill("the slot ends") for worker in self._workers), return_exceptions=True)

    async def environment(self, name: str) -> Any:
        """An environment in the worker that has the fewest: a RemoteEnvironment.

        Raises:
            RelaxError: a worker that ended cannot be replaced.
        """
        return RemoteEnvironment(await self.worker(), next(self._numbers), self._timeout_s, name)

    async def worker(self) -> Worker:
        """The one that has the fewest episodes; raises as `environment`."""
        if sum(not worker.ended for worker in self._workers) < self._size:
            await self._fill()
        return min(self._workers, key=lambda one: len(one.episodes))

    async def _fill(self) -> None:
        """Start what is missing."""
        async with self._starting:
            there = [worker for worker in self._workers if not worker.ended]
            self.killed += len(self._workers) - len(there)
            self._workers = there
            found = await asyncio.gather(
                *(self._started() for _ in range(self._size - len(there))), return_exceptions=True
            )
            for one in found:
                if isinstance(one, BaseException):
                    raise one

    async def _started(self) -> Worker:
        level = self.level
        worker = self._kind(self._spec, self._limits, level)
        try:
            await worker.start()
        except NotGuarded:
            if level == "limits":
                raise
            self.level = "limits"
            return await self._started()
        # At once: whoever waits for others as well may be cancelled, and it would be nobody's.
        self._workers.append(worker)
        return worker


def limits_of(settings: EnvSettings) -> WorkerLimits:
    """What [roles.env] gives a worker."""
    return WorkerLimits(processes=settings.worker_processes, total_mib=settings.worker_memory_mib)
