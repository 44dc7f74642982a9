"""Programs of an env slot: started through a spawner process, with bounded output, killed when they are late.

`ProgramHost.run` runs one program to its end. The spawner (program_spawner.py) is watched: one that dies or hangs is
replaced, and its programs are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.process.limits import MIB, raise_open_files
from relax_rt.roles.agentic.interface import EnvironmentFailed, EpisodeLost
from relax_rt.roles.agentic.program import ProgramLimits
from relax_rt.roles.agentic.program_spawner import END_S, MAX_MESSAGE_BYTES
from relax_rt.roles.agentic.stall_detection import EpisodesStalled
from relax_rt.transport.rpc.errors import RelaxError

KILL_S = END_S + 1.0
DRAIN_S = 2.0
"""Time for the rest of a program's output after its exit: a process that it left behind may hold the pipe."""
MAX_STDOUT_BYTES, MAX_STDERR_BYTES = 1 << 20, 64 << 10
"""The last bytes of a program's output that are kept."""
WATCH_S = 5.0
MAX_UNANSWERED = 4
"""A spawner that has not answered this many pings, `WATCH_S` apart, hangs."""
MAX_CRASHES = 8
"""Give up after this many consecutive spawners died without a single program having ended."""
SPAWN_RETRY_S = 1.0
FILES_PER_PROGRAM = 2
"""Open files of the slot for each running program: standard output and error."""
RESERVED_FILES = 256
"""Open files of the slot besides: its own, and those of programs that are starting."""
MAX_STARTING = 8
"""Programs that start at the same time; each has five open files while it starts."""
Tell = Callable[..., None]
"""Emits an event: (kind, **fields)."""


