"""A process of environments and functions that are async: ``python -m relax_rt.roles.agentic.loop_worker FD SPEC``.

Its episodes run side by side on one event loop, each in a task of its own. A thread reads what it is told, and another
one says which call blocks the loop: so both work while it is blocked. It ends with whoever started it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from relax_rt.roles.agentic.blocking import LoopWatch
from relax_rt.roles.agentic.frames import Answer, Ask, Asked, Blocked, Do, Done, Drop, Gave, Said, Spec, ToLoop, send
from relax_rt.roles.agentic.frames import body as received
from relax_rt.roles.agentic.interface import (
    EpisodeOver,
    Message,
    Observation,
    Reply,
    Step,
    Task,
    checked,
    only_over,
)
from relax_rt.roles.agentic.loading import load_factory
from relax_rt.roles.agentic.worker import encoded, end_with_parent, wrong
from relax_rt.roles.rewards.loader import user_line
from relax_rt.transport.rpc.errors import RelaxError

ERROR_CHARS = 2000


class Link:
    """The other end; any thread may send."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lock = link, threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; blocks while the other end does not read."""
        with self._lock:
            send(self._link, message)


class RemoteChat:
    """The policy's side of a function's episode, which is in another process; implements Chat."""

    def __init__(self, link: Link, number: int, asks: dict[int, asyncio.Future[Said]], numbers: itertools.count[int]):
        self._link, self._number, self._asks, self._numbers = link, number, asks, numbers
        self._replies: list[str] = []

    async def say(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, *, previous: Reply | str = ""
    ) -> Reply:
        """See Chat.say."""
        ask = next(self._numbers)
        future = self._asks[ask] = asyncio.get_running_loop().create_future()
        name = previous.id if isinstance(previous, Reply) else previous
        try:
            asked = Asked(list(messages), None if tools is None else list(tools), name)
            self._link.send(Ask(self._number, ask, encoded(asked)))
            said = await future
        except asyncio.CancelledError:
            self._link.send(Drop(self._number, ask))
            raise
        finally:
            self._asks.pop(ask, None)
        if said.over:
            raise EpisodeOver(said.over)
        if said.error:
            raise RelaxError("a reply", why=said.error)
        reply = msgspec.msgpack.decode(said.data, type=Reply)
        self._replies.append(reply.id)
        return reply

    def reward(self, value: float, reply: Reply | str = "") -> None:
        """See Chat.reward."""
        name = (reply.id if isinstance(reply, Reply) else reply) or (self._replies[-1] if self._replies else "")
        if not name:
            raise ValueError("a reward before the first reply")
        if name not in self._replies:
            raise ValueError(f"a reward of reply {name!r:.80}, which this episode does not have")
        self._link.send(Gave(self._number, checked(value), name))


