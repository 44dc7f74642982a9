"""A rank over gloo that does itself harm at one point: in the folder RELAX_FAULTS lies, by member, where and what."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_rt.transport.weights.broadcast.backends import GlooCommunicator
from relax_rt.transport.weights.broadcast.protocol import Rendezvous
from relax_rt.transport.weights.memory import Memory, View


def harm(where: str) -> None:
    """Do what is wanted here, if anything is: kill, stop, hang (the library does not come back), corrupt."""
    order = Path(os.environ["RELAX_FAULTS"]) / os.environ["RELAX_COLLECTIVE_MEMBER"]
    if not order.exists():
        return
    place, what, again = order.read_text().split()
    if place != where:
        return
    if again == "once":
        order.unlink()
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "fail":
        raise MemoryError("no room for a bucket")
    # A signal to the process takes its moment to reach this thread: nothing is done in it.
    time.sleep(3600)


class FaultyGloo(GlooCommunicator):
    """See the module."""

    def __init__(self) -> None:
        harm("start")
        super().__init__()
        self._buckets = 0

    def init(self, rank: int, world: int, rendezvous: Rendezvous, timeout_s: float) -> None:
        harm("rendezvous")
        super().init(rank, world, rendezvous, timeout_s)
        harm("joined")

    @contextmanager
    def open(self, memory: Memory, *, writable: bool) -> Iterator[View]:
        harm("before")
        self._buckets = 0
        with super().open(memory, writable=writable) as view:
            yield view
        harm("after")

    def broadcast(self, view: View, root: int, timeout_s: float) -> None:
        self._buckets += 1
        if self._buckets == 3:
            harm("middle")
        super().broadcast(view, root, timeout_s)
