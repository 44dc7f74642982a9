"""A child process: started with a log in a session of its own, watched by pidfd, killed with its process group.

For everything that hosts processes on an event loop: role processes, spares, zygotes, the keeper's successor.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

LOGS_KEPT = 2
TAIL_BYTES = 64 << 10


def spawn(
    argv: Sequence[str], env: Mapping[str, str], log: Path | BinaryIO, pass_fds: Iterable[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own that appends its output to a log.

    Blocking. A child that uses PR_SET_PDEATHSIG dies with the *thread* that called this: call it in one that lives as
    long as the child may.

    Raises:
        OSError: the program or the log cannot be opened.
    """
    if isinstance(log, Path):
        with log.open("ab", buffering=0) as out:
            return spawn(argv, env, out, pass_fds)
    return subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        pass_fds=list(pass_fds),
    )


def watch_exit(pid: int, callback: Callable[[], None]) -> Callable[[], None]:
    """Call back on the event loop once when the process has ended. Nobody may have waited for it before this call.

    Returns:
        A function that stops watching.

    Raises:
        ProcessLookupError: there is no such process.
    """
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(pid)

    def stop() -> None:
        nonlocal pidfd
        if pidfd >= 0:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            pidfd = -1

    def ended() -> None:
        stop()
        callback()

    loop.add_reader(pidfd, ended)
    return stop


class Child:
    """A living child of this process, the leader of its process group. Use it on the event loop only.

    Signals go through the pidfd, and the process group is killed before its dead leader is reaped: so neither can hit
    a process that has got a recycled number.

    Args:
        pid: the child; nobody else may wait for it.
        on_exit: called once with the exit status (negative: the signal) after the child was reaped.
        popen: the child as `subprocess` knows it, if it was not forked by a zygote.
        group: its process group ends with it.
    """

    def __init__(
        self,
        pid: int,
        on_exit: Callable[[int], None],
        popen: subprocess.Popen[bytes] | None = None,
        *,
        group: bool = True,
    ) -> None:
        self.pid, self._on_exit, self._popen, self._group = pid, on_exit, popen, group
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    @property
    def alive(self) -> bool:
        """False once its exit was seen, or it was released."""
        return self._pidfd >= 0

    def signal(self, number: int) -> None:
        """Send a signal to the child alone; nothing if it is dead."""
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except (ProcessLookupError, PermissionError):
                pass

    def kill(self) -> None:
        """SIGKILL the child with its process group; nothing once the exit was seen."""
        if self._pidfd < 0:
            return
        try:
            if self._group:
                os.killpg(self.pid, signal.SIGKILL)
                return
        except (ProcessLookupError, PermissionError):
            pass
        self.signal(signal.SIGKILL)

    def release(self) -> None:
        """Stop watching without waiting for the child: another object watches it from now on."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1

    def _exited(self) -> None:
        # The dead leader is not reaped yet and so still holds its pid: the group's number cannot be another's.
        self.kill()
        try:
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        except ChildProcessError:
            info = None  # reaped with everything that was killed at this process's own end
        self.release()
        if info is None:
            status = -int(signal.SIGKILL)
        else:
            status = -info.si_status if info.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else info.si_status
        if self._popen is not None:
            self._popen.returncode = status
        self._on_exit(status)


def describe_exit(status: int) -> str:
    """Return an exit status in words."""
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Return a pair of sockets that keep packet boundaries: a packet arrives whole or not at all."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class PacketReader:
    """Reads the packets that a child sends on its control socket, on the event loop.

    Args:
        end: our end of the pair.
        most_bytes: of a packet.
        on_packet: called for each packet. It may close the reader.
    """

    PER_TURN = 64
    """Packets read in one turn of the loop, so that a chatty child cannot hold it."""

    def __init__(self, end: socket.socket, most_bytes: int, on_packet: Callable[[bytes], None]) -> None:
        self._end, self._most_bytes, self._on_packet = end, most_bytes, on_packet
        self._reading = True
        end.setblocking(False)
        asyncio.get_running_loop().add_reader(end.fileno(), self.read)

    def read(self, packets: int = PER_TURN) -> None:
        """Read what is there."""
        for _ in range(packets):
            if not self._reading:
                return
            try:
                packet = self._end.recv(self._most_bytes)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                packet = b""
            if not packet:
                self.stop()
                return
            self._on_packet(packet)

    def stop(self) -> None:
        """Read no more; the socket stays open."""
        if self._reading:
            self._reading = False
            asyncio.get_running_loop().remove_reader(self._end.fileno())

    def close(self, unread: int = 4096) -> None:
        """Read what a dead child has left, then close the socket."""
        self.read(unread)
        self.stop()
        self._end.close()


class Notifier:
    """A condition of one event loop: wakes its waiters whenever something has changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Have every waiter evaluate its predicate again."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait_for(self, predicate: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until the predicate is true; False when that took longer than the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate():
                    await self._event.wait()
        except TimeoutError:
            return bool(predicate())
        return True


# Logs.


def rotate_log(path: Path, limit_bytes: int) -> bool:
    """Rotate a log in place once it exceeds the limit: copy it to ``.1`` (``.1`` to ``.2``), then truncate it.

    The file keeps its inode, because the child and whatever it has started hold it open for appending.
    """
    try:
        if path.stat().st_size < limit_bytes:
            return False
    except FileNotFoundError:
        return False
    for n in range(LOGS_KEPT, 1, -1):
        older = path.with_name(f"{path.name}.{n - 1}")
        if older.exists():
            older.rename(path.with_name(f"{path.name}.{n}"))
    with path.open("r+b") as log, path.with_name(f"{path.name}.1").open("wb") as copy:
        while chunk := log.read(1 << 20):
            copy.write(chunk)
        log.truncate(0)
    return True


def read_tail(path: Path, start: int, limit: int = TAIL_BYTES) -> str:
    """Return the end of a log from byte `start` on, at most `limit` bytes; empty when there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            # A log that was truncated since is all of this child.
            file.seek(max(start if start <= size else 0, size - limit))
            return file.read(limit).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
