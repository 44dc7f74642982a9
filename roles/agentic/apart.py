"""User code in a task of its own: waited for with deadlines, cancelled when it is late, and left to itself where that
does not end it.

A coroutine may swallow its cancellation (`except: await asyncio.sleep(1)` in a loop), and asyncio has nothing stronger.
So nobody waits for one any longer than a deadline and a grace; those that go on are named, counted, and bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from relax_rt.roles.agentic.pool import Broken, Lost, Stuck
from relax_rt.roles.rewards.loader import OWN_CODE
from relax_rt.transport.rpc.errors import RelaxError

T = TypeVar("T")

GRACE_S = 5.0
"""A call that was cancelled because it is late may take so long to end."""
LEAVE_S = 12.0
"""So may an episode: its open calls and its environment's close have 5 s each."""
END_S = LEAVE_S + 1.0
"""What waits for such episodes is waited for so long."""
MOST = 16
NOWHERE = "between its calls"
HINT = "let asyncio.CancelledError pass (`except Exception` does), and give retries an end"


class TooManyLeft(RelaxError):
    """More of the user's coroutines go on after they were cancelled than a slot bears: its role ends."""


class Strays:
    """Tasks of user code that did not end when they were cancelled, until they do.

    Args:
        most: at a time.
        told: is called with the episode's name, the call, and the line that it stands at.
        broken: is called with why the role must end, once there are more.
    """

    def __init__(
        self,
        most: int = MOST,
        told: Callable[[str, str, str], None] = lambda name, where, line: None,
        broken: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._most, self._told, self._broken = most, told, broken
        self._tasks: set[asyncio.Task[Any]] = set()
        self._last = ""
        self.total = 0
        """So far."""

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: asyncio.Task[Any], name: str, where: str) -> None:
        """Leave a task to itself."""
        line = line_of(task)
        self.total += 1
        self._tasks.add(task)
        self._last = f"{where} of {name} at {line}"
        task.add_done_callback(self._ended)
        self._told(name, where, line)
        if len(self._tasks) > self._most:
            what = f"{len(self._tasks)} coroutines of the environment go on although they were cancelled"
            self._broken(TooManyLeft(what, why=f"the last one {self._last}", hint=HINT))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Nobody asks what became of it, and asyncio would complain of that.
            task.exception()

    def words(self) -> str:
        """How many there are, and which was the last; empty: there are none."""
        if not self._tasks:
            return ""
        return f"{len(self._tasks)} go on although they were cancelled, the last one {self._last}"


class Apart:
    """The task of one episode. All its user code runs in it: what is opened in one call may be closed in another.

    Args:
        name: of the episode.
    """

    def __init__(self, strays: Strays, name: str) -> None:
        self._strays, self._name = strays, name
        self._late: asyncio.Future[Stuck] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None]
        self.where = NOWHERE

    @contextmanager
    def at(self, where: str, seconds: float | None = None) -> Iterator[None]:
        """What the task is at. Whoever is in there cancels it after so many seconds; some later it is given up."""
        self.where, timer = where, None
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(seconds + GRACE_S, self._is_late, where, seconds)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
        self.where = NOWHERE

    def _is_late(self, where: str, seconds: float) -> None:
        if not self._late.done():
            why = (
                f"it did not return within {seconds:g} s, nor when it was cancelled: it stands at {line_of(self._task)}"
            )
            self._late.set_result(Stuck(where, why=why, hint=HINT))

    async def run(
        self,
        work: Callable[[], Awaitable[T]],
        end: Callable[[], Awaitable[None]],
        seconds: float,
        late: Callable[[], RelaxError],
        give_up: Callable[[], None],
    ) -> T:
        """Do the work, then what is to be done at its end whatever became of it.

        Args:
            late: what is raised if the work is not over within so many seconds; asked before it is cancelled.
            give_up: is called when nobody waits for the work any more, whether it ends or not.

        Raises:
            Stuck: a call did not end when it was cancelled. Broken: it ended by what is no error, as SystemExit.
            Exception: `late`, or what the work raised.
        """
        found: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        found.add_done_callback(lambda done: done.exception())
        self._task = asyncio.create_task(self._both(work, end, found), name=f"episode {self._name}")
        try:
            waited: list[asyncio.Future[Any]] = [found, self._late]
            await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if found.done():
                return found.result()
            raise self._late.result() if self._late.done() else late()
        finally:
            if not found.done():
                give_up()
                self._task.cancel()
            await self._leave()

    async def _both(
        self, work: Callable[[], Awaitable[T]], end: Callable[[], Awaitable[None]], found: asyncio.Future[T]
    ) -> None:
        try:
            found.set_result(await work())
        except (asyncio.CancelledError, SystemExit) as error:
            # If we were who cancelled it, nobody looks at this.
            kind = Lost if self.where == NOWHERE else Broken
            found.set_exception(kind(self.where, why=f"{type(error).__name__}, raised by itself"))
        except BaseException as error:  # noqa: BLE001 - it is raised where the episode is waited for
            found.set_exception(error)
        await end()

    async def _leave(self) -> None:
        try:
            await asyncio.wait({self._task}, timeout=LEAVE_S)
        finally:
            # Also where this wait was cancelled.
            if not self._task.done():
                self.stray(self._task, self.where)

    def stray(self, task: asyncio.Task[Any], where: str) -> None:
        """A task of the episode did not end when it was cancelled."""
        self._strays.add(task, self._name, where)


async def end_all(tasks: Collection[asyncio.Task[Any]], seconds: float | None = None) -> list[asyncio.Task[Any]]:
    """Cancel tasks and wait for their ends, END_S at most.

    Returns:
        Those that did not end.
    """
    for task in tasks:
        task.cancel()
    if not tasks:
        return []
    ended, left = await asyncio.wait(tasks, timeout=END_S if seconds is None else seconds)
    for task in ended:
        if not task.cancelled():
            task.exception()
    return list(left)


def line_of(task: asyncio.Task[Any]) -> str:
    """`file:line` that a task which is suspended stands at, in the user's code if there is any."""
    lines: list[tuple[str, int]] = []
    at: Any = task.get_coro()
    while at is not None:
        frame: FrameType | None = next(
            (f for n in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(at, n, None))), None
        )
        if frame is not None:
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        at = next((a for n in ("cr_await", "gi_yieldfrom", "ag_await") if (a := getattr(at, n, None))), None)
    return users(lines)


def users(lines: list[tuple[str, int]]) -> str:
    """The innermost of some files and lines that is the user's own, else of a library. Pure."""
    outside = [(file, line) for file, line in lines if not file.startswith(("<frozen", *OWN_CODE))]
    own = [(file, line) for file, line in outside if "site-packages" not in file and "/lib/python" not in file]
    file, line = (own or outside or [("an unknown line", 0)])[-1]
    return f"{file}:{line}" if line else file
