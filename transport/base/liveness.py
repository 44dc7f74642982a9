"""Who is alive: watch this node's processes by pidfd, and detect that the server itself stood still."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from relax_rt.transport.base.process_stat import start_time
from relax_rt.transport.rpc.errors import OutOfSpace
from relax_rt.transport.rpc.identity import Incarnation

NODE_ENV = "RELAX_NODE"
"""Environment variable that overrides the node's name, to make processes of one machine count as different nodes."""


def node_name() -> str:
    """The node's name: equal for processes that can map each other's slabs and see each other's pids."""
    if named := os.environ.get(NODE_ENV):
        return named
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    pids = Path("/proc/self/ns/pid").stat().st_ino
    return f"{boot[:12]}-{Path('/dev/shm').stat().st_dev}-{pids}"


class ProcessWatch:
    """Reports the death of processes on this node.

    Args:
        gone: called with the incarnation that ended, and the evidence.
    """

    def __init__(self, gone: Callable[[Incarnation, str], None]) -> None:
        self._gone = gone
        self._fds: dict[Incarnation, int] = {}

    def add(self, who: Incarnation, pid: int, started: int) -> None:
        """Watch an incarnation's process (pid and start time, see process_stat); report one that is dead at once.

        Raises:
            OutOfSpace: too many files are open.
        """
        if not pid or who in self._fds:
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone(who, f"process {pid} is gone")
            return
        except OSError as error:
            hint = "raise the limit of open files (ulimit -n) of the broker's process"
            raise OutOfSpace(f"watching process {pid} of {who}", why=str(error), hint=hint) from error
        if start_time(pid) != started:
            # The pid was reused by another process.
            os.close(fd)
            self._gone(who, f"process {pid} is gone")
            return
        self._fds[who] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, who, pid)

    def _ended(self, who: Incarnation, pid: int) -> None:
        self.remove(who)
        self._gone(who, f"process {pid} ended")

    def remove(self, who: Incarnation) -> None:
        """Stop watching an incarnation."""
        fd = self._fds.pop(who, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        for who in list(self._fds):
            self.remove(who)


PAUSE_S = 1.0
"""A gap between two checks from which on all leases start again at full length (or two ticks, if they are longer)."""


@dataclasses.dataclass
class PauseDetector:
    """Checks the clock before a server expires leases.

    Attributes:
        checked_at: time of the last check, in seconds of the server's monotonic clock; at first, of the start.
        tick_s: interval of the checks when the server is not held up.
    """

    checked_at: float
    tick_s: float
    held: bool = False

    def check(self, now: float) -> Literal["expire", "hold", "restart"]:
        """What to do now: expire leases (expire), leave them until the next check (hold), or restart their full length.

        After a gap (the process was stopped, the machine slept) renewals that arrived meanwhile are read first.
        """
        gap, self.checked_at = now - self.checked_at, now
        if gap >= max(PAUSE_S, 2 * self.tick_s):
            return "restart"
        # Not twice in a row, so that a server that is always late still expires leases.
        self.held = gap > 2 * self.tick_s and not self.held
        return "hold" if self.held else "expire"
