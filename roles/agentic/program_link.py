"""The slot's end of a spawner: the process, what is said to it, and what is heard of it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.roles.agentic.errors import EpisodeLost
from relax_rt.roles.agentic.program import ProgramLimits
from relax_rt.roles.agentic.program_spawner import END_S, MOST_BYTES
from relax_rt.transport.rpc.errors import RelaxError

START_S = 120.0
END_WAIT_S = END_S + 1.0
PAUSE_S = 0.01
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""Errors of a machine that is full now, and may not be in a moment."""
MODULE = "relax_rt.roles.agentic.program_spawner"


class NotStarted(RelaxError):
    """There was no room for a process or its files: it may be tried again."""


class SpawnerLink:
    """One spawner, from its start to its end.

    Attributes:
        closed: it is no more, or is being ended.
        answered: the last `ask`.
    """

    def __init__(self, process: Process, link: socket.socket, heard: Callable[[dict[str, Any]], None]) -> None:
        self._process, self._link, self._heard = process, link, heard
        self._listening: asyncio.Task[None] | None = None
        self._asked = self._heard_of = 0
        self.closed = False

    @classmethod
    async def start(
        cls, cwd: Path, preload: Sequence[str], limits: ProgramLimits, heard: Callable[[dict[str, Any]], None]
    ) -> SpawnerLink:
        """Start one.

        Raises:
            NotStarted: there is no room for it now.
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
            if error.errno is None or error.errno not in NO_ROOM:
                raise
            raise NotStarted("the spawner of programs", why=os.strerror(error.errno)) from error
        found = cls(process, ours, heard)
        await found._until_ready()
        return found

    async def _until_ready(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                ready = json.loads(await self._receive() or b'{"ready": "its process ended"}')["ready"]
        except TimeoutError:
            ready = f"it was not there within {START_S:g} s"
        except BaseException:
            await asyncio.shield(self.end(at_once=True))
            raise
        if ready:
            await self.end(at_once=True)
            raise RelaxError("the spawner of programs", why=ready, hint="see roles.env.options.preload")
        self._listening = asyncio.create_task(self._listen())

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Say something; waits for room.

        Raises:
            Lost: it is gone.
        """
        while True:
            try:
                socket.send_fds(self._link, [message], fds)
            except BlockingIOError:
                await asyncio.sleep(PAUSE_S)
            except OSError as error:
                raise EpisodeLost("a program", why=f"its spawner is gone ({error})") from error
            else:
                return

    def ask(self) -> None:
        """Ask for a sign of life."""
        self._asked += 1
        # Where there is no room it does not listen: no answer comes either.
        with contextlib.suppress(OSError):
            self._link.send(json.dumps({"ping": self._asked}).encode())

    @property
    def answered(self) -> bool:
        """See the class."""
        return self._heard_of == self._asked

    async def gone(self, within_s: float) -> bool:
        """Whether it has ended in this time."""
        assert self._listening is not None
        await asyncio.wait({self._listening}, timeout=within_s)
        return self._listening.done()

    async def end(self, *, at_once: bool = False) -> str:
        """End it, and with it its programs; how it ended.

        Args:
            at_once: it has ended, or does not listen; else it has time to see its programs end.
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
            # Not its own kill(), which would reap one that has just died: how it ended would be lost to wait().
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        code = self._process.returncode
        return "" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    async def _receive(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._link, MOST_BYTES)

    async def _listen(self) -> None:
        try:
            while body := await self._receive():
                told = json.loads(body)
                if "pong" in told:
                    self._heard_of = told["pong"]
                else:
                    self._heard(told)
        except OSError:
            pass
        finally:
            self.closed = True