class Episode:
    """One episode: all its calls run in one task, so that what one of them opens another may close."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._calls: asyncio.Queue[Do] = asyncio.Queue()
        self._at = 0
        self._dropped: set[int] = set()
        self._environment: Any = None
        self.task = asyncio.create_task(self._live())
        host.running[self.task] = self

    @property
    def at(self) -> int:
        """The call that it is at; 0: none."""
        return self._at

    def do(self, call: Do) -> None:
        """Carry out a call when those before it are done."""
        self._calls.put_nowait(call)

    def drop(self, number: int) -> None:
        """Cancel a call; one that has not begun will not."""
        if self._at == number:
            self.task.cancel()
        else:
            self._dropped.add(number)

    async def _live(self) -> None:
        closed = False
        while not closed:
            call = await self._calls.get()
            self._at, closed = call.number, call.op in ("close", "play")
            try:
                if call.number in self._dropped:
                    raise asyncio.CancelledError
                done = Done(call.number, data=await self._do(call))
            except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included
                over = call.op == "play" and only_over(error)
                why = f"{type(error).__name__}: {error} at {user_line(error)}"[:ERROR_CHARS]
                done = Done(call.number, over=str(error) or "over") if over else Done(call.number, error=why)
            self._at = 0
            while self.task.cancelling():
                # What cancelled this call is not meant for the next one.
                self.task.uncancel()
            self._host.calls.pop(call.number, None)
            self._answer(done)

    def _answer(self, done: Done) -> None:
        try:
            self._host.link.send(done)
        except ValueError as error:
            # It is too large.
            self._host.link.send(Done(done.number, error=str(error)))

    async def _do(self, call: Do) -> bytes:
        """Carry out a call; what the environment raises passes through."""
        if call.op == "play":
            chat = RemoteChat(self._host.link, call.number, self._host.asks, self._host.numbers)
            last = await self._host.factory.make()(msgspec.msgpack.decode(call.data, type=Task), chat)
            return encoded(None if last is None else checked(last))
        if call.op == "close":
            if hasattr(self._environment, "close"):
                await _awaited(self._environment.close())
            return b""
        if call.op == "reset":
            self._environment = self._host.factory.make()
            found = await _awaited(self._environment.reset(msgspec.msgpack.decode(call.data, type=Task)))
            return encoded(found if isinstance(found, str | Observation) else wrong("reset", found))
        found = await _awaited(self._environment.step(msgspec.msgpack.decode(call.data, type=Reply)))
        return encoded(found if isinstance(found, Step) else wrong("step", found))


async def _awaited(found: Any) -> Any:
    return await found if hasattr(found, "__await__") else found


class Host:
    """The episodes of a process, by the numbers that its owner gives them."""

    def __init__(self, spec: Spec, link: Link) -> None:
        self.factory = load_factory(spec.target, spec.options, Path(spec.config_dir))
        self.link = link
        self.asks: dict[int, asyncio.Future[Said]] = {}
        self.numbers = itertools.count(1)
        self.running: WeakKeyDictionary[asyncio.Task[Any], Episode] = WeakKeyDictionary()
        """Whose task it is, those that user code started included."""
        self._episodes: dict[int, Episode] = {}
        self.calls: dict[int, Episode] = {}
        """Those that have not ended."""

    def take(self, message: ToLoop) -> None:
        """Do what the owner says."""
        if isinstance(message, Do):
            if message.op in ("reset", "play"):
                self._episodes[message.episode] = Episode(self)
            if (episode := self._episodes.get(message.episode)) is None:
                # It was never begun: there is nothing to close.
                self.link.send(Done(message.number))
                return
            self.calls[message.number] = episode
            episode.do(message)
            if message.op in ("close", "play"):
                del self._episodes[message.episode]
        elif isinstance(message, Said):
            future = self.asks.get(message.ask)
            if future is not None and not future.done():
                future.set_result(message)
        elif (episode := self.calls.get(message.number)) is not None:
            episode.drop(message.number)

    def blocked(self, task: asyncio.Task[Any] | None, line: str) -> None:
        """The loop does not answer; called in another thread."""
        episode = None if task is None else self.running.get(task)
        self.link.send(Blocked(0 if episode is None else episode.at, line))

    def task_of(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **how: Any) -> asyncio.Task[Any]:
        """A task, which belongs to the episode of the one that starts it."""
        made = asyncio.Task(work, loop=loop, **how)
        parent = asyncio.current_task(loop)
        if parent is not None and (episode := self.running.get(parent)) is not None:
            self.running[made] = episode
        return made


async def serve(host: Host, link: socket.socket, blocked_s: float) -> None:
    """Do what the owner says until the other end is closed; then the process ends, whatever its loop is at."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(host.task_of)  # type: ignore[arg-type]
    decoder = msgspec.msgpack.Decoder(ToLoop)

    def read() -> None:
        while (message := received(link)) is not None:
            loop.call_soon_threadsafe(host.take, decoder.decode(message))
        os._exit(0)

    threading.Thread(target=read, name="relax-worker-link", daemon=True).start()
    with LoopWatch(loop, host.blocked, lambda seconds: host.link.send(Blocked(0)), blocked_s):
        await loop.create_future()


def main(fd: int, spec: Spec) -> None:
    """Load the environment, say so, and serve."""
    end_with_parent()
    link = socket.socket(fileno=fd)
    try:
        host = Host(spec, Link(link))
    except RelaxError as error:
        send(link, Answer(0, error=str(error)))
        return
    send(link, Answer(0))
    asyncio.run(serve(host, link, spec.blocked_s))


if __name__ == "__main__":
    main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Spec))
    os._exit(0)
