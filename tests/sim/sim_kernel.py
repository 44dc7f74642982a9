"""A virtual clock and the processes on it: generators that yield seconds to sleep or a promise to wait for."""

from __future__ import annotations

import heapq
import inspect
import random
from collections.abc import Callable, Generator
from itertools import count
from typing import Any

Steps = Generator[Any, Any, Any]


class Promise:
    """Settled once, by whoever comes first."""

    def __init__(self) -> None:
        self.settled = False
        self.value: Any = None
        self._then: Callable[[Any], None] | None = None

    def settle(self, value: Any) -> None:
        if self.settled:
            return
        self.settled, self.value = True, value
        if self._then is not None:
            self._then(value)

    def then(self, call: Callable[[Any], None]) -> None:
        if self.settled:
            call(self.value)
        else:
            self._then = call


class Exit(Exception):
    """A process ends of its own accord."""


class Silence(Exception):
    """A process stands still for ever, and nobody is told."""


class Thread:
    """A generator that runs on the kernel until it ends, is killed, or stands paused."""

    def __init__(self, kernel: Kernel, steps: Steps, ended: Callable[[], None] = lambda: None) -> None:
        self._kernel, self._steps, self._ended = kernel, steps, ended
        self.alive = True
        self.resumes_at = 0.0
        kernel.after(0.0, lambda: self._go_on(None))

    def kill(self) -> None:
        self.alive = False
        if inspect.getgeneratorstate(self._steps) != inspect.GEN_RUNNING:
            self._steps.close()

    def _go_on(self, value: Any) -> None:
        if not self.alive:
            return
        if self.resumes_at > self._kernel.now:
            self._kernel.after(self.resumes_at - self._kernel.now, lambda: self._go_on(value))
            return
        try:
            wanted = self._steps.send(value)
        except Silence:
            self.alive = False
            return
        except (StopIteration, Exit):
            self.alive = False
            self._ended()
            return
        if isinstance(wanted, Promise):
            wanted.then(self._go_on)
        else:
            self._kernel.after(float(wanted), lambda: self._go_on(None))


class Kernel:
    """Runs what is due, in the order of time; the same seed gives the same run."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._n = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._n), call))

    def run(self, until: Callable[[], bool], deadline: float) -> bool:
        """Whether `until` came true before the deadline."""
        while self._queue and self.now < deadline:
            if until():
                return True
            self.now, _, call = heapq.heappop(self._queue)
            call()
        return until()
