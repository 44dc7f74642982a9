"""Spares: processes of a role that have done what can be done beforehand and wait for a slot to fall vacant.

A spare is forked as a role is, imports the role's class, runs `Role.prepare` and then waits on its control channel to
be told which slot it fills, under which epoch and on which devices.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from relax_rt.supervision.channel import MAX_PACKET_BYTES, EnlistMsg, PreparedMsg, decode_from_role, encode
from relax_rt.supervision.nursery import Bell, Say
from relax_rt.supervision.process import Born, Launch

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.5, 60.0
STEADY_S = 60.0
CLOSE_WITHIN_S = 5.0


class Spare:
    """One waiting process."""

    def __init__(self, born: Born, bell: Bell) -> None:
        self.born, self._bell = born, bell
        self.prepared = self.gone = False
        self.end = ""
        """Why we have killed it."""
        self._pidfd = os.pidfd_open(born.pid)
        loop = asyncio.get_running_loop()
        born.control.setblocking(False)
        loop.add_reader(self._pidfd, self._exited)
        loop.add_reader(born.control.fileno(), self._readable)

    def enlist(self, order: EnlistMsg, fds: list[int]) -> bool:
        """Give it its slot; from then on it is no longer ours. False: it cannot be told."""
        try:
            socket.send_fds(self.born.control, [encode(order)], fds, socket.MSG_NOSIGNAL)
        except OSError:
            return False
        self._let_go()
        return True

    def kill(self, reason: str = "") -> None:
        """SIGKILL it."""
        self.prepared, self.end = False, self.end or reason
        if not self.gone:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _let_go(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        loop.remove_reader(self.born.control.fileno())
        os.close(self._pidfd)

    def _readable(self) -> None:
        try:
            packet = self.born.control.recv(MAX_PACKET_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            packet = b""
        if not packet:
            asyncio.get_running_loop().remove_reader(self.born.control.fileno())
            return
        try:
            self.prepared = self.prepared or isinstance(decode_from_role(packet), PreparedMsg)
        except msgspec.DecodeError:
            self.kill()
        self._bell.ring()

    def _exited(self) -> None:
        try:
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        except ChildProcessError:
            info = None
        if info is not None and self.born.child is not None:
            self.born.child.returncode = info.si_status
        self._let_go()
        self.born.control.close()
        self.gone = True
        self._bell.ring()


class Wanted(NamedTuple):
    """How many spares of a kind there are to be, how one is started, and how long it may take to prepare."""

    number: int
    launch: Launch
    start_timeout_s: float = 180.0


class Spares:
    """The spares of this node.

    Args:
        bear: starts a process.
        say: takes `spare_ready` and `spare_died`.
    """

    def __init__(self, bear: Callable[[Launch], Awaitable[Born]], say: Say) -> None:
        self._bear, self._say = bear, say
        self._wanted: dict[str, Wanted] = {}
        self._waiting: dict[str, list[Spare]] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._ended: list[Spare] = []
        self._bell = Bell()
        self.starting = 0
        """Processes that may exist without anybody who watches them yet."""

    @property
    def pids(self) -> set[int]:
        """Processes that are ours to wait for."""
        return {spare.born.pid for spare in self._all() if not spare.gone}

    @property
    def kept(self) -> list[str]:
        """Kinds whose spares are kept now."""
        return list(self._keepers)

    def _all(self) -> list[Spare]:
        return [*self._ended, *(spare for spares in self._waiting.values() for spare in spares)]

    def want(self, kind: str, wanted: Wanted) -> None:
        """Say what is to be there once `begin` is called for the kind."""
        self._wanted[kind] = wanted
        self._waiting[kind] = []

    def begin(self, kind: str) -> None:
        """Keep spares of this kind from now on: not earlier than when its slots are up, to which they would be in the
        way."""
        if kind in self._wanted and kind not in self._keepers:
            self._keepers[kind] = asyncio.create_task(self._keep(kind, self._wanted[kind]))

    def end(self, kind: str) -> None:
        """Keep none of this kind any more, until `begin` is called again."""
        if (keeper := self._keepers.pop(kind, None)) is None:
            return
        keeper.cancel()
        self._ended = [spare for spare in (*self._ended, *self._waiting[kind]) if not spare.gone]
        self._waiting[kind] = []
        for spare in self._ended:
            spare.kill()

    def take(self, launch: Launch, log: int) -> Born | None:
        """A prepared spare becomes this process; None when there is none."""
        order = EnlistMsg(argv=launch.argv, env=launch.env, descriptors=tuple(launch.fds))
        for spare in self._prepared(launch):
            self._waiting[launch.slot.partition("/")[0]].remove(spare)
            self._bell.ring()
            if spare.enlist(order, [log, *launch.fds.values()]):
                return spare.born
            spare.kill()
        return None

    def has(self, launch: Launch) -> bool:
        """Whether there is a prepared spare for such a process."""
        return bool(self._prepared(launch))

    def _prepared(self, launch: Launch) -> list[Spare]:
        kind = launch.slot.partition("/")[0]
        return [spare for spare in self._waiting.get(kind, ()) if spare.prepared and not spare.gone]

    async def close(self) -> None:
        """End them."""
        for task in self._keepers.values():
            task.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        spares = self._all()
        for spare in spares:
            spare.kill()
        await self._bell.until(lambda: all(spare.gone for spare in spares), CLOSE_WITHIN_S)

    async def _keep(self, kind: str, wanted: Wanted) -> None:
        waiting = self._waiting[kind]
        backoff_s = 0.0
        while True:
            began = time.monotonic()
            spare = await self._start(wanted.launch)
            prepared = False
            if spare is not None:
                waiting.append(spare)
                prepared = await self._prepare(spare, wanted.start_timeout_s)
            if spare is not None and prepared:
                self._say("spare_ready", role=kind, pid=spare.born.pid, seconds=round(time.monotonic() - began, 3))
            await self._bell.until(lambda: len(waiting) < wanted.number or any(s.gone for s in waiting))
            dead = [s for s in waiting if s.gone]
            waiting[:] = [s for s in waiting if not s.gone]
            for lost in dead:
                self._say(
                    "spare_died", role=kind, pid=lost.born.pid, reason=lost.end or "ended", log=str(wanted.launch.log)
                )
            failed = not prepared or (bool(dead) and time.monotonic() - began < STEADY_S)
            backoff_s = min(BACKOFF_MAX_S, max(BACKOFF_FIRST_S, 2 * backoff_s)) if failed else 0.0
            await asyncio.sleep(backoff_s)

    async def _prepare(self, spare: Spare, within_s: float) -> bool:
        """Wait until it is prepared; one that takes too long is killed."""
        if not await self._bell.until(lambda: spare.prepared or spare.gone, within_s):
            spare.kill(f"not prepared within start_timeout_s = {within_s:g} s")
            await self._bell.until(lambda: spare.gone, CLOSE_WITHIN_S)
        return spare.prepared and not spare.gone

    async def _start(self, launch: Launch) -> Spare | None:
        self.starting += 1
        born = None
        try:
            born = await self._bear(launch)
            return Spare(born, self._bell)
        except Exception as error:  # noqa: BLE001 whatever went wrong, the next one may be luckier
            if born is not None:
                # Nobody would ever see it exit.
                born.control.close()
                os.kill(born.pid, signal.SIGKILL)
            self._say("spare_died", role=launch.slot.partition("/")[0], reason=f"cannot be started: {error!r}")
            return None
        finally:
            self.starting -= 1
