"""Engines and a trainer on one device, in turns: engines give their memory back, the trainer works, they take it again.

No role uses this yet: it is for engines and a trainer of one process group, once a run can be set up so.

`Turns` decides, purely; `Colocation` carries it out on engines. An engine gives memory back only while it is idle, so
its owner drains it first (sequences in flight are ended with their tokens kept, and go on afterwards). The trainer
never waits longer than the deadlines: an engine that does not give way is out, and its owner has to restart it; it may
hold memory until then, so the trainer is told who it is rather than let run into an out-of-memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from relax_rt.roles.engines.base import Engine
from relax_rt.transport.errors import DeadlineExceeded, Refused, RelaxError

Step = Literal["serving", "draining", "releasing", "released", "resuming", "out"]
WORKING: tuple[Step, ...] = ("draining", "releasing", "resuming")
LOOK_EVERY_S = 0.05


class Limits(msgspec.Struct, frozen=True):
    """How long each step of an engine may take, in seconds."""

    drain_s: float = 60.0
    release_s: float = 30.0
    resume_s: float = 60.0

    def of(self, step: Step) -> float:
        """The limit of a step under way."""
        return {"draining": self.drain_s, "releasing": self.release_s, "resuming": self.resume_s}[step]


class Do(msgspec.Struct, frozen=True):
    """Have an engine drained, its memory released or resumed."""

    engine: str
    step: Step


class Out(msgspec.Struct, frozen=True):
    """An engine is out: it did not do its step, or failed in it."""

    engine: str
    step: Step
    why: str


class Train(msgspec.Struct, frozen=True):
    """The device is the trainer's; `without`: engines that are out, and may hold memory."""

    without: tuple[str, ...]


class Serve(msgspec.Struct, frozen=True):
    """All engines that are not out serve again."""


Action = Do | Out | Train | Serve


@dataclass(slots=True)
class _Engine:
    step: Step = "serving"
    deadline: float = 0.0


@dataclass(slots=True)
class Turns:
    """Whose turn it is. Events are method calls with the time; each gives actions.

    No engine resumes before the trainer is done, and the trainer begins only when every engine has released or is out.
    """

    limits: Limits
    engines: dict[str, _Engine] = field(default_factory=dict)
    turn: Literal["engines", "changing", "trainer"] = "engines"

    def add(self, name: str) -> None:
        """An engine that serves, new or restarted. Call it while it is the engines' turn.

        Raises:
            Refused: it is the trainer's turn, or about to be.
        """
        if self.turn != "engines":
            raise Refused(f"engine {name} joins", why=f"it is not the engines' turn ({self.turn})")
        self.engines[name] = _Engine()

    @property
    def deadline(self) -> float | None:
        """When `late` is due; None: nobody is waited for."""
        return min((e.deadline for e in self.engines.values() if e.step in WORKING), default=None)

    def wanted(self, now: float) -> list[Action]:
        """The trainer wants the device.

        Raises:
            Refused: it has it, or is about to get it.
        """
        if self.turn != "engines" or any(e.step in WORKING for e in self.engines.values()):
            raise Refused("the device for the trainer", why="a change of turns is under way, or it has it already")
        self.turn = "changing"
        return [*self._begin("serving", "draining", now), *self._settled()]

    def trained(self, now: float) -> list[Action]:
        """The trainer has given its memory back.

        Raises:
            Refused: it was not its turn.
        """
        if self.turn != "trainer":
            raise Refused("the device for the engines", why="the trainer does not have it")
        self.turn = "engines"
        return [*self._begin("released", "resuming", now), *self._settled()]

    def done(self, name: str, step: Step, now: float) -> list[Action]:
        """An engine has done its step. One that was given up meanwhile stays out."""
        engine = self.engines[name]
        if engine.step != step:
            return []
        if step == "draining":
            engine.step, engine.deadline = "releasing", now + self.limits.release_s
            return [Do(name, "releasing")]
        engine.step = "released" if step == "releasing" else "serving"
        return self._settled()

    def failed(self, name: str, step: Step, why: str) -> list[Action]:
        """An engine could not do its step."""
        engine = self.engines[name]
        if engine.step != step:
            return []
        engine.step = "out"
        return [Out(name, step, why), *self._settled()]

    def late(self, now: float) -> list[Action]:
        """Time has passed."""
        actions: list[Action] = []
        for name, engine in self.engines.items():
            if engine.step in WORKING and now >= engine.deadline:
                step, engine.step = engine.step, "out"
                actions.append(Out(name, step, f"{step} took longer than {self.limits.of(step):g} s"))
        return [*actions, *self._settled()] if actions else []

    def _begin(self, fro: Step, to: Step, now: float) -> list[Action]:
        actions: list[Action] = []
        for name, engine in self.engines.items():
            if engine.step == fro:
                engine.step, engine.deadline = to, now + self.limits.of(to)
                actions.append(Do(name, to))
        return actions

    def _settled(self) -> list[Action]:
        if any(e.step in WORKING for e in self.engines.values()):
            return []
        if self.turn == "changing":
            self.turn = "trainer"
            return [Train(tuple(n for n, e in self.engines.items() if e.step == "out"))]
        return [Serve()] if self.turn == "engines" else []


