"""Tasks of user code: deadlines, cancellation, and what to do when that does not end them.

A coroutine may swallow its cancellation (`except: await asyncio.sleep(1)` in a loop), and asyncio has nothing stronger.
So nobody waits for one longer than a deadline and a grace period; those that keep running are named, counted and
limited. A coroutine may also block the event loop; `LoopWatch` reports that from another thread.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from relax_rt.roles.agentic.interface import EnvironmentFailed, EnvironmentStuck, EpisodeLost
from relax_rt.roles.base.user_code import innermost_user_line
from relax_rt.transport.rpc.errors import RelaxError

T = TypeVar("T")

CALL_GRACE_S = 5.0
"""Time for a late call to end after it was cancelled."""
EPISODE_GRACE_S = 12.0
"""The same for an episode: its open calls and the close of its environment have 5 s each."""
END_S = EPISODE_GRACE_S + 1.0
"""Time for a caller to wait for such episodes."""
MAX_ABANDONED = 16
BETWEEN_CALLS = "between its calls"
HINT = "let asyncio.CancelledError pass (`except Exception` does), and give retries an end"
BLOCKED_AFTER_S = 5.0
"""An event loop that does not answer for so long is blocked."""
POLL_S = 1.0


class TooManyAbandoned(RelaxError):
    """More user tasks than a slot tolerates keep running although they were cancelled: its role ends."""


class AbandonedTasks:
    """Tasks of user code that did not end when they were cancelled, until they do.

    Args:
        max_count: at a time.
        on_abandoned: called with the episode's name, the call, and the line where it is suspended.
        on_too_many: called with why the role must end, once there are more than `max_count`.

    Attributes:
        total: so far.
    """

    def __init__(
        self,
        max_count: int = MAX_ABANDONED,
        on_abandoned: Callable[[str, str, str], None] = lambda name, where, line: None,
        on_too_many: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._max_count, self._on_abandoned, self._on_too_many = max_count, on_abandoned, on_too_many
        self._tasks: set[asyncio.Task[Any]] = set()
        self._last = ""
        self.total = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: asyncio.Task[Any], name: str, where: str) -> None:
        """Stop waiting for a task."""
        line = task_line(task)
        self.total += 1
        self._tasks.add(task)
        self._last = f"{where} of {name} at {line}"
        task.add_done_callback(self._ended)
        self._on_abandoned(name, where, line)
        if len(self._tasks) > self._max_count:
            what = f"{len(self._tasks)} coroutines of the environment keep running although they were cancelled"
            self._on_too_many(TooManyAbandoned(what, why=f"the last one {self._last}", hint=HINT))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Retrieve it, or asyncio logs an unretrieved exception.
            task.exception()

    def summary(self) -> str:
        """Describe how many there are, and the last one; empty if there are none."""
        if not self._tasks:
            return ""
        return f"{len(self._tasks)} keep running although they were cancelled, the last one {self._last}"


class EpisodeTask:
    """The task of one episode. All of its user code runs in it, so one call may close what another one opened.

    Args:
        name: of the episode.

    Attributes:
        where: the call that it is in.
    """

    def __init__(self, abandoned: AbandonedTasks, name: str) -> None:
        self._abandoned, self._name = abandoned, name
        self._stuck: asyncio.Future[EnvironmentStuck] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None]
        self.where = BETWEEN_CALLS

    @contextmanager
    def calling(self, where: str, timeout_s: float | None = None) -> Iterator[None]:
        """Name the current call. The caller cancels it after `timeout_s`; a grace period later the episode is stuck."""
        self.where, timer = where, None
        if timeout_s is not None:
            timer = asyncio.get_running_loop().call_later(timeout_s + CALL_GRACE_S, self._set_stuck, where, timeout_s)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
        self.where = BETWEEN_CALLS

    def _set_stuck(self, where: str, timeout_s: float) -> None:
        if not self._stuck.done():
            line = task_line(self._task)
            why = f"it did not return within {timeout_s:g} s, nor when it was cancelled: it stands at {line}"
            self._stuck.set_result(EnvironmentStuck(where, why=why, hint=HINT))

    async def run(
        self,
        work: Callable[[], Awaitable[T]],
        end: Callable[[], Awaitable[None]],
        timeout_s: float,
        late: Callable[[], RelaxError],
        abandon: Callable[[], None],
    ) -> T:
        """Do the work, then `end`, whatever the work's result.

        Args:
            late: returns what is raised if the work is not over in time; called before it is cancelled.
            abandon: called when the work is no longer waited for, whether it ends or not.

        Raises:
            EnvironmentStuck: a call did not end when it was cancelled. EnvironmentFailed: it ended by what is no
            error, as SystemExit. Exception: `late`, or what the work raised.
        """
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        result.add_done_callback(lambda done: done.exception())
        self._task = asyncio.create_task(self._run(work, end, result), name=f"episode {self._name}")
        try:
            waited: list[asyncio.Future[Any]] = [result, self._stuck]
            await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return result.result()
            raise self._stuck.result() if self._stuck.done() else late()
        finally:
            if not result.done():
                abandon()
                self._task.cancel()
            try:
                await asyncio.wait({self._task}, timeout=EPISODE_GRACE_S)
            finally:
                # Also if this wait was cancelled.
                if not self._task.done():
                    self.abandon(self._task, self.where)

    async def _run(
        self, work: Callable[[], Awaitable[T]], end: Callable[[], Awaitable[None]], result: asyncio.Future[T]
    ) -> None:
        try:
            result.set_result(await work())
        except (asyncio.CancelledError, SystemExit) as error:
            # If this task was cancelled from outside, this result is not read.
            kind = EpisodeLost if self.where == BETWEEN_CALLS else EnvironmentFailed
            result.set_exception(kind(self.where, why=f"{type(error).__name__}, raised by itself"))
        except BaseException as error:  # noqa: BLE001 - it is raised where the episode is waited for
            result.set_exception(error)
        await end()

    def abandon(self, task: asyncio.Task[Any], where: str) -> None:
        """Stop waiting for a task of the episode that did not end when it was cancelled."""
        self._abandoned.add(task, self._name, where)


async def cancel_all(tasks: Collection[asyncio.Task[Any]], timeout_s: float | None = None) -> list[asyncio.Task[Any]]:
    """Cancel tasks, wait for them, END_S at most, and return those that did not end."""
    for task in tasks:
        task.cancel()
    if not tasks:
        return []
    ended, running = await asyncio.wait(tasks, timeout=END_S if timeout_s is None else timeout_s)
    for task in ended:
        if not task.cancelled():
            task.exception()
    return list(running)


def task_line(task: asyncio.Task[Any]) -> str:
    """Return the `file:line` of a suspended task, in the user's code if there is any."""
    lines: list[tuple[str, int]] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame: FrameType | None = next(
            (f for n in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(awaited, n, None))), None
        )
        if frame is not None:
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        awaited = next((a for n in ("cr_await", "gi_yieldfrom", "ag_await") if (a := getattr(awaited, n, None))), None)
    return innermost_user_line(lines)


