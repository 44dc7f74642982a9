"""Call a reward function and read what it returns; scores and failures; calls in a thread of this process."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from relax_rt.roles.base.user_code import user_line
from relax_rt.roles.rewards.library.functions import RewardFunction, UnreadableAnswer
from relax_rt.transport.rpc.errors import DeadlineExceeded, RelaxError

T = TypeVar("T")

MAX_COMPONENTS = 64
MAX_TURNS = 4096
TOTAL, TURNS = "total", "turn_rewards"
FLOAT32_MAX = 3.4028234e38
"""Rewards cross the queue as float32."""
CONCURRENT_CALLS = 64
"""Async rewards awaited at the same time."""
SCORE = "score"
"""Parameter by which a function takes the task's own verdict."""
PER_COMPLETION = ("finish_reason", "truncated", "tokens", "turns", "verdict")
"""Information that differs among the completions of a prompt."""
GRACE_S = 1.0
"""Time for an event loop on top of its calls' deadlines, before its thread or process is abandoned."""


class RewardRequest(msgspec.Struct, frozen=True):
    """One completion to score.

    Attributes:
        answer: of any JSON type; a function whose parameter is annotated as `str` gets it as text.
        info: offered to the function by parameter name. group: names the completions of one prompt.
    """

    completion: str
    answer: Any
    info: dict[str, Any]
    group: int = 0


class Score(msgspec.Struct, frozen=True):
    """A reward: its total, its components by name, and one for each turn of the assistant if a function gives them.

    Attributes:
        forgiven: why components count 0 instead of failing the sample.
        unreadable: why a component could not read the right answer of the item and counts 0; empty if all could.
    """

    total: float
    components: dict[str, float]
    turns: tuple[float, ...] = ()
    forgiven: tuple[str, ...] = ()
    unreadable: str = ""


class RewardFailed(msgspec.Struct, frozen=True):
    """Why a completion has no reward.

    Attributes:
        stuck: the call did not return and still holds its thread. excess: it exceeded a time or memory limit.
        unreadable: the right answer of its item cannot be read, so any other completion would fail as well.
    """

    reason: str
    stuck: bool = False
    excess: bool = False
    unreadable: bool = False


def parse_score(value: Any) -> Score:
    """Return a reward function's result as a score.

    A number is the total; a dict holds components, whose sum is the total unless it has a `total` of its own. Its
    `turn_rewards`, a number for each turn of the assistant, are no component; alone, their sum is the total.

    Raises:
        ValueError: it is neither, or not finite.
    """
    if not isinstance(value, dict):
        number = _number(value, "it")
        return Score(number, {"reward": number})
    given = value.get(TURNS, ())
    given = () if given is None else given
    if isinstance(given, str | bytes | dict) or not hasattr(given, "__len__") or len(given) > MAX_TURNS:
        raise ValueError(f"returned {TURNS} = {given!r:.80}; it must be a list of at most {MAX_TURNS} numbers")
    turns = tuple(_number(one, f"{TURNS}[{turn}]") for turn, one in enumerate(given))
    parts = {name: part for name, part in value.items() if name != TURNS}
    if not value or len(parts) > MAX_COMPONENTS:
        raise ValueError(f"returned a dict of {len(parts)} components; 1 to {MAX_COMPONENTS} are taken")
    numbers = {str(name): _number(part, f"component {name!r}") for name, part in parts.items()}
    total = numbers.pop(TOTAL, None)
    if total is None:
        total = _number(sum(numbers.values()) if numbers else sum(turns), "the sum")
    return Score(total, numbers or {"reward": total}, turns)


def _number(value: Any, what: str) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        lists = "; a list of rewards is for `group = true`" if isinstance(value, list | tuple) else ""
        raise ValueError(f"returned {value!r:.80}; {what} must be a number or a dict of numbers{lists}") from None
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"returned {value!r:.80}; {what} must be finite, as a 32-bit float")
    return number


