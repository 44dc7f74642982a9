"""Turns on a shared device, carried out: the trainer's side serves them, an engine's role follows. See colocate."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from relax_rt.interfaces.registry import Changes, Member
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.rollout.engines.colocate import Action, Out, Report, Told, Train, Turns, nobody_trains
from relax_rt.transport.rpc.errors import DeadlineExceeded, RelaxError, ShuttingDown, Unreachable
from relax_rt.transport.rpc.interface import idempotent

TRAINER_SLOT = "trainer/0"
ENGINES = "rollout"
"""The role whose engines share the trainer's device."""
WAIT_S, CALL_S = 1.0, 1.0
"""An engine asks so often, and a trainer that dies is noticed so late."""
MOST_WAIT_S = 10.0
RETRY_S = 0.1
WATCH_S = 5.0
REGISTRY_WAIT_S = 600.0
GRACE_S = 15.0
"""An engine that is late ends its process; the trainer waits so much longer for that."""


class TurnsApi(Protocol):
    """What the trainer serves to engines that share its device."""

    @idempotent
    async def turn(self, report: Report, wait_s: float) -> Told:
        """Whether the engine may have memory of the device: as soon as that is not what it does, or after wait_s."""


class TrainerTurns:
    """The trainer's side. Implements TurnsApi; all of it on the event loop.

    Args:
        give_way_s: how long an engine may take to give its memory back, seconds.
    """

    def __init__(self, ctx: RoleContext, give_way_s: float) -> None:
        self._ctx = ctx
        self.turns = Turns(ctx.who.epoch, give_way_s + GRACE_S)
        self._changed = asyncio.Event()
        self._without: tuple[str, ...] = ()

    async def turn(self, report: Report, wait_s: float) -> Told:
        """See TurnsApi."""
        try:
            async with asyncio.timeout(min(max(wait_s, 0.0), MOST_WAIT_S)):
                self._do(self.turns.heard(report))
                while not self.turns.news_for(report):
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.turns.answer(report)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[tuple[str, ...]]:
        """The device is the trainer's inside the block, but for engines that are out, which it yields.

        Raises:
            Unreachable, DeadlineExceeded: the registry, which knows the engines, is away for too long.
        """
        began = taken = time.monotonic()
        self.turns.wanted()
        self._tell()
        try:
            await self._settled()
            taken = time.monotonic()
            facts = {"turn": self.turns.number, "waited_s": round(taken - began, 3), "without": list(self._without)}
            self._ctx.event("device_acquired", **facts)
            yield self._without
            await asyncio.to_thread(release_cache)
        finally:
            held = self.turns.turn == "trainer"
            self.turns.done()
            self._tell()
            if held:
                self._ctx.event("device_released", turn=self.turns.number, seconds=round(time.monotonic() - taken, 3))

    async def _settled(self) -> None:
        loop = asyncio.get_running_loop()
        self._ctx.progress.waiting("the device: the list of its engines")
        known = await self._list()
        self._do(self.turns.listed(_engines(known), loop.time(), whole=True))
        news = asyncio.create_task(self._follow(known.revision))
        try:
            while self.turns.turn == "changing":
                self._ctx.progress.waiting(f"the device: {', '.join(self.turns.in_the_way)} to give way")
                assert self.turns.deadline is not None
                try:
                    async with asyncio.timeout(max(self.turns.deadline - loop.time(), 0.0)):
                        await self._changed.wait()
                except TimeoutError:
                    self._do(self.turns.late(loop.time()))
        finally:
            news.cancel()
            await asyncio.gather(news, return_exceptions=True)
            self._ctx.progress.waiting("")

    async def _list(self) -> Changes:
        """All members, with our own address: engines that are not among them will find us."""
        deadline = time.monotonic() + REGISTRY_WAIT_S
        while True:
            try:
                known = await self._ctx.registry.watch(0, 0.0)
            except (Unreachable, DeadlineExceeded):
                if time.monotonic() > deadline:
                    raise
            else:
                if any(member.who == self._ctx.who and member.address for member in known.members):
                    return known
                if time.monotonic() > deadline:
                    why = f"the registry does not have our address after {REGISTRY_WAIT_S:g} s"
                    raise DeadlineExceeded("the list of engines on the trainer's device", why=why)
            await asyncio.sleep(RETRY_S)

    async def _follow(self, revision: int) -> None:
        """Deaths of engines, as the registry tells them."""
        while True:
            try:
                news = await self._ctx.registry.watch(revision, WATCH_S)
            except RelaxError:
                await asyncio.sleep(RETRY_S)
                continue
            revision = news.revision
            now = asyncio.get_running_loop().time()
            self._do(self.turns.listed(_engines(news), now, whole=news.snapshot))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Out):
                facts = {"engine": f"{action.slot}#{action.epoch}", "why": action.why}
                self._ctx.event("engine_not_released", **facts)
                self._ctx.log.warning("an engine keeps its memory in the trainer's turn", **facts)
            elif isinstance(action, Train):
                self._without = action.without
        if actions:
            self._tell()

    def _tell(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()


def _engines(known: Changes) -> list[Member]:
    return [member for member in known.members if member.who.role == ENGINES]


def release_cache() -> None:
    """Memory of the device that is free but held by this process goes back to it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class NoWay(RelaxError):
    """An engine could not give its memory back, or take it again, in time: its role ends and is started again."""


class EngineTurns:
    """An engine's side: asks the trainer, gives memory back on its word, and takes it again.

    Args:
        leave: has what is in flight ended with its tokens kept, and gives the memory back.
        back: takes the memory again.
        give_way_s, take_back_s: how long each may take, seconds.
    """

    def __init__(
        self,
        ctx: RoleContext,
        leave: Callable[[], Awaitable[None]],
        back: Callable[[], Awaitable[None]],
        *,
        give_way_s: float,
        take_back_s: float,
    ) -> None:
        self._ctx, self._leave, self._back = ctx, leave, back
        self._give_way_s, self._take_back_s = give_way_s, take_back_s
        self._call = self._trainer = 0
        self._holds = False

    async def enter(self) -> None:
        """Return when the engine may take memory for the first time; call it before that, at the start of the role."""
        self._ctx.progress.waiting("the device: the trainer has its turn, or is not there yet")
        extended = time.monotonic()
        while not await self._may_have():
            # Whoever waits for the trainer does not take long to start.
            self._ctx.progress.extend(time.monotonic() - extended, "waiting for the trainer's turn to end")
            extended = time.monotonic()
        self._ctx.progress.waiting("")
        self._holds = True

    async def follow(self) -> None:
        """Take part in the turns; never returns.

        Raises:
            NoWay: memory was not given back, or taken again, in time.
        """
        while True:
            if await self._may_have() == self._holds:
                continue
            if self._holds:
                self._ctx.progress.waiting("the trainer's turn on the device")
                await self._within(self._leave(), self._give_way_s, "give its memory back", "device_released")
                self._holds = False
            else:
                # Before the memory is taken, so that no call that is made meanwhile says otherwise.
                self._holds = True
                await self._within(self._back(), self._take_back_s, "take its memory again", "device_resumed")
                self._ctx.progress.waiting("")

    async def _may_have(self) -> bool:
        """The trainer's word, or what follows from there being none. May wait for WAIT_S."""
        self._call += 1
        report = Report(self._ctx.who.slot, self._ctx.who.epoch, self._call, self._holds, self._trainer)
        try:
            trainer = await self._ctx.peer(TRAINER_SLOT, TurnsApi, timeout_s=CALL_S)
            told = await trainer.turn(report, WAIT_S)
        except (Unreachable, DeadlineExceeded, ShuttingDown):
            await asyncio.sleep(RETRY_S)
            return self._holds or await self._nobody_trains()
        self._trainer = max(self._trainer, told.trainer)
        return told.word == "have" if told.trainer == self._trainer else self._holds

    async def _nobody_trains(self) -> bool:
        try:
            known = await self._ctx.registry.watch(0, 0.0)
        except (Unreachable, DeadlineExceeded):
            return False
        trainer = next((member for member in known.members if member.who.slot == TRAINER_SLOT), None)
        return nobody_trains(trainer, self._trainer)

    async def _within(self, work: Awaitable[None], limit_s: float, what: str, kind: str) -> None:
        began = time.monotonic()
        self._ctx.progress.extend(limit_s, f"to {what}")
        try:
            # Not wait_for, which forgets a cancellation that comes together with the result.
            async with asyncio.timeout(limit_s):
                await work
        except TimeoutError:
            raise NoWay(
                f"{self._ctx.who} did not {what}",
                why=f"not within {limit_s:g} s",
                hint="raise it in [colocation] if the device is that slow",
            ) from None
        self._ctx.event(kind, seconds=round(time.monotonic() - began, 3))


class Gate:
    """Work that needs the engine's memory, and the times when there is none."""

    def __init__(self) -> None:
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._inside = 0

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Work with the memory there; waits until it is."""
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._idle.set()

    async def close(self) -> None:
        """Nothing is begun from now on; returns when what was begun is over."""
        self._open.clear()
        while self._inside:
            await self._idle.wait()

    def open(self) -> None:
        """The memory is there again."""
        self._open.set()
