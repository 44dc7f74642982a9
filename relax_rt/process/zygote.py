"""The zygote: a process that has the imports done and forks others, ``python -m relax_rt.process.zygote``.

The owner (see zygote_pool.py) starts one for each interpreter and environment, tells it over a socket what to import,
and then asks for forks; the log and the control socket of the new process come along as descriptors (SCM_RIGHTS). The
process is forked twice: the helper in between dies at once, so that the owner, a subreaper, becomes the parent of the
new process and can wait for it. A zygote can also fork another zygote, which continues to import while the first stays
free.

A fork is safe only in a process with one thread, without a ZeroMQ context, a running event loop or a CUDA context.
This is checked after each import and before each fork; a refusal names what was found.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import threadpoolctl

from relax_rt.config.target import load_target
from relax_rt.process import limits, procfs

MAX_PACKET_BYTES = 192 << 10
"""Below the default buffer of a unix socket (208 KiB): a packet is there whole or not at all."""
PLACEHOLDER_NAME = "RELAX_PLACEHOLDER"
PLACEHOLDER = "." * 640
"""Reserves space in the zygote's environment and command for those of its children, see `set_process_title`."""
MAX_FDS = 16
REPARENT_POLL_MS = 20
EXIT_ORPHANED = 70
GO = b"1"
"""A forked process waits for this before it does anything: its owner has recorded it."""


class PreloadMsg(msgspec.Struct, frozen=True, tag_field="t", tag="preload"):
    """Import modules, then report ready.

    Attributes:
        modules: names of modules.
        targets: ``module:name`` or ``file.py:name``.
        calls: functions (as targets) to call with a path each, for what that imports.
    """

    modules: list[str]
    targets: list[str] = []
    calls: dict[str, str] = {}


class ForkMsg(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="fork"):
    """Fork a process. Its descriptors come along: the log, the control socket, others that it is given, and its gate.

    The gate is a pipe from which the new process reads `GO` once its owner has recorded its pid. When the pipe is
    closed instead, the process ends at once: the owner never learned of it and has started another one in its place.

    Attributes:
        number: of the request, repeated in the reply.
        entry: ``module:function`` that the process runs, its result is the exit code; empty: it is another zygote.
        descriptors: environment variables that carry the numbers of the descriptors after the log.
        argv: command that `ps` shows.
        env: its whole environment; of a zygote, ignored.
        tags: names of variables of `env` that /proc/<pid>/environ shows.
    """

    number: int = 0
    entry: str = ""
    argv: list[str]
    env: dict[str, str]
    descriptors: tuple[str, ...] = ("RELAX_CONTROL_FD",)
    tags: tuple[str, ...] = ()
    limits: limits.ProcessLimits = limits.ProcessLimits()


class LoadedMsg(msgspec.Struct, frozen=True, tag_field="t", tag="loaded"):
    """A module is imported or, with a reason, cannot be."""

    module: str
    seconds: float
    failed: str = ""


class PreloadedMsg(msgspec.Struct, frozen=True, tag_field="t", tag="ready"):
    """Everything is imported."""

    seconds: float


class UnsafeMsg(msgspec.Struct, frozen=True, tag_field="t", tag="unsafe"):
    """After this import a fork is not safe any more; the zygote ends."""

    module: str
    reason: str


class ForkedMsg(msgspec.Struct, frozen=True, tag_field="t", tag="forked"):
    """The requested process exists, as a child of the owner."""

    number: int
    pid: int


class RefusedMsg(msgspec.Struct, frozen=True, tag_field="t", tag="refused"):
    """The request failed."""

    number: int
    reason: str


ToZygote = PreloadMsg | ForkMsg
FromZygote = LoadedMsg | PreloadedMsg | UnsafeMsg | ForkedMsg | RefusedMsg

encode = msgspec.json.Encoder().encode
decode_to_zygote = msgspec.json.Decoder(ToZygote).decode
decode_from_zygote = msgspec.json.Decoder(FromZygote).decode
"""Both raise msgspec.DecodeError on anything else."""

# What makes a fork unsafe.


def fork_hazard() -> str:
    """Return why a fork is not safe in this process now, or empty."""
    threads = list(Path("/proc/self/task").iterdir())
    if len(threads) != 1:
        names = []
        for thread in threads:
            if thread.name != str(os.getpid()):
                with suppress(OSError):  # it has ended since
                    names.append((thread / "comm").read_text().strip())
        return f"{len(threads)} threads ({', '.join(sorted(names))})"
    if asyncio._get_running_loop() is not None:
        return "an event loop is running"
    zmq = sys.modules.get("zmq")
    if zmq is not None and getattr(getattr(zmq, "Context", None), "_instance", None) is not None:
        return "a ZeroMQ context exists"
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "torch has initialised CUDA"
    # The driver keeps its devices open, whichever library called it.
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if (target := str(fd.readlink())).startswith("/dev/nvidia"):
                return f"the CUDA driver is in use ({target} is open)"
    return ""


