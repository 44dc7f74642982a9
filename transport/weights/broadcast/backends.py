"""Communicators over gloo and NCCL, and how their ranks find each other before a library connects them.

Ranks meet through torch's TCPStore: one that does not come is noticed there, where the wait can be ended at once;
libraries wait in native code.

Only the thread of the collective calls NCCL (through CuPy). Its communicators are non-blocking (NCCL 2.14 and later):
each call returns at once and is polled until it is done, its deadline has passed or it is aborted. What NCCL does not
release then ends with the process.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed

from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, RelaxError
from relax_rt.transport.weights import device
from relax_rt.transport.weights.broadcast.protocol import DuplicateDevice, PeerLost, Rendezvous
from relax_rt.transport.weights.device import DeviceView
from relax_rt.transport.weights.memory import HostView, Memory, View, map_host_memory

MEET_POLL_S = 0.02

dist: Any = torch.distributed
"""Typed as Any because its stubs do not export ProcessGroupGloo and the stores."""


def open_store(rendezvous: Rendezvous, timeout_s: float) -> Any:
    """Connect to the store and open the keys of this generation."""
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.TCPStore(rendezvous.host, rendezvous.port, None, False, timeout)
    return dist.PrefixStore(rendezvous.prefix, store)


def meet(
    store: Any,
    rank: int,
    world: int,
    timeout_s: float,
    aborted: Callable[[], bool],
    device: str = "",
    *,
    shared_devices: bool = False,
) -> float:
    """Wait until every rank has registered; return the seconds left.

    Raises:
        PeerLost: a rank has not come in time, or `aborted` returns True.
        DuplicateDevice: an earlier rank works on this rank's device.
    """
    deadline = time.monotonic() + timeout_s
    store.set(f"here/{rank}", device)
    missing = [f"here/{other}" for other in range(world) if other != rank]
    while missing := [key for key in missing if not store.check([key])]:
        if aborted():
            raise PeerLost(f"rank {rank} of {world} meets the others", why="aborted")
        if time.monotonic() >= deadline:
            ranks = ", ".join(key.removeprefix("here/") for key in missing)
            raise PeerLost(f"rank {rank} of {world} meets the others", why=f"not there: rank {ranks}")
        time.sleep(MEET_POLL_S)
    if device and not shared_devices:
        for other in range(rank):
            if store.get(f"here/{other}").decode() == device:
                raise DuplicateDevice(f"rank {rank} on device {device}", why=f"rank {other} works on it as well")
    return max(deadline - time.monotonic(), 0.1)


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, without its stack."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def serve_store(address: str) -> Any:
    """Serve the store in which ranks find each other, in this process: it outlives every rank.

    torch would listen on every address of this host, without authentication, so it gets a socket that is bound to one.

    Raises:
        Refused: the address is none of this host's.
    """
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((address, 0), family=family)
    except OSError as error:
        what, hint = f"a store for ranks at {address}", "give an address of this host that all ranks reach"
        raise Refused(what, why=str(error), hint=hint) from None
    port = listening.getsockname()[1]
    return dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach())


class GlooCommunicator:
    """A rank over gloo. Implements Communicator."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.device = ""
        self.software = f"gloo of torch {torch.__version__}"
        self._group: Any = None
        self._aborted = False

    def open(self, memory: Memory, *, writable: bool) -> AbstractContextManager[View]:
        return map_host_memory(memory, writable=writable)

    def init(self, rank: int, world: int, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._aborted = False
        what = f"rank {rank} of {world} meets the others"
        try:
            store = open_store(rendezvous, timeout_s)
            left_s = meet(store, rank, world, timeout_s, lambda: self._aborted)
            options = dist.ProcessGroupGloo._Options()
            # Where other ranks reach this one.
            address = os.environ.get("RELAX_COLLECTIVE_ADDRESS", "127.0.0.1")
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
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


NON_BLOCKING_SINCE = 21400
SHARED_DEVICES = "NCCL_MULTI_RANK_GPU_ENABLE"
POLL_EVERY_S = 0.001
SUCCESS, UNHANDLED_CUDA, SYSTEM, REMOTE, IN_PROGRESS = 0, 1, 2, 6, 7
"""ncclResult_t. SYSTEM and REMOTE are what a lost peer looks like from here."""


class NcclFailed(RelaxError):
    """NCCL refused or failed for a reason of this rank."""


class NcclCommunicator:
    """A rank over NCCL. Implements Communicator."""

    def __init__(self) -> None:
        # NCCL reads it once, before its first communicator.
        os.environ.setdefault("NCCL_COMM_BLOCKING", "0")
        self._cupy = device.cupy()
        self._nccl: Any = self._cupy.cuda.nccl
        if not getattr(self._nccl, "available", False):
            raise Refused("NCCL through CuPy", why="CuPy finds no libnccl", hint="pip install nvidia-nccl-cu13")
        self.device = device.device_uuid(0)
        self.version = int(self._nccl.get_version())
        self.non_blocking = self.version >= NON_BLOCKING_SINCE
        kind = "non-blocking" if self.non_blocking else "blocking: an absent rank costs the process"
        self.software = f"NCCL {self.version} through CuPy {self._cupy.__version__}, {kind}"
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._communicator: Any = None
        self._aborted = False

    def open(self, memory: Memory, *, writable: bool) -> AbstractContextManager[View]:
        return device.open_device_memory(memory)

    def init(self, rank: int, world: int, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._aborted = False
        what = f"rank {rank} of {world} meets the others over NCCL"
        deadline = time.monotonic() + timeout_s
        try:
            store = open_store(rendezvous, timeout_s)
            self.meet(store, rank, world, timeout_s)
            unique = self._exchange(store, rank, deadline)
        except RuntimeError as error:
            raise PeerLost(what, why=first_line(error)) from error
        # Made without its constructor: a constructor that raises "in progress" would take the handle along.
        self._communicator = self._nccl.NcclCommunicator.__new__(self._nccl.NcclCommunicator)
        self._until_done(lambda: self._communicator.__init__(world, unique, rank), what, deadline)

    def meet(self, store: Any, rank: int, world: int, timeout_s: float) -> None:
        """Wait for the others before NCCL does, which would wait for an absent one in native code.

        Raises:
            PeerLost, DuplicateDevice: see rendezvous.meet.
        """
        shared = os.environ.get(SHARED_DEVICES) == "1"
        meet(store, rank, world, timeout_s, self._is_aborted, self.device, shared_devices=shared)

    def broadcast(self, view: View, root: int, timeout_s: float) -> None:
        assert isinstance(view, DeviceView) and self._communicator is not None
        what, deadline = f"broadcast of {view.nbytes} bytes over NCCL", time.monotonic() + timeout_s
        comm, at = self._communicator, view.pointer
        kind = self._nccl.NCCL_UINT8
        self._until_done(lambda: comm.broadcast(at, at, view.nbytes, kind, root, self._stream.ptr), what, deadline)
        try:
            device.wait(
                self._stream, what, deadline - time.monotonic(), lambda: self._is_aborted() or self._has_failed(comm)
            )
        except DeadlineExceeded as error:
            self._abort_communicator()
            raise PeerLost(what, why=error.why) from error

    def abort(self) -> None:
        # The thread that calls NCCL polls this flag every millisecond, unless NCCL blocks it.
        self._aborted = True

    def close(self) -> None:
        # An abort, because an orderly end would wait for the other ranks.
        self._abort_communicator()

    def _is_aborted(self) -> bool:
        return self._aborted

    def _exchange(self, store: Any, rank: int, deadline: float) -> tuple[int, ...]:
        """Rank 0 makes the group's id, and listens for the others from there on."""
        if rank == 0:
            unique = tuple(self._nccl.get_unique_id())
            # As CuPy gives them: whether they are signed depends on its version.
            store.set("id", ",".join(map(str, unique)))
            return unique
        while not store.check(["id"]):
            if self._aborted or time.monotonic() > deadline:
                raise PeerLost("the id of the group", why="rank 0 has not made one in time")
            time.sleep(POLL_EVERY_S)
        return tuple(int(word) for word in store.get("id").decode().split(","))

    def _until_done(self, call: Callable[[], object], what: str, deadline: float) -> None:
        """Start an NCCL call and poll it until it is done."""
        status, message = self._status(call)
        while status == IN_PROGRESS:
            if self._aborted or time.monotonic() > deadline:
                self._abort_communicator()
                raise PeerLost(what, why="aborted" if self._aborted else "not done before its deadline")
            time.sleep(POLL_EVERY_S)
            status, message = self._status(self._communicator.check_async_error)
        if status != SUCCESS:
            self._abort_communicator()
            if self._aborted or status in (SYSTEM, REMOTE):
                raise PeerLost(what, why=message)
            raise NcclFailed(what, why=message, hint="NCCL_DEBUG=INFO writes more to the log of this rank")

    def _has_failed(self, comm: Any) -> bool:
        """Whether NCCL has noticed that the operation will never end."""
        return self._status(comm.check_async_error)[0] not in (SUCCESS, IN_PROGRESS)

    def _status(self, call: Callable[[], object]) -> tuple[int, str]:
        """Return NCCL's status. CuPy raises for "in progress" too, and KeyError for codes newer than its list."""
        try:
            call()
        except KeyError as error:
            return int(error.args[0]), f"ncclResult_t {error.args[0]}"
        except self._nccl.NcclError as error:
            return int(error.status), str(error)
        return SUCCESS, ""

    def _abort_communicator(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()
