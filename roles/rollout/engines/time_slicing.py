"""Time slicing of a device that engines share with a trainer (modes colocate and hybrid).

Engines have the device until the trainer requests it. Then each releases its memory and reports so. The trainer starts
when every engine has done so, is dead, or is late and therefore excluded. Afterwards the engines take memory again.

Two rules keep both from having the device at once, whoever dies and whichever call is lost:

- An engine takes memory on the trainer's grant, which counts as taken from the moment it is given; or when the registry
  shows that no trainer can be using the device (`nobody_trains`).
- The trainer starts when all engines of a list have told *this* incarnation of the trainer that they hold nothing. The
  registry must have given the list after the trainer requested the device, and with the trainer's own address in it:
  an engine that enters the registry later sees the address, and asks.

`DeviceSchedule` is the pure state machine; `TrainerTimeSlicing` serves it, `EngineTimeSlicing` is the engine's side.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from relax_rt.interfaces.registry import Changes, Member
from relax_rt.interfaces.role import RoleContext
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, RelaxError, ShuttingDown, Unreachable
from relax_rt.transport.rpc.interface import idempotent

GrantWord = Literal["hold", "release"]
"""hold: the engine may have memory of the device. release: it may not, and releases what it has."""


class HolderReport(msgspec.Struct, frozen=True):
    """State of an engine, sent with each call.

    Attributes:
        slot, epoch: of the engine.
        call: number of the call, from 1; the engine acts only on the answer to its last one.
        holds: it has memory of the device.
        trainer: epoch of the trainer that answered it last; 0: none did.
    """

    slot: str
    epoch: int
    call: int
    holds: bool
    trainer: int


class DeviceGrant(msgspec.Struct, frozen=True):
    """A trainer's answer, with its epoch."""

    trainer: int
    word: GrantWord


class EngineExcluded(msgspec.Struct, frozen=True):
    """An engine did not release its memory in time. It may hold some until its process ends."""

    slot: str
    epoch: int
    why: str


class StartTraining(msgspec.Struct, frozen=True):
    """The device is the trainer's; `without`: excluded engines, which may still hold memory of it."""

    without: tuple[str, ...]


ScheduleAction = EngineExcluded | StartTraining


@dataclass(slots=True)
class _HolderState:
    """`holds` is None until the engine has reported to this trainer."""

    epoch: int
    call: int = 0
    holds: bool | None = None
    excluded: bool = False

    @property
    def blocks_trainer(self) -> bool:
        return self.holds is not False and not self.excluded


