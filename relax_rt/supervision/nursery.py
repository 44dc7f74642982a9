"""The agent's zygotes: two for each interpreter and environment, watched, and started again when they die.

The light one knows the host and the runtime's own roles; it is up as soon as the registry could be. The heavy one is
forked from it and goes on importing what the other roles need, while the light one stays free. A role that needs none
of the heavy imports never waits for them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from relax_rt.supervision.channel import control_pair
from relax_rt.supervision.limits import Limits
from relax_rt.supervision.zygote import (
    GO,
    MAX_FDS,
    MAX_PACKET_BYTES,
    ROOM,
    ROOM_NAME,
    ForkedMsg,
    ForkMsg,
    FromZygote,
    LoadedMsg,
    PreloadMsg,
    ReadyMsg,
    RefusedMsg,
    UnfitMsg,
    decode_from_zygote,
    encode,
    zygote_argv,
)

LIGHT = (
    "relax_rt.hosting.host",
    "relax_rt.cluster.registry.role",
    "relax_rt.cluster.registry.service",
    "relax_rt.hosting.queue_role",
)
"""What every role, the registry and the queue need."""
LIGHT_PATIENCE_S = 3.0
"""A role waits so long for a zygote that is only just starting: a spawn takes as long on a busy machine."""
HEAVY_PATIENCE_S = 30.0
"""A role waits so long for heavy imports, which it would otherwise do itself and begin later."""
FORK_WAIT_S = 5.0
"""A zygote that has nothing to do and does not answer for so long is stuck."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 10.0
STEADY_S = 60.0
"""A zygote that lived so long starts again without delay."""
LIGHT_TRIES = 3
"""A light zygote that was unfit for forks so often is given up: what it imports does not change."""

Say = Callable[..., None]
"""Appends to the event log: say(kind, **fields)."""


class NoZygote(Exception):
    """No fork came of it; the text says why."""


class ZygoteKey(NamedTuple):
    """What processes must share to be forked from one zygote: environment variables may be read by an import."""

    python: str
    env: tuple[tuple[str, str], ...]


class Birth(NamedTuple):
    """A role's process that is wanted.

    Attributes:
        target: its class.
        needs: modules that it must not have to import itself.
        fds: descriptors by the environment variable that tells their number.
    """

    key: ZygoteKey
    target: str
    needs: Sequence[str]
    argv: list[str]
    env: dict[str, str]
    log_fd: int
    fds: dict[str, int]
    limits: Limits


