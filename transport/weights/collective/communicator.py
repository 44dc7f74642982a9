"""What a collective needs of a library: a communicator, memory that it can broadcast, and where its ranks meet.

A communicator lives in a process of its own (see `worker`), so that whoever owns the weights never waits inside it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from relax_rt.transport.rpc.errors import Refused, RelaxError, Unreachable
from relax_rt.transport.weights.collective.events import Outcome


class PeerLost(Unreachable):
    """A collective ended because another rank did not come, went away or stood still."""


class DuplicateDevice(Refused):
    """Two ranks of one group work on the same device, which the library does not allow."""


class CollectiveFailed(RelaxError):
    """A broadcast was given up: its root is lost, or no group came about before its deadline.

    Attributes:
        outcome: what became of each rank, where a whole broadcast was given up.
    """

    outcome: Outcome | None = None


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the ranks of one generation of a group meet: a key-value store, and their part of its keys."""

    host: str
    port: int
    prefix: str


class HostMemory(msgspec.Struct, frozen=True, tag="host"):
    """A file in shared memory: `nbytes` from its start."""

    path: str
    nbytes: int


class DeviceMemory(msgspec.Struct, frozen=True, tag="device"):
    """Device memory of another process: `nbytes` from `offset` in the allocation that the IPC handle names.

    `device` is the UUID of the device that it lies on.
    """

    handle: bytes
    device: str
    offset: int
    nbytes: int


Memory = HostMemory | DeviceMemory


class View(Protocol):
    """Opened memory, in the form that its communicator takes."""

    nbytes: int

    def part(self, start: int, stop: int) -> View:
        """The bytes from start to stop, not copied."""

    def digest(self) -> str:
        """A digest of the bytes, the same for equal bytes in either kind of memory's own digest."""


class Communicator(Protocol):
    """The ranks of one group, as one of them has them. Its calls block; `abort` may come from another thread.

    Attributes:
        device: UUID of the device it works on; empty: the CPU.
        software: what carries it, for people.
    """

    device: str
    software: str

    def open(self, memory: Memory, *, writable: bool) -> AbstractContextManager[View]:
        """Memory to broadcast from, or into.

        Raises:
            Refused: it is not memory of this communicator's kind, or not there.
        """

    def init(self, rank: int, world: int, rendezvous: Rendezvous, timeout_s: float) -> None:
        """Meet the other ranks.

        Raises:
            PeerLost: not all of them came in time, or `abort` was called.
        """

    def broadcast(self, view: View, root: int, timeout_s: float) -> None:
        """Send the view's bytes from rank `root` to all others, into theirs.

        Raises:
            PeerLost: a rank went away or stood still, or `abort` was called. What lies in the view is undefined.
        """

    def abort(self) -> None:
        """Have a blocked call return soon, where the library can; after it only `close` and `init` make sense."""

    def close(self) -> None:
        """Let go of the group; `init` may follow."""


def bucket_bounds(nbytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """Byte ranges that are broadcast one by one."""
    return [(at, min(at + bucket_bytes, nbytes)) for at in range(0, nbytes, bucket_bytes)]
