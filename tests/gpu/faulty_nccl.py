"""A rank over NCCL that does itself harm, as tests/unit/transport/weights/faulty_gloo.py does over gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from faulty_gloo import harm

from relax_rt.transport.weights.broadcast.backends import NcclCommunicator
from relax_rt.transport.weights.broadcast.protocol import Rendezvous
from relax_rt.transport.weights.memory import Memory, View


class FaultyNccl(NcclCommunicator):
    """With RELAX_LONELY=1 it does not look for the others first, so that NCCL itself meets the absent or double one."""

    def __init__(self) -> None:
        harm("start")
        super().__init__()
        self._buckets = 0

    def meet(self, store: Any, rank: int, world: int, timeout_s: float) -> None:
        if os.environ.get("RELAX_LONELY") != "1":
            super().meet(store, rank, world, timeout_s)

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
