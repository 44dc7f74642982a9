"""The owner's side of zygotes: a light and a heavy one for each interpreter and environment, restarted when they die.

The light one imports what every process needs, and is ready soon. The heavy one is forked from it and imports the rest,
while the light one stays free. A process that needs no heavy import never waits for them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from relax_rt.process.child import Child, Notifier, PacketReader, describe_exit, packet_pair
from relax_rt.process.zygote import (
    GO,
    MAX_FDS,
    MAX_PACKET_BYTES,
    PLACEHOLDER,
    PLACEHOLDER_NAME,
    ForkedMsg,
    ForkMsg,
    FromZygote,
    LoadedMsg,
    PreloadedMsg,
    PreloadMsg,
    RefusedMsg,
    UnsafeMsg,
    decode_from_zygote,
    encode,
    zygote_argv,
)

LIGHT_TIMEOUT_S = 3.0
"""A fork waits this long for a zygote that is still starting: on a busy machine a spawn takes as long."""
HEAVY_TIMEOUT_S = 30.0
"""A fork waits this long for heavy imports, which the process would otherwise do itself."""
FORK_TIMEOUT_S = 5.0
"""An idle zygote that does not answer for this long is stuck."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 10.0
STEADY_S = 60.0
"""A zygote that lived this long is restarted without back-off."""
LIGHT_TRIES = 3
"""Give up a light zygote after so many that became unsafe to fork: its imports do not change."""


EmitEvent = Callable[..., None]
"""Appends to an event log: emit(kind, **fields)."""


class ForkFailed(Exception):
    """The fork failed; the message says why."""


class ZygoteKey(NamedTuple):
    """What processes share that are forked from one zygote: an import may read environment variables."""

    python: str
    env: tuple[tuple[str, str], ...]


