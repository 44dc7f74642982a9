"""What a joined node keeps on its own disk: its membership in a run while that lasts, and how it ended."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from relax_rt.cluster.nodes.api import JoinReply
from relax_rt.cluster.nodes.join_key import FILE, curve_keys, read_key
from relax_rt.supervision.rundir import RunPaths
from relax_rt.transport.rpc.errors import Corrupt
from relax_rt.transport.rpc.identity import CurveKeys

T = TypeVar("T")

RECORD = "membership.json"
END = "node.json"


def boot_clock() -> float:
    """Seconds of a clock that runs on while the machine sleeps, the same for all processes of the machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class JoinRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A membership, as the process that joined hands it to the node's agent.

    Attributes:
        head: address of the head's listener.
        host: address of this node for others.
        reply: the head's answer.
    """

    head: str
    host: str
    reply: JoinReply


class MembershipEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a node's membership ended.

    Attributes:
        membership: whose end it is, in words.
        over: do not join again: the run has ended, the node was asked to leave, or it cannot take part.
        exit_code, reason: how it ended.
    """

    membership: str
    over: bool
    exit_code: int
    reason: str


def node_paths(reply: JoinReply, run_dir: Path) -> RunPaths:
    """Directories of a membership on this machine: not shared with the head or another membership of the run."""
    membership = reply.membership
    return RunPaths(f"{membership.run_id}-{membership.node}-{membership.epoch}", run_dir)


def write_record(paths: RunPaths, record: JoinRecord) -> None:
    """Leave it for the agent, in a directory that only the user can read."""
    (paths.socket_dir / RECORD).write_bytes(msgspec.json.encode(record))


def read_record(paths: RunPaths) -> JoinRecord:
    """Read what `write_record` wrote. Raises Corrupt: there is none."""
    return _read(paths.socket_dir / RECORD, JoinRecord)


def read_keys(paths: RunPaths) -> CurveKeys:
    """The run's keys, from the private directory."""
    return curve_keys(read_key(paths.socket_dir / FILE))


def write_end(run_dir: Path, end: MembershipEnd) -> None:
    """Write how it ended, whole or not at all."""
    temporary = run_dir / f".{END}.{os.getpid()}"
    temporary.write_bytes(msgspec.json.encode(end) + b"\n")
    temporary.rename(run_dir / END)


def read_end(run_dir: Path, membership: str) -> MembershipEnd | None:
    """How this membership ended; None when no agent wrote it."""
    try:
        end = _read(run_dir / END, MembershipEnd)
    except Corrupt:
        return None
    return end if end.membership == membership else None


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise Corrupt(f"{path}", why=str(error)) from error
