"""Messages on the control channel between the agent and a role, one JSON line a packet.

The channel is a pair of sockets that keep packet boundaries (process/child.py); a role ends when its end is closed.
"""

from __future__ import annotations

import socket
from typing import Literal

import msgspec

from relax_rt.supervision.diagnosis import FailureReport

MAX_PACKET_BYTES = 64 << 10


class HelloMsg(msgspec.Struct, frozen=True, tag_field="t", tag="hello"):
    """First message of a role: its signal handlers are installed, so a stack dump may be requested by signal."""


class ReadyMsg(msgspec.Struct, frozen=True, tag_field="t", tag="ready"):
    """The role is ready."""


class ProgressMsg(msgspec.Struct, frozen=True, tag_field="t", tag="progress"):
    """Progress counter, current activity, why it is idle, and slow work announced since the last message."""

    n: int
    detail: str = ""
    waiting: str = ""
    extend_s: float = 0.0


class AddressMsg(msgspec.Struct, frozen=True, tag_field="t", tag="address"):
    """Where the role serves: for its own node, and for other nodes if the run has any."""

    address: str
    remote: str = ""


class FinishedMsg(msgspec.Struct, frozen=True, tag_field="t", tag="finished"):
    """The role has finished; its process is about to exit."""


class FailedMsg(msgspec.Struct, frozen=True, tag_field="t", tag="failed"):
    """The role is about to exit because of this."""

    diagnosis: FailureReport


class PreparedMsg(msgspec.Struct, frozen=True, tag_field="t", tag="prepared"):
    """A spare is ready for a slot."""


FromRole = PreparedMsg | HelloMsg | ReadyMsg | ProgressMsg | AddressMsg | FinishedMsg | FailedMsg


class StopMsg(msgspec.Struct, frozen=True, tag_field="t", tag="stop"):
    """Finish the work in hand and return."""


class DumpStacksMsg(msgspec.Struct, frozen=True, tag_field="t", tag="dump_stacks"):
    """Write the stacks of all threads to the log."""


FaultKind = Literal["hang_loop", "hold_gil", "eat_memory", "clock_jump", "delay", "partition"]


class FaultMsg(msgspec.Struct, frozen=True, tag_field="t", tag="fault"):
    """Inject a fault into the role, for so many seconds.

    Attributes:
        kind: hang_loop blocks the event loop, hold_gil the interpreter; eat_memory takes `amount` MiB; clock_jump
            shifts the time of day by `amount` seconds; delay holds each message back for `amount` seconds; partition
            loses them.
    """

    kind: FaultKind
    seconds: float
    amount: float = 0.0


class AssignMsg(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="assign"):
    """Assign a slot to a spare. The log's descriptor comes along, then those that `descriptors` names."""

    argv: list[str]
    env: dict[str, str]
    descriptors: tuple[str, ...] = ()


ToRole = StopMsg | DumpStacksMsg | FaultMsg | AssignMsg

decode_from_role = msgspec.json.Decoder(FromRole).decode
decode_to_role = msgspec.json.Decoder(ToRole).decode
"""Both raise msgspec.DecodeError on anything else."""


def encode(message: FromRole | ToRole) -> bytes:
    """Return a message as one packet."""
    return msgspec.json.encode(message) + b"\n"


def send_now(end: socket.socket, message: FromRole | ToRole, flags: int = 0) -> bool:
    """Send a packet; False when the far end is gone or, with MSG_DONTWAIT, its buffer is full."""
    try:
        end.send(encode(message), flags | socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True