class DeviceSchedule:
    """Decides who has the device, on the trainer's side. Events are method calls, which return actions.

    Args:
        trainer: epoch of this trainer.
        release_timeout_s: how long engines may take to release their memory.
    """

    def __init__(self, trainer: int, release_timeout_s: float) -> None:
        self.trainer, self.release_timeout_s = trainer, release_timeout_s
        self.phase: Literal["engines", "changing", "trainer"] = "engines"
        self.number = 0
        """Number of time slices that the trainer has had."""
        self.deadline: float | None = None
        """When `tick` is due; None: no engine is late."""
        self._engines: dict[str, _HolderState] = {}
        self._listed = False

    @property
    def holders(self) -> list[str]:
        """Engines that have not released their memory yet."""
        return sorted(slot for slot, engine in self._engines.items() if engine.blocks_trainer)

    def on_members(self, members: Iterable[Member], now: float, *, whole: bool) -> list[ScheduleAction]:
        """Apply the registry's entries of the engines' role.

        Args:
            whole: it is the whole list, read after the device was requested.
        """
        seen: set[str] = set()
        for member in members:
            slot, epoch = member.who.slot, member.who.epoch
            seen.add(slot)
            known = self._engines.get(slot)
            if known is not None and known.epoch > epoch:
                continue
            if member.state == "gone":
                self._engines.pop(slot, None)
            elif known is None or known.epoch < epoch:
                # The incarnation before it has ended: slots are given again only then.
                self._engines[slot] = _HolderState(epoch)
        if whole:
            for slot in self._engines.keys() - seen:
                del self._engines[slot]
            if self.phase == "changing" and not self._listed:
                self._listed, self.deadline = True, now + self.release_timeout_s
        return self._start_if_free()

    def on_report(self, report: HolderReport) -> list[ScheduleAction]:
        """Apply an engine's report."""
        engine = self._engines.get(report.slot)
        if engine is None or engine.epoch < report.epoch:
            engine = self._engines[report.slot] = _HolderState(report.epoch)
        # Before this trainer has answered it, it may still act by the registry, and hold what it says it does not.
        if engine.epoch == report.epoch and report.call > engine.call and report.trainer == self.trainer:
            engine.call, engine.holds = report.call, report.holds
            engine.excluded = engine.excluded and report.holds
        return self._start_if_free()

    def changes_for(self, report: HolderReport) -> bool:
        """Whether the answer to this call changes what the engine may hold."""
        return report.trainer != self.trainer or self._decide(report) != ("hold" if report.holds else "release")

    def answer(self, report: HolderReport) -> DeviceGrant:
        """Answer a call. Memory that it grants counts as taken."""
        word, engine = self._decide(report), self._engines.get(report.slot)
        if word == "hold" and engine is not None:
            engine.call, engine.holds = report.call, True
        return DeviceGrant(self.trainer, word)

    def request(self) -> None:
        """Request the device for the trainer; `on_members` must follow.

        Raises:
            Refused: it has it, or is about to get it.
        """
        if self.phase != "engines":
            raise Refused("the device for the trainer", why=f"a turn is under way ({self.phase})")
        self.phase, self._listed = "changing", False

    def release(self) -> None:
        """Give the device back to the engines."""
        self.phase, self.deadline = "engines", None
        for engine in self._engines.values():
            engine.excluded = False

    def tick(self, now: float) -> list[ScheduleAction]:
        """Exclude the engines that are late."""
        if self.phase != "changing" or self.deadline is None or now < self.deadline:
            return []
        actions: list[ScheduleAction] = []
        for slot in self.holders:
            engine = self._engines[slot]
            engine.excluded = True
            what = "was not heard of" if engine.holds is None else "did not give its memory back"
            actions.append(EngineExcluded(slot, engine.epoch, f"it {what} within {self.release_timeout_s:g} s"))
        return [*actions, *self._start_if_free()]

    def _decide(self, report: HolderReport) -> GrantWord:
        engine = self._engines.get(report.slot)
        outdated = engine is None or engine.epoch != report.epoch or engine.call > report.call
        return "release" if outdated or self.phase != "engines" else "hold"

    def _start_if_free(self) -> list[ScheduleAction]:
        if self.phase != "changing" or not self._listed or self.holders:
            return []
        self.phase, self.deadline = "trainer", None
        self.number += 1
        return [StartTraining(tuple(sorted(slot for slot, engine in self._engines.items() if engine.excluded)))]


def nobody_trains(member: Member | None, last: int) -> bool:
    """Whether an engine may take memory without a grant: no trainer has the device, nor can get it before it has
    heard of the engine.

    Args:
        member: the trainer's entry, as the registry has it now, in which the engine itself is entered.
        last: epoch of the trainer that answered the engine last; 0: none did.
    """
    if member is None or member.state == "gone":
        return True
    # It is starting: it reads the list of engines once it has its address, before its first time slice.
    return member.who.epoch > last and not member.address


TRAINER_SLOT = "trainer/0"
ENGINE_ROLE = "rollout"
"""The role whose engines share the trainer's device."""
WAIT_S, CALL_S = 1.0, 1.0
"""Time between two calls of an engine, after which a trainer's death is noticed."""
MAX_WAIT_S = 10.0
RETRY_S = 0.1
WATCH_S = 5.0
REGISTRY_WAIT_S = 600.0
GRACE_S = 15.0
"""An engine that is late ends its process; the trainer waits so much longer for that."""


class TimeSlicingApi(Protocol):
    """What the trainer serves to engines that share its device."""

    @idempotent
    async def may_hold(self, report: HolderReport, wait_s: float) -> DeviceGrant:
        """Return whether the engine may hold memory of the device, once that changes or after wait_s."""


