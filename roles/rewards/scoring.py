"""Calling a reward function under a deadline and reading what it returns."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from relax_rt.roles.rewards.loader import RewardFunction, user_line
from relax_rt.transport.errors import DeadlineExceeded, RelaxError

T = TypeVar("T")

MAX_COMPONENTS = 64
TOTAL = "total"
FLOAT32_MAX = 3.4028234e38
"""Rewards cross the queue as float32."""
CONCURRENT_CALLS = 64
"""Async rewards awaited at the same time."""
GRACE_S = 1.0
"""What an event loop gets on top of its calls' deadlines before its thread is given up."""


class Request(msgspec.Struct, frozen=True):
    """One completion to score; info is offered to the function by parameter name."""

    completion: str
    answer: str
    info: dict[str, Any]


class Score(msgspec.Struct, frozen=True):
    """A reward: its total, and its components by name."""

    total: float
    components: dict[str, float]


class Failed(msgspec.Struct, frozen=True):
    """Why a completion has no reward. `stuck`: the call did not return and still holds its thread."""

    reason: str
    stuck: bool = False


def read_score(value: Any) -> Score:
    """What a reward function returned, as a score.

    A number is the total; a dict holds components, whose sum is the total unless it has a `total` of its own.

    Raises:
        ValueError: it is neither, or not finite.
    """
    if isinstance(value, dict):
        if not value or len(value) > MAX_COMPONENTS:
            raise ValueError(f"returned a dict of {len(value)} components; 1 to {MAX_COMPONENTS} are taken")
        numbers = {str(name): _number(part, f"component {name!r}") for name, part in value.items()}
        total = numbers.pop(TOTAL, None)
        if total is None:
            total = _number(sum(numbers.values()), "the sum")
        return Score(total, numbers)
    total = _number(value, "it")
    return Score(total, {"reward": total})


def _number(value: Any, what: str) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"returned {value!r:.80}; {what} must be a number or a dict of numbers") from None
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"returned {value!r:.80}; {what} must be finite, as a 32-bit float")
    return number


class Stuck(DeadlineExceeded):
    """A call did not return in time and holds its thread."""


class Worker:
    """One daemon thread that runs calls in order. Unlike an executor's, a call that never returns does not keep the
    process from ending."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="relax-reward", daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    async def do(self, function: Callable[[], T], timeout_s: float) -> T:
        """Run the function in the thread and wait for it; what it raises is raised here.

        Raises:
            Stuck: it did not return within timeout_s; the thread is lost.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if not outcome.done():
                outcome.set_result((value, error))

        def call() -> None:
            value, caught = None, None
            try:
                value = function()
            except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included
                caught = error
            try:
                loop.call_soon_threadsafe(settle, value, caught)
            except RuntimeError:
                # The loop was closed while the call ran late: no one waits for it any more.
                return

        self._calls.put(call)
        try:
            async with asyncio.timeout(timeout_s):
                value, error = await outcome
        except TimeoutError:
            raise Stuck("a call of user code", why=f"it did not return within {timeout_s:g} s") from None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """Let the thread end after the calls it has."""
        self._calls.put(None)


class Scorer:
    """Scores completions with a reward function, each call within `timeout_s`.

    A call that does not return is given up: its request is `Failed(stuck=True)`, and the rest goes on in a new
    thread. The old thread cannot be ended, so the process should exit once the batch is handed back.
    """

    def __init__(self, function: RewardFunction, timeout_s: float) -> None:
        self.function, self.timeout_s = function, timeout_s
        self._worker = Worker()

    async def score(
        self, requests: Sequence[Request], after_each: Callable[[], None] = lambda: None
    ) -> list[Score | Failed]:
        """Scores in order; `after_each` is called for each one that is there."""
        results: list[Score | Failed] = []
        if self.function.is_async:
            for first in range(0, len(requests), CONCURRENT_CALLS):
                part = await self._score_together(requests[first : first + CONCURRENT_CALLS])
                for result in part:
                    results.append(result)
                    after_each()
            return results
        for request in requests:
            results.append(await self._score_one(request))
            after_each()
        return results

    async def _score_one(self, request: Request) -> Score | Failed:
        def call() -> Score | Failed:
            value = self._call(request)
            if inspect.isawaitable(value):
                # A plain function that returns a coroutine, as a decorated async one.
                value = asyncio.run(_awaited(value))
            return self._read(value)

        return await self._in_thread(lambda: self._guard(call), self.timeout_s)

    async def _score_together(self, requests: Sequence[Request]) -> list[Score | Failed]:
        """In one thread, on an event loop of their own: user code that blocks does not stop the role."""
        results: list[Score | Failed | None] = [None] * len(requests)

        async def one(index: int) -> None:
            deadline = asyncio.timeout(self.timeout_s)
            try:
                async with deadline:
                    results[index] = self._read(await self._call(requests[index]))
            except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included
                results[index] = Failed(self._late()) if deadline.expired() else self._failed(error)

        async def together() -> None:
            await asyncio.gather(*(one(index) for index in range(len(requests))))

        def call() -> Score | Failed:
            asyncio.run(together())
            return Score(0.0, {})

        # A call that blocks its loop is seen when that loop cannot even keep its own deadlines.
        outcome = await self._in_thread(lambda: self._guard(call), self.timeout_s + GRACE_S)
        missing = outcome if isinstance(outcome, Failed) else Failed("the reward's event loop ended early")
        return [missing if result is None else result for result in results]

    async def _in_thread(self, call: Callable[[], Score | Failed], timeout_s: float) -> Score | Failed:
        try:
            return await self._worker.do(call, timeout_s)
        except Stuck:
            self._worker = Worker()
            return Failed(self._late(), stuck=True)

    def _call(self, request: Request) -> Any:
        return self.function.call(request.completion, request.answer, request.info)

    def _guard(self, call: Callable[[], Score | Failed]) -> Score | Failed:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included
            return self._failed(error)

    def _late(self) -> str:
        return f"{self.function.target} did not return within reward.timeout_s = {self.timeout_s:g} s"

    def _read(self, value: Any) -> Score | Failed:
        try:
            return read_score(value)
        except ValueError as error:
            return Failed(f"{self.function.target} {error}")

    def _failed(self, error: BaseException) -> Failed:
        if isinstance(error, RelaxError):
            return Failed(str(error))
        return Failed(f"{self.function.target} raised {type(error).__name__}: {error} at {user_line(error)}")

    def close(self) -> None:
        """End the thread once it is idle."""
        self._worker.close()


async def _awaited(value: Awaitable[T]) -> T:
    return await value
