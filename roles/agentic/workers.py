"""Worker processes of an env slot: environments that may block or hang, killed when a call is late.

They are workers of relax_rt/process/worker_pool.py with limits of their own: environments keep programs, browsers and
much memory for as long as they play. Each worker holds many episodes (worker_process.py).

- `BlockingWorker`: methods that block; one call after the other.
- `AsyncWorker`: async methods and functions; calls side by side. A late call is cancelled and costs no other episode
  anything. If it does not end then, because it swallows its cancellation or the loop is blocked, the process is killed:
  the call that blocks it is stuck, and all other episodes are lost and played again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import suppress
from typing import Any

import msgspec

from relax_rt.process.sandbox import Level
from relax_rt.process.worker import encode_frame
from relax_rt.process.worker_pool import (
    Worker,
    WorkerDied,
    WorkerKilled,
    WorkerNotStarted,
    WorkerPool,
    WorkerSpec,
    WorkerTimeout,
)
from relax_rt.roles.agentic.interface import (
    Chat,
    EnvironmentFailed,
    EnvironmentStuck,
    EpisodeLost,
    EpisodeOver,
    Observation,
    Reply,
    Step,
    Task,
)
from relax_rt.roles.agentic.loading import EnvironmentFactory
from relax_rt.roles.agentic.settings import EnvSettings
from relax_rt.roles.agentic.worker_process import (
    MAX_BYTES,
    CallResult,
    CancelCall,
    EnvironmentCall,
    FromWorker,
    LoopBlocked,
    Operation,
    PolicyArguments,
    PolicyReply,
    PolicyRequest,
    WorkerSetup,
)
from relax_rt.transport.rpc.errors import RelaxError

log = logging.getLogger(__name__)

CANCEL_GRACE_S = 2.0
"""Time for a late call to end after it was cancelled, before its process is killed."""


class EnvironmentWorker(Worker):
    """One process that holds environments; its load is the number of its episodes."""

    def __init__(self, spec: WorkerSpec, level: Level) -> None:
        super().__init__(spec, level)
        self._numbers = itertools.count(1)

    async def start(self) -> bytes:
        """Start the process and load the environment.

        Raises:
            WorkerNotStarted: its guard could not start it. RelaxError: it cannot be loaded.
        """
        try:
            body = await super().start()
            result = msgspec.msgpack.decode(body, type=CallResult)
        except WorkerNotStarted:
            raise
        except WorkerDied as error:
            how = f"its process ended while it loaded the environment: {error.how}" if error.how else error.why
            raise RelaxError(self.spec.name, why=how, hint="see the log") from error
        if result.error:
            await self.kill("it could not load the environment")
            raise RelaxError(self.spec.name, why=result.error, hint="see the log")
        return body

    async def call(
        self, episode: int, operation: Operation, data: bytes, timeout_s: float, where: str, chat: Chat | None = None
    ) -> bytes:
        """Call an episode's environment.

        Args:
            where: names the call in errors.
            chat: answers a function, which plays the episode in this call.

        Raises:
            EnvironmentStuck: it was late. EnvironmentFailed: it raised an error, or the process ended.
            EpisodeLost: the process was killed because of another episode. EpisodeOver: a function let it pass.
        """
        raise NotImplementedError


class BlockingWorker(EnvironmentWorker):
    """Carries out calls one after the other; a late one kills the process."""

    async def call(
        self, episode: int, operation: Operation, data: bytes, timeout_s: float, where: str, chat: Chat | None = None
    ) -> bytes:
        """Call an episode's environment; the deadline starts when it is this call's turn.

        Cancelling it does not cancel the call in the process, which continues with the calls behind it.
        """
        task = asyncio.create_task(self._call(episode, operation, data, timeout_s, where))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _call(self, episode: int, operation: Operation, data: bytes, timeout_s: float, where: str) -> bytes:
        results: list[CallResult] = []

        def take(body: bytes) -> bool:
            results.append(msgspec.msgpack.decode(body, type=CallResult))
            return True

        frame = encode_frame(EnvironmentCall(next(self._numbers), episode, operation, data), MAX_BYTES)
        try:
            await self.request(frame, timeout_s, take, where)
        except WorkerKilled as error:
            raise EpisodeLost(where, why=error.why) from None
        except WorkerTimeout as error:
            raise EnvironmentStuck(where, why=error.why) from None
        except WorkerDied as error:
            raise EnvironmentFailed(where, why=f"the process ended: {error.how}") from None
        if results[0].error:
            raise EnvironmentFailed(where, why=results[0].error)
        return results[0].data


class PendingCall:
    """A call that is running in an AsyncWorker.

    Attributes:
        requests: chat requests of its function that are being answered.
        abandoned: its caller does not wait for it any more.
    """

    def __init__(self, where: str, chat: Chat | None) -> None:
        self.where, self.chat = where, chat
        self.result: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self.result.add_done_callback(lambda done: done.exception())
        self.requests: dict[int, asyncio.Task[None]] = {}
        self.abandoned = asyncio.Event()

    def fail(self, error: RelaxError) -> None:
        """End it with an error, unless it has ended."""
        if not self.result.done():
            self.result.set_exception(error)

    def cancel_requests(self) -> None:
        """Cancel the chat requests that are still open."""
        for task in list(self.requests.values()):
            task.cancel()


class AsyncWorker(EnvironmentWorker):
    """Carries out calls side by side.

    Args:
        max_block_s: a loop that is blocked for longer ends the process, whether a call is late by then or not.
    """

    def __init__(self, spec: WorkerSpec, level: Level, max_block_s: float) -> None:
        super().__init__(spec, level)
        self._max_block_s = max_block_s
        self._block_timer: asyncio.TimerHandle | None = None
        self._ending_blocked: asyncio.Task[None] | None = None
        self._calls: dict[int, PendingCall] = {}
        self._blocked = LoopBlocked(0)
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> bytes:
        """Start the process, load the environment and begin to read results."""
        body = await super().start()
        self._reading = asyncio.create_task(self._read())
        return body

    async def call(
        self, episode: int, operation: Operation, data: bytes, timeout_s: float, where: str, chat: Chat | None = None
    ) -> bytes:
        """Call an episode's environment; cancelling it cancels the call in the process."""
        if self.ended:
            raise EpisodeLost(where, why=self.ended)
        number = next(self._numbers)
        self._send(EnvironmentCall(number, episode, operation if chat is None else "play", data))
        call = self._calls[number] = PendingCall(where, chat)
        # In a task of its own: a cancelled call that does not end must still be detected.
        task = asyncio.create_task(self._watch(number, call, timeout_s))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._send(CancelCall(number))
            call.abandoned.set()
            call.cancel_requests()
            raise
        if result.over:
            raise EpisodeOver(result.over)
        if result.error:
            raise EnvironmentFailed(where, why=result.error)
        return result.data

    async def _watch(self, number: int, call: PendingCall, timeout_s: float) -> CallResult:
        """Wait for the end of a call; cancel it if it is late or abandoned, and kill the process if it goes on."""
        abandoned = asyncio.ensure_future(call.abandoned.wait())
        try:
            waited: list[asyncio.Future[Any]] = [call.result, abandoned]
            await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not call.result.done():
                why = f"it did not return within {timeout_s:g} s"
                if call.abandoned.is_set():
                    why = "it did not return when it was cancelled"
                else:
                    self._send(CancelCall(number))
                await asyncio.wait({call.result}, timeout=CANCEL_GRACE_S)
                if call.result.done() and not self.ended:
                    raise EnvironmentStuck(call.where, why=why)
                await self._kill_stuck(call, why)
            return call.result.result()
        finally:
            abandoned.cancel()
            call.cancel_requests()
            self._calls.pop(number, None)

    async def _kill_stuck(self, late: PendingCall | None, why: str) -> None:
        """Kill the process because a call did not end when it was cancelled. Blame the call that blocks the loop, if
        any, else the late one.

        Args:
            late: None: the loop was blocked before any call was late.
        """
        blocked = f"it blocks the event loop of its process at {self._blocked.line}" if self._blocked.line else ""
        guilty = (self._calls.get(self._blocked.number) if blocked else None) or late
        # A call that becomes late while the process is being killed is not to blame.
        if guilty is not None and not self.ended:
            reason = blocked or f"{why}, nor when it was cancelled"
            guilty.fail(EnvironmentStuck(guilty.where, why=f"{reason}: its process was killed"))
        where = guilty.where if guilty is not None else f"at {self._blocked.line}"
        await self.kill(f"another episode of its process was stuck {where}")

    async def kill(self, why: str) -> None:
        """Kill the process; running calls are lost."""
        if self._block_timer is not None:
            self._block_timer.cancel()
        await super().kill(why)
        for call in list(self._calls.values()):
            call.fail(EpisodeLost(call.where, why=self.ended))
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromWorker)
        try:
            while True:
                self._handle(decoder.decode(await self.receive()))
        except WorkerDied as error:
            how = error.how
        except msgspec.DecodeError as error:
            how = f"it sent an undecodable message: {error}"
        except Exception as error:
            # Unforeseen; without a reader all its calls would wait until they are late.
            log.exception("handling a message of an environment's worker")
            how = f"its message could not be handled: {type(error).__name__}: {error}"
        if self.ended:
            return
        if len(self._calls) == 1:
            # No other call can have ended it.
            (call,) = self._calls.values()
            call.fail(EnvironmentFailed(call.where, why=f"the process ended: {how}"))
        await self.kill(f"its process ended: {how}")

    def _handle(self, message: FromWorker) -> None:
        if isinstance(message, LoopBlocked):
            self._blocked = message
            if self._block_timer is not None:
                self._block_timer.cancel()
            if message.line:
                loop = asyncio.get_running_loop()
                self._block_timer = loop.call_later(self._max_block_s, self._end_blocked)
            return
        call = self._calls.get(message.number)
        if call is None or call.result.done():
            return
        if isinstance(message, CallResult):
            call.result.set_result(message)
        elif isinstance(message, PolicyRequest):
            task = call.requests[message.request] = asyncio.create_task(self._answer(call, message))
            task.add_done_callback(lambda done: call.requests.pop(message.request, None))
        elif isinstance(message, CancelCall):
            if message.request in call.requests:
                call.requests[message.request].cancel()
        elif call.chat is not None:
            # The value was checked by the process.
            with suppress(ValueError):
                call.chat.reward(message.value, message.reply)

    def _end_blocked(self) -> None:
        self._ending_blocked = asyncio.create_task(self._kill_stuck(None, ""))

    async def _answer(self, call: PendingCall, request: PolicyRequest) -> None:
        """Have the policy reply to a function's chat request."""
        assert call.chat is not None
        try:
            arguments = msgspec.msgpack.decode(request.data, type=PolicyArguments)
            reply = await call.chat.say(arguments.messages, arguments.tools, previous=arguments.previous)
            answer = PolicyReply(request.request, msgspec.msgpack.encode(reply))
        except EpisodeOver as error:
            answer = PolicyReply(request.request, over=str(error) or "over")
        except Exception as error:  # noqa: BLE001 - raised in the function, as it would be here
            answer = PolicyReply(request.request, error=f"{type(error).__name__}: {error}")
        self._send(answer)

    def _send(self, message: msgspec.Struct) -> None:
        self.write(encode_frame(message, MAX_BYTES))


