"""Starts and ends the programs of an env slot: ``python -m relax_rt.roles.agentic.program_spawner FD SETUP``.

One process of one thread between the slot and its programs, for three reasons. A program dies with it, and it with the
slot, whoever was killed, without the program's help. A Python program can be begun in a fork that has its slow imports
done. And it alone waits for them, so that none is killed by a number that another process has meanwhile.

Messages are JSON, one a datagram (SOCK_SEQPACKET). From the slot: ``{"start": n, "argv": [...], "env": {...}}`` with
the descriptors of standard input, output and error; ``{"kill": n}``. To the slot: ``{"ready": error}``, ``{"started":
n, "pid": pid}``, ``{"ended": n, "code": code}`` (negative: a signal's number).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
MOST_BYTES = 1 << 17
CANNOT_START = 127


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; at once if it has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Spawner:
    """See the module.

    Args:
        link: to the slot. cwd: where programs are started. preload: modules, imported once.
    """

    def __init__(self, link: socket.socket, cwd: str, preload: list[str]) -> None:
        self._link, self._cwd, self._preload, self._pid = link, cwd, preload, os.getpid()
        self._poll = select.poll()
        self._poll.register(link.fileno(), select.POLLIN)
        self._programs: dict[int, tuple[int, int]] = {}
        """pidfd -> (the slot's number, process)."""

    def serve(self) -> None:
        """Until the slot closes the link."""
        error = ""
        for name in self._preload:
            try:
                importlib.import_module(name)
            except Exception as caught:  # noqa: BLE001 - a module may raise anything
                error = f"{name}: {type(caught).__name__}: {caught}"
        self._say({"ready": error})
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._link.fileno():
                    self._ended(fd)
                elif not self._listen():
                    return

    def _listen(self) -> bool:
        """One message; False: the slot is gone."""
        body, fds, _, _ = socket.recv_fds(self._link, MOST_BYTES, 3)
        if not body:
            return False
        asked = json.loads(body)
        if "kill" in asked:
            for number, pid in self._programs.values():
                if number == asked["kill"]:
                    kill_group(pid)
            return True
        try:
            self._start(asked, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _start(self, asked: dict[str, Any], fds: list[int]) -> None:
        pid = os.fork()
        if not pid:
            self._be_program(asked, fds)
        # In both processes, so that the group is there whoever is first.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        pidfd = os.pidfd_open(pid)
        self._programs[pidfd] = asked["start"], pid
        self._poll.register(pidfd, select.POLLIN)
        self._say({"started": asked["start"], "pid": pid})

    def _ended(self, pidfd: int) -> None:
        number, pid = self._programs.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        # What it leaves running in its group ends with it; the process itself still holds the group's number.
        kill_group(pid)
        _, status = os.waitpid(pid, 0)
        self._say({"ended": number, "code": os.waitstatus_to_exitcode(status)})

    def _say(self, what: dict[str, Any]) -> None:
        try:
            self._link.send(json.dumps(what).encode())
        except OSError:
            os._exit(1)

    # --- in the fork

    def _be_program(self, asked: dict[str, Any], fds: list[int]) -> None:
        """Never returns."""
        code = CANNOT_START
        try:
            os.setpgid(0, 0)
            die_with(self._pid)
            signal.signal(signal.SIGINT, signal.default_int_handler if self._preload else signal.SIG_DFL)
            for target, fd in enumerate(fds):
                os.dup2(fd, target)
            # The descriptors of other programs are none of its business, nor is the link.
            os.closerange(3, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 4096))
            os.chdir(self._cwd)
            os.environ.clear()
            os.environ.update(asked["env"])
            argv = asked["argv"]
            if self._preload:
                code = run_script(argv)
            else:
                os.execvpe(argv[0], argv, asked["env"])
        except BaseException as error:  # noqa: BLE001 - the fork must not go on as a second spawner
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)


def kill_group(pid: int) -> None:
    """SIGKILL for a program and what it has started in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def run_script(argv: list[str]) -> int:
    """``python SCRIPT ARGUMENTS…`` or ``python -m MODULE ARGUMENTS…`` in this process; its exit code."""
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))
    words = argv[1:]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    code = 0
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], str(Path.cwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def main(fd: int, setup: dict[str, Any]) -> None:
    """Serve the slot that holds the link's other end."""
    die_with(setup["parent"])
    # A Ctrl-C at the terminal is the slot's affair.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Spawner(socket.socket(fileno=fd), setup["cwd"], setup["preload"]).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
    os._exit(0)
