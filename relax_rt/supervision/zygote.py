"""The zygote: a process that has the imports done and forks roles, ``python -m relax_rt.supervision.zygote``.

The agent starts one for each interpreter and environment, hands it over a socket what to import, and then asks for
forks; control channel and log of the new process come along as descriptors (SCM_RIGHTS). The new process is forked
twice, so that the zygote's helper in between dies at once and the agent, a subreaper, becomes its parent and can wait
for it. A zygote can also fork another one, that goes on importing: so the light one is free at any time.

Forking is safe only in a process with one thread, without a ZeroMQ context, a running event loop or a CUDA context:
this is looked at after each import, and again before each fork, and answered with a refusal that says what was found.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from relax_rt.supervision import limits, procfs

HOST = "relax_rt.hosting.host"
"""Module whose `main` runs in each forked role."""
MAX_PACKET_BYTES = 192 << 10
"""Below the default buffer of a unix socket (208 KiB): a packet is there whole or not at all."""
ROOM_NAME = "RELAX_ROOM"
ROOM = "." * 640
"""Placeholder in the zygote's environment and command: its children write their own names over it, see `stamp`."""
MAX_FDS = 16
ADOPTION_POLL_MS = 20
EXIT_ORPHANED = 70
GO = b"1"
"""What a forked process waits for before it does anything: the agent knows of it."""


class PreloadMsg(msgspec.Struct, frozen=True, tag_field="t", tag="preload"):
    """Import these, then say that you are ready. Targets are ``module:name`` or ``file.py:name``."""

    modules: list[str]
    targets: list[str] = []
    config: str = ""


class ForkMsg(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="fork"):
    """Fork a process. Its descriptors come along: its log, its control channel, what else it is handed, and its gate.

    The gate is a pipe from which the new process reads `GO` once the agent knows its pid. It ends at once if the pipe
    is closed instead: the agent, who never heard of it, has started another one in its place.

    Attributes:
        number: names the request in the answer.
        what: a role, or a zygote that goes on from here.
        descriptors: environment variables that tell the process the numbers of the descriptors after the log.
        argv: what the process is to look like in `ps`.
        env: its whole environment (a role's), or what is added to ours (a zygote's).
        agent_pid: who must be its parent.
    """

    number: int
    what: Literal["role", "zygote"]
    argv: list[str]
    env: dict[str, str]
    agent_pid: int
    descriptors: tuple[str, ...] = ("RELAX_CONTROL_FD",)
    limits: limits.Limits = limits.Limits()


class LoadedMsg(msgspec.Struct, frozen=True, tag_field="t", tag="loaded"):
    """A module is imported, or (with a reason) cannot be."""

    module: str
    seconds: float
    failed: str = ""


class ReadyMsg(msgspec.Struct, frozen=True, tag_field="t", tag="ready"):
    """All is imported, in so many seconds since this process began to."""

    seconds: float


class UnfitMsg(msgspec.Struct, frozen=True, tag_field="t", tag="unfit"):
    """After this import nothing can be forked safely any more; the zygote ends."""

    module: str
    reason: str


class ForkedMsg(msgspec.Struct, frozen=True, tag_field="t", tag="forked"):
    """The process asked for exists, as a child of the agent."""

    number: int
    pid: int


class RefusedMsg(msgspec.Struct, frozen=True, tag_field="t", tag="refused"):
    """No process came of the request."""

    number: int
    reason: str


ToZygote = PreloadMsg | ForkMsg
FromZygote = LoadedMsg | ReadyMsg | UnfitMsg | ForkedMsg | RefusedMsg

_encoder = msgspec.json.Encoder()
_to_zygote: msgspec.json.Decoder[ToZygote] = msgspec.json.Decoder(ToZygote)
_from_zygote: msgspec.json.Decoder[FromZygote] = msgspec.json.Decoder(FromZygote)


def encode(message: ToZygote | FromZygote) -> bytes:
    """A message as one packet."""
    return _encoder.encode(message)


def decode_from_zygote(packet: bytes) -> FromZygote:
    """Raises msgspec.DecodeError on anything else."""
    return _from_zygote.decode(packet)


def unfit() -> str:
    """Why a fork would not be safe here, or empty."""
    threads = list(Path("/proc/self/task").iterdir())
    if len(threads) != 1:
        names = [_text(thread / "comm") for thread in threads if thread.name != str(os.getpid())]
        return f"{len(threads)} threads ({', '.join(sorted(names))})"
    if asyncio._get_running_loop() is not None:
        return "an event loop is running"
    zmq = sys.modules.get("zmq")
    if zmq is not None and getattr(getattr(zmq, "Context", None), "_instance", None) is not None:
        return "a ZeroMQ context exists"
    return _cuda_in_use()


