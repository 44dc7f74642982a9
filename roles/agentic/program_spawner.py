"""The spawner of an env slot's programs: ``python -m relax_rt.roles.agentic.program_spawner FD SETUP``.

A process with one thread between the slot (program_host.py) and its programs, for three reasons: programs die with it,
and it with the slot, whoever was killed, without the program's help; a Python program can start in a fork that has its
slow imports done; and as it alone waits for programs, no signal reaches a recycled pid.

Each program has a keeper in between: a fork of the spawner that is the program's parent and, as a subreaper, that of
everything the program leaves behind, also in other groups and sessions. It kills all of that when the program ends, and
then ends as the program did, so that its exit status is the program's. The spawner measures all processes below a
keeper together, and ends a program that exceeds a limit. A keeper's orders are signals, which the spawner has blocked
beforehand: SIGTERM (from the spawner, or from the kernel when the spawner is dead) ends the program.

Messages are JSON, one a datagram (SOCK_SEQPACKET). From the slot: ``{"start": n, "argv": [...], "env": {...}}`` with
the descriptors of standard input, output and error; ``{"kill": n}``; ``{"ping": k}``. To the slot: ``{"ready":
error}``, ``{"not_started": n, "why": why}`` (no room), ``{"pong": k}``, ``{"ended": n, "code": code, "over": limit}``
(a negative code is a signal).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from relax_rt.process import procfs, sandbox_setup
from relax_rt.process.limits import MIB, own_memory

MAX_MESSAGE_BYTES = 1 << 17
CHECK_INTERVAL_S = 0.25
CHECK_SHARE = 20
"""At most one part in so many of the time is spent measuring processes."""
END_S = 4.0
"""Time for all programs to end, with what they started, when the slot closes the link."""
CANNOT_START = 127
KEEPER_SIGNALS = frozenset({signal.SIGTERM, signal.SIGCHLD})
"""Signals that a keeper waits for; blocked in it before its fork."""
DATA_TIMES = 2
"""RLIMIT_DATA of a process is the memory limit times this: it bounds what a process can take between two checks."""


class Spawner:
    """Starts, measures and ends the programs of one slot.

    Args:
        link: to the slot.
        setup: cwd: folder that programs start in; preload: modules, imported once; limits: of each program, by name.
    """

    def __init__(self, link: socket.socket, setup: dict[str, Any]) -> None:
        self._link, self._setup, self._pid = link, setup, os.getpid()
        self._limits = setup["limits"]
        self._poll = select.poll()
        self._poll.register(link.fileno(), select.POLLIN)
        self._programs: dict[int, tuple[int, int]] = {}
        """pidfd of its keeper -> (the slot's number, the keeper's pid)."""
        self._over: dict[int, str] = {}
        """Programs that are being killed -> the limit that they exceeded."""
        self._check_at = 0.0
        self._preload_children: set[int] = set()
        """Children that preloaded modules have started."""

    def serve(self) -> None:
        """Serve until the slot closes the link; then end all programs."""
        error = ""
        for name in self._setup["preload"]:
            try:
                importlib.import_module(name)
            except Exception as caught:  # noqa: BLE001 - a module may raise anything
                error = f"{name}: {type(caught).__name__}: {caught}"
        gc.collect()
        # Garbage collection in forks leaves these objects alone, and so their pages shared.
        gc.freeze()
        self._preload_children = set(procfs.children(self._pid))
        signal.pthread_sigmask(signal.SIG_BLOCK, KEEPER_SIGNALS)
        # Reaps the orphans of a killed keeper.
        procfs.become_subreaper()
        self._send({"ready": error})
        wanted = True
        while wanted:
            timeout_ms = 1000 * max(0.0, self._check_at - time.monotonic()) if self._programs else None
            for fd, _ in self._poll.poll(timeout_ms):
                if fd != self._link.fileno():
                    self._reap(fd)
                else:
                    wanted = self._receive()
            if self._programs and time.monotonic() >= self._check_at:
                self._check_limits()
        self._end_all()

    def _receive(self) -> bool:
        """Handle one message; return False if the slot is gone."""
        try:
            body, fds, flags, _ = socket.recv_fds(self._link, MAX_MESSAGE_BYTES, 3)
        except ConnectionError:
            return False
        if not body:
            return False
        asked = json.loads(body)
        try:
            if "ping" in asked:
                self._send({"pong": asked["ping"]})
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
            run_keeper(
                self._pid,
                lambda ours: run_program(asked, fds, self._setup, ours),
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
        self._send({"not_started": number, "why": why})

    def _kill(self, number: int) -> None:
        for one, keeper in self._programs.values():
            if one == number:
                os.kill(keeper, signal.SIGTERM)

    def _reap(self, pidfd: int) -> None:
        number, keeper = self._programs.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(keeper, 0)
        self._kill_orphans()
        over = self._over.pop(number, "")
        self._send({"ended": number, "code": os.waitstatus_to_exitcode(status), "over": over})

    def _check_limits(self) -> None:
        """Kill the programs that exceed a limit."""
        began = time.monotonic()
        keepers = {keeper: number for number, keeper in self._programs.values()}
        for keeper, living in procfs.descendants_of_each(keepers).items():
            most, over = self._limits["memory_mib"], ""
            if len(living) > self._limits["processes"]:
                over = "processes"
            elif most is not None and sum(map(own_memory, living)) > most * MIB:
                over = "memory"
            if over and keepers[keeper] not in self._over:
                self._over[keepers[keeper]] = over
                os.kill(keeper, signal.SIGTERM)
        self._kill_orphans()
        took = time.monotonic() - began
        self._check_at = began + took + max(CHECK_INTERVAL_S, CHECK_SHARE * took)

    def _kill_orphans(self) -> None:
        """Kill the orphans of a killed keeper."""
        known = {keeper for _, keeper in self._programs.values()} | self._preload_children
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
        self._kill_orphans()

    def _send(self, what: dict[str, Any]) -> None:
        try:
            self._link.send(json.dumps(what).encode())
        except OSError:
            return  # the slot is gone


# --- the keeper of one program


def run_keeper(spawner: int, run_program: Callable[[int], NoReturn], refused: Callable[[OSError], None]) -> NoReturn:
    """Run as the keeper of a program, in a fork of the spawner.

    Args:
        spawner: process id of the parent.
        run_program: called in the program's process with the keeper's id. refused: called if no process can be forked.
    """
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, KEEPER_SIGNALS)
        procfs.become_subreaper()
        die_with(spawner, signal.SIGTERM)
        ours = os.getpid()
        try:
            program = os.fork()
        except OSError as error:
            refused(error)
            os._exit(CANNOT_START)
        if not program:
            run_program(ours)
        close_from(3)
        # None: SIGTERM came, and the program must be killed.
        status: int | None = None
        while status is None and signal.sigwait(KEEPER_SIGNALS) != signal.SIGTERM:
            with contextlib.suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    if found[0] == program:
                        status = found[1]
                        break
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(program, signal.SIGKILL)
        # Orphaned descendants are children of this process, too.
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        else:
            procfs.kill_descendants()
        # Exit as the program did; None: killed.
        number = signal.SIGKILL if status is None else os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number:
            sandbox_setup.set_rlimits({})
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            os.kill(os.getpid(), number)
        os._exit(os.WEXITSTATUS(status) if status is not None else CANNOT_START)
    except BaseException:  # noqa: BLE001 - the fork must not continue as a second spawner
        traceback.print_exc()
    finally:
        os._exit(CANNOT_START)


def die_with(parent: int, number: int) -> None:
    """Have the kernel send this process a signal when its parent ends; exit if it has ended already."""
    if not procfs.die_with_parent(parent, number):
        os._exit(1)


def close_from(first: int) -> None:
    """Close all descriptors from this one on."""
    last = max((int(name) for name in os.listdir("/proc/self/fd")), default=first)  # noqa: PTH208
    os.closerange(first, last + 1)


# --- the program's process


def run_program(asked: Mapping[str, Any], fds: Sequence[int], setup: Mapping[str, Any], keeper: int) -> NoReturn:
    """Become the program.

    Args:
        asked: argv and env. fds: standard input, output and error.
        setup: see Spawner.
    """
    code = CANNOT_START
    try:
        os.setpgid(0, 0)
        die_with(keeper, signal.SIGKILL)
        preloaded = bool(setup["preload"])
        signal.signal(signal.SIGINT, signal.default_int_handler if preloaded else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        # Neither descriptors of other programs nor the link are left open in it.
        close_from(3)
        os.chdir(setup["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        limit(setup["limits"])
        argv = asked["argv"]
        if preloaded:
            code = run_python(argv)
        else:
            os.execvpe(argv[0], argv, asked["env"])
    except BaseException as error:  # noqa: BLE001 - the fork must not continue as a second keeper
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def limit(limits: Mapping[str, Any]) -> None:
    """Set the limits that the kernel enforces; the spawner checks the rest (see `ProgramLimits`)."""
    memory = limits["memory_mib"]
    data = None if memory is None else DATA_TIMES * memory
    sandbox_setup.set_rlimits({"open_files": limits["open_files"], "file_mib": limits["file_mib"], "data_mib": data})


def run_python(argv: list[str]) -> int:
    """Run ``python SCRIPT ARGUMENTS…`` or ``python -m MODULE ARGUMENTS…`` in this process; return its exit code."""
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
    die_with(setup["parent"], signal.SIGKILL)
    # Ctrl-C at the terminal is handled by the slot.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Spawner(socket.socket(fileno=fd), setup).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
    os._exit(0)
