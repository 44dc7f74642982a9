"""What a joined node keeps on its own disk: its seat while it takes part, and how its part ended."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from relax_rt.cluster.nodes.api import Joined
from relax_rt.cluster.nodes.keys import FILE, curve_keys, read_key
from relax_rt.supervision.rundir import RunPaths
from relax_rt.transport.rpc.errors import Corrupt
from relax_rt.transport.rpc.identity import CurveKeys

T = TypeVar("T")

SEAT = "seat.json"
END = "node.json"


def boot_clock() -> float:
    """Seconds of a clock that runs on while the machine sleeps, the same for all processes of the machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A seat that was taken, as the process that joined hands it to the node's agent.

    Attributes:
        head: address of the head's door.
        host: address of this node for others.
        joined: the head's answer.
    """

    head: str
    host: str
    joined: Joined


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How a node's part in a run ended.

    Attributes:
        seat: whose end it is, in words.
        over: there is nothing to join again: the run has ended, the node was asked to leave, or cannot take part.
        exit_code, reason: how it ended.
    """

    seat: str
    over: bool
    exit_code: int
    reason: str


def node_paths(joined: Joined, run_dir: Path) -> RunPaths:
    """Directories of a seat on this machine: no other seat's, also of the same run, and not the head's."""
    seat = joined.seat
    return RunPaths(f"{seat.run_id}-{seat.node}-{seat.epoch}", run_dir)


def write_seat(paths: RunPaths, taken: Taken) -> None:
    """Leave it for the agent, in a directory that only the user can read."""
    (paths.socket_dir / SEAT).write_bytes(msgspec.json.encode(taken))


def read_seat(paths: RunPaths) -> Taken:
    """Raises:
    Corrupt: there is none.
    """
    return _read(paths.socket_dir / SEAT, Taken)


def read_keys(paths: RunPaths) -> CurveKeys:
    """The run's keys, from the private directory."""
    return curve_keys(read_key(paths.socket_dir / FILE))


def write_end(run_dir: Path, end: End) -> None:
    """Say how it ended, whole or not at all."""
    temporary = run_dir / f".{END}.{os.getpid()}"
    temporary.write_bytes(msgspec.json.encode(end) + b"\n")
    temporary.rename(run_dir / END)


def read_end(run_dir: Path, seat: str) -> End | None:
    """How this seat's part ended; None when nobody could say."""
    try:
        end = _read(run_dir / END, End)
    except Corrupt:
        return None
    return end if end.seat == seat else None


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise Corrupt(f"{path}", why=str(error)) from error
