"""Lets calls in by turns: carries out what admission control decides."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from relax_rt.roles.gateway.admission import Action, Admission, Admit, Load, Marks, Refuse, Shed
from relax_rt.roles.gateway.errors import CallError

T = TypeVar("T")

log = logging.getLogger(__name__)

TICK_S = 0.1


class _Turn:
    """A call's place in the line: a future for each time that it waits."""

    def __init__(self) -> None:
        self.let_in: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.shed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Gate:
    """`async with gate:` watches the load; `pass_through` has a call wait for its turn and work.

    Args:
        load: how the engines do.
    """

    def __init__(self, marks: Marks, load: Callable[[], Load]) -> None:
        self.core = Admission(marks)
        self._load = load
        self._numbers = itertools.count(1)
        self._turns: dict[int, _Turn] = {}
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Gate:
        self._watch = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def pass_through(
        self, group: str, work: Callable[[Callable[[], bool]], Awaitable[T]], *, sequences: int = 1
    ) -> T:
        """Wait for a turn and do the work, from its beginning again if it is shed meanwhile. What it is given is to be
        called before it does what must not be done twice; False: it was shed, and is about to be cancelled.

        Args:
            sequences: that the work has made.

        Raises:
            CallError: 429: too many wait, or it waited for too long.
        """
        number, turn = next(self._numbers), _Turn()
        self._turns[number] = turn
        self._do(self.core.arrive(self._now(), number, group, sequences))
        try:
            while True:
                await turn.let_in
                task = asyncio.ensure_future(work(lambda: self.core.hold(number)))
                try:
                    either: list[asyncio.Future[Any]] = [task, turn.shed]
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    if task.done() or not turn.shed.done():
                        return await task
                finally:
                    await _ended(task)
                turn.shed = asyncio.get_running_loop().create_future()
        finally:
            del self._turns[number]
            for future in (turn.let_in, turn.shed):
                future.cancel()
            self._do(self.core.leave(self._now(), number))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if (turn := self._turns.get(action.number)) is None:
                continue
            match action:
                case Admit() if not turn.let_in.done():
                    turn.let_in.set_result(None)
                case Refuse(_, why, after_s) if not turn.let_in.done():
                    error = CallError(429, f"too much to do: {why}", code="busy", retry_after_s=after_s)
                    turn.let_in.set_exception(error)
                case Shed():
                    turn.let_in = asyncio.get_running_loop().create_future()
                    if not turn.shed.done():
                        turn.shed.set_result(None)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._do(self.core.tick(self._now(), self._load()))
            except Exception:
                # Without it nobody's wait would end.
                log.exception("admission control")


async def _ended(task: asyncio.Future[T]) -> None:
    """Not longer at work when this returns."""
    if not task.done():
        task.cancel()
        # Not by awaiting it: who is cancelled meanwhile must hear of it, and not take it for the task's own end.
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