class LoopWatch:
    """Watches an event loop from another thread; a context manager, to be used in the loop's own thread.

    Args:
        on_blocked: called in the watching thread, once each time the loop is blocked, with the task that blocks it
            (None: no task does) and the `file:line` that it is at, in the user's code if there is any.
        on_answer: called likewise when it answers again, with the seconds that it did not.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_blocked: Callable[[asyncio.Task[Any] | None, str], None],
        on_answer: Callable[[float], None] = lambda seconds: None,
        after_s: float | None = None,
    ) -> None:
        self._loop, self._on_blocked, self._on_answer = loop, on_blocked, on_answer
        self._after_s = BLOCKED_AFTER_S if after_s is None else after_s
        self._thread = threading.get_ident()
        self._ended = threading.Event()

    def __enter__(self) -> LoopWatch:
        threading.Thread(target=self._watch, name="relax-loop-watch", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(min(POLL_S, self._after_s)):
            answered = threading.Event()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:
                # The loop is closed.
                return
            if answered.wait(self._after_s) or self._ended.is_set():
                continue
            seconds = self._after_s
            frame: FrameType | None = sys._current_frames().get(self._thread)
            lines: list[tuple[str, int]] = []
            while frame is not None:
                lines.append((frame.f_code.co_filename, frame.f_lineno))
                frame = frame.f_back
            self._on_blocked(asyncio.current_task(self._loop), innermost_user_line(lines[::-1]))
            while not answered.wait(POLL_S) and not self._ended.is_set():
                seconds += POLL_S
            self._on_answer(seconds)