class WorkerEnvironment:
    """An environment in a worker; implements Environment. Its calls raise as `EnvironmentWorker.call`."""

    def __init__(self, worker: EnvironmentWorker, number: int, timeout_s: float, name: str) -> None:
        self._worker, self._number, self._timeout_s, self._name = worker, number, timeout_s, name
        self._turns = 0
        worker.load += 1

    async def reset(self, task: Task) -> Observation | str:
        """Begin the task."""
        found = await self._call("reset", msgspec.msgpack.encode(task), f"in reset of {self._name}")
        return msgspec.msgpack.decode(found, type=Observation | str)

    async def step(self, reply: Reply) -> Step:
        """Take the policy's reply."""
        self._turns += 1
        where = f"in step {self._turns} of {self._name}"
        return msgspec.msgpack.decode(await self._call("step", msgspec.msgpack.encode(reply), where), type=Step)

    async def close(self) -> None:
        """Close the environment, unless its process has ended."""
        self._worker.load -= 1
        if not self._worker.ended:
            await self._call("close", b"", f"in close of {self._name}")

    async def _call(self, operation: Operation, data: bytes, where: str) -> bytes:
        return await self._worker.call(self._number, operation, data, self._timeout_s, where)


class WorkerFunction:
    """A function in a worker that plays an episode; implements Play. Its call raises as `EnvironmentWorker.call`."""

    def __init__(self, worker: EnvironmentWorker, number: int, timeout_s: float, name: str) -> None:
        self._worker, self._number, self._timeout_s, self._name = worker, number, timeout_s, name
        worker.load += 1

    async def __call__(self, task: Task, chat: Chat) -> float | None:
        """Play the episode."""
        where, data = f"in play of {self._name}", msgspec.msgpack.encode(task)
        found = await self._worker.call(self._number, "play", data, self._timeout_s, where, chat)
        return msgspec.msgpack.decode(found, type=float | None)

    async def close(self) -> None:
        """End the episode."""
        self._worker.load -= 1