class Popen(Protocol):
    """Starts a process from a thread that outlives it, as its death signal needs."""

    def __call__(
        self, argv: list[str], env: dict[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> Awaitable[subprocess.Popen[bytes]]: ...


class Bell:
    """Wakes whoever waits for something to become true."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Have every waiter look again."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, probe: Callable[[], object], patience_s: float | None = None) -> bool:
        """Wait until the probe is true; False when that took too long."""
        try:
            async with asyncio.timeout(patience_s):
                while not probe():
                    await self._event.wait()
        except TimeoutError:
            return bool(probe())
        return True


class ZygoteProcess:
    """A living zygote as the agent's loop sees it.

    Args:
        child: the process as `subprocess` knows it, if it was not forked.
        bell: rung at each change.
    """

    def __init__(
        self, name: str, pid: int, control: socket.socket, bell: Bell, child: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.name, self.pid = name, pid
        self.began = time.monotonic()
        self.loaded: set[str] = set()
        self.ready = self.gone = False
        self.end = ""
        self.unfit: UnfitMsg | None = None
        self._bell, self._child, self._control = bell, child, control
        self._pidfd = os.pidfd_open(pid)
        self._answers: dict[int, asyncio.Future[int]] = {}
        self._numbers = 0
        loop = asyncio.get_running_loop()
        control.setblocking(False)
        loop.add_reader(self._pidfd, self._exited)
        loop.add_reader(control.fileno(), self._readable)

    def __str__(self) -> str:
        return f"zygote {self.name} (pid {self.pid})"

    def knows(self, modules: Sequence[str]) -> bool:
        """Whether all of these are imported, or cannot be."""
        return self.loaded.issuperset(modules)

    def preload(self, order: PreloadMsg) -> None:
        """Have modules imported."""
        self._send(encode(order), [])

    async def fork(self, order: ForkMsg, fds: Sequence[int]) -> int:
        """Have a process forked; its pid.

        Raises:
            NoZygote: it refused, died or did not answer.
        """
        self._numbers += 1
        number = self._numbers
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        # Closed without a word if nothing comes of it: one that was forked and not told of then ends by itself.
        gate, ours = os.pipe()
        try:
            try:
                self._send(encode(msgspec.structs.replace(order, number=number)), [*fds, gate])
            finally:
                os.close(gate)
            # One that is at an import answers after it.
            async with asyncio.timeout(FORK_WAIT_S if self.ready else HEAVY_PATIENCE_S):
                pid = await answer
            with suppress(BrokenPipeError):
                os.write(ours, GO)
            return pid
        except TimeoutError:
            self.kill("did not answer")
            raise NoZygote(f"{self} did not answer") from None
        finally:
            os.close(ours)
            self._answers.pop(number, None)

    def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        if len(packet) > MAX_PACKET_BYTES or len(fds) > MAX_FDS:
            raise NoZygote(f"an order of {len(packet)} bytes and {len(fds)} descriptors is too large")
        try:
            socket.send_fds(self._control, [packet], list(fds), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise NoZygote(f"{self} has too many orders waiting") from None
        except OSError as error:
            raise NoZygote(f"{self} is gone: {self.end or error}") from error

    def kill(self, reason: str) -> None:
        """SIGKILL it."""
        self.end = self.end or reason
        if not self.gone:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _readable(self) -> None:
        while True:
            try:
                packet = self._control.recv(MAX_PACKET_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                packet = b""
            if not packet:
                asyncio.get_running_loop().remove_reader(self._control.fileno())
                return
            try:
                self._take(decode_from_zygote(packet))
            except msgspec.DecodeError as error:
                self.kill(f"spoke nonsense: {error}")
                return

    def _take(self, message: FromZygote) -> None:
        match message:
            case LoadedMsg(module=module):
                self.loaded.add(module)
                self._bell.ring()
            case ReadyMsg():
                self.ready = True
                self._bell.ring()
            case UnfitMsg(module=module, reason=reason):
                self.unfit = message
                self.end = f"nothing can be forked any more after {module or 'its imports'}: {reason}"
            case ForkedMsg(number=number, pid=pid):
                if (answer := self._answers.get(number)) is not None and not answer.done():
                    answer.set_result(pid)
            case RefusedMsg(number=number, reason=reason):
                self._refuse(number, f"{self} refused: {reason}")

    def _refuse(self, number: int, reason: str) -> None:
        if (answer := self._answers.get(number)) is not None and not answer.done():
            answer.set_exception(NoZygote(reason))

    def _exited(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        self._readable()
        loop.remove_reader(self._control.fileno())
        self._control.close()
        status = self._status()
        self.end = self.end or status
        os.close(self._pidfd)
        self.gone = True
        self.ready = False
        for number in list(self._answers):
            self._refuse(number, f"{self} died: {self.end}")
        self._bell.ring()

    def _status(self) -> str:
        try:
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        except ChildProcessError:
            info = None
        if info is None:
            return "ended"
        by_signal = info.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        if self._child is not None:
            self._child.returncode = -info.si_status if by_signal else info.si_status
        return f"ended by {signal.Signals(info.si_status).name}" if by_signal else f"exit code {info.si_status}"


class Kept:
    """One zygote that is to be there: started, and started again after its death, with back-off. It is given up when
    it is found unfit for forks again and again, with nothing that the next one could leave out.

    Args:
        begin: starts one and gives it its first order.
        tries: so many may be unfit before it is given up.
        learn: takes what made one unfit; whether the next one leaves it out.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[], Awaitable[ZygoteProcess]],
        bell: Bell,
        say: Say,
        *,
        tries: int,
        learn: Callable[[UnfitMsg], bool] = lambda unfit: False,
    ) -> None:
        self.name, self._tries, self._learn = name, tries, learn
        self.now: ZygoteProcess | None = None
        self.absent = ""
        """Why there is none and none is being started; empty while there is one or it is on its way."""
        self._begin, self._bell, self._say = begin, bell, say
        self._task: asyncio.Task[None] | None = None

    @property
    def living(self) -> ZygoteProcess | None:
        """The process, if it lives."""
        return self.now if self.now is not None and not self.now.gone else None

    def start(self) -> None:
        """Begin to keep it."""
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Keep it no more, and end it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if (zygote := self.living) is not None:
            zygote.kill("the agent is closing")
            await self._bell.until(lambda: zygote.gone, FORK_WAIT_S)

    async def _keep(self) -> None:
        backoff_s, left = 0.0, self._tries
        while True:
            began = time.monotonic()
            self.absent = reason = ""
            learnt = False
            try:
                zygote = self.now = await self._begin()
                await self._live(zygote)
                reason = zygote.end
                if zygote.unfit is not None:
                    learnt = self._learn(zygote.unfit)
                    left -= not learnt
                else:
                    left = self._tries
            except (OSError, NoZygote) as error:
                reason = f"cannot be started: {error}"
            steady = learnt or time.monotonic() - began > STEADY_S
            backoff_s = 0.0 if steady else min(BACKOFF_MAX_S, max(BACKOFF_FIRST_S, 2 * backoff_s))
            # One that is begun again at once is worth waiting for.
            self.absent = reason if backoff_s or not left else ""
            if not left:
                self._say("zygote_given_up", zygote=self.name, reason=reason)
                self._bell.ring()
                return
            self._say("zygote_died", zygote=self.name, reason=reason, wait_s=backoff_s)
            self._bell.ring()
            await asyncio.sleep(backoff_s)

    async def _live(self, zygote: ZygoteProcess) -> None:
        await self._bell.until(lambda: zygote.ready or zygote.gone)
        if zygote.ready:
            seconds = round(time.monotonic() - zygote.began, 3)
            self._say("zygote_ready", zygote=self.name, pid=zygote.pid, seconds=seconds, modules=len(zygote.loaded))
        await self._bell.until(lambda: zygote.gone)


