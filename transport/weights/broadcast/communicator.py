"""What a broadcast needs of a library, and the errors that end one.

A communicator lives in a process of its own (see `rank`), so that whoever owns the weights never waits inside it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from relax_rt.transport.rpc.errors import Refused, RelaxError, Unreachable
from relax_rt.transport.weights.broadcast.machine import Outcome
from relax_rt.transport.weights.broadcast.messages import Rendezvous
from relax_rt.transport.weights.memory import Memory, View


class PeerLost(Unreachable):
    """A collective ended because another rank did not come, went away or stood still."""


class DuplicateDevice(Refused):
    """Two ranks of one group work on the same device, which the library does not allow."""


class BroadcastFailed(RelaxError):
    """A broadcast was given up: its root is lost, or no group came about before its deadline.

    Attributes:
        outcome: what became of each rank, where a whole broadcast was given up.
    """

    outcome: Outcome | None = None


class Communicator(Protocol):
    """One rank of a group. Its calls block; `abort` may come from another thread.

    Attributes:
        device: UUID of the device it works on; empty: the CPU.
        software: name and version of the library, for people.
    """

    device: str
    software: str

    def open(self, memory: Memory, *, writable: bool) -> AbstractContextManager[View]:
        """Open memory to broadcast from, or into.

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
        """Leave the group; `init` may follow."""


def bucket_bounds(nbytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """Return the byte ranges that are broadcast one by one."""
    return [(at, min(at + bucket_bytes, nbytes)) for at in range(0, nbytes, bucket_bytes)]
