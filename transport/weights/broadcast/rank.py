"""The process of one rank, and the launcher that forks such processes with the library imported once.

``python -m relax_rt.transport.weights.broadcast.rank COMMUNICATOR FD PARENT`` is the launcher. It has one thread and
makes no call that a fork could not survive (no CUDA call above all), so that a lost rank is replaced within a tenth of
a second. It ends with its owner, and its ranks with it. A rank owns a communicator and may be killed at any moment.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import queue
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn, cast

from relax_rt.transport.rpc.errors import Refused, RelaxError
from relax_rt.transport.weights.broadcast.protocol import (
    ERROR_CHARS,
    MAX_PACKET_BYTES,
    AbortCommand,
    AbortReceived,
    BroadcastCommand,
    Command,
    Communicator,
    ForkRank,
    InitCommand,
    PeerLost,
    RankAborted,
    RankFailed,
    RankForked,
    RankHello,
    RankJoined,
    RankProcessExited,
    Report,
    TransferDone,
    TransferProgress,
    bucket_bounds,
    decode_command,
    decode_fork,
    encode,
)
from relax_rt.transport.weights.manifest import total_digest
from relax_rt.transport.weights.memory import View

MAX_COMMANDS = 16
PR_SET_PDEATHSIG = 1


class Rank:
    """One rank of a group, in its own process.

    Two threads. The main one listens to the owner of the group and answers at once, whatever the library does; the
    other is the only one to call the library, and may hang in it. The owner's death ends the process.
    """

    def __init__(self, control: socket.socket, communicator: Communicator) -> None:
        self._control = control
        self._communicator = communicator
        self._commands: queue.Queue[Command] = queue.Queue(MAX_COMMANDS)
        self._aborted = 0
        self._sending = threading.Lock()

    def run(self) -> NoReturn:
        """Serve until the owner is gone; the process ends with it."""
        threading.Thread(target=self._collective, name="collective", daemon=True).start()
        self._report(RankHello(self._communicator.device, self._communicator.software))
        while packet := self._control.recv(MAX_PACKET_BYTES):
            command = decode_command(packet)
            if isinstance(command, AbortCommand):
                self._aborted = command.generation
                self._report(AbortReceived(command.generation))
                self._communicator.abort()
            self._commands.put_nowait(command)  # full: the owner breaks the protocol, and the process ends
        os._exit(0)

    def _report(self, report: Report) -> None:
        try:
            with self._sending:
                self._control.send(encode(report))
        except OSError:
            os._exit(0)  # the owner is gone

    def _collective(self) -> None:
        """The only thread that calls the library."""
        while True:
            command = self._commands.get()
            try:
                self._execute(command)
            except PeerLost as error:
                self._failed(command.generation, error, own=False)
            except (RelaxError, OSError, RuntimeError, ValueError, ImportError, MemoryError) as error:
                self._failed(command.generation, error, own=True)
            except BaseException as error:  # noqa: BLE001 - a rank without this thread would look alive for ever
                self._failed(command.generation, error, own=True)
                os._exit(1)

    def _failed(self, generation: int, error: BaseException, *, own: bool) -> None:
        # The error of an aborted call comes from the abort and is not reported. The communicator is closed first: from
        # the report on the owner counts on it that the library no longer writes into the memory.
        if generation > self._aborted:
            self._communicator.close()
            self._report(RankFailed(generation, own, f"{type(error).__name__}: {error}"[:ERROR_CHARS]))

    def _execute(self, command: Command) -> None:
        if isinstance(command, AbortCommand):
            self._communicator.close()
            self._report(RankAborted(command.generation))
        elif command.generation <= self._aborted:
            return
        elif isinstance(command, InitCommand):
            self._communicator.close()
            self._communicator.init(command.rank, command.world, command.rendezvous, command.timeout_s)
            self._report(RankJoined(command.generation))
        else:
            self._broadcast(command)

    def _broadcast(self, command: BroadcastCommand) -> None:
        bounds = bucket_bounds(command.memory.nbytes, command.bucket_bytes)
        with self._communicator.open(command.memory, writable=not command.root) as view:
            for number, (start, stop) in enumerate(bounds[command.first :], command.first + 1):
                self._communicator.broadcast(view.part(start, stop), 0, command.stall_s)
                if number < len(bounds):
                    self._report(TransferProgress(command.generation, number))
            digest = digest_of(view, command.bucket_bytes)
        self._report(TransferDone(command.generation, command.transfer, digest))


def digest_of(view: View, bucket_bytes: int) -> str:
    """Digest all buckets, as a manifest does."""
    bounds = bucket_bounds(view.nbytes, bucket_bytes)
    return total_digest(view.part(start, stop).digest() for start, stop in bounds)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def communicator_class(path: str) -> type[Communicator]:
    """Import the class that ``module:Class`` names."""
    module, _, name = path.partition(":")
    return cast("type[Communicator]", getattr(importlib.import_module(module), name))


class Launcher:
    """Forks ranks on request and reports their exits."""

    def __init__(self, control: socket.socket, kind: Callable[[], Communicator]) -> None:
        self._control, self._kind = control, kind
        self._wake, woken = socket.socketpair()
        self._woken = woken
        woken.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> NoReturn:
        """Serve until the owner is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wake:
                        self._wake.recv(4096)
                        self._reap()
                    else:
                        self._serve()

    def _serve(self) -> None:
        packet, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1)
        if not packet:
            os._exit(0)  # the kernel ends the ranks with this process
        self._fork(decode_fork(packet), fds[0])

    def _fork(self, request: ForkRank, channel: int) -> None:
        assert threading.active_count() == 1, "a fork with threads may inherit locks that nobody will release"
        parent = os.getpid()
        if (pid := os.fork()) == 0:
            try:
                self._become(request, channel, parent)
            finally:
                os._exit(1)
        os.close(channel)
        pidfd = os.pidfd_open(pid)
        try:
            socket.send_fds(self._control, [encode(RankForked(request.member, request.incarnation, pid))], [pidfd])
        finally:
            os.close(pidfd)

    def _become(self, request: ForkRank, channel: int, parent: int) -> NoReturn:
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for ours in (self._control, self._wake, self._woken):
            ours.close()
        control = socket.socket(fileno=channel)
        os.environ["RELAX_COLLECTIVE_MEMBER"] = request.member
        if request.device:
            os.environ["CUDA_VISIBLE_DEVICES"] = request.device
        try:
            communicator = self._kind()
        except Exception as error:
            control.send(encode(RankFailed(0, True, f"{type(error).__name__}: {error}"[:ERROR_CHARS])))
            raise
        Rank(control, communicator).run()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._control.send(encode(RankProcessExited(pid, os.waitstatus_to_exitcode(status))))


def _missing(path: str, why: str) -> NoReturn:
    """Stand in for a communicator whose library is missing: each rank reports it."""
    raise Refused(f"communicator {path}", why=why, hint="install its library where this runs")


def main() -> None:
    """Run the launcher."""
    parent = int(sys.argv[3])
    die_with_parent(parent)
    # A terminal's Ctrl-C is the owner's business: it ends us in request.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        kind: Callable[[], Communicator] = communicator_class(sys.argv[1])
    except (ImportError, AttributeError, OSError) as error:
        kind = partial(_missing, sys.argv[1], f"{type(error).__name__}: {error}")
    Launcher(socket.socket(fileno=int(sys.argv[2])), kind).run()


if __name__ == "__main__":
    main()