Drain = Callable[[], Awaitable[None]]
"""Ends what is in flight in an engine, tokens kept, and returns when it is idle; nothing is submitted from then on."""


class Colocation:
    """Engines that share a device with a trainer in this event loop's process, each with what drains it.

    Args:
        on_out: told once of each engine that is out.
    """

    def __init__(
        self,
        engines: Mapping[str, tuple[Engine, Drain]],
        limits: Limits | None = None,
        on_out: Callable[[Out], None] = lambda _: None,
    ) -> None:
        self.turns = Turns(limits or Limits())
        self._engines = dict(engines)
        self._on_out = on_out
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._settled = asyncio.Event()
        self._without: tuple[str, ...] = ()
        for name in engines:
            self.turns.add(name)

    def join(self, name: str, engine: Engine, drain: Drain) -> None:
        """An engine takes its part again, restarted, or for the first time.

        Raises:
            Refused: it is not the engines' turn; try again after it.
        """
        self.turns.add(name)
        self._engines[name] = (engine, drain)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[tuple[str, ...]]:
        """The device is the trainer's inside the block, but for engines that are out, which it yields.

        Raises:
            Refused: another one has it.
        """
        await self._to_the_end(self._change(self.turns.wanted), self._back)
        try:
            yield self._without
        finally:
            await self._back()

    async def _back(self) -> None:
        await self._to_the_end(self._change(self.turns.trained), _nothing)

    async def _to_the_end(self, change: Coroutine[None, None, None], undo: Callable[[], Awaitable[None]]) -> None:
        """A change of turns is never left half-way, also when its caller is cancelled; it ends by its deadlines."""
        task = asyncio.get_running_loop().create_task(change)
        cancelled = await _wait_out(task)
        if cancelled is None:
            return task.result()
        if task.exception() is None:
            # Not left half-way either, however often the caller is cancelled meanwhile.
            back = asyncio.ensure_future(undo())
            await _wait_out(back)
            back.result()
        raise cancelled

    async def _change(self, event: Callable[[float], list[Action]]) -> None:
        loop = asyncio.get_running_loop()
        actions = event(loop.time())
        self._settled.clear()
        self._carry_out(actions)
        while not self._settled.is_set():
            deadline = self.turns.deadline
            assert deadline is not None
            try:
                await asyncio.wait_for(self._settled.wait(), max(deadline - loop.time(), 0.0))
            except TimeoutError:
                self._carry_out(self.turns.late(loop.time()))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Do):
                self._tasks[action.engine] = asyncio.get_running_loop().create_task(self._do(action))
            elif isinstance(action, Out):
                if (task := self._tasks.pop(action.engine, None)) is not None:
                    task.cancel()
                self._on_out(action)
            else:
                self._without = action.without if isinstance(action, Train) else ()
                self._settled.set()

    async def _do(self, action: Do) -> None:
        engine, drain = self._engines[action.engine]
        try:
            if action.step == "draining":
                await drain()
            elif action.step == "releasing":
                await engine.release_memory()
            else:
                await engine.resume_memory()
        except (RelaxError, OSError, RuntimeError) as error:
            self._carry_out(self.turns.failed(action.engine, action.step, str(error)))
            return
        self._carry_out(self.turns.done(action.engine, action.step, asyncio.get_running_loop().time()))


async def _wait_out(task: asyncio.Future[None]) -> asyncio.CancelledError | None:
    """Wait for a task whatever happens; the cancellation that came meanwhile."""
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def _nothing() -> None:
    """Nothing is to be undone."""


async def abort_all(engine: Engine, requests: Callable[[], list[int]], timeout_s: float) -> None:
    """End these requests with their tokens kept, and wait until the engine is idle: a drain for whoever keeps partials.

    Raises:
        DeadlineExceeded: it is not idle in time.
    """
    for request in requests():
        engine.abort(request)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while (load := engine.load()).running or load.waiting:
        if loop.time() > deadline:
            raise DeadlineExceeded(
                f"engine {engine.name} becomes idle", why=f"{load.running} sequences run after {timeout_s:g} s"
            )
        await asyncio.sleep(LOOK_EVERY_S)