def leaked_context() -> str:
    """Return the ZeroMQ context or event loop that an import left open, or empty. Slow: inspects every object."""
    zmq = sys.modules.get("zmq")
    for found in gc.get_objects():
        # By type, not isinstance: proxies of other libraries do anything when they are asked for their class.
        kind = type(found)
        if issubclass(kind, asyncio.AbstractEventLoop) and not found.is_closed():
            return f"an open event loop, {kind.__module__}.{kind.__name__}"
        if zmq is not None and issubclass(kind, zmq.Context) and not found.closed:
            return "an open ZeroMQ context"
    return ""


class Zygote:
    """Serves preloads and forks on its control socket, and ends with it."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def serve(self) -> NoReturn:
        """Carry out requests until the owner is gone. Raises ForkedChild: in each process that was forked."""
        while True:
            self._step()

    def _step(self) -> None:
        packet, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, MAX_FDS)
        if not packet:
            os._exit(0)
        try:
            match decode_to_zygote(packet):
                case PreloadMsg() as wanted:
                    self._preload(wanted)
                case ForkMsg() as order:
                    self._fork(order, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _preload(self, wanted: PreloadMsg) -> None:
        """Import one after the other; requests that arrive in between are served in between."""
        began = time.monotonic()
        work: list[tuple[str, Callable[[], object]]] = [
            *((name, partial(importlib.import_module, name)) for name in wanted.modules),
            *((f"{name}({path})", partial(_call, name, Path(path))) for name, path in wanted.calls.items()),
            *((target, partial(load_target, target)) for target in wanted.targets),
        ]
        for name, load in work:
            self._load(name, load)
            while select.select([self._control], [], [], 0)[0]:
                self._step()
        if leaked := leaked_context():
            self._end_unsafe("", leaked)
        # What exists now stays for good: a collection in a child must not touch, and so copy, its pages.
        gc.collect()
        gc.freeze()
        self._send(PreloadedMsg(round(time.monotonic() - began, 4)))

    def _load(self, name: str, load: Callable[[], object]) -> None:
        began = time.monotonic()
        failed = ""
        try:
            load()
        except BaseException as error:  # noqa: BLE001 the process that needs it meets the same error, with a diagnosis
            failed = f"{type(error).__name__}: {error}"[:500]
        if reason := fork_hazard():
            self._end_unsafe(name, reason)
        self._send(LoadedMsg(name, round(time.monotonic() - began, 4), failed))

    def _end_unsafe(self, module: str, reason: str) -> NoReturn:
        self._send(UnsafeMsg(module, reason))
        os._exit(1)

    def _send(self, message: FromZygote) -> None:
        try:
            self._control.send(encode(message), socket.MSG_NOSIGNAL)
        except OSError:
            os._exit(EXIT_ORPHANED)

    def _fork(self, order: ForkMsg, fds: list[int]) -> None:
        """Have a helper fork the process; by the helper's death the process becomes the owner's child. Raises
        ForkedChild: in the new process."""
        reason = fork_hazard()
        if len(fds) != 2 + len(order.descriptors):
            reason = reason or f"{len(fds)} descriptors came along, not {2 + len(order.descriptors)}"
        if reason:
            self._send(RefusedMsg(order.number, reason))
            return
        _flush()
        pid_reader, pid_writer = os.pipe()
        try:
            helper = os.fork()
            if helper == 0:
                child = ForkedChild(order, list(fds), _fork_in_helper(pid_writer))
                # The descriptors are the new process's own from here on; the socket to the owner is not.
                fds.clear()
                os.close(self._control.detach())
                raise child
            os.close(pid_writer)
            pid_writer = -1
            answer = os.read(pid_reader, 32)
            os.waitpid(helper, 0)
        except OSError as error:
            self._send(RefusedMsg(order.number, f"cannot fork: {error}"))
            return
        finally:
            os.close(pid_reader)
            if pid_writer >= 0:
                os.close(pid_writer)
        if answer:
            self._send(ForkedMsg(order.number, int(answer)))
        else:
            self._send(RefusedMsg(order.number, "the helper was ended before it could fork"))


class ForkedChild(BaseException):
    """Raised in a process that was just forked.

    It unwinds the zygote's calls, so that the process starts at the bottom of the stack and dumps of its stack show
    only its own frames.
    """

    def __init__(self, order: ForkMsg, fds: list[int], helper: int) -> None:
        self.order, self.fds, self.helper = order, fds, helper

    def start(self) -> int:
        """Drop the zygote's state and take on our own; return the control descriptor.

        Does not return in a process that its owner has not recorded.
        """
        os.setsid()
        log, *handed, gate = self.fds
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        wait_for_reparenting(self.helper)
        if os.read(gate, len(GO)) != GO:
            os._exit(EXIT_ORPHANED)
        os.close(gate)
        order = self.order
        if not order.entry:
            set_process_title(order.argv, {})
            return handed[0]
        env = {**order.env, **dict(zip(order.descriptors, map(str, handed), strict=True))}
        replace_environment(env)
        set_process_title(order.argv, {name: env[name] for name in order.tags if name in env})
        for problem in limits.apply(order.limits):
            os.write(2, f"{problem}\n".encode())
        reseed()
        set_threads(order.limits.threads)
        return handed[0]


def _fork_in_helper(pid_writer: int) -> int:
    """Fork and report the pid; return in the grandchild only, with the helper's own pid."""
    helper = os.getpid()
    try:
        child = os.fork()
        if child:
            os.write(pid_writer, str(child).encode())
    except BaseException:  # noqa: BLE001 the helper must never continue as a second zygote
        os._exit(1)
    if child:
        os._exit(0)
    return helper


