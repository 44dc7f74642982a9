"""Runs programs for a slot, through a spawner: started, fed, listened to within bounds, killed when they are late."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_rt.process.limits import MIB, raise_open_files
from relax_rt.roles.agentic.errors import EnvironmentFailed, EpisodeLost
from relax_rt.roles.agentic.program import ProgramLimits
from relax_rt.roles.agentic.program_link import NO_ROOM, NotStarted, SpawnerLink
from relax_rt.roles.agentic.program_spawner import END_S, MOST_BYTES
from relax_rt.roles.agentic.stall_detection import Fruitless
from relax_rt.transport.rpc.errors import RelaxError

KILL_S = END_S + 1.0
DRAIN_S = 2.0
"""For the rest of its output, once a program has ended: something that it left behind may hold the pipe."""
STDOUT_BYTES, STDERR_BYTES = 1 << 20, 64 << 10
"""The end of what a program writes is kept."""
WATCH_S = 5.0
SILENT = 4
"""A spawner that has not answered when it was asked so often, `WATCH_S` apart, hangs."""
LOST_IN_A_ROW = 8
"""Spawners that ended without one program having come to its end: then it is not chance."""
RETRY_S = 1.0
FILES_EACH = 2
"""Open files of the slot for each of its programs, as long as it runs: standard output and error."""
OTHER_FILES = 256
"""Open files of the slot besides: its own, and those of programs that are being started."""
STARTS = 8
"""Programs that are being started at a time: five open files each."""
Tell = Callable[..., None]
"""(kind, **fields) of an event."""


@dataclass
class Ended:
    """How a program ended.

    Attributes:
        code: its exit code; negative: the number of the signal.
        stdout, stderr: the end of what it wrote.
        over: the limit that it was ended for: memory, processes or output; empty: none.
    """

    code: int
    stdout: str
    stderr: str
    over: str = ""


@dataclass
class _Running:
    number: int
    link: SpawnerLink
    ended: asyncio.Future[tuple[int, str]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    printed: int = 0
    too_much: asyncio.Event = field(default_factory=asyncio.Event)


class _Tail(asyncio.Protocol):
    """Keeps the end of what comes through a pipe, and counts all of it."""

    def __init__(self, kept: int, of: _Running, most: int) -> None:
        self._most_kept, self._kept, self._of, self._most = kept, bytearray(), of, most
        self.over = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > 2 * self._most_kept:
            del self._kept[: -self._most_kept]
        self._of.printed += len(data)
        if self._of.printed > self._most:
            self._of.too_much.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()

    def text(self) -> str:
        """What was kept; bytes that are no text are marked."""
        return bytes(self._kept[-self._most_kept :]).decode(errors="replace")


class ProgramHost:
    """`async with` it. Its spawner is watched: one that ends or hangs is replaced, and its programs are lost.

    Args:
        cwd: where programs are started. preload: modules that a Python program finds imported.
        limits: of each program.
        files: that this process may have open; 0: as many as its hard limit allows.
        tell: is told of what happens: `spawner_lost`.
        watch_s: between two looks at the spawner.

    Attributes:
        places: programs that there is room for at a time.
        lost: spawners that had to be replaced.
        broken: has an error when no spawner stays alive.
    """

    def __init__(
        self,
        cwd: Path,
        preload: Sequence[str] = (),
        limits: ProgramLimits | None = None,
        *,
        files: int = 0,
        tell: Tell = lambda kind, **fields: None,
        watch_s: float = WATCH_S,
    ) -> None:
        self._limits = limits or ProgramLimits()
        self._cwd, self._preload = cwd, tuple(preload)
        self._tell, self._watch_s = tell, watch_s
        self._numbers = itertools.count(1)
        self._running: dict[int, _Running] = {}
        self._alone = asyncio.Lock()
        self._link: SpawnerLink | None = None
        self._watching: asyncio.Task[None]
        allowed = files or raise_open_files(1 << 20)
        self.places = max(1, (allowed - OTHER_FILES) // FILES_EACH)
        self._free, self._starts = asyncio.Semaphore(self.places), asyncio.Semaphore(STARTS)
        self._lost_in_a_row = self.lost = 0
        self.broken: asyncio.Future[None]

    @property
    def spawner(self) -> int:
        """Process id of the spawner; 0: there is none at the moment."""
        return self._link.pid if self._link is not None and not self._link.closed else 0

    async def __aenter__(self) -> ProgramHost:
        self.broken = asyncio.get_running_loop().create_future()
        await self._spawner()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        self.broken.cancel()
        if self._link is not None:
            await self._link.end()
            self._all_lost("the slot ends")

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait until there is room for one more program."""
        async with self._free:
            yield

    async def run(self, argv: Sequence[str], env: Mapping[str, str], stdin: bytes = b"") -> Ended:
        """Run a program to its end. Cancelling it kills the program and all that it started.

        Raises:
            NotStarted: there is no room for a process or its files now.
            Lost: the spawner ended, and all its programs with it.
            Broken: the arguments are too long.
            RelaxError: no spawner can be started.
        """
        running = _Running(next(self._numbers), await self._spawner())
        self._running[running.number] = running
        try:
            async with contextlib.AsyncExitStack() as stack:
                out, err = await self._start(running, argv, env, stdin, stack)
                try:
                    code, over = await self._until_ended(running)
                except asyncio.CancelledError:
                    await asyncio.shield(self._kill(running))
                    raise
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_S):
                        await out.over.wait()
                        await err.over.wait()
                over = over or ("output" if running.too_much.is_set() else "")
                return Ended(code, out.text(), err.text(), over)
        finally:
            self._running.pop(running.number, None)

    async def _until_ended(self, running: _Running) -> tuple[int, str]:
        """Its exit code, and the limit that it passed."""
        too_much = asyncio.ensure_future(running.too_much.wait())
        try:
            either: list[asyncio.Future[Any]] = [running.ended, too_much]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not running.ended.done():
                await self._kill(running)
            return await running.ended
        finally:
            too_much.cancel()

    async def _start(
        self,
        running: _Running,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdin: bytes,
        stack: contextlib.AsyncExitStack,
    ) -> tuple[_Tail, _Tail]:
        message = json.dumps({"start": running.number, "argv": list(argv), "env": dict(env)}).encode()
        if len(message) >= MOST_BYTES:
            why = f"arguments and environment have {len(message)} bytes, {MOST_BYTES} at most"
            raise EnvironmentFailed(f"the program {argv[0]}", why=why, hint="have it read its task from standard input")
        async with self._starts:
            fds: list[int] = []
            try:
                fds.append(os.memfd_create("task", os.MFD_CLOEXEC))
                os.write(fds[0], stdin)
                os.lseek(fds[0], 0, os.SEEK_SET)
                tails = []
                for kept in (STDOUT_BYTES, STDERR_BYTES):
                    ours, theirs = os.pipe2(os.O_CLOEXEC)
                    fds.append(theirs)
                    tails.append(await self._listen_to(ours, _Tail(kept, running, self._most_printed), stack))
                await running.link.send(message, fds)
            except OSError as error:
                if error.errno is None or error.errno not in NO_ROOM:
                    raise
                raise NotStarted("a program", why=os.strerror(error.errno)) from error
            finally:
                for fd in fds:
                    os.close(fd)
        return tails[0], tails[1]

    @property
    def _most_printed(self) -> int:
        return self._limits.output_mib * MIB

    async def _listen_to(self, fd: int, tail: _Tail, stack: contextlib.AsyncExitStack) -> _Tail:
        file = stack.enter_context(os.fdopen(fd, "rb", 0))
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: tail, file)
        stack.callback(transport.close)
        return tail

    async def _kill(self, running: _Running) -> None:
        """Returns when it is dead."""
        with contextlib.suppress(TimeoutError, RelaxError):
            async with asyncio.timeout(KILL_S):
                await running.link.send(json.dumps({"kill": running.number}).encode())
                await asyncio.shield(running.ended)

    # --- the spawner

    async def _spawner(self) -> SpawnerLink:
        """Have one.

        Raises:
            RelaxError: it does not start, or a module cannot be imported.
        """
        async with self._alone:
            if self._link is None or self._link.closed:
                self._link = await SpawnerLink.start(self._cwd, self._preload, self._limits, self._heard)
            return self._link

    def _heard(self, told: dict[str, object]) -> None:
        number = told.get("ended", told.get("not_started"))
        running = self._running.get(number) if isinstance(number, int) else None
        if running is None or running.ended.done():
            return
        if "ended" in told:
            self._lost_in_a_row = 0
            code = told["code"]
            assert isinstance(code, int)
            running.ended.set_result((code, str(told["over"])))
        else:
            running.ended.set_exception(NotStarted("a program", why=str(told["why"])))

    def _all_lost(self, why: str) -> int:
        """End the waiting of all that ran on a spawner that is gone; how many those were."""
        count = 0
        for running in self._running.values():
            if running.link.closed and not running.ended.done():
                count += 1
                running.ended.set_exception(EpisodeLost("a program", why=f"{why}, and the program with it"))
                # Nobody may be waiting.
                running.ended.exception()
        return count

    async def _watch(self) -> None:
        """Replace a spawner that has ended or does not answer."""
        try:
            while True:
                link = await self._spawner_again()
                why = f"its spawner {await self._until_gone(link)}"
                self.lost += 1
                self._lost_in_a_row += 1
                self._tell("spawner_lost", why=why, programs=self._all_lost(why))
                if self._lost_in_a_row >= LOST_IN_A_ROW:
                    what = f"{LOST_IN_A_ROW} spawners of programs ended one after the other"
                    raise Fruitless(what, why=why, hint="see the role's log, and the memory of the machine")
        except RelaxError as error:
            self._all_lost(str(error))
            if not self.broken.done():
                self.broken.set_exception(error)
                self.broken.exception()

    async def _spawner_again(self) -> SpawnerLink:
        while True:
            try:
                return await self._spawner()
            except NotStarted:
                await asyncio.sleep(RETRY_S)

    async def _until_gone(self, link: SpawnerLink) -> str:
        """Returns when a spawner is no more; how it ended."""
        silent = 0
        while True:
            silent = 0 if link.answered else silent + 1
            if silent >= SILENT:
                await link.end(at_once=True)
                return f"did not answer for {SILENT * self._watch_s:g} s"
            link.ask()
            if await link.gone(self._watch_s):
                return await link.end(at_once=True) or "ended"
