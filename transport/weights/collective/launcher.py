"""Forks the processes of ranks, with the library imported once: a lost rank is there again in a tenth of a second.

Run as ``python -m relax_rt.transport.weights.collective.launcher COMMUNICATOR FD``. It has one thread and makes no call
that a fork could not survive (no CUDA call above all); it ends with its owner, and its ranks with it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn, cast

from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.weights.collective.communicator import Communicator
from relax_rt.transport.weights.collective.messages import (
    ERROR_CHARS,
    MAX_PACKET_BYTES,
    ExitedSaid,
    FailedSaid,
    ForkedSaid,
    ForkOrder,
    decode_fork,
    encode,
)
from relax_rt.transport.weights.collective.worker import Worker

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def communicator_class(path: str) -> type[Communicator]:
    """The class that ``module:Class`` names."""
    module, _, name = path.partition(":")
    return cast("type[Communicator]", getattr(importlib.import_module(module), name))


class Launcher:
    """One process; see the module."""

    def __init__(self, control: socket.socket, kind: Callable[[], Communicator]) -> None:
        self._control, self._kind = control, kind
        self._wake, woken = socket.socketpair()
        self._woken = woken
        woken.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> NoReturn:
        """Fork on request, tell of exits; end when the owner is gone."""
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

    def _fork(self, order: ForkOrder, channel: int) -> None:
        assert threading.active_count() == 1, "a fork with threads may inherit locks that nobody will release"
        parent = os.getpid()
        if (pid := os.fork()) == 0:
            try:
                self._become(order, channel, parent)
            finally:
                os._exit(1)
        os.close(channel)
        pidfd = os.pidfd_open(pid)
        try:
            socket.send_fds(self._control, [encode(ForkedSaid(order.member, order.incarnation, pid))], [pidfd])
        finally:
            os.close(pidfd)

    def _become(self, order: ForkOrder, channel: int, parent: int) -> NoReturn:
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for ours in (self._control, self._wake, self._woken):
            ours.close()
        control = socket.socket(fileno=channel)
        os.environ["RELAX_COLLECTIVE_MEMBER"] = order.member
        if order.device:
            os.environ["CUDA_VISIBLE_DEVICES"] = order.device
        try:
            communicator = self._kind()
        except Exception as error:
            control.send(encode(FailedSaid(0, True, f"{type(error).__name__}: {error}"[:ERROR_CHARS])))
            raise
        Worker(control, communicator).run()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._control.send(encode(ExitedSaid(pid, os.waitstatus_to_exitcode(status))))


def _missing(path: str, why: str) -> NoReturn:
    """Instead of a communicator whose library is not there: each rank says so."""
    raise Refused(f"communicator {path}", why=why, hint="install its library where this runs")


def main() -> None:
    """Entry of the process."""
    parent = int(sys.argv[3])
    die_with_parent(parent)
    # A terminal's Ctrl-C is the owner's business: it ends us in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        kind: Callable[[], Communicator] = communicator_class(sys.argv[1])
    except (ImportError, AttributeError, OSError) as error:
        kind = partial(_missing, sys.argv[1], f"{type(error).__name__}: {error}")
    Launcher(socket.socket(fileno=int(sys.argv[2])), kind).run()


if __name__ == "__main__":
    main()