class EnvironmentPool:
    """The workers of a slot; use it as an async context manager.

    Args:
        blocking: the environment's methods are not async.
        timeout_s: for each call; also how long one may block the event loop of its process.
        play_timeout_s: for an episode that is a function; None: the environment is a class.
        processes, memory_mib: limits for a worker with everything it starts.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        size: int,
        timeout_s: float,
        *,
        blocking: bool,
        play_timeout_s: float | None = None,
        processes: int = 1024,
        memory_mib: int | None = None,
    ) -> None:
        # A call that blocks the loop must be known before those that wait behind it are late.
        setup = msgspec.structs.replace(setup, blocked_after_s=min(setup.blocked_after_s, timeout_s / 2))
        self._timeout_s, self._play_timeout_s = timeout_s, play_timeout_s
        self._numbers = itertools.count(1)
        spec = WorkerSpec(
            name=f"a worker of {setup.target}",
            module="relax_rt.roles.agentic.worker_process",
            setup=msgspec.msgpack.encode(setup),
            processes=processes,
            memory_mib=memory_mib,
            processes_key="roles.env.worker_processes",
            memory_key="roles.env.worker_memory_mib",
            max_reply_bytes=MAX_BYTES,
        )

        def make(level: Level) -> EnvironmentWorker:
            return BlockingWorker(spec, level) if blocking else AsyncWorker(spec, level, timeout_s)

        self.pool: WorkerPool[EnvironmentWorker] = WorkerPool(size, make)

    async def __aenter__(self) -> EnvironmentPool:
        try:
            await self.pool.fill()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.pool.close("the slot ends")

    async def environment(self, name: str) -> Any:
        """Return an environment in the worker that has the fewest: a WorkerEnvironment or a WorkerFunction.

        Raises:
            RelaxError: a worker that ended cannot be replaced.
        """
        worker, number = await self.pool.least_loaded(), next(self._numbers)
        if self._play_timeout_s is not None:
            return WorkerFunction(worker, number, self._play_timeout_s, name)
        return WorkerEnvironment(worker, number, self._timeout_s, name)


def open_pool(
    settings: EnvSettings, factory: EnvironmentFactory, config_dir: str, size: int | None = None
) -> EnvironmentPool | None:
    """Return the pool of a slot, to be entered; None: episodes are played in the slot's own process.

    Args:
        size: of the pool, if not as in the settings.
    """
    workers = int(factory.blocking) if settings.workers is None else settings.workers
    if not workers:
        return None
    return EnvironmentPool(
        WorkerSetup(settings.environment, settings.options, config_dir),
        size or workers,
        settings.turn_timeout_s,
        blocking=factory.blocking,
        play_timeout_s=settings.episode_timeout_s if factory.plays else None,
        processes=settings.worker_processes,
        memory_mib=settings.worker_memory_mib,
    )