class Family:
    """The two zygotes of one interpreter and environment."""

    def __init__(self, nursery: Nursery, key: ZygoteKey) -> None:
        self.key = key
        self.targets: list[str] = []
        self.modules: list[str] = []
        self._skipped: set[str] = set()
        self._nursery = nursery
        name = f"{len(nursery.families)}"
        self.light = Kept(f"light-{name}", self._begin_light, nursery.bell, nursery.say, tries=LIGHT_TRIES)
        self.heavy = Kept(f"heavy-{name}", self._begin_heavy, nursery.bell, nursery.say, tries=1, learn=self._leave_out)

    def start(self) -> None:
        """Keep both; the heavy one only if anything is to be known."""
        self.light.start()
        if self.targets or self.modules:
            self.heavy.start()
        else:
            self.heavy.absent = "nothing to preload"

    async def choose(self, birth: Birth) -> ZygoteProcess:
        """The zygote that has most of what a role needs, waiting for it as long as that is worth it.

        Raises:
            NoZygote: there is none.
        """
        bell, light, heavy = self._nursery.bell, self.light, self.heavy

        def fit() -> ZygoteProcess | None:
            needs = [module for module in birth.needs if module not in self._skipped]
            return heavy.living if heavy.living is not None and heavy.living.knows(needs) else None

        if birth.needs:
            # The heavy one is forked from the light one: without both, none comes soon.
            await bell.until(lambda: heavy.absent or (light.absent and not heavy.living) or fit(), HEAVY_PATIENCE_S)
            if zygote := fit():
                return zygote
        await bell.until(lambda: light.absent or (light.living and light.living.ready), LIGHT_PATIENCE_S)
        known = [birth.target] if birth.target in self.targets else []
        if heavy.living and heavy.living.ready and known and heavy.living.knows(known):
            return heavy.living
        if light.living and light.living.ready:
            return light.living
        raise NoZygote(f"zygote {light.name} is not there: {light.absent or 'it is still starting'}")

    async def _begin_light(self) -> ZygoteProcess:
        nursery = self._nursery
        ours, theirs = control_pair()
        env = {**nursery.environment(dict(self.key.env)), ROOM_NAME: ROOM}
        with theirs:
            argv = [*zygote_argv(self.key.python, str(theirs.fileno())), str(os.getpid()), self.light.name, ROOM]
            start = asyncio.ensure_future(nursery.popen(argv, env, nursery.log, (theirs.fileno(),)))
            try:
                child = await asyncio.shield(start)
            except asyncio.CancelledError:
                # The thread that starts it cannot be called off.
                ours.close()
                child = await start
                child.kill()
                child.wait()
                raise
            except BaseException:
                ours.close()
                raise
        zygote = ZygoteProcess(self.light.name, child.pid, ours, nursery.bell, child)
        zygote.preload(PreloadMsg(list(LIGHT), config=nursery.config))
        return zygote

    def _leave_out(self, unfit: UnfitMsg) -> bool:
        """False when all imports together have made it unfit, or what was left out already."""
        if not unfit.module or unfit.module in self._skipped:
            return False
        self._skipped.add(unfit.module)
        return True

    async def _begin_heavy(self) -> ZygoteProcess:
        nursery = self._nursery
        await nursery.bell.until(lambda: self.light.living and self.light.living.ready)
        light = self.light.living
        assert light is not None
        ours, theirs = control_pair()
        nursery.starting += 1
        try:
            with theirs, nursery.log.open("ab", buffering=0) as log:
                argv = zygote_argv(self.key.python, self.heavy.name)
                order = ForkMsg(number=0, what="zygote", argv=argv, env={}, agent_pid=os.getpid())
                pid = await light.fork(order, [log.fileno(), theirs.fileno()])
            zygote = ZygoteProcess(self.heavy.name, pid, ours, nursery.bell)
        except BaseException:
            ours.close()
            raise
        finally:
            nursery.starting -= 1
        zygote.preload(
            PreloadMsg(
                [module for module in self.modules if module not in self._skipped],
                [target for target in self.targets if target not in self._skipped],
            )
        )
        return zygote


