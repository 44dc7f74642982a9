"""What a simulated run is made of: hosts, a network between them, processes with clocks of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from sim_kernel import Promise, Steps, Thread

from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from plane_world import World

CALL_S = 1.0
"""After so long without an answer a call is made again."""
LATE_S = 0.3
"""A message that took longer is trouble for those at its ends."""


class Clock:
    """Monotonic seconds of one process: begun anywhere, a little fast or slow, sometimes ahead at one stroke."""

    def __init__(self, world: World) -> None:
        rng = world.kernel.random
        self._kernel = world.kernel
        self._rate = 1.0 + rng.uniform(-0.01, 0.01)
        self._offset = rng.uniform(0.0, 1e5)

    def __call__(self) -> float:
        return self._offset + self._kernel.now * self._rate

    def jump(self, seconds: float) -> None:
        self._offset += seconds

    @staticmethod
    def like(other: Clock) -> Clock:
        """Of another process on the same machine."""
        return copy.copy(other)


class Host:
    """A machine. `cut_until`: nobody outside is reached; `excused_until`: its agent cannot end its roles in time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cut_until = 0.0
        self.excused_until = 0.0


class Net:
    """Messages are lost, late and overtaken as long as there are faults, and end at a cut for as long as it lasts.

    What is lost or late here is a connection that broke, or a call that sat in the socket of a stalled process: the
    caller makes it again, and both may arrive.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.faulty = True
        self.loss = self.late = 0.0

    def send(self, source: Process, target: Process, deliver: Callable[[], None]) -> None:
        kernel = self._world.kernel
        rng, now = kernel.random, kernel.now
        if source.host is not target.host:
            cut_until = max(source.host.cut_until, target.host.cut_until)
            if cut_until > now:
                source.troubled(cut_until)
                target.troubled(cut_until)
                if rng.random() < 0.5:
                    kernel.after(cut_until - now + rng.uniform(0.001, 0.3), lambda: target.take(deliver))
                return
        if not self.faulty:
            kernel.after(0.002, lambda: target.take(deliver))
            return
        chance = rng.random()
        if chance >= self.loss + self.late:
            delay = rng.uniform(0.0005, 0.01)
        elif chance >= self.loss:
            delay = rng.uniform(0.1, 3.0)
        else:
            source.troubled(now + CALL_S)
            target.troubled(now + CALL_S)
            return
        if delay > LATE_S:
            source.troubled(now + delay)
            target.troubled(now + delay)
        kernel.after(delay, lambda: target.take(deliver))


class Process:
    """A process on a host: threads and messages stand still while it is stopped, and end with it."""

    def __init__(self, world: World, name: str, host: Host) -> None:
        self.world, self.name, self.host, self.run = world, name, host, world.run
        self.now = Clock(world)
        self.alive = True
        self.stopped_until = self.still_since = 0.0
        self.trouble = world.kernel.now
        self._threads: list[Thread] = []

    def __str__(self) -> str:
        return self.name

    def thread(self, steps: Steps, ended: Callable[[], None] = lambda: None) -> Thread:
        thread = Thread(self.world.kernel, steps, ended)
        if self.alive:
            thread.resumes_at = self.stopped_until
            self._threads = [t for t in self._threads if t.alive]
            self._threads.append(thread)
        else:
            thread.kill()
        return thread

    def take(self, call: Callable[[], None]) -> None:
        """A message has come; it waits while the process is stopped."""
        if not self.alive:
            return
        if self.stopped_until > self.world.kernel.now:
            self.world.kernel.after(self.stopped_until - self.world.kernel.now, lambda: self.take(call))
        else:
            call()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.world.kernel.after(seconds, lambda: self.take(call))

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        if not self.stopped:
            self.still_since = self.world.kernel.now
        self.stopped_until = max(self.stopped_until, self.world.kernel.now + seconds)
        self.troubled(self.stopped_until)
        for thread in self._threads:
            thread.resumes_at = self.stopped_until

    @property
    def stopped(self) -> bool:
        return self.stopped_until > self.world.kernel.now

    def troubled(self, until: float) -> None:
        """Until then its calls may go wrong for reasons of its own or of the network."""
        self.trouble = max(self.trouble, until)

    def die(self) -> None:
        self.alive = False
        for thread in self._threads:
            thread.kill()
        self._threads.clear()

    def ask(
        self,
        server: str,
        call: str,
        *arguments: Any,
        timeout_s: float = CALL_S,
        give_up_s: float = float("inf"),
        shown: bool = True,
    ) -> Steps:
        """Call what serves there now, again and again until it answers. shown: a wait for it is told.

        Raises:
            TimeoutError: it did not within `give_up_s`.
            RelaxError: its answer.
        """
        kernel, ends = self.world.kernel, self.world.kernel.now + give_up_s
        while True:
            target, answer = self.world.servers.get(server), Promise()
            if target is not None and target.alive and target.run == self.run:
                self._send(target, methodcaller(call, *arguments), answer)
                kernel.after(timeout_s, partial(answer.settle, None))
                got = yield answer
                if got is not None:
                    if isinstance(got[0], RelaxError):
                        raise got[0]
                    return got[0]
            else:
                yield 0.2
            if kernel.now >= ends:
                raise TimeoutError(server)
            if shown:
                self.waiting(f"{server} does not answer")

    def _send(self, target: Process, do: Callable[[Any], Any], answer: Promise) -> None:
        net = self.world.net

        def back(value: Any) -> None:
            if target.alive:
                net.send(target, self, lambda: answer.settle((value,)))

        net.send(self, target, lambda: target.serve(do, back))

    def waiting(self, reason: str) -> None:
        """Say why nothing goes on."""

    def serve(self, do: Callable[[Any], Any], back: Callable[[Any], None]) -> None:
        """Answer a call."""
        raise NotImplementedError
