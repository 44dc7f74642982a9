"""Worker processes of environments and functions that are async, each with an event loop; see pool.

A call that is late is cancelled, and costs no one else anything. Where that does not end it, because it swallows its
cancellation or the loop is blocked, the process is killed: whoever blocks it is stuck, all others are lost, and are
played again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import msgspec

from relax_rt.roles.agentic.frames import Ask, Asked, Blocked, Do, Done, Drop, FromLoop, Op, Said, Spec, frame
from relax_rt.roles.agentic.interface import Chat, EpisodeOver, Task
from relax_rt.roles.agentic.pool import Broken, Lost, Pool, Stuck, Worker, WorkerLimits
from relax_rt.roles.rewards.box.run import Level
from relax_rt.transport.rpc.errors import RelaxError

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""A call that is cancelled because it is late has so long to end, before its process is killed."""


class Pending:
    """A call that is under way.

    Attributes:
        asks: calls of the policy that its function waits for.
        dropped: its caller waits for it no more.
    """

    def __init__(self, where: str, chat: Chat | None) -> None:
        self.where, self.chat = where, chat
        self.future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self.future.add_done_callback(lambda done: done.exception())
        self.asks: dict[int, asyncio.Task[None]] = {}
        self.dropped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def drop(self) -> None:
        """See `dropped`."""
        if not self.dropped.done():
            self.dropped.set_result(None)

    def fail(self, error: RelaxError) -> None:
        """It is over, if it was not."""
        if not self.future.done():
            self.future.set_exception(error)


class LoopWorker(Worker):
    """One process with calls done side by side.

    Args:
        block_s: a loop that is blocked for longer ends the process, whether a call is late by then or not.
    """

    module: ClassVar[str] = "relax_rt.roles.agentic.loop_worker"

    def __init__(self, spec: Spec, limits: WorkerLimits, level: Level, block_s: float) -> None:
        super().__init__(spec, limits, level)
        self._block_s = block_s
        self._block_timer: asyncio.TimerHandle | None = None
        self._giving_up: asyncio.Task[None] | None = None
        self._calls: dict[int, Pending] = {}
        self._call_numbers = itertools.count(1)
        self._blocked = Blocked(0)
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """See Worker.start."""
        await super().start()
        self._reading = asyncio.create_task(self._read())

    async def call(
        self, episode: int, op: Op, data: bytes, timeout_s: float, where: str, chat: Chat | None = None
    ) -> bytes:
        """See Worker.call; what is cancelled here is cancelled there.

        Args:
            chat: answers what a function asks; then the episode is played in this call.

        Raises:
            EpisodeOver: the function let it pass. Stuck, Broken, Lost: see Worker.call.
        """
        if self.ended:
            raise Lost(where, why=self.ended)
        number = next(self._call_numbers)
        self._send(Do(number, episode, op if chat is None else "play", data))
        call = self._calls[number] = Pending(where, chat)
        # On its own, so that a call that is cancelled and does not end is seen to.
        task = asyncio.create_task(self._watched(number, call, timeout_s))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            done = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._send(Drop(number))
            call.drop()
            self._give_up_asks(call)
            raise
        if done.over:
            raise EpisodeOver(done.over)
        if done.error:
            raise Broken(where, why=done.error)
        return done.data

    async def _watched(self, number: int, call: Pending, timeout_s: float) -> Done:
        try:
            ends: list[asyncio.Future[Any]] = [call.future, call.dropped]
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not call.future.done():
                late = f"it did not return within {timeout_s:g} s"
                if call.dropped.done():
                    late = "it did not return when it was given up"
                else:
                    self._send(Drop(number))
                await asyncio.wait({call.future}, timeout=GRACE_S)
                if call.future.done() and not self.ended:
                    raise Stuck(call.where, why=late)
                await self._give_up(call, late)
            return call.future.result()
        finally:
            self._give_up_asks(call)
            self._calls.pop(number, None)

    async def _give_up(self, late: Pending | None, why: str) -> None:
        """A call does not end when it is cancelled: the process is killed because of it, or of who blocks it.

        Args:
            late: None: the loop was blocked before any was.
        """
        blocks = f"it blocks the event loop of its process at {self._blocked.line}" if self._blocked.line else ""
        guilty = (self._calls.get(self._blocked.number) if blocks else None) or late
        # Who is late while it is being killed is not to blame.
        if guilty is not None and not self.ended:
            reason = blocks or f"{why}, nor when it was cancelled"
            guilty.fail(Stuck(guilty.where, why=f"{reason}: its process was killed"))
        where = guilty.where if guilty is not None else f"at {self._blocked.line}"
        await self.kill(f"another episode of its process was stuck {where}")

    def _is_blocked(self, message: Blocked) -> None:
        self._blocked = message
        if self._block_timer is not None:
            self._block_timer.cancel()
        if message.line:
            self._block_timer = asyncio.get_running_loop().call_later(self._block_s, self._end_blocked)

    def _end_blocked(self) -> None:
        self._giving_up = asyncio.create_task(self._give_up(None, ""))

    async def kill(self, why: str) -> None:
        """See Worker.kill: calls that are under way are lost."""
        if self._block_timer is not None:
            self._block_timer.cancel()
        await super().kill(why)
        for call in list(self._calls.values()):
            call.fail(Lost(call.where, why=self.ended))
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromLoop)
        try:
            while (body := await self._body()) is not None:
                self._take(decoder.decode(body))
            how = "" if self.ended else await self._how()
        except msgspec.DecodeError as error:
            how = f"it said what nobody understands: {error}"
        except Exception as error:
            # Not foreseen; without a reader its calls would all wait until they are late.
            log.exception("what a worker of environments says")
            how = f"what it said could not be done: {type(error).__name__}: {error}"
        if self.ended:
            return
        if len(self._calls) == 1:
            # Nobody else can have ended it.
            (call,) = self._calls.values()
            call.fail(Broken(call.where, why=f"the process ended: {how}"))
        await self.kill(f"its process ended: {how}")

    def _take(self, message: FromLoop) -> None:
        if isinstance(message, Blocked):
            self._is_blocked(message)
            return
        call = self._calls.get(message.number)
        if call is None or call.future.done():
            return
        if isinstance(message, Done):
            call.future.set_result(message)
        elif isinstance(message, Ask):
            task = call.asks[message.ask] = asyncio.create_task(self._say(call, message))
            task.add_done_callback(lambda done: call.asks.pop(message.ask, None))
        elif isinstance(message, Drop):
            if message.ask in call.asks:
                call.asks[message.ask].cancel()
        elif call.chat is not None:
            # It was checked where it was given.
            with suppress(ValueError):
                call.chat.reward(message.value, message.reply)

    async def _say(self, call: Pending, ask: Ask) -> None:
        assert call.chat is not None
        try:
            asked = msgspec.msgpack.decode(ask.data, type=Asked)
            reply = await call.chat.say(asked.messages, asked.tools, previous=asked.previous)
            said = Said(ask.ask, msgspec.msgpack.encode(reply))
        except EpisodeOver as error:
            said = Said(ask.ask, over=str(error) or "over")
        except Exception as error:  # noqa: BLE001 - the function is told, as it would be here
            said = Said(ask.ask, error=f"{type(error).__name__}: {error}")
        self._send(said)

    def _give_up_asks(self, call: Pending) -> None:
        for task in list(call.asks.values()):
            task.cancel()

    def _send(self, message: msgspec.Struct) -> None:
        if not self.ended:
            self._writer.write(frame(message))


