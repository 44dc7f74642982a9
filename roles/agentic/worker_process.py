"""The worker process of environments: ``python -m relax_rt.roles.agentic.worker_process FD``.

It plays any number of episodes and ends with the slot that started it (workers.py); its state can be thrown away at any
moment.

- Environments with blocking methods: one call after the other.
- Async environments and functions: episodes run side by side on one event loop, each in a task of its own. One thread
  reads messages and another one reports which call blocks the loop, so both work while it is blocked.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import msgspec

from relax_rt.process import procfs
from relax_rt.process.worker import WorkerLink
from relax_rt.roles.agentic.interface import (
    EpisodeOver,
    Message,
    Observation,
    Reply,
    Step,
    Task,
    checked_reward,
    is_episode_over,
)
from relax_rt.roles.agentic.loading import EnvironmentFactory, load_factory
from relax_rt.roles.agentic.user_tasks import LoopWatch
from relax_rt.roles.base.user_code import user_line
from relax_rt.transport.rpc.errors import RelaxError

MAX_BYTES = 64 << 20
Operation = Literal["reset", "step", "close", "play"]


class WorkerSetup(msgspec.Struct, frozen=True):
    """The first message: which environment to load; see [roles.env].

    Attributes:
        blocked_after_s: an event loop that does not answer for so long is reported as blocked.
    """

    target: str
    options: dict[str, Any]
    config_dir: str
    blocked_after_s: float = 5.0


class EnvironmentCall(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A call of an episode's environment; data is the encoded task or reply.

    Async environments get further calls before this one has returned. `play` calls a function that plays the episode.
    """

    number: int
    episode: int
    operation: Operation
    data: bytes = b""


class CallResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """The result of a call: an encoded Observation, text, Step or reward, or an error; number 0: of loading.

    Attributes:
        over: a function let EpisodeOver pass.
    """

    number: int
    data: bytes = b""
    error: str = ""
    over: str = ""


class PolicyRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A function, called by `number`, asks the policy; data is an encoded PolicyArguments."""

    number: int
    request: int
    data: bytes


class PolicyReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """The policy's reply to a PolicyRequest: an encoded Reply, or why there is none."""

    request: int
    data: bytes = b""
    error: str = ""
    over: str = ""


class ReplyReward(msgspec.Struct, frozen=True, array_like=True, tag="reward"):
    """A reward that a function, called by `number`, gives to a reply."""

    number: int
    value: float
    reply: str