class SpawnProcess(Protocol):
    """Starts a process from a thread that outlives it, as its PR_SET_PDEATHSIG needs."""

    def __call__(
        self, argv: list[str], env: dict[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> Awaitable[subprocess.Popen[bytes]]: ...


class ZygoteProcess:
    """A living zygote, as its owner's event loop sees it.

    Args:
        changed: notified at each change.
        popen: the process as `subprocess` knows it, if it was not forked.
    """

    def __init__(
        self,
        name: str,
        pid: int,
        control: socket.socket,
        changed: Notifier,
        popen: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.name, self.pid = name, pid
        self.began = time.monotonic()
        self.loaded: set[str] = set()
        self.ready = False
        self.end = ""
        """Why it has ended, or is being killed."""
        self.unsafe: UnsafeMsg | None = None
        self._changed, self._control = changed, control
        self._replies: dict[int, asyncio.Future[int]] = {}
        self._last_number = 0
        # Without its group: a process that it has just forked may still be in there.
        self._child = Child(pid, self._exited, popen, group=False)
        self._reader = PacketReader(control, MAX_PACKET_BYTES, self._on_packet)

    def __str__(self) -> str:
        return f"zygote {self.name} (pid {self.pid})"

    @property
    def gone(self) -> bool:
        """Its exit was seen."""
        return not self._child.alive

    def knows(self, modules: Sequence[str]) -> bool:
        """Return whether all of these are imported, or cannot be."""
        return self.loaded.issuperset(modules)

    def preload(self, order: PreloadMsg) -> None:
        """Have modules imported."""
        self._send(encode(order), [])

    async def fork(self, order: ForkMsg, fds: Sequence[int]) -> int:
        """Have a process forked; return its pid. Raises ForkFailed: the zygote refused, died or did not answer."""
        self._last_number += 1
        number = self._last_number
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        # Closed without GO if the fork fails for us: a process that was forked all the same then ends by itself.
        gate, ours = os.pipe()
        try:
            try:
                self._send(encode(msgspec.structs.replace(order, number=number)), [*fds, gate])
            finally:
                os.close(gate)
            # A zygote that is inside an import answers after it.
            async with asyncio.timeout(FORK_TIMEOUT_S if self.ready else HEAVY_TIMEOUT_S):
                pid = await reply
            with suppress(BrokenPipeError):
                os.write(ours, GO)
            return pid
        except TimeoutError:
            self.kill("did not answer")
            raise ForkFailed(f"{self} did not answer") from None
        finally:
            os.close(ours)
            self._replies.pop(number, None)

    def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        if len(packet) > MAX_PACKET_BYTES or len(fds) > MAX_FDS:
            raise ForkFailed(f"a request of {len(packet)} bytes and {len(fds)} descriptors is too large")
        try:
            socket.send_fds(self._control, [packet], list(fds), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise ForkFailed(f"{self} has too many requests waiting") from None
        except OSError as error:
            raise ForkFailed(f"{self} is gone: {self.end or error}") from error

    def kill(self, reason: str) -> None:
        """SIGKILL it."""
        self.end = self.end or reason
        self._child.kill()

    def _on_packet(self, packet: bytes) -> None:
        try:
            self._on_message(decode_from_zygote(packet))
        except msgspec.DecodeError as error:
            self.kill(f"sent an undecodable message: {error}")

    def _on_message(self, message: FromZygote) -> None:
        match message:
            case LoadedMsg(module=module):
                self.loaded.add(module)
                self._changed.notify()
            case PreloadedMsg():
                self.ready = True
                self._changed.notify()
            case UnsafeMsg(module=module, reason=reason):
                self.unsafe = message
                self.end = f"no fork is safe any more after {module or 'its imports'}: {reason}"
            case ForkedMsg(number=number, pid=pid):
                if (reply := self._replies.get(number)) is not None and not reply.done():
                    reply.set_result(pid)
            case RefusedMsg(number=number, reason=reason):
                self._fail(number, f"{self} refused: {reason}")

    def _fail(self, number: int, reason: str) -> None:
        if (reply := self._replies.get(number)) is not None and not reply.done():
            reply.set_exception(ForkFailed(reason))

    def _exited(self, status: int) -> None:
        self._reader.close()
        self.end = self.end or describe_exit(status)
        self.ready = False
        for number in list(self._replies):
            self._fail(number, f"{self} died: {self.end}")
        self._changed.notify()


class SupervisedZygote:
    """Starts a zygote, and starts it again with back-off when it dies.

    It is given up when it becomes unsafe to fork again and again, with nothing that the next one could leave out.

    Args:
        start_one: starts a zygote and gives it its first order.
        tries: give up after so many unsafe ones.
        learn: takes what made one unsafe; returns whether the next one leaves that out.
    """

    def __init__(
        self,
        name: str,
        start_one: Callable[[], Awaitable[ZygoteProcess]],
        changed: Notifier,
        emit: EmitEvent,
        *,
        tries: int,
        learn: Callable[[UnsafeMsg], bool] = lambda unsafe: False,
    ) -> None:
        self.name, self._tries, self._learn = name, tries, learn
        self.absent = ""
        """Why there is none and none is being started; empty while there is one or it is on its way."""
        self._current: ZygoteProcess | None = None
        self._start_one, self._changed, self._emit = start_one, changed, emit
        self._task: asyncio.Task[None] | None = None

    @property
    def living(self) -> ZygoteProcess | None:
        """The process, if it lives."""
        return self._current if self._current is not None and not self._current.gone else None

    @property
    def ready(self) -> ZygoteProcess | None:
        """The process, if it has imported everything."""
        return self._current if self._current is not None and self._current.ready else None

    def start(self) -> None:
        """Start it, and restart it from now on."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End it, and restart it no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if (zygote := self.living) is not None:
            zygote.kill("its owner is closing")
            await self._changed.wait_for(lambda: zygote.gone, FORK_TIMEOUT_S)

    async def _run(self) -> None:
        backoff_s, left = 0.0, self._tries
        while True:
            began = time.monotonic()
            self.absent = reason = ""
            learnt = False
            try:
                zygote = self._current = await self._start_one()
                await self._watch(zygote)
                reason = zygote.end
                if zygote.unsafe is not None:
                    learnt = self._learn(zygote.unsafe)
                    left -= not learnt
                else:
                    left = self._tries
            except (OSError, ForkFailed) as error:
                reason = f"cannot be started: {error}"
            steady = learnt or time.monotonic() - began > STEADY_S
            backoff_s = 0.0 if steady else min(BACKOFF_MAX_S, max(BACKOFF_FIRST_S, 2 * backoff_s))
            # One that is restarted at once is worth waiting for.
            self.absent = reason if backoff_s or not left else ""
            if not left:
                self._emit("zygote_given_up", zygote=self.name, reason=reason)
                self._changed.notify()
                return
            self._emit("zygote_died", zygote=self.name, reason=reason, wait_s=backoff_s)
            self._changed.notify()
            await asyncio.sleep(backoff_s)

    async def _watch(self, zygote: ZygoteProcess) -> None:
        await self._changed.wait_for(lambda: zygote.ready or zygote.gone)
        if zygote.ready:
            seconds = round(time.monotonic() - zygote.began, 3)
            self._emit("zygote_ready", zygote=self.name, pid=zygote.pid, seconds=seconds, modules=len(zygote.loaded))
        await self._changed.wait_for(lambda: zygote.gone)


class ZygotePair:
    """The light and the heavy zygote of one interpreter and environment."""

    def __init__(self, pool: ZygotePool, key: ZygoteKey) -> None:
        self.key = key
        self.targets: list[str] = []
        self.modules: list[str] = []
        self._skipped: set[str] = set()
        self._pool = pool
        number, changed, emit = len(pool.pairs), pool.changed, pool.emit
        self.light = SupervisedZygote(f"light-{number}", self._start_light, changed, emit, tries=LIGHT_TRIES)
        self.heavy = SupervisedZygote(f"heavy-{number}", self._start_heavy, changed, emit, tries=1, learn=self._skip)

    def start(self) -> None:
        """Start both; the heavy one only if anything is to be imported."""
        self.light.start()
        if self.targets or self.modules:
            self.heavy.start()
        else:
            self.heavy.absent = "nothing to preload"

    async def choose(self, target: str, needs: Sequence[str]) -> ZygoteProcess:
        """Return the zygote that has most of what a process needs, waiting for it as long as that pays. Raises
        ForkFailed: there is none."""
        changed, light, heavy = self._pool.changed, self.light, self.heavy

        def fit() -> ZygoteProcess | None:
            wanted = [module for module in needs if module not in self._skipped]
            return heavy.living if heavy.living is not None and heavy.living.knows(wanted) else None

        if needs:
            # The heavy one is forked from the light one: without both, none comes soon.
            await changed.wait_for(
                lambda: heavy.absent or (light.absent and not heavy.living) or fit(), HEAVY_TIMEOUT_S
            )
            if zygote := fit():
                return zygote
        await changed.wait_for(lambda: light.absent or light.ready, LIGHT_TIMEOUT_S)
        if heavy.ready and target in self.targets and heavy.ready.knows([target]):
            return heavy.ready
        if light.ready:
            return light.ready
        raise ForkFailed(f"zygote {light.name} is not there: {light.absent or 'it is still starting'}")

    async def _start_light(self) -> ZygoteProcess:
        pool = self._pool
        ours, theirs = packet_pair()
        env = {**pool.environment(dict(self.key.env)), PLACEHOLDER_NAME: PLACEHOLDER}
        with theirs:
            argv = [*zygote_argv(self.key.python, str(theirs.fileno())), str(os.getpid()), self.light.name, PLACEHOLDER]
            start = asyncio.ensure_future(pool.spawn(argv, env, pool.log, (theirs.fileno(),)))
            try:
                child = await asyncio.shield(start)
            except asyncio.CancelledError:
                # The thread that starts it cannot be cancelled.
                ours.close()
                child = await start
                child.kill()
                child.wait()
                raise
            except BaseException:
                ours.close()
                raise
        zygote = ZygoteProcess(self.light.name, child.pid, ours, pool.changed, child)
        zygote.preload(PreloadMsg(list(pool.light_modules), calls=dict(pool.calls)))
        return zygote

    def _skip(self, unsafe: UnsafeMsg) -> bool:
        """Leave a module out from now on. False: all imports together were unsafe, or it was left out already."""
        if not unsafe.module or unsafe.module in self._skipped:
            return False
        self._skipped.add(unsafe.module)
        return True

    async def _start_heavy(self) -> ZygoteProcess:
        pool = self._pool
        await pool.changed.wait_for(lambda: self.light.ready)
        light = self.light.ready
        assert light is not None
        ours, theirs = packet_pair()
        pool.starting += 1
        try:
            with theirs, pool.log.open("ab", buffering=0) as log:
                argv = zygote_argv(self.key.python, self.heavy.name)
                order = ForkMsg(argv=argv, env={})
                pid = await light.fork(order, [log.fileno(), theirs.fileno()])
            zygote = ZygoteProcess(self.heavy.name, pid, ours, pool.changed)
        except BaseException:
            ours.close()
            raise
        finally:
            pool.starting -= 1
        zygote.preload(
            PreloadMsg(
                [module for module in self.modules if module not in self._skipped],
                [target for target in self.targets if target not in self._skipped],
            )
        )
        return zygote


class ZygotePool:
    """All zygotes of this process, which must be a subreaper.

    Args:
        spawn: starts a process.
        environment: returns the environment of a zygote, given the variables that its processes have of their own.
        log: where zygotes write.
        light_modules, calls: what light zygotes preload, see PreloadMsg.
        emit: takes zygote_ready, zygote_died and zygote_given_up.
    """

    def __init__(
        self,
        spawn: SpawnProcess,
        environment: Callable[[dict[str, str]], dict[str, str]],
        log: Path,
        emit: EmitEvent,
        light_modules: Sequence[str] = (),
        calls: Mapping[str, str] | None = None,
    ) -> None:
        self.spawn, self.environment, self.log, self.emit = spawn, environment, log, emit
        self.light_modules, self.calls = light_modules, calls or {}
        self.pairs: dict[ZygoteKey, ZygotePair] = {}
        self.changed = Notifier()
        self.starting = 0
        """Forks in progress: a process may exist that is not watched yet."""

    @property
    def pids(self) -> set[int]:
        """Processes that the pool waits for."""
        zygotes = [zygote.living for pair in self.pairs.values() for zygote in (pair.light, pair.heavy)]
        return {zygote.pid for zygote in zygotes if zygote is not None}

    def preload(self, key: ZygoteKey, target: str, modules: Sequence[str]) -> None:
        """Register, before `start`, what a process will import."""
        pair = self.pairs.get(key)
        if pair is None:
            pair = self.pairs[key] = ZygotePair(self, key)
        pair.targets += [target] if target and target not in pair.targets else []
        pair.modules += [module for module in modules if module not in pair.modules]

    def start(self) -> None:
        """Start the zygotes and keep them alive, in the background."""
        for pair in self.pairs.values():
            pair.start()

    async def close(self) -> None:
        """End them."""
        for pair in self.pairs.values():
            await pair.heavy.close()
            await pair.light.close()

    async def fork(
        self, key: ZygoteKey, order: ForkMsg, fds: Sequence[int], *, target: str = "", needs: Sequence[str] = ()
    ) -> int:
        """Fork a process; return its pid.

        Args:
            key: its zygotes.
            order: what it is.
            fds: its log, then those that `order.descriptors` names.
            target: what it will import for sure, if a zygote knows it.
            needs: modules that it must not have to import itself.

        Raises:
            ForkFailed: the process must be spawned, and why.
        """
        pair = self.pairs.get(key)
        if pair is None:
            raise ForkFailed("no zygote for its interpreter and environment")
        return await (await pair.choose(target, needs)).fork(order, fds)
