"""The workers of one process that scores: started, given requests, and replaced when a call does not return."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from relax_rt.roles.rewards.box.run import Level, guard, read_report
from relax_rt.roles.rewards.scoring import GRACE_S, Failed, Request, Score, chunks
from relax_rt.roles.rewards.workers.messages import (
    HEADER,
    REPLY_BYTES,
    About,
    Calls,
    Done,
    Loaded,
    NotLoaded,
    Reply,
    Setup,
    frame,
)
from relax_rt.transport.rpc.errors import RelaxError

SERVE = "relax_rt.roles.rewards.workers.serve"
LOAD_S = 120.0
"""For a worker to import what its functions need."""
LOST_LOADING = 3
"""A worker that is lost so often while it loads is not tried again."""
LOST = {
    "processes": "it had more than {processes} processes (reward.processes)",
    "memory": "it took more than {total_mib} MiB (reward.memory_mib)",
}


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker may take, with all that it starts.

    Attributes:
        total_mib: memory of its own; None: not limited.
    """

    processes: int = 64
    total_mib: int | None = None


class Lost(RelaxError):
    """A worker is gone, or has been given up; the text says why. `excess`: it took more than it may."""

    excess = False


class NotStarted(Lost):
    """Its process did not even begin."""


class Function:
    """What the role knows of a function that a worker has loaded; see RewardFunction."""

    def __init__(self, about: About) -> None:
        self.is_async = about.is_async
        self.wants = None if about.wants is None else frozenset(about.wants)
        self.needs = frozenset(about.needs)