class TrainerTimeSlicing:
    """The trainer's side; implements TimeSlicingApi, all of it on the event loop.

    Args:
        release_timeout_s: how long an engine may take to release its memory.
    """

    def __init__(self, ctx: RoleContext, release_timeout_s: float) -> None:
        self._ctx = ctx
        self.schedule = DeviceSchedule(ctx.who.epoch, release_timeout_s + GRACE_S)
        self._changed = asyncio.Event()
        self._without: tuple[str, ...] = ()

    async def may_hold(self, report: HolderReport, wait_s: float) -> DeviceGrant:
        """Answer an engine's call."""
        try:
            async with asyncio.timeout(min(max(wait_s, 0.0), MAX_WAIT_S)):
                self._apply(self.schedule.on_report(report))
                while not self.schedule.changes_for(report):
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.schedule.answer(report)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[tuple[str, ...]]:
        """Have the device inside the block; yields the excluded engines.

        Raises:
            Unreachable, DeadlineExceeded: the registry, which knows the engines, is away for too long.
        """
        began = taken = time.monotonic()
        self.schedule.request()
        self._notify()
        try:
            await self._wait_for_device()
            taken = time.monotonic()
            facts = {"turn": self.schedule.number, "waited_s": round(taken - began, 3), "without": list(self._without)}
            self._ctx.event("device_acquired", **facts)
            yield self._without
            await asyncio.to_thread(release_cache)
        finally:
            held = self.schedule.phase == "trainer"
            self.schedule.release()
            self._notify()
            if held:
                self._ctx.event(
                    "device_released", turn=self.schedule.number, seconds=round(time.monotonic() - taken, 3)
                )

    async def _wait_for_device(self) -> None:
        loop = asyncio.get_running_loop()
        self._ctx.progress.waiting("the device: the list of its engines")
        # All members, once our own address is among them: engines that enter later will find us.
        deadline = time.monotonic() + REGISTRY_WAIT_S
        while True:
            try:
                known = await self._ctx.registry.watch(0, 0.0)
            except (Unreachable, DeadlineExceeded):
                if time.monotonic() > deadline:
                    raise
            else:
                if any(member.who == self._ctx.who and member.address for member in known.members):
                    break
                if time.monotonic() > deadline:
                    why = f"the registry does not have our address after {REGISTRY_WAIT_S:g} s"
                    raise DeadlineExceeded("the list of engines on the trainer's device", why=why)
            await asyncio.sleep(RETRY_S)
        self._apply(self.schedule.on_members(_engines(known), loop.time(), whole=True))
        watching = asyncio.create_task(self._follow(known.revision))
        try:
            while self.schedule.phase == "changing":
                self._ctx.progress.waiting(f"the device: {', '.join(self.schedule.holders)} to release its memory")
                assert self.schedule.deadline is not None
                try:
                    async with asyncio.timeout(max(self.schedule.deadline - loop.time(), 0.0)):
                        await self._changed.wait()
                except TimeoutError:
                    self._apply(self.schedule.tick(loop.time()))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._ctx.progress.waiting("")

    async def _follow(self, revision: int) -> None:
        while True:
            try:
                changes = await self._ctx.registry.watch(revision, WATCH_S)
            except RelaxError:
                await asyncio.sleep(RETRY_S)
                continue
            revision = changes.revision
            now = asyncio.get_running_loop().time()
            self._apply(self.schedule.on_members(_engines(changes), now, whole=changes.snapshot))

    def _apply(self, actions: list[ScheduleAction]) -> None:
        for action in actions:
            if isinstance(action, EngineExcluded):
                facts = {"engine": f"{action.slot}#{action.epoch}", "why": action.why}
                self._ctx.event("engine_not_released", **facts)
                self._ctx.log.warning("an engine keeps its memory while the trainer has the device", **facts)
            elif isinstance(action, StartTraining):
                self._without = action.without
        if actions:
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _engines(known: Changes) -> list[Member]:
    return [member for member in known.members if member.who.role == ENGINE_ROLE]