def wait_for_reparenting(helper: int) -> None:
    """Wait until the helper is dead: from then on the owner is our parent.

    A PR_SET_PDEATHSIG set before that would fire at the helper's own death.
    """
    while os.getppid() == helper:
        try:
            pidfd = os.pidfd_open(helper)
        except ProcessLookupError:
            continue
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll(REPARENT_POLL_MS)
        os.close(pidfd)


def replace_environment(env: Mapping[str, str]) -> None:
    """Replace the environment of this process."""
    zone = os.environ.get("TZ")
    os.environ.clear()
    os.environ.update(env)
    if os.environ.get("TZ") != zone:
        time.tzset()


def reseed() -> None:
    """Reseed the random generators of the loaded libraries: children of one zygote must not draw alike."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        # CUDA's generators are created when CUDA is initialised, which is after the fork.
        torch.random.default_generator.manual_seed(int.from_bytes(os.urandom(7), "little"))


def set_threads(threads: int) -> None:
    """Set the number of compute threads: the libraries have read the environment when they were loaded, with one."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)
    if threads > 1 and "numpy" in sys.modules:
        threadpoolctl.threadpool_limits(threads)


def set_process_title(argv: Sequence[str], tags: Mapping[str, str]) -> bool:
    """Write a command and tags into the memory that /proc shows, as if this process had been started with them.

    ``ps`` shows the command, and a search for ``NAME=value`` in /proc/<pid>/environ (orphans of a dead process, what is
    left of a run) finds this process and all that it forks. The memory is that of the zygote's start, where
    `PLACEHOLDER` reserves the space; a library for titles would use up the environment's part.

    Returns:
        False when the kernel does not say where that memory is.
    """
    fields = procfs.stat_fields(os.getpid())
    if fields is None:
        return False
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    if not arg_start or not env_start:
        return False
    command = b"".join(part.encode("utf-8", "replace") + b"\0" for part in argv)
    space = arg_end - arg_start
    ctypes.memmove(arg_start, command[: space - 1].ljust(space, b"\0"), space)
    if not tags:
        return True
    # The placeholder's name stays, so that a later call finds the place again.
    label = f"{PLACEHOLDER_NAME}=".encode()
    environment = ctypes.string_at(env_start, env_end - env_start)
    at = environment.find(label)
    if at < 0 or (at and environment[at - 1]):
        return False
    text = b"".join(b"\0" + f"{name}={value}".encode() for name, value in tags.items())
    if len(text) > len(PLACEHOLDER):
        return False
    ctypes.memmove(env_start + at + len(label), text.ljust(len(PLACEHOLDER), b"\0"), len(PLACEHOLDER))
    return True


def _call(target: str, path: Path) -> None:
    load_target(target)(path)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass


def serve(control_fd: int, owner: int) -> ForkedChild:
    """Be a zygote until its owner, our parent, ends. Returns in the processes that are forked."""
    if not procfs.die_with_parent(owner):
        os._exit(EXIT_ORPHANED)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Zygote(socket.socket(fileno=control_fd)).serve()
    except ForkedChild as child:
        # Without the traceback, which would keep the zygote's frames alive.
        return child.with_traceback(None)


def main(argv: Sequence[str]) -> int:
    """Entry point: control descriptor, the owner's pid, a name, and a placeholder for the commands of the children."""
    if len(argv) < 3:
        sys.stderr.write("relax_rt.process.zygote is started by `relax-rt up`, not by hand\n")
        return 2
    set_process_title(zygote_argv(sys.executable, argv[2]), {})
    control, owner = int(argv[0]), int(argv[1])
    child = serve(control, owner)
    while not child.order.entry:
        child = serve(child.start(), owner)
    child.start()
    status = load_target(child.order.entry)()
    return status if isinstance(status, int) else 0


def zygote_argv(python: str, name: str) -> list[str]:
    """Return the command that `ps` shows for a zygote."""
    return [python, "-m", "relax_rt.process.zygote", name]


if __name__ == "__main__":
    status = 1
    try:
        status = main(sys.argv[1:])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 whatever it was, this process ends here
        traceback.print_exc()
    _flush()
    # Without interpreter shutdown: a thread that does not end would hold it up.
    os._exit(status)