class RemoteFunction:
    """A function in a worker, called as it is; raises Stuck, Broken, Lost and EpisodeOver."""

    def __init__(self, worker: LoopWorker, number: int, timeout_s: float, name: str) -> None:
        self._worker, self._number, self._timeout_s, self._name = worker, number, timeout_s, name
        worker.episodes.add(number)

    async def __call__(self, task: Task, chat: Chat) -> float | None:
        """See Play."""
        where, data = f"in play of {self._name}", msgspec.msgpack.encode(task)
        found = await self._worker.call(self._number, "reset", data, self._timeout_s, where, chat)
        return msgspec.msgpack.decode(found, type=float | None)

    async def close(self) -> None:
        """Its episode is over."""
        self._worker.episodes.discard(self._number)


class LoopPool(Pool):
    """Workers of what is async.

    Args:
        timeout_s: of each call; also how long one may block its process. plays_s: of an episode that is a function;
            None: it is a class.
    """

    def __init__(
        self,
        spec: Spec,
        size: int,
        timeout_s: float,
        limits: WorkerLimits | None = None,
        *,
        plays_s: float | None = None,
    ) -> None:
        # Who blocks a loop is to be known before those who wait behind it are late.
        spec = msgspec.structs.replace(spec, blocked_s=min(spec.blocked_s, timeout_s / 2))
        super().__init__(spec, size, timeout_s, limits, partial(LoopWorker, block_s=timeout_s))
        self._plays_s = plays_s

    async def environment(self, name: str) -> Any:
        """See Pool.environment; a RemoteFunction, where that plays."""
        if self._plays_s is None:
            return await super().environment(name)
        worker = await self.worker()
        assert isinstance(worker, LoopWorker)
        return RemoteFunction(worker, next(self._numbers), self._plays_s, name)