START_S = 120.0
END_WAIT_S = END_S + 1.0
SEND_RETRY_S = 0.01
NO_ROOM_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""Errors of a machine that has no room now, but may have in a moment."""
MODULE = "relax_rt.roles.agentic.program_spawner"


@dataclass
class ProgramExit:
    """How a program ended.

    Attributes:
        code: its exit code; negative: the number of the signal.
        stdout, stderr: the end of what it wrote.
        over: the limit that it was killed for: memory, processes or output; empty: none.
    """

    code: int
    stdout: str
    stderr: str
    over: str = ""


@dataclass
class RunningProgram:
    number: int
    link: SpawnerLink
    ended: asyncio.Future[tuple[int, str]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    printed: int = 0
    output_exceeded: asyncio.Event = field(default_factory=asyncio.Event)


class OutputTail(asyncio.Protocol):
    """Keeps the end of what comes through a pipe, and counts all of it."""

    def __init__(self, kept: int, of: RunningProgram, most: int) -> None:
        self._max_kept, self._kept, self._program, self._max_bytes = kept, bytearray(), of, most
        self.over = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > 2 * self._max_kept:
            del self._kept[: -self._max_kept]
        self._program.printed += len(data)
        if self._program.printed > self._max_bytes:
            self._program.output_exceeded.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()

    def text(self) -> str:
        """Return the end of the output; undecodable bytes are replaced."""
        return bytes(self._kept[-self._max_kept :]).decode(errors="replace")


class ProgramHost:
    """Runs the programs of a slot; an async context manager.

    Args:
        cwd: folder that programs start in. preload: modules that a Python program finds imported.
        limits: of each program.
        files: open files of this process; 0: as many as its hard limit allows.
        on_event: called with events: `spawner_lost`.
        ping_interval_s: between two pings of the spawner.

    Attributes:
        capacity: programs that can run at a time.
        spawners_lost: spawners that had to be replaced.
        failed: has an error when no spawner stays alive.
    """

    def __init__(
        self,
        cwd: Path,
        preload: Sequence[str] = (),
        limits: ProgramLimits | None = None,
        *,
        files: int = 0,
        on_event: Tell = lambda kind, **fields: None,
        ping_interval_s: float = WATCH_S,
    ) -> None:
        self._limits = limits or ProgramLimits()
        self._cwd, self._preload = cwd, tuple(preload)
        self._on_event, self._ping_interval_s = on_event, ping_interval_s
        self._numbers = itertools.count(1)
        self._running: dict[int, RunningProgram] = {}
        self._starting = asyncio.Lock()
        self._link: SpawnerLink | None = None
        self._watching: asyncio.Task[None]
        allowed = files or raise_open_files(1 << 20)
        self.capacity = max(1, (allowed - RESERVED_FILES) // FILES_PER_PROGRAM)
        self._reservations, self._start_slots = asyncio.Semaphore(self.capacity), asyncio.Semaphore(MAX_STARTING)
        self._crashes = self.spawners_lost = 0
        self.failed: asyncio.Future[None]

    @property
    def spawner(self) -> int:
        """Process id of the spawner; 0 if there is none at the moment."""
        return self._link.pid if self._link is not None and not self._link.closed else 0

    async def __aenter__(self) -> ProgramHost:
        self.failed = asyncio.get_running_loop().create_future()
        await self._current_spawner()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        self.failed.cancel()
        if self._link is not None:
            await self._link.end()
            self._lose_all("the slot ends")

    @contextlib.asynccontextmanager
    async def reserve(self) -> AsyncIterator[None]:
        """Wait until one more program can run."""
        async with self._reservations:
            yield

    async def run(self, argv: Sequence[str], env: Mapping[str, str], stdin: bytes = b"") -> ProgramExit:
        """Run a program to its end. Cancelling it kills the program and all that it started.

        Raises:
            ProgramNotStarted: there is no room for a process or its files now.
            EpisodeLost: the spawner ended, and all its programs with it.
            EnvironmentFailed: the arguments are too long.
            RelaxError: no spawner can be started.
        """
        running = RunningProgram(next(self._numbers), await self._current_spawner())
        self._running[running.number] = running
        try:
            async with contextlib.AsyncExitStack() as stack:
                out, err = await self._start(running, argv, env, stdin, stack)
                output_exceeded = asyncio.ensure_future(running.output_exceeded.wait())
                either: list[asyncio.Future[Any]] = [running.ended, output_exceeded]
                try:
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    if not running.ended.done():
                        await self._kill(running)
                    code, over = await running.ended
                except asyncio.CancelledError:
                    await asyncio.shield(self._kill(running))
                    raise
                finally:
                    output_exceeded.cancel()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_S):
                        await out.over.wait()
                        await err.over.wait()
                over = over or ("output" if running.output_exceeded.is_set() else "")
                return ProgramExit(code, out.text(), err.text(), over)
        finally:
            self._running.pop(running.number, None)

    async def _start(
        self,
        running: RunningProgram,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdin: bytes,
        stack: contextlib.AsyncExitStack,
    ) -> tuple[OutputTail, OutputTail]:
        message = json.dumps({"start": running.number, "argv": list(argv), "env": dict(env)}).encode()
        if len(message) >= MAX_MESSAGE_BYTES:
            why = f"arguments and environment have {len(message)} bytes, {MAX_MESSAGE_BYTES} at most"
            raise EnvironmentFailed(f"the program {argv[0]}", why=why, hint="have it read its task from standard input")
        loop = asyncio.get_running_loop()
        async with self._start_slots:
            fds: list[int] = []
            try:
                fds.append(os.memfd_create("task", os.MFD_CLOEXEC))
                os.write(fds[0], stdin)
                os.lseek(fds[0], 0, os.SEEK_SET)
                tails = []
                for kept in (MAX_STDOUT_BYTES, MAX_STDERR_BYTES):
                    ours, theirs = os.pipe2(os.O_CLOEXEC)
                    fds.append(theirs)
                    file = stack.enter_context(os.fdopen(ours, "rb", 0))
                    make = partial(OutputTail, kept, running, self._limits.output_mib * MIB)
                    transport, tail = await loop.connect_read_pipe(make, file)
                    stack.callback(transport.close)
                    tails.append(tail)
                await running.link.send(message, fds)
            except OSError as error:
                if error.errno is None or error.errno not in NO_ROOM_ERRORS:
                    raise
                raise ProgramNotStarted("a program", why=os.strerror(error.errno)) from error
            finally:
                for fd in fds:
                    os.close(fd)
        return tails[0], tails[1]

    async def _kill(self, running: RunningProgram) -> None:
        """Kill a program and wait until it is dead."""
        with contextlib.suppress(TimeoutError, RelaxError):
            async with asyncio.timeout(KILL_S):
                await running.link.send(json.dumps({"kill": running.number}).encode())
                await asyncio.shield(running.ended)

    # --- the spawner

    async def _current_spawner(self) -> SpawnerLink:
        """Return the running spawner; start one if there is none.

        Raises:
            RelaxError: it does not start, or a module cannot be imported.
        """
        async with self._starting:
            if self._link is None or self._link.closed:
                self._link = await SpawnerLink.start(self._cwd, self._preload, self._limits, self._on_message)
            return self._link

    def _on_message(self, message: dict[str, object]) -> None:
        number = message.get("ended", message.get("not_started"))
        running = self._running.get(number) if isinstance(number, int) else None
        if running is None or running.ended.done():
            return
        if "ended" in message:
            self._crashes = 0
            code = message["code"]
            assert isinstance(code, int)
            running.ended.set_result((code, str(message["over"])))
        else:
            running.ended.set_exception(ProgramNotStarted("a program", why=str(message["why"])))

    def _lose_all(self, why: str) -> int:
        """Fail all programs whose spawner is gone; return how many these were."""
        count = 0
        for running in self._running.values():
            if running.link.closed and not running.ended.done():
                count += 1
                running.ended.set_exception(EpisodeLost("a program", why=f"{why}, and the program with it"))
                # Retrieve it, in case no caller is waiting.
                running.ended.exception()
        return count

    async def _watch(self) -> None:
        """Replace a spawner that has died or does not answer."""
        try:
            while True:
                try:
                    link = await self._current_spawner()
                except ProgramNotStarted:
                    await asyncio.sleep(SPAWN_RETRY_S)
                    continue
                why = f"its spawner {await self._wait_until_gone(link)}"
                self.spawners_lost += 1
                self._crashes += 1
                self._on_event("spawner_lost", why=why, programs=self._lose_all(why))
                if self._crashes >= MAX_CRASHES:
                    what = f"{MAX_CRASHES} spawners of programs ended one after the other"
                    raise EpisodesStalled(what, why=why, hint="see the role's log, and the memory of the machine")
        except RelaxError as error:
            self._lose_all(str(error))
            if not self.failed.done():
                self.failed.set_exception(error)
                self.failed.exception()

    async def _wait_until_gone(self, link: SpawnerLink) -> str:
        """Wait for the end of a spawner, killing one that does not answer; return how it ended."""
        silent = 0
        while True:
            silent = 0 if link.answered else silent + 1
            if silent >= MAX_UNANSWERED:
                await link.end(at_once=True)
                return f"did not answer for {MAX_UNANSWERED * self._ping_interval_s:g} s"
            link.ping()
            if await link.wait_closed(self._ping_interval_s):
                return await link.end(at_once=True) or "ended"


class ProgramNotStarted(RelaxError):
    """There was no room for a process or its files: it may be retried."""


class SpawnerLink:
    """The slot's end of one spawner.

    Attributes:
        closed: it has died, or is being ended.
    """

    def __init__(self, process: Process, link: socket.socket, on_message: Callable[[dict[str, Any]], None]) -> None:
        self._process, self._link, self._on_message = process, link, on_message
        self._listening: asyncio.Task[None] | None = None
        self._pings = self._answered = 0
        self.closed = False

    @classmethod
    async def start(
        cls, cwd: Path, preload: Sequence[str], limits: ProgramLimits, on_message: Callable[[dict[str, Any]], None]
    ) -> SpawnerLink:
        """Start a spawner.

        Raises:
            ProgramNotStarted: there is no room for it now.
            RelaxError: it does not start, or a module cannot be imported.
        """
        setup = {
            "cwd": str(cwd),
            "preload": list(preload),
            "limits": msgspec.to_builtins(limits),
            "parent": os.getpid(),
        }
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            with theirs:
                command = (sys.executable, "-m", MODULE, str(theirs.fileno()), json.dumps(setup))
                process = await asyncio.create_subprocess_exec(
                    *command, pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL
                )
        except OSError as error:
            if error.errno is None or error.errno not in NO_ROOM_ERRORS:
                raise
            raise ProgramNotStarted("the spawner of programs", why=os.strerror(error.errno)) from error
        found = cls(process, ours, on_message)
        await found._until_ready()
        return found

    async def _until_ready(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                ready = json.loads(await self._receive() or b'{"ready": "its process ended"}')["ready"]
        except TimeoutError:
            ready = f"it was not ready within {START_S:g} s"
        except BaseException:
            await asyncio.shield(self.end(at_once=True))
            raise
        if ready:
            await self.end(at_once=True)
            raise RelaxError("the spawner of programs", why=ready, hint="see roles.env.options.preload")
        self._listening = asyncio.create_task(self._listen())

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message, waiting for room in the socket.

        Raises:
            EpisodeLost: the spawner is gone.
        """
        while True:
            try:
                socket.send_fds(self._link, [message], fds)
            except BlockingIOError:
                await asyncio.sleep(SEND_RETRY_S)
            except OSError as error:
                raise EpisodeLost("a program", why=f"its spawner is gone ({error})") from error
            else:
                return

    def ping(self) -> None:
        """Ask for an answer; see `answered`."""
        self._pings += 1
        # If the socket is full, the spawner does not read: no answer will come either.
        with contextlib.suppress(OSError):
            self._link.send(json.dumps({"ping": self._pings}).encode())

    @property
    def answered(self) -> bool:
        """Whether the last ping was answered."""
        return self._answered == self._pings

    async def wait_closed(self, within_s: float) -> bool:
        """Return whether it has ended within this time."""
        assert self._listening is not None
        await asyncio.wait({self._listening}, timeout=within_s)
        return self._listening.done()

    async def end(self, *, at_once: bool = False) -> str:
        """End it with its programs; return how it ended.

        Args:
            at_once: it has died, or does not read; else it gets time to end its programs.
        """
        self.closed = True
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._link.close()
        for wait_s in (0.0 if at_once else END_WAIT_S, END_WAIT_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._process.wait()
            if self._process.returncode is not None:
                break
            # Not Process.kill(), which would reap a process that has just died: wait() would not learn how it ended.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        code = self._process.returncode
        return "" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    async def _receive(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._link, MAX_MESSAGE_BYTES)

    async def _listen(self) -> None:
        try:
            while body := await self._receive():
                message = json.loads(body)
                if "pong" in message:
                    self._answered = message["pong"]
                else:
                    self._on_message(message)
        except OSError:
            pass
        finally:
            self.closed = True
