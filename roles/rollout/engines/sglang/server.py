"""The server as a supervised child: started on a port of its own, probed, watched, ended with all that it started."""

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
from relax_rt.roles.rollout.engines.sglang.client import Client, ServerRefused
from relax_rt.roles.rollout.engines.sglang.options import Boot, Option, as_arguments
from relax_rt.transport.rpc.errors import DeadlineExceeded, ProtocolError, RelaxError, Unreachable

PORT_TRIES = 3
ROLE_NAMES = ("RELAX_SLOT", "RELAX_EPOCH")
"""By these in its environment the agent knows what a dead role left behind, and kills it."""
PROBE_EVERY_S = 0.1
PROBE_TIMEOUT_S = 5.0
TELL_EVERY_S = 1.0
END_TOLD_S = 8.0
"""A broken connection comes before the word that the server has ended; its watchdog looks once a second."""
LOG_MIB = 8
TAIL_LINES = 6
TAIL_BYTES = 16 << 10
LINE = 300
PORT_TAKEN = ("address already in use", "port is not available", "is occupied", "port is already in use")


class ServerDied(RelaxError):
    """The server's process ended, or it never came up."""


class Place(msgspec.Struct, frozen=True):
    """Where a server lives on this machine.

    Attributes:
        python: the interpreter that has sglang.
        folder: private to it, on a short path: sockets, temporary files.
        log: its output; rotated.
    """

    python: str
    folder: Path
    log: Path
    environment: dict[str, str]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Mark(msgspec.Struct, frozen=True):
    """How far a log was written at a moment: the file by its inode, for it may be rotated since, and its size."""

    inode: int = 0
    size: int = 0


def mark_of(log: Path) -> Mark:
    """Where the log ends now."""
    try:
        found = log.stat()
    except OSError:
        return Mark()
    return Mark(found.st_ino, found.st_size)


BEGINNING = Mark()


def read_tail(log: Path, since: Mark = BEGINNING) -> list[str]:
    """The lines at the end of a log that say something, of those that were written since."""
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
"""What a server's processes say when another of them has ended: the reason stands before it."""


def crash_in(lines: Sequence[str], pids: Collection[int] = ()) -> str:
    """Which of a server's processes was ended, by its watchdog's word (SGLang, utils/watchdog.py); empty: none.

    One that a signal ends says nothing itself, and what the others say of it afterwards is noise.

    Args:
        pids: the server's processes, where they are known: what is said of others is not of this server.
    """
    for line in reversed(lines):
        if (found := _CRASHED.search(line)) and (not pids or int(found[2]) in pids):
            return f"its {found[1]} {_how(int(found[3]))}"
    return ""


def exception_in(lines: Sequence[str]) -> str:
    """The exception that ended a server; empty: none is told. Processes that miss the first tell theirs after it."""
    said = [line for line in lines if _EXCEPTION.match(line)]
    return next((line for line in reversed(said) if not line.startswith(_CONSEQUENCES)), said[-1] if said else "")


