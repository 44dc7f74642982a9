"""Runs programs for a slot, through a spawner: started, fed, listened to within bounds, killed when they are late."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relax_rt.roles.agentic.pool import Broken, Lost
from relax_rt.roles.agentic.program_spawner import MOST_BYTES
from relax_rt.transport.errors import RelaxError

START_S = 120.0
KILL_S = 5.0
DRAIN_S = 2.0
"""For the rest of its output, once a program has ended: something that it left behind may hold the pipe."""
STDOUT_BYTES, STDERR_BYTES = 1 << 20, 64 << 10
"""The end of what a program writes is kept."""
PAUSE_S = 0.01


@dataclass
class Ended:
    """How a program ended.

    Attributes:
        code: its exit code; negative: the number of the signal.
        stdout, stderr: the end of what it wrote.
    """

    code: int
    stdout: str
    stderr: str


class _Tail(asyncio.Protocol):
    """Keeps the end of what comes through a pipe."""

    def __init__(self, most: int) -> None:
        self._most, self._kept = most, bytearray()
        self.over = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > 2 * self._most:
            del self._kept[: -self._most]

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()

    def text(self) -> str:
        """What was kept; bytes that are no text are marked."""
        return bytes(self._kept[-self._most :]).decode(errors="replace")


@dataclass
class _Running:
    number: int
    ended: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ProgramHost:
    """`async with` it; a spawner that ends is replaced when the next program is started.

    Args:
        cwd: where programs are started. preload: modules that a Python program finds imported.
    """

    def __init__(self, cwd: Path, preload: Sequence[str] = ()) -> None:
        self._setup = {"cwd": str(cwd), "preload": list(preload), "parent": os.getpid()}
        self._numbers = itertools.count(1)
        self._running: dict[int, _Running] = {}
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._link: socket.socket
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ProgramHost:
        await self._spawner()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._end("the slot ends")

    async def run(self, argv: Sequence[str], env: Mapping[str, str], stdin: bytes = b"") -> Ended:
        """Run a program to its end. Cancelling it kills the program and its group.

        Raises:
            Lost: the spawner ended, and all its programs with it.
            Broken: the arguments are too long.
            RelaxError: no spawner can be started.
        """
        await self._spawner()
        running = _Running(next(self._numbers))
        self._running[running.number] = running
        try:
            async with contextlib.AsyncExitStack() as stack:
                out, err = await self._start(running, argv, env, stdin, stack)
                try:
                    code = await running.ended
                except asyncio.CancelledError:
                    await asyncio.shield(self._kill(running))
                    raise
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_S):
                        await out.over.wait()
                        await err.over.wait()
                return Ended(code, out.text(), err.text())
        finally:
            self._running.pop(running.number, None)

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
            raise Broken(f"the program {argv[0]}", why=why, hint="have it read its task from standard input")
        given = os.memfd_create("task", os.MFD_CLOEXEC)
        fds = [given]
        try:
            os.write(given, stdin)
            os.lseek(given, 0, os.SEEK_SET)
            tails = []
            for most in (STDOUT_BYTES, STDERR_BYTES):
                ours, theirs = os.pipe2(os.O_CLOEXEC)
                fds.append(theirs)
                tails.append(await self._listen_to(ours, most, stack))
            await self._send(message, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return tails[0], tails[1]

    async def _listen_to(self, fd: int, most: int, stack: contextlib.AsyncExitStack) -> _Tail:
        tail = _Tail(most)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: tail, os.fdopen(fd, "rb", 0))
        stack.callback(transport.close)
        return tail

    async def _kill(self, running: _Running) -> None:
        """Returns when it is dead."""
        await self._send(json.dumps({"kill": running.number}).encode(), [])
        with contextlib.suppress(TimeoutError, RelaxError):
            async with asyncio.timeout(KILL_S):
                await asyncio.shield(running.ended)

    async def _send(self, message: bytes, fds: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self._link, [message], fds)
            except BlockingIOError:
                await asyncio.sleep(PAUSE_S)
            except OSError as error:
                raise Lost("a program", why=f"its spawner is gone ({error})") from error
            else:
                return

    # --- the spawner

    async def _spawner(self) -> None:
        """Have one.

        Raises:
            RelaxError: it does not start, or a module cannot be imported.
        """
        async with self._starting:
            if self._listening is not None and not self._listening.done():
                return
            await self._end("its spawner ended")
            self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._link.setblocking(False)
            command = (sys.executable, "-m", "relax_rt.roles.agentic.program_spawner", str(theirs.fileno()))
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *command, json.dumps(self._setup), pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL
                )
            try:
                async with asyncio.timeout(START_S):
                    ready = json.loads(await self._receive() or b'{"ready": "its process ended"}')
            except TimeoutError:
                ready = {"ready": f"it was not there within {START_S:g} s"}
            if ready["ready"]:
                await self._end("it did not start")
                hint = "see roles.env.options.preload"
                raise RelaxError("the spawner of programs", why=ready["ready"], hint=hint)
            self._listening = asyncio.create_task(self._listen())

    async def _receive(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._link, MOST_BYTES)

    async def _listen(self) -> None:
        try:
            while body := await self._receive():
                told = json.loads(body)
                running = self._running.get(told.get("ended", 0))
                if running is not None and not running.ended.done():
                    running.ended.set_result(told["code"])
        except OSError:
            pass
        finally:
            for running in self._running.values():
                if not running.ended.done():
                    running.ended.set_exception(Lost("a program", why="its spawner ended, and the program with it"))
                    # Nobody may be waiting.
                    running.ended.exception()

    async def _end(self, why: str) -> None:
        """End the spawner, and with it its programs."""
        process, self._process = self._process, None
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
            self._listening = None
        if process is None:
            return
        self._link.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_S):
                await process.wait()