class CancelCall(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Cancel: sent to a worker for a call, by a worker for a PolicyRequest."""

    number: int
    request: int = 0


class LoopBlocked(msgspec.Struct, frozen=True, array_like=True, tag="blocked"):
    """A call (0: unknown) blocks the worker's event loop at this line of code; empty line: it answers again."""

    number: int
    line: str = ""


class PolicyArguments(msgspec.Struct, frozen=True, array_like=True):
    """Arguments of Chat.say."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    previous: str


ToWorker = EnvironmentCall | PolicyReply | CancelCall
FromWorker = CallResult | PolicyRequest | ReplyReward | CancelCall | LoopBlocked


MAX_ERROR_CHARS = 2000


def main() -> None:
    """Load the environment, report that, and serve the slot that holds the other end of the socket."""
    # Neither threads of user code nor a call that hangs keep this process alive.
    if not procfs.die_with_parent(os.getppid()):
        return
    link = WorkerLink(int(sys.argv[1]), MAX_BYTES)
    if (body := link.receive()) is None:
        return
    setup = msgspec.msgpack.decode(body, type=WorkerSetup)
    try:
        factory = load_factory(setup.target, setup.options, Path(setup.config_dir))
    except RelaxError as error:
        link.send(CallResult(0, error=str(error)))
        return
    link.send(CallResult(0))
    if factory.blocking:
        serve_blocking(factory, link)
    else:
        asyncio.run(serve_async(AsyncEpisodes(factory, link), link, setup.blocked_after_s))


def serve_blocking(factory: EnvironmentFactory, link: WorkerLink) -> None:
    """Carry out calls one after the other, until the other end is closed."""
    environments: dict[int, Any] = {}
    while (body := link.receive()) is not None:
        call = msgspec.msgpack.decode(body, type=EnvironmentCall)
        try:
            result = CallResult(call.number, data=_call_blocking(factory, environments, call))
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included
            result = CallResult(call.number, error=_error_text(error))
        _send_result(link, result)


def _call_blocking(factory: EnvironmentFactory, environments: dict[int, Any], call: EnvironmentCall) -> bytes:
    if call.operation == "close":
        environment = environments.pop(call.episode, None)
        if environment is not None and hasattr(environment, "close"):
            environment.close()
        return b""
    if call.operation == "reset":
        environment = environments[call.episode] = factory.make()
        return _encoded_observation(environment.reset(msgspec.msgpack.decode(call.data, type=Task)))
    return _encoded_step(environments[call.episode].step(msgspec.msgpack.decode(call.data, type=Reply)))


def _encoded_observation(value: Any) -> bytes:
    if not isinstance(value, str | Observation):
        raise TypeError(f"reset returned {value!r:.80}, which is not an Observation or a text")
    return _encoded(value)


def _encoded_step(value: Any) -> bytes:
    if not isinstance(value, Step):
        raise TypeError(f"step returned {value!r:.80}, which is not a Step")
    return _encoded(value)


def _encoded(value: Any) -> bytes:
    def plain(value: Any) -> Any:
        if hasattr(value, "item"):  # a number of numpy
            return value.item()
        raise TypeError(f"{type(value).__name__} cannot be sent to another process")

    return msgspec.msgpack.encode(value, enc_hook=plain)


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error} at {user_line(error)}"[:MAX_ERROR_CHARS]


def _send_result(link: WorkerLink, result: CallResult) -> None:
    try:
        link.send(result)
    except ValueError as error:
        # It is too large.
        link.send(CallResult(result.number, error=str(error)))


# --- async environments and functions


class RemoteChat:
    """The policy's side of an episode that a function plays, for that function; implements Chat."""

    def __init__(
        self,
        link: WorkerLink,
        number: int,
        replies: dict[int, asyncio.Future[PolicyReply]],
        numbers: itertools.count[int],
    ):
        self._link, self._number, self._pending, self._numbers = link, number, replies, numbers
        self._replies: list[str] = []

    async def say(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, *, previous: Reply | str = ""
    ) -> Reply:
        """Send the conversation to the slot and wait for the policy's reply; see Chat.say."""
        number = next(self._numbers)
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        name = previous.id if isinstance(previous, Reply) else previous
        try:
            arguments = PolicyArguments(list(messages), None if tools is None else list(tools), name)
            self._link.send(PolicyRequest(self._number, number, _encoded(arguments)))
            found = await future
        except asyncio.CancelledError:
            self._link.send(CancelCall(self._number, number))
            raise
        finally:
            self._pending.pop(number, None)
        if found.over:
            raise EpisodeOver(found.over)
        if found.error:
            raise RelaxError("a reply", why=found.error)
        reply = msgspec.msgpack.decode(found.data, type=Reply)
        self._replies.append(reply.id)
        return reply

    def reward(self, value: float, reply: Reply | str = "") -> None:
        """Send a reward for a reply to the slot; see Chat.reward."""
        name = (reply.id if isinstance(reply, Reply) else reply) or (self._replies[-1] if self._replies else "")
        if not name:
            raise ValueError("a reward before the first reply")
        if name not in self._replies:
            raise ValueError(f"a reward of reply {name!r:.80}, which this episode does not have")
        self._link.send(ReplyReward(self._number, checked_reward(value), name))


class AsyncEpisode:
    """One episode. All its calls run in one task, so that what one of them opens another one may close.

    Attributes:
        current: number of the call that is running; 0: none.
    """

    def __init__(self, episodes: AsyncEpisodes) -> None:
        self._episodes = episodes
        self._calls: asyncio.Queue[EnvironmentCall] = asyncio.Queue()
        self._cancelled: set[int] = set()
        self._environment: Any = None
        self.current = 0
        self.task = asyncio.create_task(self._run())
        episodes.running[self.task] = self

    def put(self, call: EnvironmentCall) -> None:
        """Carry out a call after those before it."""
        self._calls.put_nowait(call)

    def cancel(self, number: int) -> None:
        """Cancel a call; if it has not started, it will not."""
        if self.current == number:
            self.task.cancel()
        else:
            self._cancelled.add(number)

    async def _run(self) -> None:
        closed = False
        while not closed:
            call = await self._calls.get()
            self.current, closed = call.number, call.operation in ("close", "play")
            try:
                if call.number in self._cancelled:
                    raise asyncio.CancelledError
                result = CallResult(call.number, data=await self._call(call))
            except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included
                if call.operation == "play" and is_episode_over(error):
                    result = CallResult(call.number, over=str(error) or "over")
                else:
                    result = CallResult(call.number, error=_error_text(error))
            self.current = 0
            while self.task.cancelling():
                # A cancellation of this call must not reach the next one.
                self.task.uncancel()
            self._episodes.calls.pop(call.number, None)
            _send_result(self._episodes.link, result)

    async def _call(self, call: EnvironmentCall) -> bytes:
        """Carry out a call; what the environment raises passes through."""
        make = self._episodes.factory.make
        if call.operation == "play":
            chat = RemoteChat(self._episodes.link, call.number, self._episodes.replies, self._episodes.numbers)
            last = await make()(msgspec.msgpack.decode(call.data, type=Task), chat)
            return _encoded(None if last is None else checked_reward(last))
        if call.operation == "close":
            if hasattr(self._environment, "close"):
                await _await_if_needed(self._environment.close())
            return b""
        if call.operation == "reset":
            self._environment = make()
            found = await _await_if_needed(self._environment.reset(msgspec.msgpack.decode(call.data, type=Task)))
            return _encoded_observation(found)
        return _encoded_step(
            await _await_if_needed(self._environment.step(msgspec.msgpack.decode(call.data, type=Reply)))
        )


async def _await_if_needed(value: Any) -> Any:
    return await value if hasattr(value, "__await__") else value


class AsyncEpisodes:
    """The episodes of a process, by the numbers that the slot gives them.

    Attributes:
        replies: futures of chat requests, by number.
        running: the episode of each task, including tasks that user code started.
        calls: the episode of each call that has not returned.
    """

    def __init__(self, factory: EnvironmentFactory, link: WorkerLink) -> None:
        self.factory, self.link = factory, link
        self.replies: dict[int, asyncio.Future[PolicyReply]] = {}
        self.numbers = itertools.count(1)
        self.running: WeakKeyDictionary[asyncio.Task[Any], AsyncEpisode] = WeakKeyDictionary()
        self._episodes: dict[int, AsyncEpisode] = {}
        self.calls: dict[int, AsyncEpisode] = {}

    def receive(self, message: ToWorker) -> None:
        """Handle a message of the slot."""
        if isinstance(message, EnvironmentCall):
            if message.operation in ("reset", "play"):
                self._episodes[message.episode] = AsyncEpisode(self)
            if (episode := self._episodes.get(message.episode)) is None:
                # It never began: there is nothing to close.
                self.link.send(CallResult(message.number))
                return
            self.calls[message.number] = episode
            episode.put(message)
            if message.operation in ("close", "play"):
                del self._episodes[message.episode]
        elif isinstance(message, PolicyReply):
            future = self.replies.get(message.request)
            if future is not None and not future.done():
                future.set_result(message)
        elif (episode := self.calls.get(message.number)) is not None:
            episode.cancel(message.number)

    def report_blocked(self, task: asyncio.Task[Any] | None, line: str) -> None:
        """Report that the loop does not answer; called in another thread."""
        episode = None if task is None else self.running.get(task)
        self.link.send(LoopBlocked(0 if episode is None else episode.current, line))

    def make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **how: Any
    ) -> asyncio.Task[Any]:
        """Create a task that belongs to the episode of the task that starts it."""
        made = asyncio.Task(work, loop=loop, **how)
        parent = asyncio.current_task(loop)
        if parent is not None and (episode := self.running.get(parent)) is not None:
            self.running[made] = episode
        return made


async def serve_async(episodes: AsyncEpisodes, link: WorkerLink, blocked_after_s: float) -> None:
    """Serve the slot until the other end is closed; then the process ends, whatever its loop is doing."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(episodes.make_task)  # type: ignore[arg-type]
    decoder = msgspec.msgpack.Decoder(ToWorker)

    def read() -> None:
        while (body := link.receive()) is not None:
            loop.call_soon_threadsafe(episodes.receive, decoder.decode(body))
        os._exit(0)

    threading.Thread(target=read, name="relax-worker-link", daemon=True).start()
    with LoopWatch(loop, episodes.report_blocked, lambda seconds: link.send(LoopBlocked(0)), blocked_after_s):
        await loop.create_future()


if __name__ == "__main__":
    main()
    # Tasks that user code left running are not waited for.
    os._exit(0)