class RewardCaller:
    """Calls one reward function and returns its score or failure, whatever it does short of not returning.

    Args:
        timeout_s: for each call of an async function, and in errors; None: it has deadlines of its own.
        verify: the task's own verdict on a text, for functions that take `score`.
    """

    def __init__(
        self,
        function: RewardFunction,
        timeout_s: float | None,
        verify: Callable[[str, dict[str, Any]], float] | None = None,
    ) -> None:
        self.function, self.timeout_s = function, timeout_s
        self._verify = verify

    def one(self, request: RewardRequest) -> Score | RewardFailed:
        """Call it once."""

        def call() -> Score | RewardFailed:
            value = self._call(request)
            if inspect.isawaitable(value):
                # A plain function that returns a coroutine, as a decorated async one.
                value = asyncio.run(_awaited(value))
            return self._read(value)

        return self.guard(call)

    def group(self, requests: Sequence[RewardRequest]) -> list[Score | RewardFailed]:
        """Call it once with all members of a group: its completions as a list, and what differs among them too."""
        results: list[Score | RewardFailed] = []

        def call() -> Score | RewardFailed:
            # Lists of what differs among the completions; the item's own information as it is.
            infos = [self._info(request) for request in requests]
            info = {
                name: [one.get(name) for one in infos] if name in PER_COMPLETION else value
                for name, value in infos[0].items()
            }
            value = self.function.call([one.completion for one in requests], requests[0].answer, info)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            if isinstance(value, str | bytes | dict) or not hasattr(value, "__len__") or len(value) != len(requests):
                raise ValueError(f"returned {value!r:.80}; it must be a list with one reward for each completion")
            results.extend(self._read(one) for one in value)
            return Score(0.0, {})

        outcome = self.guard(call)
        return [outcome] * len(requests) if isinstance(outcome, RewardFailed) else results

    async def together(
        self, requests: Sequence[RewardRequest], done: Callable[[int, Score | RewardFailed], None]
    ) -> None:
        """Await the calls of an async function concurrently, each within its deadline; `done` gets each result."""

        async def one(index: int) -> None:
            deadline = asyncio.timeout(self.timeout_s)
            result: Score | RewardFailed
            try:
                async with deadline:
                    result = self._read(await self._call(requests[index]))
            except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included
                result = RewardFailed(self.late(), excess=True) if deadline.expired() else self.failed(error)
            done(index, result)

        await asyncio.gather(*(one(index) for index in range(len(requests))))

    def guard(self, call: Callable[[], Score | RewardFailed]) -> Score | RewardFailed:
        """Return the result of a call, or its failure."""
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included
            return self.failed(error)

    def late(self) -> str:
        """Return the reason of a call that took too long."""
        return f"{self.function.target} did not return within reward.timeout_s = {self.timeout_s or 0:g} s"

    def failed(self, error: BaseException) -> RewardFailed:
        """Return the failure of a call that raised."""
        if isinstance(error, RelaxError):
            return RewardFailed(str(error))
        if isinstance(error, UnreadableAnswer):
            return RewardFailed(f"{self.function.target}: {error}", unreadable=True)
        return RewardFailed(f"{self.function.target} raised {type(error).__name__}: {error} at {user_line(error)}")

    def _call(self, request: RewardRequest) -> Any:
        return self.function.call(request.completion, request.answer, self._info(request))

    def _info(self, request: RewardRequest) -> dict[str, Any]:
        if self._verify is None or SCORE in request.info:
            return request.info
        verify, metadata = self._verify, request.info.get("metadata", {})
        return {**request.info, SCORE: lambda text: verify(text, metadata)}

    def _read(self, value: Any) -> Score | RewardFailed:
        try:
            return parse_score(value)
        except ValueError as error:
            return RewardFailed(f"{self.function.target} {error}")


class CallStuck(DeadlineExceeded):
    """A call did not return in time and holds its thread."""


