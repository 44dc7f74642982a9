"""The owner's side of the rank processes: start them through the launcher, send commands, kill them for sure."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from relax_rt.transport.weights.broadcast.protocol import (
    MAX_PACKET_BYTES,
    Command,
    ForkRank,
    RankProcessExited,
    Report,
    decode_launcher_report,
    decode_report,
    encode,
)

PACKETS_A_TURN = 64
EXIT_TIMEOUT_S = 5.0
LAUNCHER_ENDED = "the launcher of the ranks has ended"
Key = tuple[str, int]
"""A member and its incarnation."""


class RankProcesses:
    """Processes by member and incarnation. Call it on the loop.

    Args:
        communicator: class of the communicator, ``module:Class``.
        devices: what CUDA_VISIBLE_DEVICES of a member's process is to be; empty: as it is here.
        on_report: takes what a rank reports. on_exit: takes the end of its process with a diagnosis, once.
        environment: further variables of the processes.
    """

    def __init__(
        self,
        communicator: str,
        devices: Mapping[str, str],
        on_report: Callable[[Key, Report], None],
        on_exit: Callable[[Key, str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._communicator, self._devices = communicator, devices
        self._environment = dict(environment or {})
        self._on_report, self._on_exit = on_report, on_exit
        # The kernel kills a child when the thread that started it ends: this one lives as long as the group.
        self._thread = ThreadPoolExecutor(1, "relax-launch")
        self._child: subprocess.Popen[bytes] | None = None
        self._launcher: socket.socket | None = None
        self._starting: asyncio.Task[None] | None = None
        self._launcher_answered = False
        self._unsent: list[tuple[Key, socket.socket]] = []
        self._channels: dict[Key, socket.socket] = {}
        self._pidfds: dict[Key, int] = {}
        self._doomed: set[Key] = set()
        self._reported_early: set[Key] = set()
        self._pids: dict[int, Key] = {}

    @property
    def pids(self) -> dict[str, int]:
        return {key[0]: pid for pid, key in self._pids.items()}

    @property
    def living(self) -> bool:
        return bool(self._pids) or (self._child is not None and self._child.poll() is None)

    def spawn(self, key: Key) -> None:
        """Start a rank's process; it reports Hello, or its exit is reported."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._channels[key] = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._readable, key)
        self._unsent.append((key, theirs))
        self._flush()

    def send(self, key: Key, command: Command) -> None:
        """Send a command. A rank that is gone or reads nothing is found by its silence: the machine has deadlines."""
        if (channel := self._channels.get(key)) is not None:
            with suppress(OSError):
                channel.send(encode(command))

    def kill(self, key: Key) -> None:
        """End its process, also a stopped one, or one that is just being started."""
        if (pidfd := self._pidfds.get(key)) is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        else:
            self._doomed.add(key)
            waits = key in self._reported_early or key in (waiting for waiting, _ in self._unsent)
            if self._launcher_answered and not waits:
                self._end_launcher()  # it has forked others and not this one: it hangs
        self._close_channel(key)

    async def close(self) -> None:
        """Kill everything and wait until it is gone."""
        try:
            if (starting := self._starting) is not None:
                await asyncio.wait([starting])
                if not starting.cancelled() and not isinstance(error := starting.exception(), OSError | None):
                    raise error
        finally:
            await self._end_all()

    async def _end_all(self) -> None:
        self._launcher_answered = False
        for key in list(self._channels):
            self.kill(key)
        for _, theirs in self._unsent:
            theirs.close()
        self._drop_launcher()
        if (child := self._child) is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, _end, child)
        for pidfd in self._pidfds.values():
            asyncio.get_running_loop().remove_reader(pidfd)
            await asyncio.to_thread(_wait_gone, pidfd)
            os.close(pidfd)
        self._pidfds.clear()
        self._pids.clear()
        self._thread.shutdown(wait=False)

    def _flush(self) -> None:
        """Send the fork requests that wait; start the launcher if there is none."""
        if self._launcher is None:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.get_running_loop().create_task(self._start_launcher())
            return
        unsent, self._unsent = self._unsent, []
        for key, theirs in unsent:
            request = encode(ForkRank(key[0], key[1], self._devices.get(key[0], "")))
            with theirs, suppress(OSError):  # a launcher that reads nothing is found by the rank's silence
                socket.send_fds(self._launcher, [request], [theirs.fileno()])

    async def _start_launcher(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        module = "relax_rt.transport.weights.broadcast.rank"
        argv = [sys.executable, "-m", module, self._communicator, str(theirs.fileno()), str(os.getpid())]
        loop, before = asyncio.get_running_loop(), self._child

        def start() -> subprocess.Popen[bytes]:
            if before is not None:
                _end(before)
            environment = {**os.environ, **self._environment}
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)

        with theirs:
            self._child = await loop.run_in_executor(self._thread, start)
        self._launcher = ours
        loop.add_reader(ours.fileno(), self._launcher_readable)
        self._flush()

    def _launcher_readable(self) -> None:
        assert self._launcher is not None
        for _ in range(PACKETS_A_TURN):
            try:
                packet, fds, _, _ = socket.recv_fds(self._launcher, MAX_PACKET_BYTES, 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                packet, fds = b"", []
            if not packet:
                self._launcher_gone()
                return
            report = decode_launcher_report(packet)
            if isinstance(report, RankProcessExited):
                self._exited(report.pid, describe_exit(report.status))
            else:
                self._forked((report.member, report.incarnation), report.pid, fds[0])

    def _forked(self, key: Key, pid: int, pidfd: int) -> None:
        self._launcher_answered = True
        self._reported_early.discard(key)
        self._pids[pid] = key
        self._pidfds[key] = pidfd
        if key in self._doomed:
            self._doomed.discard(key)
            self.kill(key)

    def _exited(self, pid: int, how: str) -> None:
        key = self._pids.pop(pid, None)
        if key is None:
            return
        if (pidfd := self._pidfds.pop(key, None)) is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
        if key in self._channels:
            self._readable(key)  # reports sent before its exit
        self._close_channel(key)
        self._on_exit(key, how)

    def _launcher_gone(self) -> None:
        """Its ranks end with it; the next spawn starts another."""
        self._drop_launcher()
        unsent, self._unsent = self._unsent, []
        for _, theirs in unsent:
            theirs.close()
        self._doomed.clear()
        self._reported_early.clear()
        unforked = self._channels.keys() - set(self._pids.values())
        for pid, key in self._pids.items():
            # The kernel is about to end them. Each exit is reported once the process can write nothing any more.
            asyncio.get_running_loop().add_reader(self._pidfds[key], self._exited, pid, LAUNCHER_ENDED)
        for key in unforked:
            self._close_channel(key)
            self._on_exit(key, LAUNCHER_ENDED)

    def _end_launcher(self) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.kill()

    def _drop_launcher(self) -> None:
        self._launcher_answered = False
        if self._launcher is not None:
            asyncio.get_running_loop().remove_reader(self._launcher.fileno())
            self._launcher.close()
            self._launcher = None

    def _readable(self, key: Key) -> None:
        channel = self._channels[key]
        for _ in range(PACKETS_A_TURN):
            try:
                packet = channel.recv(MAX_PACKET_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                packet = b""
            if not packet:
                self._close_channel(key)  # the launcher reports its exit
                return
            try:
                report = decode_report(packet)
            except msgspec.DecodeError:
                self.kill(key)
                return
            if key not in self._pidfds:
                self._reported_early.add(key)  # a rank may report before the launcher has reported the fork
            self._on_report(key, report)
            if key not in self._channels:
                return  # handling the report has ended the rank

    def _close_channel(self, key: Key) -> None:
        if (channel := self._channels.pop(key, None)) is not None:
            asyncio.get_running_loop().remove_reader(channel.fileno())
            channel.close()


def describe_exit(status: int) -> str:
    """Describe how a process ended."""
    if status >= 0:
        return f"its process ended with exit code {status}"
    return f"its process was ended by {signal.Signals(-status).name}"


def _end(child: subprocess.Popen[bytes]) -> None:
    """Wait for the launcher, which ends when its owner closes the channel; kill it if it does not."""
    try:
        child.wait(EXIT_TIMEOUT_S / 5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _wait_gone(pidfd: int) -> None:
    """Wait until the process has ended: the kernel kills ranks with their launcher."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll(EXIT_TIMEOUT_S * 1000)
