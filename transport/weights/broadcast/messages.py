"""Messages between the owner of a broadcast group, the processes of its ranks, and the launcher that forks them.

One packet a message, over a SOCK_SEQPACKET socket pair. The owner sends commands, a rank answers with reports.
"""

from __future__ import annotations

import msgspec

from relax_rt.transport.weights.memory import Memory

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


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The process runs and works on `device`."""

    device: str = ""
    software: str = ""


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """The rank has met all others of the generation."""

    generation: int


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The rank has the first `buckets` of the transfer."""

    generation: int
    buckets: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The rank has received, or sent, all buckets; `digest` is that of what lies in its memory."""

    generation: int
    transfer: int
    digest: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The collective ended with an error; `own`: for a reason of this rank, not on account of another one."""

    generation: int
    own: bool
    error: str


class AbortReceived(msgspec.Struct, frozen=True, tag="abort_received"):
    """The rank's listening thread has read the command to abort."""

    generation: int


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """Nothing of that generation runs any more; the rank can join another group."""

    generation: int


Report = Hello | Joined | Progress | Done | Failed | AbortReceived | Aborted


# --- owner and launcher


class ForkRequest(msgspec.Struct, frozen=True, tag="fork"):
    """Fork a rank. The packet carries its end of a socket pair."""

    member: str
    incarnation: int
    device: str


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """A rank's process runs; the packet carries a pidfd of it."""

    member: str
    incarnation: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """A rank's process has ended: exit code, or minus the signal."""

    pid: int
    status: int


LauncherReport = Forked | Exited

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_launcher_report = msgspec.msgpack.Decoder(LauncherReport).decode
decode_fork = msgspec.msgpack.Decoder(ForkRequest).decode