def _cuda_in_use() -> str:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "torch has initialised CUDA"
    # The driver keeps its devices open, whoever called it.
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            return f"the CUDA driver is in use ({target} is open)"
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "gone"


def foreign_context() -> str:
    """Name of a ZeroMQ context or event loop that an import left open, or empty. Looks at every object: once only."""
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
    """The serving side.

    Args:
        control: the socket to the agent; its end is ours too.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._began = time.monotonic()

    def serve(self) -> NoReturn:
        """Do what the agent says until it is gone.

        Raises:
            Reborn: in each process that was forked.
        """
        while True:
            self._step()

    def _step(self) -> None:
        packet, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, MAX_FDS)
        if not packet:
            os._exit(0)
        try:
            match _to_zygote.decode(packet):
                case PreloadMsg() as wanted:
                    self._preload(wanted)
                case ForkMsg() as order:
                    self._fork(order, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _waiting_orders(self) -> bool:
        return bool(select.select([self._control], [], [], 0)[0])

    def _preload(self, wanted: PreloadMsg) -> None:
        """Import one after the other; whoever asks for a fork in between is served in between."""
        began = time.monotonic()
        work: list[tuple[str, Callable[[], object]]] = [
            (name, lambda name=name: importlib.import_module(name))  # type: ignore[misc]
            for name in wanted.modules
        ]
        if wanted.config:
            work.append((wanted.config, lambda: _read_config(wanted.config)))
        work += [(target, lambda target=target: _import_target(target)) for target in wanted.targets]  # type: ignore[misc]
        for name, load in work:
            self._load(name, load)
            while self._waiting_orders():
                self._step()
        left_open = foreign_context()
        if left_open:
            self._end_unfit("", left_open)
        # What is there now stays for good: collections in children must not touch, and so copy, its pages.
        gc.collect()
        gc.freeze()
        self._say(ReadyMsg(round(time.monotonic() - began, 4)))

    def _load(self, name: str, load: Callable[[], object]) -> None:
        began = time.monotonic()
        failed = ""
        try:
            load()
        except BaseException as error:  # noqa: BLE001 the role that needs it will meet the same error, with a diagnosis
            failed = f"{type(error).__name__}: {error}"[:500]
        if reason := unfit():
            self._end_unfit(name, reason)
        self._say(LoadedMsg(name, round(time.monotonic() - began, 4), failed))

    def _end_unfit(self, module: str, reason: str) -> NoReturn:
        self._say(UnfitMsg(module, reason))
        os._exit(1)

    def _say(self, message: FromZygote) -> None:
        try:
            self._control.send(encode(message), socket.MSG_NOSIGNAL)
        except OSError:
            os._exit(EXIT_ORPHANED)

    def _fork(self, order: ForkMsg, fds: list[int]) -> None:
        """Have the process forked by a helper, whose death makes it the agent's child.

        Raises:
            Reborn: in the new process.
        """
        reason = unfit()
        if len(fds) != 2 + len(order.descriptors):
            reason = reason or f"{len(fds)} descriptors came along, not {2 + len(order.descriptors)}"
        if reason:
            self._say(RefusedMsg(order.number, reason))
            return
        _flush()
        news, told = os.pipe()
        try:
            helper = os.fork()
            if helper == 0:
                birth = Reborn(order, list(fds), _fork_in_helper(told))
                # The descriptors are the new process's own from here on; the socket to the agent is not.
                fds.clear()
                os.close(self._control.detach())
                raise birth
            os.close(told)
            told = -1
            answer = os.read(news, 32)
            os.waitpid(helper, 0)
        except OSError as error:
            self._say(RefusedMsg(order.number, f"cannot fork: {error}"))
            return
        finally:
            os.close(news)
            if told >= 0:
                os.close(told)
        if answer:
            self._say(ForkedMsg(order.number, int(answer)))
        else:
            self._say(RefusedMsg(order.number, "the process in between was ended before it could fork"))


class Reborn(BaseException):
    """Raised in a process that was just forked: it leaves the zygote's calls behind and begins at the bottom of the
    stack, so that dumps of its stack show nothing but its own."""

    def __init__(self, order: ForkMsg, fds: list[int], helper: int) -> None:
        self.order, self.fds, self.helper = order, fds, helper

    def begin(self) -> int:
        """Let go of what is the zygote's and take on what is our own; the control channel. Does not return in one that
        the agent does not know of."""
        os.setsid()
        log, *handed, gate = self.fds
        control = handed[0]
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        await_adoption(self.helper)
        if os.read(gate, len(GO)) != GO:
            os._exit(EXIT_ORPHANED)
        os.close(gate)
        order = self.order
        if order.what == "zygote":
            stamp(order.argv, {})
            return control
        env = {**order.env, **dict(zip(order.descriptors, map(str, handed), strict=True))}
        fresh_environment(env)
        stamp(order.argv, {name: env[name] for name in ("RELAX_SLOT", "RELAX_EPOCH") if name in env})
        for problem in limits.apply(order.limits):
            os.write(2, f"{problem}\n".encode())
        reseed()
        set_threads(order.limits.threads)
        return control


def _fork_in_helper(told: int) -> int:
    """Returns in the grandchild only, whose pid was told; the helper's own pid."""
    helper = os.getpid()
    try:
        child = os.fork()
        if child:
            os.write(told, str(child).encode())
    except BaseException:  # noqa: BLE001 the helper must never run on as the zygote
        os._exit(1)
    if child:
        os._exit(0)
    return helper