class CallThread:
    """A daemon thread that runs calls in order. Unlike in an executor, a call that never returns does not keep the
    process from ending."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="relax-reward", daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    async def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """Run the function in the thread and wait for it; what it raises is raised here.

        Raises:
            CallStuck: it did not return within timeout_s; the thread is lost.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if not outcome.done():
                outcome.set_result((value, error))

        def run() -> None:
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

        self._calls.put(run)
        try:
            async with asyncio.timeout(timeout_s):
                value, error = await outcome
        except TimeoutError:
            raise CallStuck("a call of user code", why=f"it did not return within {timeout_s:g} s") from None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """Let the thread end after the calls it has."""
        self._calls.put(None)


class ThreadScorer:
    """Scores completions with a reward function in a thread of this process, each call within `timeout_s`.

    A call that does not return is abandoned: its request is `Failed(stuck=True)`, and the rest continues in a new
    thread. The old thread cannot be ended, so this is for our own functions, and for debugging.

    Args:
        groups: the function scores whole groups.
    """

    def __init__(self, caller: RewardCaller, timeout_s: float, *, groups: bool = False) -> None:
        self.caller, self.groups, self._timeout_s = caller, groups, timeout_s
        self._thread = CallThread()

    async def score(
        self, requests: Sequence[RewardRequest], after_each: Callable[[], None] = lambda: None
    ) -> list[Score | RewardFailed]:
        """Return scores in order; `after_each` is called for each result as it comes."""
        results: list[Score | RewardFailed] = []
        for chunk in split_requests(self.caller.function.is_async, requests, groups=self.groups):
            for result in await self._score(chunk):
                results.append(result)
                after_each()
        return results

    async def _score(self, chunk: Sequence[RewardRequest]) -> list[Score | RewardFailed]:
        caller = self.caller
        if self.groups:
            return await self._in_thread(lambda: caller.group(chunk), len(chunk), self._timeout_s)
        if not caller.function.is_async:
            return await self._in_thread(lambda: [caller.one(chunk[0])], 1, self._timeout_s)
        # A call that blocks its event loop also blocks the loop's own deadlines; the grace period detects that.
        return await self._in_thread(lambda: run_together(caller, chunk), len(chunk), self._timeout_s + GRACE_S)

    async def _in_thread(
        self, call: Callable[[], list[Score | RewardFailed]], size: int, timeout_s: float
    ) -> list[Score | RewardFailed]:
        try:
            return await self._thread.call(call, timeout_s)
        except CallStuck:
            self._thread = CallThread()
            return [RewardFailed(self.caller.late(), stuck=True, excess=True)] * size

    async def close(self) -> None:
        """End the thread once it is idle."""
        self._thread.close()


def split_requests(is_async: bool, requests: Sequence[RewardRequest], *, groups: bool) -> list[list[RewardRequest]]:
    """Split requests, in order, into those of one call: single ones, CONCURRENT_CALLS of an async function, groups."""
    if groups:
        return [list(members) for _, members in itertools.groupby(requests, key=lambda request: request.group)]
    size = CONCURRENT_CALLS if is_async else 1
    return [list(requests[first : first + size]) for first in range(0, len(requests), size)]


def run_together(
    caller: RewardCaller,
    requests: Sequence[RewardRequest],
    done: Callable[[int, Score | RewardFailed], None] = lambda index, result: None,
) -> list[Score | RewardFailed]:
    """Call an async function for all requests, on an event loop of their own."""
    results: list[Score | RewardFailed | None] = [None] * len(requests)

    def keep(index: int, result: Score | RewardFailed) -> None:
        results[index] = result
        done(index, result)

    def call() -> Score | RewardFailed:
        asyncio.run(caller.together(requests, keep))
        return Score(0.0, {})

    outcome = caller.guard(call)
    missing = outcome if isinstance(outcome, RewardFailed) else RewardFailed("the reward's event loop ended early")
    return [missing if result is None else result for result in results]


async def _awaited(value: Awaitable[T]) -> T:
    return await value