def release_cache() -> None:
    """Release the device memory that torch caches."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class ReleaseTimedOut(RelaxError):
    """An engine could not release its memory, or take it again, in time: its role ends and is restarted."""


class EngineTimeSlicing:
    """An engine's side: asks the trainer, releases memory on its request, and takes it again.

    Args:
        release: ends sequences in flight, tokens kept, and releases the memory.
        resume: takes the memory again.
        release_timeout_s, resume_timeout_s: how long each may take.
    """

    def __init__(
        self,
        ctx: RoleContext,
        release: Callable[[], Awaitable[None]],
        resume: Callable[[], Awaitable[None]],
        *,
        release_timeout_s: float,
        resume_timeout_s: float,
    ) -> None:
        self._ctx, self._release, self._resume = ctx, release, resume
        self._release_timeout_s, self._resume_timeout_s = release_timeout_s, resume_timeout_s
        self._call = self._trainer = 0
        self._holds = False

    async def enter(self) -> None:
        """Wait until the engine may take memory for the first time. Call it at the start of the role."""
        self._ctx.progress.waiting("the device: the trainer has it, or is not there yet")
        extended = time.monotonic()
        while not await self._may_hold():
            # Waiting for the trainer does not count as start time.
            self._ctx.progress.extend(time.monotonic() - extended, "waiting for the trainer to give the device back")
            extended = time.monotonic()
        self._ctx.progress.waiting("")
        self._holds = True

    async def follow(self) -> None:
        """Release and take memory as the trainer decides; never returns.

        Raises:
            ReleaseTimedOut: memory was not released, or taken again, in time.
        """
        while True:
            if await self._may_hold() == self._holds:
                continue
            if self._holds:
                self._ctx.progress.waiting("the trainer, which has the device")
                await self._within(self._release(), self._release_timeout_s, "release its memory", "engine_released")
                self._holds = False
            else:
                # Set before the memory is taken, so that no call meanwhile reports otherwise.
                self._holds = True
                await self._within(self._resume(), self._resume_timeout_s, "take its memory again", "engine_resumed")
                self._ctx.progress.waiting("")

    async def _may_hold(self) -> bool:
        """Ask the trainer, or without one the registry. May wait for WAIT_S."""
        self._call += 1
        report = HolderReport(self._ctx.who.slot, self._ctx.who.epoch, self._call, self._holds, self._trainer)
        try:
            trainer = await self._ctx.peer(TRAINER_SLOT, TimeSlicingApi, timeout_s=CALL_S)
            grant = await trainer.may_hold(report, WAIT_S)
        except (Unreachable, DeadlineExceeded, ShuttingDown):
            await asyncio.sleep(RETRY_S)
            if self._holds:
                return True
            try:
                known = await self._ctx.registry.watch(0, 0.0)
            except (Unreachable, DeadlineExceeded):
                return False
            entry = next((member for member in known.members if member.who.slot == TRAINER_SLOT), None)
            return nobody_trains(entry, self._trainer)
        self._trainer = max(self._trainer, grant.trainer)
        return grant.word == "hold" if grant.trainer == self._trainer else self._holds

    async def _within(self, work: Awaitable[None], limit_s: float, what: str, kind: str) -> None:
        began = time.monotonic()
        self._ctx.progress.extend(limit_s, f"to {what}")
        try:
            # Not wait_for, which swallows a cancellation that arrives together with the result.
            async with asyncio.timeout(limit_s):
                await work
        except TimeoutError:
            raise ReleaseTimedOut(
                f"{self._ctx.who} did not {what}",
                why=f"not within {limit_s:g} s",
                hint="raise it in [colocation] if the device is that slow",
            ) from None
        self._ctx.event(kind, seconds=round(time.monotonic() - began, 3))


class MemoryGate:
    """Keeps work that needs the engine's memory out of the times when it is released."""

    def __init__(self) -> None:
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._inside = 0

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Wait until the memory is there, and keep it for the block."""
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
        """Let no work begin any more; return when all blocks have ended."""
        self._open.clear()
        while self._inside:
            await self._idle.wait()

    def open(self) -> None:
        """Let work begin again."""
        self._open.set()
