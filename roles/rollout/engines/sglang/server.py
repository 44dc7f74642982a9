"""The SGLang server as a child process: start on a free port, probe, watch, diagnose, and end with all its
processes."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from relax_rt.process import procfs
from relax_rt.roles.rollout.engines.sglang.client import ServerRefused, SglangClient
from relax_rt.roles.rollout.engines.sglang.options import Boot, Option, as_arguments
from relax_rt.transport.rpc.errors import DeadlineExceeded, ProtocolError, RelaxError, Unreachable

PORT_TRIES = 3
ROLE_NAMES = ("RELAX_SLOT", "RELAX_EPOCH")
"""Environment variables by which the agent finds and kills what a dead role left behind."""
PROBE_EVERY_S = 0.1
PROBE_TIMEOUT_S = 5.0
REPORT_EVERY_S = 1.0
EXIT_WAIT_S = 8.0
"""A broken connection comes before the report that the server has ended; its watchdog polls once a second."""
LOG_MIB = 8
TAIL_LINES = 6
TAIL_BYTES = 16 << 10
LINE = 300
PORT_TAKEN = ("address already in use", "port is not available", "is occupied", "port is already in use")


class ServerDied(RelaxError):
    """The server's process ended, or it never came up."""


class ServerSpec(msgspec.Struct, frozen=True):
    """Interpreter, folders and environment of a server.

    Attributes:
        python: the interpreter that has sglang.
        folder: private to the server, on a short path: sockets, temporary files.
        log: its output; rotated.
    """

    python: str
    folder: Path
    log: Path
    environment: dict[str, str]


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class LogPosition(msgspec.Struct, frozen=True):
    """The end of a log at some time: the file by its inode, because it may be rotated later, and its size."""

    inode: int = 0
    size: int = 0


def log_position(log: Path) -> LogPosition:
    """Return where the log ends now."""
    try:
        found = log.stat()
    except OSError:
        return LogPosition()
    return LogPosition(found.st_ino, found.st_size)


BEGINNING = LogPosition()


def read_tail(log: Path, since: LogPosition = BEGINNING) -> list[str]:
    """Return the last lines of a log that are not empty, of those written since."""
    try:
        with log.open("rb") as file:
            now = os.fstat(file.fileno())
            ours = since.size if now.st_ino == since.inode and now.st_size >= since.size else 0
            file.seek(max(ours, now.st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip()[:LINE] for line in text.splitlines() if line.strip()]


_CRASHED = re.compile(r"Subprocess (\S+) \(pid=(\d+)\) crashed with exit code (-?\d+)")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Refused): .+")
_CONSEQUENCES = ("EOFError", "BrokenPipeError", "RuntimeError: Initialization failed")
"""Exceptions of a server's processes after another one has ended: the cause stands before them in the log."""


def find_crash(lines: Sequence[str], pids: Collection[int] = ()) -> str:
    """Return which of a server's processes crashed, as its watchdog logs it (SGLang, utils/watchdog.py); empty: none.

    A process that a signal ends logs nothing itself, and what the others log afterwards is noise.

    Args:
        pids: the server's processes, if they are known: crashes of others are ignored.
    """
    for line in reversed(lines):
        if (found := _CRASHED.search(line)) and (not pids or int(found[2]) in pids):
            code = int(found[3])  # as multiprocessing reports it: negative for a signal
            if code >= 0:
                return f"its {found[1]} ended with exit code {code}"
            names = {int(one): one.name for one in signal.Signals}
            return f"its {found[1]} was killed by {names.get(-code, f'signal {-code}')}"
    return ""


def find_exception(lines: Sequence[str]) -> str:
    """Return the exception that ended a server; empty: none is logged. Its consequences in other processes follow
    it."""
    found = [line for line in lines if _EXCEPTION.match(line)]
    return next((line for line in reversed(found) if not line.startswith(_CONSEQUENCES)), found[-1] if found else "")


