"""What the owner of a group and the process of a rank say to each other, one packet a message."""

from __future__ import annotations

import msgspec

from relax_rt.transport.weights.collective.communicator import Memory, Rendezvous

MAX_PACKET_BYTES = 32 << 10
ERROR_CHARS = 2_000


class InitOrder(msgspec.Struct, frozen=True, tag="init"):
    """Meet the other ranks of the generation."""

    generation: int
    rank: int
    world: int
    rendezvous: Rendezvous
    timeout_s: float


class BroadcastOrder(msgspec.Struct, frozen=True, tag="broadcast"):
    """Take part in a transfer from bucket `first` on; rank 0 sends. `digest`: what the whole must have."""

    generation: int
    transfer: int
    memory: Memory
    bucket_bytes: int
    first: int
    root: bool
    stall_s: float


class AbortOrder(msgspec.Struct, frozen=True, tag="abort"):
    """End the collective of that generation."""

    generation: int


Order = InitOrder | BroadcastOrder | AbortOrder


class HelloSaid(msgspec.Struct, frozen=True, tag="hello"):
    """The process is there."""

    pid: int
    device: str
    software: str


class JoinedSaid(msgspec.Struct, frozen=True, tag="joined"):
    """It has met the others."""

    generation: int


class ProgressSaid(msgspec.Struct, frozen=True, tag="progress"):
    """It has that many buckets of the transfer."""

    generation: int
    buckets: int


class DoneSaid(msgspec.Struct, frozen=True, tag="done"):
    """It has all of them."""

    generation: int
    transfer: int
    digest: str


class FailedSaid(msgspec.Struct, frozen=True, tag="failed"):
    """See events.Failed."""

    generation: int
    own: bool
    error: str


class HeardSaid(msgspec.Struct, frozen=True, tag="heard"):
    """It has understood the request to abort."""

    generation: int


class AbortedSaid(msgspec.Struct, frozen=True, tag="aborted"):
    """Nothing of that generation runs any more."""

    generation: int


Said = HelloSaid | JoinedSaid | ProgressSaid | DoneSaid | FailedSaid | HeardSaid | AbortedSaid


class ForkOrder(msgspec.Struct, frozen=True, tag="fork"):
    """To a launcher: fork a rank. The packet carries its end of a socket pair."""

    member: str
    incarnation: int
    device: str


class ForkedSaid(msgspec.Struct, frozen=True, tag="forked"):
    """The rank's process; the packet carries a pidfd of it."""

    member: str
    incarnation: int
    pid: int


class ExitedSaid(msgspec.Struct, frozen=True, tag="exited"):
    """A rank's process has ended: exit code, or minus the signal."""

    pid: int
    status: int


LauncherSaid = ForkedSaid | ExitedSaid

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_said = msgspec.msgpack.Decoder(Said).decode
decode_launcher_said = msgspec.msgpack.Decoder(LauncherSaid).decode
decode_fork = msgspec.msgpack.Decoder(ForkOrder).decode
