"""The serving side of actors: a role whose public async methods are its interface, and the mailbox of its calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar, NoReturn, Self, cast

from relax_rt.interfaces.role import Role, RoleContext
from relax_rt.transport.rpc.errors import Refused, ShuttingDown, Unreachable
from relax_rt.transport.rpc.interface import methods_of

REPORT_EVERY_S = 0.5
DRAIN_S = 5.0
IDLE = "calls"
_REFERENCE_METHODS = ("with_options", "all")


class Actor(Role):
    """A role whose public async methods can be called from other processes::

        class Reward(Actor):
            async def setup(self) -> None:
                self.model = load()

            async def score(self, text: str) -> float:
                return self.model(text)

    ``[roles.reward] target = "mine.py:Reward"`` runs it; ``ctx.actor("reward", Reward).score("…")`` calls it.
    State lives in the object and is lost with its process. Parameters and results are annotated with what msgspec can
    carry. `setup` and `teardown` are awaited before the first call and after the last.
    """

    tier = 30
    max_concurrency: ClassVar[int] = 64
    """Calls and streams that run at once; 1: one after the other."""
    mailbox: ClassVar[int] = 1024
    """Calls that may wait; further ones wait in their connections, up to the connection's bound."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _REFERENCE_METHODS:
            if name in vars(cls):
                raise TypeError(f"{cls.__name__}.{name}: the name belongs to references; choose another")

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        cls = type(self)
        if cls.max_concurrency < 1 or cls.mailbox < 0:
            raise Refused(
                f"actor {cls.__name__}",
                why=f"max_concurrency is {cls.max_concurrency} and mailbox {cls.mailbox}",
                hint="at least 1 and 0",
            )
        self._mailbox = Mailbox(self)
        ctx.serve(cls, cast(Self, self._mailbox), max_calls=cls.max_concurrency + cls.mailbox)

    @classmethod
    def __relax_interface__(cls) -> list[str]:
        """Names of the methods that can be called: public, async, and not this class's own."""
        found = []
        for name in dir(cls):
            function = inspect.getattr_static(cls, name)
            wanted = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
            if wanted and not name.startswith("_") and not hasattr(Actor, name):
                found.append(name)
        return found

    async def run(self) -> None:
        """Answer calls until asked to stop, then finish the running ones."""
        await self.ctx.ready()
        await self._mailbox.report()
        await self._mailbox.close(DRAIN_S)

    def with_options(self, *, timeout_s: float | None = None, window: int | None = None) -> Self:
        """On a reference: a copy with another deadline or window.

        Args:
            timeout_s: deadline of a call, and of each item of a stream, seconds.
            window: items of a stream that may be in flight.
        """
        self._only_references("with_options")

    async def all(self) -> list[Self]:
        """On a reference: a reference to each ready member of the role, once there is one."""
        self._only_references("all")

    def _only_references(self, name: str) -> NoReturn:
        raise TypeError(f"{type(self).__name__}.{name} is for references: ctx.actor(name, {type(self).__name__})")


class Mailbox:
    """Serves the actor's methods, at most `max_concurrency` at once."""

    def __init__(self, actor: Actor) -> None:
        self.running = 0
        self.with_consumer = 0
        """Running streams whose last item is with the consumer, which has not asked for the next one."""
        self.done = 0
        """Calls that ended and stream items that were produced."""
        self._actor = actor
        self._closed = False
        self._turn = asyncio.Semaphore(type(actor).max_concurrency)
        self._idle = asyncio.Event()
        for name, method in methods_of(type(actor)).items():
            handler = getattr(actor, name)
            setattr(self, name, self._stream(handler) if method.stream else self._call(handler))

    async def report(self) -> None:
        """Report progress to the watchdog until the actor is asked to stop; an idle actor is not hung."""
        ctx = self._actor.ctx
        stop = asyncio.create_task(ctx.stopping.wait())
        reported, waiting = 0, ""
        try:
            while not stop.done():
                if self.done != reported:
                    ctx.progress.advance(self.done - reported)
                    reported = self.done
                if (now := "" if self.running > self.with_consumer else IDLE) != waiting:
                    ctx.progress.waiting(now)
                    waiting = now
                await asyncio.wait({stop}, timeout=REPORT_EVERY_S)
        finally:
            stop.cancel()

    async def close(self, grace_s: float) -> None:
        """Start no more calls, and wait up to grace_s for the running ones."""
        self._closed = True
        try:
            async with asyncio.timeout(grace_s):
                while self.running:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            pass

    async def _enter(self) -> None:
        await self._turn.acquire()
        if self._closed:
            self._turn.release()
            raise ShuttingDown(f"{self._actor.ctx.who}", why="it is stopping and starts no more calls")
        self.running += 1

    def _leave(self) -> None:
        self.running -= 1
        self.done += 1
        self._turn.release()
        if not self.running:
            self._idle.set()

    def _call(self, handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._enter()
            try:
                return await handler(*args, **kwargs)
            except ShuttingDown as error:
                raise _as_unreachable(error) from error
            finally:
                self._leave()

        return call

    def _stream(self, handler: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            await self._enter()
            items = handler(*args, **kwargs)
            try:
                async for item in items:
                    self.done += 1
                    self.with_consumer += 1
                    try:
                        yield item
                    finally:
                        self.with_consumer -= 1
            except ShuttingDown as error:
                raise _as_unreachable(error) from error
            finally:
                try:
                    if (aclose := getattr(items, "aclose", None)) is not None:
                        await aclose()
                finally:
                    self._leave()

        return stream


def _as_unreachable(error: ShuttingDown) -> Unreachable:
    """Another actor refused a handler's call. For our own caller the call has started, so it is no refusal."""
    return Unreachable(error.what, why=error.why, hint=error.hint)