def describe(lines: Sequence[str], what: str, *, ended: bool, pids: Collection[int] = ()) -> str:
    """Describe what happened to a server: the cause, `what`, the last lines of its log; each once.

    Args:
        lines: the end of this server's log.
        ended: it has ended, so that an exception in the log is the cause; while it lives that may be an old one.
        pids: see find_crash.
    """
    if crash := find_crash(lines, pids):
        return f"{crash}; {what}"
    cause = find_exception(lines) if ended else ""
    last = [line for line in lines[-TAIL_LINES:] if not cause or cause not in line]
    return "; ".join(filter(None, [cause, what, f"its last lines: {' | '.join(last) or 'none'}"]))


class SglangServer:
    """One server process and the client that talks to it.

    Args:
        options: returns the options of `sglang.launch_server`, from what differs between starts.
        on_exit: called on the loop when it ends unasked.
        on_progress: called every second with how far its start is.
    """

    def __init__(
        self,
        spec: ServerSpec,
        model: Path,
        options: Callable[[Boot], dict[str, Option]],
        on_exit: Callable[[RelaxError], None],
        on_progress: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._spec, self._model, self._options = spec, model, options
        self._on_exit, self._on_progress = on_exit, on_progress
        self._guard: subprocess.Popen[bytes] | None = None
        self._status_pipe = self._lifeline = -1
        self._since, self._pids = LogPosition(), frozenset[int]()
        self._status: int | None = None
        self._booting = False
        self._died = asyncio.Event()
        self.client: SglangClient

    @property
    def pid(self) -> int:
        """Process id of the guard, whose descendant the server is; 0 when there is none."""
        return self._guard.pid if self._guard is not None else 0

    async def start(self, timeout_s: float) -> None:
        """Start it and wait until it answers.

        Raises:
            ServerDied: it ended, with its last lines.
            DeadlineExceeded: it does not answer in time, with its last lines.
        """
        began = time.monotonic()
        self._booting = True

        async def report_progress() -> None:
            while (passed := time.monotonic() - began) < timeout_s:
                self._on_progress(f"starting its SGLang server, {passed:.0f} s of {timeout_s:g} s")
                await asyncio.sleep(REPORT_EVERY_S)

        reporting = asyncio.create_task(report_progress())
        try:
            for attempt in range(PORT_TRIES):
                try:
                    await self._start_once(began + timeout_s, timeout_s)
                    break
                except ServerDied as error:
                    await self.stop()
                    # Another process may have taken the port between our look for a free one and the server's bind.
                    if attempt + 1 == PORT_TRIES or not any(sign in str(error).lower() for sign in PORT_TAKEN):
                        raise
                except BaseException:
                    await self.stop()
                    raise
        finally:
            reporting.cancel()
        self._booting = False

    async def _start_once(self, deadline: float, timeout_s: float) -> None:
        self._spec.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._spec.log.parent.mkdir(parents=True, exist_ok=True)
        # Hexadecimal: the server passes its file on as arguments, and takes a key that begins with a dash for an
        # option.
        key, port = secrets.token_hex(24), free_port()
        boot = Boot(model=self._model, port=port, name=secrets.token_hex(8), secrets=self._spec.folder / "key.yaml")
        with os.fdopen(os.open(boot.secrets, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f'api-key: "{key}"\n')
        self.client = SglangClient(f"http://127.0.0.1:{port}", key)
        self._spawn([self._spec.python, "-m", "sglang.launch_server", *as_arguments(self._options(boot))])
        while True:
            if self._died.is_set():
                raise self._diagnosis()
            try:
                answer = await self.client.call("/model_info", timeout_s=PROBE_TIMEOUT_S)
            except (Unreachable, DeadlineExceeded, ServerRefused):
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        "the start of the SGLang server",
                        why=self._describe(f"no answer within {timeout_s:g} s", ended=False),
                        hint=f"see {self._spec.log}, or raise sglang.boot_timeout_s",
                    ) from None
                await asyncio.sleep(PROBE_EVERY_S)
                continue
            if answer.get("served_model_name") != boot.name:
                raise ProtocolError(f"another server answers at port {port}", why="it took the port before ours did")
            self._pids = frozenset(await asyncio.to_thread(procfs.descendants, self.pid))
            if self._died.is_set():
                raise self._diagnosis()
            return

    def _spawn(self, command: list[str]) -> None:
        reading, self._lifeline = os.pipe()
        self._status_pipe, writing = os.pipe()
        log, theirs = self._spec.log, self._spec.environment
        self._since, self._pids, self._status = log_position(log), frozenset(), None
        guard = [sys.executable, "-m", "relax_rt.process.guard", "--lifeline", str(reading), "--status", str(writing)]
        guard += ["--shm-prefix", "sglang", "--log", str(log), "--log-mib", str(LOG_MIB)]
        # The guard's environment is ours without the role's names; the server's differs by these.
        guard += [f"--set={name}={value}" for name, value in theirs.items() if os.environ.get(name) != value]
        guard += [f"--unset={name}" for name in os.environ if name not in theirs]
        try:
            self._guard = subprocess.Popen(
                [*guard, "--", *command],
                stdin=subprocess.DEVNULL,
                pass_fds=(reading, writing),
                # Out of the role's process group, without its names: the guard outlives the role by the moment that it
                # takes to clean up. Killed with the role it would leave the server's processes to the agent, which
                # they may signal.
                env={name: value for name, value in os.environ.items() if name not in ROLE_NAMES},
                start_new_session=True,
            )
        finally:
            os.close(reading)
            os.close(writing)
        self._died.clear()
        asyncio.get_running_loop().add_reader(self._status_pipe, self._exited)

    def _exited(self) -> None:
        """The guard reports the server's exit status, before it cleans up; or it has ended itself, without a report."""
        said = os.read(self._status_pipe, 16)
        self._status = int(said) if said else None
        self._close_status_pipe()
        self._died.set()
        if not self._booting:
            self._on_exit(self._diagnosis())

    def _close_status_pipe(self) -> None:
        if self._status_pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._status_pipe)
            os.close(self._status_pipe)
            self._status_pipe = -1

    def _diagnosis(self) -> ServerDied:
        status = self._status
        if status is None:
            status = self._guard.wait() if self._guard is not None else 0
        how = f"signal {status - 128}" if status > 128 else f"exit status {status}"
        return ServerDied(
            "the SGLang server ended",
            why=self._describe(how, ended=True),
            hint=f"see {self._spec.log}",
        )

    def _describe(self, what: str, *, ended: bool) -> str:
        return describe(read_tail(self._spec.log, self._since), what, ended=ended, pids=self._pids)

    def crashed(self) -> ServerDied | None:
        """Return the crash of one of its processes, by its log: the server itself ends seconds later."""
        crash = find_crash(read_tail(self._spec.log, self._since), self._pids) if self._pids else ""
        return ServerDied("the SGLang server ended", why=crash, hint=f"see {self._spec.log}") if crash else None

    async def wait_for_exit(self, within_s: float = EXIT_WAIT_S) -> None:
        """Wait until its end is known and `on_exit` was called, at most `within_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._died.wait()

    def explain(self, error: RelaxError) -> RelaxError:
        """Return the error with the cause by this server's part of the log, and the log's path."""
        why = self._describe(error.why, ended=False)
        return type(error)(error.what, why=why, hint=error.hint or f"see {self._spec.log}")

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End it and all its processes, and remove its folder."""
        if hasattr(self, "client"):
            await self.client.close()
        if self._guard is not None:
            self._close_status_pipe()
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
            # A guard that is late is still cleaning up, and nobody else knows what the server has left behind.
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._guard.wait, timeout_s)
            self._guard = None
        await asyncio.to_thread(shutil.rmtree, self._spec.folder, True)
