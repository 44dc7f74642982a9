"""The keeper of one program: a fork of the spawner that is the program's parent and, as a subreaper, that of whatever
the program leaves behind, also in other groups and sessions. It ends all of that with the program, and then itself
ends as the program did, so that who waits for the keeper knows the program's exit code or signal.

Its orders are signals, which the spawner has blocked before: SIGTERM (from the spawner, or from the kernel when the
spawner is dead) ends the program.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from relax_rt.process import procfs, sandbox_setup

CANNOT_START = 127
ORDERS = frozenset({signal.SIGTERM, signal.SIGCHLD})
"""What a keeper waits for; blocked in it from its birth on."""
DATA_TIMES = 2
"""So many times the bound on memory is what the kernel refuses a process: between two looks it could take much."""


def keep(spawner: int, begin: Callable[[int], NoReturn], refused: Callable[[OSError], None]) -> NoReturn:
    """Be the keeper of a program.

    Args:
        spawner: process id of the parent.
        begin: is called in the program's process with the keeper's id. refused: when there is no room for a process.
    """
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, ORDERS)
        procfs.become_subreaper()
        die_with(spawner, signal.SIGTERM)
        ours = os.getpid()
        try:
            program = os.fork()
        except OSError as error:
            refused(error)
            os._exit(CANNOT_START)
        if not program:
            begin(ours)
        close_from(3)
        status = _wait(program)
        if status is None:
            _kill(program)
        if _has_children():
            procfs.kill_descendants()
        _end_as(status)
    except BaseException:  # noqa: BLE001 - the fork must not go on as a second spawner
        traceback.print_exc()
    finally:
        os._exit(CANNOT_START)


def die_with(parent: int, number: int) -> None:
    """Have the kernel send this process a signal when its parent ends; if it has ended, this process does."""
    procfs.prctl(procfs.PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def close_from(first: int) -> None:
    """Close all descriptors from this one on."""
    last = max((int(name) for name in os.listdir("/proc/self/fd")), default=first)  # noqa: PTH208
    os.closerange(first, last + 1)


def _wait(program: int) -> int | None:
    """The program's status; None: it is to be ended."""
    while signal.sigwait(ORDERS) != signal.SIGTERM:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == program:
                    return found[1]
    return None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _has_children() -> bool:
    """Whether anything is left: what has lost its parents is this process's child."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _end_as(status: int | None) -> NoReturn:
    """End as the program did; None: killed."""
    number = signal.SIGKILL if status is None else os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number:
        sandbox_setup.set_rlimits({})
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status) if status is not None else CANNOT_START)


# --- the program's process


def begin(asked: Mapping[str, Any], fds: Sequence[int], setup: Mapping[str, Any], keeper: int) -> NoReturn:
    """Be the program.

    Args:
        asked: argv and env. fds: its standard input, output and error.
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
        # The descriptors of other programs are none of its business, nor is the link.
        close_from(3)
        os.chdir(setup["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        limit(setup["limits"])
        argv = asked["argv"]
        if preloaded:
            code = run_script(argv)
        else:
            os.execvpe(argv[0], argv, asked["env"])
    except BaseException as error:  # noqa: BLE001 - the fork must not go on as a second keeper
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def limit(limits: Mapping[str, Any]) -> None:
    """What the kernel sees to; the spawner looks for the rest (see `ProgramLimits`)."""
    memory = limits["memory_mib"]
    data = None if memory is None else DATA_TIMES * memory
    sandbox_setup.set_rlimits({"open_files": limits["open_files"], "file_mib": limits["file_mib"], "data_mib": data})


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