class Worker:
    """One worker process under its guard. `close` it, whatever happens."""

    def __init__(self, setup: Setup, limits: WorkerLimits, level: Level) -> None:
        self._setup, self._limits, self._level = setup, limits, level
        self._stack = contextlib.AsyncExitStack()
        self._guard: asyncio.subprocess.Process
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._number = 0

    async def start(self) -> list[About]:
        """Start it and have it load the functions.

        Raises:
            Lost: it died, or did not load in time.
            RelaxError: a function cannot be loaded, as the worker says.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            self._stack.push_async_callback(self._hang_up)
            number = theirs.fileno()
            order = {
                "kind": "worker",
                "level": self._level,
                # Without the current folder on its path: nothing there may shadow a module.
                "argv": [sys.executable, "-P", "-m", SERVE, str(number)],
                "env": dict(os.environ),
                "folder": str(os.getcwd()),  # noqa: PTH109 the plain text is wanted
                "fds": [number],
                "limits": msgspec.to_builtins(self._limits),
            }
            self._guard = await self._stack.enter_async_context(guard(order, fds=[number], talk=True))
        try:
            async with asyncio.timeout(LOAD_S):
                said = await read_report(self._guard)
                if "started" not in said:
                    why = str(said.get("refused") or "it was killed")
                    raise NotStarted("a reward worker", why=f"it could not be started: {why}")
                await self._send(frame(self._setup))
                answer = await self._read()
        except TimeoutError:
            raise Lost("a reward worker", why=f"it did not load its functions within {LOAD_S:g} s") from None
        if isinstance(answer, NotLoaded):
            raise RelaxError(answer.what, why=answer.why, hint=answer.hint)
        if not isinstance(answer, Loaded) or len(answer.parts) != len(self._setup.parts):
            raise Lost("a reward worker", why="it spoke nonsense")
        return answer.parts

    async def call(
        self, part: int, requests: Sequence[Request], done: Callable[[int, Score | Failed], None], timeout_s: float
    ) -> None:
        """Have requests scored; `done` is told of each as it comes.

        Raises:
            Lost: the worker is gone, or spoke nonsense. TimeoutError: not all came in time. It is of no use then.
        """
        self._number += 1
        number, missing = self._number, set(range(len(requests)))
        async with asyncio.timeout(timeout_s):
            await self._send(frame(Calls(number, part, list(requests))))
            while missing:
                answer = await self._read()
                if not isinstance(answer, Done) or answer.number != number or answer.index not in missing:
                    raise Lost("a reward worker", why="its function, or what that started, wrote to its socket")
                missing.remove(answer.index)
                done(answer.index, answer.outcome())

    async def _send(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except ConnectionError:
            raise await self._lost() from None

    async def _read(self) -> Reply:
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > REPLY_BYTES:
                raise Lost("a reward worker", why=f"its function wrote to its socket: {size} bytes are announced")
            reply: Reply = msgspec.msgpack.decode(await self._reader.readexactly(size), type=Reply)
            return reply
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._lost() from None
        except msgspec.MsgspecError:
            raise Lost("a reward worker", why="its function, or what that started, wrote to its socket") from None

    async def _lost(self) -> Lost:
        """How the process ended, as its guard says."""
        said = await read_report(self._guard)
        reason, code = said.get("ended"), said.get("code")
        why = "its process was killed"
        if reason in LOST:
            why = f"{why}: " + LOST[reason].format(**msgspec.to_builtins(self._limits))
        elif isinstance(code, int):
            why = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
        lost = Lost("a reward worker", why=why)
        lost.excess = reason in LOST
        return lost

    async def _hang_up(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def close(self) -> None:
        """End it and all that it started."""
        await self._stack.aclose()


class Pool:
    """Workers with the same functions. One that is lost is replaced; what it worked on has failed, the rest goes on.

    Args:
        say: told of each worker that was lost, in words.
    """

    def __init__(
        self, setup: Setup, limits: WorkerLimits, size: int, say: Callable[[str], None] = lambda why: None
    ) -> None:
        self._setup, self._limits, self._size, self._say = setup, limits, size, say
        self.level: Level = "namespaces"
        self._idle: asyncio.Queue[Worker | None] = asyncio.Queue()
        self._all: set[Worker] = set()
        self._lost_loading = 0
        self.functions: list[Function] = []

    async def start(self) -> None:
        """Start one worker, and so load the functions; the others come with the work.

        Raises:
            RelaxError: a function cannot be loaded, or no worker started.
        """
        try:
            worker = await self._started()
        except NotStarted:
            self.level = "limits"
            worker = await self._started()
        self._idle.put_nowait(worker)
        for _ in range(self._size - 1):
            self._idle.put_nowait(None)

    async def _started(self) -> Worker:
        worker = Worker(self._setup, self._limits, self.level)
        self._all.add(worker)
        try:
            self.functions = [Function(about) for about in await worker.start()]
        except BaseException:
            await self._drop(worker)
            raise
        return worker

    async def _drop(self, worker: Worker) -> None:
        await worker.close()
        self._all.discard(worker)

    async def score(
        self, part: int, requests: Sequence[Request], after_each: Callable[[], None] = lambda: None
    ) -> list[Score | Failed]:
        """Scores in order, by as many workers as there are; `after_each` is called for each one that is there."""
        groups = self._setup.parts[part].group
        work: deque[tuple[int, list[Request]]] = deque()
        place = 0
        for chunk in chunks(self.functions[part].is_async, requests, groups=groups):
            work.append((place, chunk))
            place += len(chunk)
        results: list[Score | Failed] = [Failed("it was not scored")] * len(requests)

        def settle(place: int, result: Score | Failed) -> None:
            results[place] = result
            after_each()

        async def drain() -> None:
            while work:
                worker = await self._idle.get()
                try:
                    while work:
                        first, chunk = work.popleft()
                        one, worker = worker, None
                        worker = await self._run(one, part, first, chunk, settle)
                finally:
                    self._idle.put_nowait(worker)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self._size, len(work))):
                tasks.create_task(drain())
        return results

    async def _run(
        self,
        worker: Worker | None,
        part: int,
        first: int,
        chunk: list[Request],
        settle: Callable[[int, Score | Failed], None],
    ) -> Worker | None:
        """Have a chunk scored; the worker to go on with, if there is one."""
        missing = set(range(len(chunk)))

        def done(index: int, result: Score | Failed) -> None:
            missing.discard(index)
            settle(first + index, result)

        setup = self._setup
        together = self.functions[part].is_async and not setup.parts[part].group
        try:
            worker = worker or await self._again()
            # Async calls keep their own deadlines, unless they block their loop.
            await worker.call(part, chunk, done, setup.timeout_s + (GRACE_S if together else 0.0))
            return worker
        except (TimeoutError, Lost) as error:
            target = setup.parts[part].target
            late = f"{target} did not return within reward.timeout_s = {setup.timeout_s:g} s: its process was killed"
            failed = (
                Failed(f"{target} did not return: {error.why}", excess=error.excess)
                if isinstance(error, Lost)
                else Failed(late, excess=True)
            )
            self._say(failed.reason)
            if worker is not None:
                await self._drop(worker)
            for index in sorted(missing):
                settle(first + index, failed)
            return None
        except BaseException:
            if worker is not None:
                await self._drop(worker)
            raise

    async def _again(self) -> Worker:
        try:
            worker = await self._started()
        except Lost:
            self._lost_loading += 1
            if self._lost_loading >= LOST_LOADING:
                raise RelaxError(
                    "reward workers", why=f"{LOST_LOADING} were lost while they loaded their functions"
                ) from None
            raise
        self._lost_loading = 0
        return worker

    async def close(self) -> None:
        """End all workers and what they started."""
        for worker in list(self._all):
            await self._drop(worker)