class Nursery:
    """All zygotes of this agent.

    Args:
        popen: starts a process.
        environment: what a zygote is started with, given a role's own variables.
        log: where zygotes write.
        config: file of the run's resolved config, read beforehand for its imports; empty for none.
        say: takes zygote_ready, zygote_died and zygote_given_up.
    """

    def __init__(
        self,
        popen: Popen,
        environment: Callable[[dict[str, str]], dict[str, str]],
        log: Path,
        config: str,
        say: Say,
    ) -> None:
        self.popen, self.environment = popen, environment
        self.log, self.config, self.say = log, config, say
        self.families: dict[ZygoteKey, Family] = {}
        self.bell = Bell()
        self.starting = 0
        """Forks under way: a process may exist that nobody watches yet."""

    @property
    def pids(self) -> set[int]:
        """Processes that are ours to wait for."""
        kept = [k.living for family in self.families.values() for k in (family.light, family.heavy)]
        return {zygote.pid for zygote in kept if zygote is not None}

    def want(self, key: ZygoteKey, target: str, modules: Sequence[str]) -> None:
        """Say before `start` what a role will need."""
        family = self.families.get(key)
        if family is None:
            family = self.families[key] = Family(self, key)
        family.targets += [target] if target and target not in family.targets else []
        family.modules += [module for module in modules if module not in family.modules]

    def start(self) -> None:
        """Start the zygotes and keep them alive, in the background."""
        for family in self.families.values():
            family.start()

    async def close(self) -> None:
        """End them."""
        for family in self.families.values():
            await family.heavy.close()
            await family.light.close()

    async def fork(self, birth: Birth) -> int:
        """Fork a role; its pid.

        Raises:
            NoZygote: it must be spawned, and why.
        """
        family = self.families.get(birth.key)
        if family is None:
            raise NoZygote("no zygote for its interpreter and environment")
        zygote = await family.choose(birth)
        order = ForkMsg(
            number=0,
            what="role",
            argv=birth.argv,
            env=birth.env,
            agent_pid=os.getpid(),
            descriptors=tuple(birth.fds),
            limits=birth.limits,
        )
        return await zygote.fork(order, [birth.log_fd, *birth.fds.values()])
