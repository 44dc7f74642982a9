"""Starts and ends the programs of an env slot: ``python -m relax_rt.roles.agentic.program_spawner FD SETUP``.

One process of one thread between the slot and its programs, for three reasons. A program dies with it, and it with the
slot, whoever was killed, without the program's help. A Python program can be begun in a fork that has its slow imports
done. And it alone waits for them, so that none is killed by a number that another process has meanwhile.

Each program has a keeper in between (see program_keeper.py), below which all of its processes are; they are looked at
together, and a program that has too many or takes too much is ended.

Messages are JSON, one a datagram (SOCK_SEQPACKET). From the slot: ``{"start": n, "argv": [...], "env": {...}}`` with
the descriptors of standard input, output and error; ``{"kill": n}``; ``{"ping": k}``. To the slot: ``{"ready":
error}``, ``{"not_started": n, "why": why}`` (there is no room for it), ``{"pong": k}``, ``{"ended": n, "code": code,
"over": limit}`` (a negative code: a signal's number).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from relax_rt.process import procfs
from relax_rt.process.limits import MIB, own_memory
from relax_rt.roles.agentic import program_keeper

MOST_BYTES = 1 << 17
LOOK_S = 0.25
LOOK_SHARE = 20
"""Looking at all processes may take one part in so many of the time."""
END_S = 4.0
"""For all programs to end, with what they started, when the slot closes the link."""


class Spawner:
    """See the module.

    Args:
        link: to the slot.
        setup: cwd: where programs are started; preload: modules, imported once; limits: those of each program, by name.
    """

    def __init__(self, link: socket.socket, setup: dict[str, Any]) -> None:
        self._link, self._setup, self._pid = link, setup, os.getpid()
        self._limits = setup["limits"]
        self._poll = select.poll()
        self._poll.register(link.fileno(), select.POLLIN)
        self._programs: dict[int, tuple[int, int]] = {}
        """pidfd of its keeper -> (the slot's number, the keeper)."""
        self._over: dict[int, str] = {}
        """Programs that are being ended -> which limit they passed."""
        self._look_at = 0.0
        self._others: set[int] = set()
        """Children that preloaded modules have started."""

    def serve(self) -> None:
        """Until the slot closes the link; then all programs are ended."""
        error = ""
        for name in self._setup["preload"]:
            try:
                importlib.import_module(name)
            except Exception as caught:  # noqa: BLE001 - a module may raise anything
                error = f"{name}: {type(caught).__name__}: {caught}"
        gc.collect()
        # Collections in forks leave these objects alone, and the pages that they lie in shared.
        gc.freeze()
        self._others = set(procfs.children(self._pid))
        # Keepers have them blocked from their first instant.
        signal.pthread_sigmask(signal.SIG_BLOCK, program_keeper.ORDERS)
        # What a keeper leaves behind that was killed.
        procfs.become_subreaper()
        self._say({"ready": error})
        wanted = True
        while wanted:
            timeout_ms = 1000 * max(0.0, self._look_at - time.monotonic()) if self._programs else None
            for fd, _ in self._poll.poll(timeout_ms):
                if fd != self._link.fileno():
                    self._ended(fd)
                else:
                    wanted = self._listen()
            if self._programs and time.monotonic() >= self._look_at:
                self._look()
        self._end_all()

    def _listen(self) -> bool:
        """One message; False: the slot is gone."""
        try:
            body, fds, flags, _ = socket.recv_fds(self._link, MOST_BYTES, 3)
        except ConnectionError:
            return False
        if not body:
            return False
        asked = json.loads(body)
        try:
            if "ping" in asked:
                self._say({"pong": asked["ping"]})
            elif "kill" in asked:
                self._kill(asked["kill"])
            elif flags & socket.MSG_CTRUNC or len(fds) < 3:
                self._refuse(asked["start"], "the spawner of programs has too many open files")
            else:
                self._start(asked, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _start(self, asked: dict[str, Any], fds: list[int]) -> None:
        number = asked["start"]
        try:
            keeper = os.fork()
        except OSError as error:
            self._refuse(number, f"no new process: {error.strerror}")
            return
        if not keeper:
            program_keeper.keep(
                self._pid,
                lambda ours: program_keeper.begin(asked, fds, self._setup, ours),
                lambda error: self._refuse(number, f"no new process: {error.strerror}"),
            )
        try:
            pidfd = os.pidfd_open(keeper)
        except OSError as error:
            os.kill(keeper, signal.SIGTERM)
            os.waitpid(keeper, 0)
            self._refuse(number, f"no new descriptor: {error.strerror}")
            return
        self._programs[pidfd] = number, keeper
        self._poll.register(pidfd, select.POLLIN)

    def _refuse(self, number: int, why: str) -> None:
        self._say({"not_started": number, "why": why})

    def _kill(self, number: int) -> None:
        for one, keeper in self._programs.values():
            if one == number:
                os.kill(keeper, signal.SIGTERM)

    def _ended(self, pidfd: int) -> None:
        number, keeper = self._programs.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(keeper, 0)
        self._end_strays()
        over = self._over.pop(number, "")
        self._say({"ended": number, "code": os.waitstatus_to_exitcode(status), "over": over})

    def _look(self) -> None:
        """End the programs that have passed a limit."""
        began = time.monotonic()
        keepers = {keeper: number for number, keeper in self._programs.values()}
        for keeper, living in procfs.descendants_of_each(keepers).items():
            if (over := self._passed(living)) and keepers[keeper] not in self._over:
                self._over[keepers[keeper]] = over
                os.kill(keeper, signal.SIGTERM)
        self._end_strays()
        took = time.monotonic() - began
        self._look_at = began + took + max(LOOK_S, LOOK_SHARE * took)

    def _passed(self, living: set[int]) -> str:
        if len(living) > self._limits["processes"]:
            return "processes"
        most = self._limits["memory_mib"]
        return "memory" if most is not None and sum(map(own_memory, living)) > most * MIB else ""

    def _end_strays(self) -> None:
        """What a keeper that was killed has left here."""
        known = {keeper for _, keeper in self._programs.values()} | self._others
        for pid in procfs.children(self._pid):
            if pid not in known:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _end_all(self) -> None:
        for _, keeper in self._programs.values():
            os.kill(keeper, signal.SIGTERM)
        end = time.monotonic() + END_S
        while self._programs and (left_s := end - time.monotonic()) > 0:
            for fd, _ in self._poll.poll(1000 * left_s):
                if fd in self._programs:
                    _, keeper = self._programs.pop(fd)
                    self._poll.unregister(fd)
                    os.waitpid(keeper, 0)
                else:
                    self._poll.unregister(fd)
        self._end_strays()

    def _say(self, what: dict[str, Any]) -> None:
        try:
            self._link.send(json.dumps(what).encode())
        except OSError:
            return  # the slot is gone, and closes the link


def main(fd: int, setup: dict[str, Any]) -> None:
    """Serve the slot that holds the link's other end."""
    program_keeper.die_with(setup["parent"], signal.SIGKILL)
    # A Ctrl-C at the terminal is the slot's affair.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Spawner(socket.socket(fileno=fd), setup).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
    os._exit(0)
