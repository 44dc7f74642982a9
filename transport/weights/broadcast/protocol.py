"""What the owner of a broadcast group, its rank processes and their launcher share: messages, outcomes, communicators.

A message is one packet over a SOCK_SEQPACKET socket pair: the owner sends commands, a rank answers with reports. A
communicator lives in a process of its own (see `rank`), so that whoever owns the weights never waits inside a library.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, Protocol

import msgspec

from relax_rt.transport.rpc.errors import Refused, RelaxError, Unreachable
from relax_rt.transport.weights.memory import Memory, View

MAX_PACKET_BYTES = 32 << 10
ERROR_CHARS = 2_000


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the ranks of one generation of a group meet: a key-value store, and their part of its keys."""

    host: str
    port: int
    prefix: str


# --- owner to rank


class InitCommand(msgspec.Struct, frozen=True, tag="init"):
    """Meet the other ranks of the generation."""

    generation: int
    rank: int
    world: int
    rendezvous: Rendezvous
    timeout_s: float


class BroadcastCommand(msgspec.Struct, frozen=True, tag="broadcast"):
    """Take part in a transfer from bucket `first` on; rank 0 sends."""

    generation: int
    transfer: int
    memory: Memory
    bucket_bytes: int
    first: int
    root: bool
    stall_s: float


class AbortCommand(msgspec.Struct, frozen=True, tag="abort"):
    """End the collective of that generation."""

    generation: int


Command = InitCommand | BroadcastCommand | AbortCommand


# --- rank to owner


class RankHello(msgspec.Struct, frozen=True, tag="hello"):
    """The process runs and works on `device`."""

    device: str = ""
    software: str = ""


class RankJoined(msgspec.Struct, frozen=True, tag="joined"):
    """The rank has met all others of the generation."""

    generation: int


class TransferProgress(msgspec.Struct, frozen=True, tag="progress"):
    """The rank has the first `buckets` of the transfer."""

    generation: int
    buckets: int


class TransferDone(msgspec.Struct, frozen=True, tag="done"):
    """The rank has received, or sent, all buckets; `digest` is that of what lies in its memory."""

    generation: int
    transfer: int
    digest: str


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The collective ended with an error; `own`: for a reason of this rank, not on account of another one."""

    generation: int
    own: bool
    error: str


class AbortReceived(msgspec.Struct, frozen=True, tag="abort_received"):
    """The rank's listening thread has read the command to abort."""

    generation: int


class RankAborted(msgspec.Struct, frozen=True, tag="aborted"):
    """Nothing of that generation runs any more; the rank can join another group."""

    generation: int


Report = RankHello | RankJoined | TransferProgress | TransferDone | RankFailed | AbortReceived | RankAborted


# --- owner and launcher


class ForkRank(msgspec.Struct, frozen=True, tag="fork"):
    """Fork a rank. The packet carries its end of a socket pair."""

    member: str
    incarnation: int
    device: str


class RankForked(msgspec.Struct, frozen=True, tag="forked"):
    """A rank's process runs; the packet carries a pidfd of it."""

    member: str
    incarnation: int
    pid: int


class RankProcessExited(msgspec.Struct, frozen=True, tag="exited"):
    """A rank's process has ended: exit code, or minus the signal."""

    pid: int
    status: int


LauncherReport = RankForked | RankProcessExited

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_launcher_report = msgspec.msgpack.Decoder(LauncherReport).decode
decode_fork = msgspec.msgpack.Decoder(ForkRank).decode


# --- outcomes and errors

Fate = Literal["died", "silent", "absent", "stuck", "duplicate_device", "corrupt", "failed", "late"]
"""Why a member did not get a transfer.

died: its process ended. silent: it answered nothing, as a stopped process does. absent: it never came. stuck: its
collective could not be ended, twice. duplicate_device: another rank has its device. corrupt: what it received is not
what was sent. failed: it reported an error of its own. late: the transfer's own deadline came first.
"""


class LostRank(msgspec.Struct, frozen=True):
    """A member that did not get the transfer, and why."""

    member: str
    fate: Fate
    why: str


class BroadcastOutcome(msgspec.Struct, frozen=True):
    """How a transfer ended: each of its members but the root is delivered or lost. `error`: why nobody was served."""

    transfer: int
    delivered: tuple[str, ...]
    lost: tuple[LostRank, ...]
    error: str = ""


class PeerLost(Unreachable):
    """A collective ended because another rank did not come, went away or stood still."""


class DuplicateDevice(Refused):
    """Two ranks of one group work on the same device, which the library does not allow."""


class BroadcastFailed(RelaxError):
    """A broadcast failed as a whole: its root is lost, or no group formed before its deadline.

    Attributes:
        outcome: what became of each rank, where a whole broadcast failed.
    """

    outcome: BroadcastOutcome | None = None


# --- the communicator


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
    return [(at, min(at + bucket_bytes, nbytes)) for at in range(0, nbytes, bucket_bytes)]