def await_adoption(helper: int) -> None:
    """Wait until the process in between is dead: from then on the agent is our parent.

    A death signal asked for before that would be sent by the helper's own death.
    """
    while os.getppid() == helper:
        try:
            pidfd = os.pidfd_open(helper)
        except ProcessLookupError:
            continue
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll(ADOPTION_POLL_MS)
        os.close(pidfd)


def fresh_environment(env: dict[str, str]) -> None:
    """Replace our environment; nothing of the zygote's own is left."""
    zone = os.environ.get("TZ")
    os.environ.clear()
    os.environ.update(env)
    if os.environ.get("TZ") != zone:
        time.tzset()


def reseed() -> None:
    """Fresh random generators, of the libraries that are loaded: children of one zygote must not draw alike."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        # CUDA's generators are made when CUDA is initialised, which is after the fork.
        torch.random.default_generator.manual_seed(int.from_bytes(os.urandom(7), "little"))


def set_threads(threads: int) -> None:
    """Compute threads: their libraries read the environment when they were loaded, with one thread."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)
    if threads > 1 and "numpy" in sys.modules:
        import threadpoolctl

        threadpoolctl.threadpool_limits(threads)


def stamp(argv: Sequence[str], tags: dict[str, str]) -> bool:
    """Write a command and names of ours into the memory that /proc shows, as if we had been started with them.

    ``ps`` shows the command, and what looks for processes by ``NAME=value`` in /proc/<pid>/environ (strays of a dead
    incarnation, leftovers of a run) finds this one and all that it forks. The memory is that of the zygote's start,
    where `ROOM` keeps the place; a library for titles would use up the environment's part.

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
    room = arg_end - arg_start
    ctypes.memmove(arg_start, command[: room - 1].ljust(room, b"\0"), room)
    if not tags:
        return True
    # The placeholder's name stays, so that a later stamp finds its place again.
    label = f"{ROOM_NAME}=".encode()
    environment = ctypes.string_at(env_start, env_end - env_start)
    at = environment.find(label)
    if at < 0 or (at and environment[at - 1]):
        return False
    text = b"".join(b"\0" + f"{name}={value}".encode() for name, value in tags.items())
    if len(text) > len(ROOM):
        return False
    ctypes.memmove(env_start + at + len(label), text.ljust(len(ROOM), b"\0"), len(ROOM))
    return True


def _read_config(path: str) -> None:
    from relax_rt.config.loader import read_resolved

    read_resolved(Path(path))


def _import_target(target: str) -> Any:
    from relax_rt.config.target import load_target

    return load_target(target)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass


def serve(control_fd: int, agent_pid: int) -> Reborn:
    """Be a zygote; the agent must be our parent, and we end with it. Returns in the processes that are forked."""
    procfs.prctl(procfs.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent_pid:
        os._exit(EXIT_ORPHANED)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Zygote(socket.socket(fileno=control_fd)).serve()
    except Reborn as birth:
        # Without the calls that led here: they would keep the zygote's frames alive.
        return birth.with_traceback(None)


def main(argv: Sequence[str]) -> int:
    """Entry point: control descriptor, the agent's pid, a name, and room for the commands of those who are forked."""
    if len(argv) < 3:
        sys.stderr.write("relax_rt.supervision.zygote is started by `relax-rt up`, not by hand\n")
        return 2
    stamp(zygote_argv(sys.executable, argv[2]), {})
    control, agent_pid = int(argv[0]), int(argv[1])
    birth = serve(control, agent_pid)
    while birth.order.what == "zygote":
        birth = serve(birth.begin(), agent_pid)
    birth.begin()
    # By name: what is forked here decides nothing of what it hosts.
    status: int = importlib.import_module(HOST).main()
    return status


def zygote_argv(python: str, name: str) -> list[str]:
    """What a zygote looks like in `ps`."""
    return [python, "-m", "relax_rt.supervision.zygote", name]


if __name__ == "__main__":
    status = 1
    try:
        status = main(sys.argv[1:])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 whatever it was, this process ends here
        traceback.print_exc()
    _flush()
    # No interpreter shutdown: see relax_rt.hosting.host.
    os._exit(status)