def _how(code: int) -> str:
    """The end of a process, by its exit code as multiprocessing gives it."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = {int(one): one.name for one in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"


def told_by(lines: Sequence[str], what: str, *, ended: bool, pids: Collection[int] = ()) -> str:
    """What has come over a server: the cause, `what`, the last lines of its log; each once.

    Args:
        lines: the end of what this server has said.
        ended: it is over, so that an exception in the log is the cause; while it lives it may be of long ago.
        pids: as of crash_in.
    """
    if crash := crash_in(lines, pids):
        return f"{crash}; {what}"
    cause = exception_in(lines) if ended else ""
    last = [line for line in lines[-TAIL_LINES:] if not cause or cause not in line]
    return "; ".join(filter(None, [cause, what, f"its last lines: {' | '.join(last) or 'none'}"]))


class Server:
    """One server process and the client that talks to it.

    Args:
        options: of `sglang.launch_server`, for what differs from start to start.
        on_exit: called on the loop when it ends without having been asked to.
        tell: told how far its start is, every second.
    """

    def __init__(
        self,
        place: Place,
        model: Path,
        options: Callable[[Boot], dict[str, Option]],
        on_exit: Callable[[RelaxError], None],
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._place, self._model, self._options, self._on_exit, self._tell = place, model, options, on_exit, tell
        self._guard: subprocess.Popen[bytes] | None = None
        self._told = self._lifeline = -1
        self._since, self._pids = Mark(), frozenset[int]()
        self._status: int | None = None
        self._booting = False
        self._died = asyncio.Event()
        self.client: Client

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
        telling = asyncio.create_task(self._tell_of_start(began, timeout_s))
        try:
            await self._start_within(began + timeout_s, timeout_s)
        finally:
            telling.cancel()
        self._booting = False

    async def _tell_of_start(self, began: float, timeout_s: float) -> None:
        while (passed := time.monotonic() - began) < timeout_s:
            self._tell(f"starting its SGLang server, {passed:.0f} s of {timeout_s:g} s")
            await asyncio.sleep(TELL_EVERY_S)

    async def _start_within(self, deadline: float, timeout_s: float) -> None:
        for attempt in range(PORT_TRIES):
            try:
                await self._start_once(deadline, timeout_s)
                break
            except ServerDied as error:
                await self.stop()
                # Between our look for a free port and its bind another may have taken it.
                if attempt + 1 == PORT_TRIES or not any(sign in str(error).lower() for sign in PORT_TAKEN):
                    raise
            except BaseException:
                await self.stop()
                raise

    async def _start_once(self, deadline: float, timeout_s: float) -> None:
        self._place.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._place.log.parent.mkdir(parents=True, exist_ok=True)
        # Hexadecimal: the server hands its file on as arguments, and takes a key that begins with a dash for an option.
        key, port = secrets.token_hex(24), free_port()
        boot = Boot(model=self._model, port=port, name=secrets.token_hex(8), secrets=self._place.folder / "key.yaml")
        self._write_key(boot.secrets, key)
        self.client = Client(f"http://127.0.0.1:{port}", key)
        self._spawn([self._place.python, "-m", "sglang.launch_server", *as_arguments(self._options(boot))])
        while True:
            if self._died.is_set():
                raise self._diagnosis()
            try:
                answer = await self.client.call("/model_info", timeout_s=PROBE_TIMEOUT_S)
            except (Unreachable, DeadlineExceeded, ServerRefused):
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        "the start of the SGLang server",
                        why=self._told_by(f"no answer within {timeout_s:g} s", ended=False),
                        hint=f"see {self._place.log}, or raise sglang.boot_timeout_s",
                    ) from None
                await asyncio.sleep(PROBE_EVERY_S)
                continue
            if answer.get("served_model_name") != boot.name:
                raise ProtocolError(f"another server answers at port {port}", why="it took the port before ours did")
            self._pids = frozenset(await asyncio.to_thread(procfs.descendants, self.pid))
            if self._died.is_set():
                raise self._diagnosis()
            return

    @staticmethod
    def _write_key(path: Path, key: str) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f'api-key: "{key}"\n')

    def _spawn(self, command: list[str]) -> None:
        reading, self._lifeline = os.pipe()
        self._told, telling = os.pipe()
        self._since, self._pids, self._status = mark_of(self._place.log), frozenset(), None
        try:
            guard = [
                sys.executable,
                "-m",
                "relax_rt.process.guard",
                "--lifeline",
                str(reading),
            ]
            log = ["--log", str(self._place.log), "--log-mib", str(LOG_MIB)]
            self._guard = subprocess.Popen(
                [*guard, "--status", str(telling), "--shm-prefix", "sglang", *log, *self._changes(), "--", *command],
                stdin=subprocess.DEVNULL,
                pass_fds=(reading, telling),
                # Out of the role's group, without its names: the guard outlives the role by the moment that it takes to
                # clean up. Shot with the role it would leave the server's processes to the agent, whom they may signal.
                env={name: value for name, value in os.environ.items() if name not in ROLE_NAMES},
                start_new_session=True,
            )
        finally:
            os.close(reading)
            os.close(telling)
        self._died.clear()
        asyncio.get_running_loop().add_reader(self._told, self._exited)

    def _changes(self) -> list[str]:
        """How the server's environment differs from ours; the guard's is ours but for the role's names."""
        theirs = self._place.environment
        changed = [f"--set={name}={value}" for name, value in theirs.items() if os.environ.get(name) != value]
        return [*changed, *(f"--unset={name}" for name in os.environ if name not in theirs)]

    def _exited(self) -> None:
        """The guard has told how the server ended, before it cleans up; or it has ended itself, with nothing told."""
        said = os.read(self._told, 16)
        self._status = int(said) if said else None
        self._listen_no_more()
        self._died.set()
        if not self._booting:
            self._on_exit(self._diagnosis())

    def _listen_no_more(self) -> None:
        if self._told >= 0:
            asyncio.get_running_loop().remove_reader(self._told)
            os.close(self._told)
            self._told = -1

    def _diagnosis(self) -> ServerDied:
        status = self._status
        if status is None:
            status = self._guard.wait() if self._guard is not None else 0
        how = f"signal {status - 128}" if status > 128 else f"exit status {status}"
        return ServerDied(
            "the SGLang server ended",
            why=self._told_by(how, ended=True),
            hint=f"see {self._place.log}",
        )

    def _told_by(self, what: str, *, ended: bool) -> str:
        return told_by(read_tail(self._place.log, self._since), what, ended=ended, pids=self._pids)

    def crashed(self) -> ServerDied | None:
        """The end of one of its processes, by its log: the server itself goes down behind it, which takes seconds."""
        crash = crash_in(read_tail(self._place.log, self._since), self._pids) if self._pids else ""
        return ServerDied("the SGLang server ended", why=crash, hint=f"see {self._place.log}") if crash else None

    async def end_told(self, within_s: float = END_TOLD_S) -> None:
        """Wait until its end is known and `on_exit` was called; not longer than that where it has not ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._died.wait()

    def explain(self, error: RelaxError) -> RelaxError:
        """The same error with what this server's part of the log says of the cause, and where the log is."""
        why = self._told_by(error.why, ended=False)
        return type(error)(error.what, why=why, hint=error.hint or f"see {self._place.log}")

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End it and all its processes; its folder is removed."""
        if hasattr(self, "client"):
            await self.client.close()
        if self._guard is not None:
            self._listen_no_more()
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
            await asyncio.to_thread(self._reap, self._guard, timeout_s)
            self._guard = None
        await asyncio.to_thread(shutil.rmtree, self._place.folder, True)

    @staticmethod
    def _reap(guard: subprocess.Popen[bytes], timeout_s: float) -> None:
        # A guard that is late is still at its work, and nobody else knows what the server has left behind.
        with suppress(subprocess.TimeoutExpired):
            guard.wait(timeout_s)
