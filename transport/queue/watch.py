"""Processes that joined of their own accord, watched by pidfd: their death is known within milliseconds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from relax_rt.transport.memory.process_stat import start_time
from relax_rt.transport.queue.ledger.callers import Home
from relax_rt.transport.rpc.errors import OutOfSpace
from relax_rt.transport.rpc.identity import Incarnation

NODE_ENV = "RELAX_NODE"
"""Environment variable that names the node instead, where processes are to be kept apart that need not be."""


def node_name() -> str:
    """Names what processes share that can map each other's slabs and see each other's pids: boot, /dev/shm, pids."""
    if named := os.environ.get(NODE_ENV):
        return named
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    pids = Path("/proc/self/ns/pid").stat().st_ino
    return f"{boot[:12]}-{Path('/dev/shm').stat().st_dev}-{pids}"


class Watch:
    """Tells of the death of processes on this node.

    Args:
        gone: is told who ended, and why one thinks so.
    """

    def __init__(self, gone: Callable[[Incarnation, str], None]) -> None:
        self._gone = gone
        self._fds: dict[Incarnation, int] = {}

    def add(self, home: Home) -> None:
        """Watch this incarnation's process; one that is dead already is told of at once.

        Raises:
            OutOfSpace: too many files are open.
        """
        if not home.pid or home.who in self._fds:
            return
        try:
            fd = os.pidfd_open(home.pid)
        except ProcessLookupError:
            self._gone(home.who, f"process {home.pid} is gone")
            return
        except OSError as error:
            hint = "raise the limit of open files (ulimit -n) of the broker's process"
            raise OutOfSpace(f"watching process {home.pid} of {home.who}", why=str(error), hint=hint) from error
        if start_time(home.pid) != home.started:
            os.close(fd)
            self._gone(home.who, f"process {home.pid} is gone")
            return
        self._fds[home.who] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, home)

    def _ended(self, home: Home) -> None:
        self.remove(home.who)
        self._gone(home.who, f"process {home.pid} ended")

    def remove(self, who: Incarnation) -> None:
        """Watch it no more."""
        fd = self._fds.pop(who, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        """Watch nothing more."""
        for who in list(self._fds):
            self.remove(who)
