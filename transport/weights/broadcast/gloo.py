"""A communicator over gloo, between processes of the CPU. It takes torch's process group alone: no default group."""

from __future__ import annotations

import datetime
import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from relax_rt.transport.weights import memory as host
from relax_rt.transport.weights.broadcast.communicator import PeerLost
from relax_rt.transport.weights.broadcast.messages import Rendezvous
from relax_rt.transport.weights.broadcast.rendezvous import dist, first_line, meet, open_store
from relax_rt.transport.weights.memory import HostView, Memory, View


class GlooCommunicator:
    """A rank over gloo. Implements Communicator."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.device = ""
        self.software = f"gloo of torch {torch.__version__}"
        self._group: Any = None
        self._aborted = False

    def open(self, memory: Memory, *, writable: bool) -> AbstractContextManager[View]:
        return host.opened(memory, writable=writable)

    def init(self, rank: int, world: int, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._aborted = False
        what = f"rank {rank} of {world} meets the others"
        try:
            store = open_store(rendezvous, timeout_s)
            left_s = meet(store, rank, world, timeout_s, lambda: self._aborted)
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address())]
            options._timeout = datetime.timedelta(seconds=left_s)
            self._group = dist.ProcessGroupGloo(store, rank, world, options)
        except RuntimeError as error:
            raise PeerLost(what, why=first_line(error)) from error
        if self._aborted:
            raise PeerLost(what, why="aborted")

    def broadcast(self, view: View, root: int, timeout_s: float) -> None:
        assert isinstance(view, HostView) and self._group is not None
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = datetime.timedelta(seconds=timeout_s)
        try:
            self._group.broadcast([torch.frombuffer(view.data, dtype=torch.uint8)], options).wait()
        except RuntimeError as error:
            raise PeerLost(f"broadcast of {view.nbytes} bytes", why=first_line(error)) from error
        if self._aborted:
            raise PeerLost(f"broadcast of {view.nbytes} bytes", why="aborted")

    def abort(self) -> None:
        # While connections are made there is nothing to abort: `init` ends by its own deadline.
        self._aborted = True
        if (group := self._group) is not None:
            group.abort()

    def close(self) -> None:
        self._group = None


def _address() -> str:
    """Return the address where other ranks reach this one: loopback, unless the environment names another."""
    return os.environ.get("RELAX_COLLECTIVE_ADDRESS", "127.0.0.1")
