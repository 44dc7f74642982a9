"""This process's connection: an event loop in a thread of its own, and the broker's process if this one started it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from relax_rt.transport.base.folder import find
from relax_rt.transport.base.process_stat import start_time
from relax_rt.transport.compat.store.api import StoreConfig
from relax_rt.transport.compat.store.client import StoreClient
from relax_rt.transport.compat.transfer_queue import config
from relax_rt.transport.compat.transfer_queue.errors import NotInitialized
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, Unreachable

START_S = 60.0
STOP_S = 15.0
RESTARTS = 5
POLL_S = 0.02

_log = logging.getLogger(__name__)
T = TypeVar("T")


def is_served(folder: Path) -> bool:
    """Whether a living broker serves the folder."""
    try:
        return start_time(find(folder).pid) > 0
    except Refused:
        return False


class BrokerProcess:
    """The broker, in a process that ends with this one, and is started again if it dies before."""

    def __init__(self, folder: Path, spill_bytes: int) -> None:
        self._command = [sys.executable, "-m", "relax_rt.transport.compat.store", str(folder)]
        if spill_bytes:
            self._command += ["--capacity-bytes", str(config.capacity_bytes(None)), "--spill-bytes", str(spill_bytes)]
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process = self._start()
        threading.Thread(target=self._keep, name="transfer-queue-broker", daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE)

    @property
    def ended(self) -> bool:
        """Whether the process has exited."""
        return self._process.poll() is not None

    def _keep(self) -> None:
        for restart in range(RESTARTS + 1):
            code = self._process.wait()
            # An error of its own (1) comes again; a kill or a broken journal disk is worth another start.
            if self._stopping.is_set() or code in (0, 1) or restart == RESTARTS:
                return
            _log.warning("the broker ended with %d; it is started again from its journal", code)
            self._stopping.wait(0.1 * 2**restart)
            with self._lock:
                if self._stopping.is_set():
                    return
                self._close_pipe()
                self._process = self._start()

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def stop(self) -> None:
        """Terminate it; kill it if it does not exit in time."""
        self._stopping.set()
        with self._lock:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._close_pipe()


class Connection:
    """A client of the store, for blocking code and for any event loop.

    Args:
        folder: of the queue; a broker serves it.
        capacity_bytes: see StoreClient.
        settings: what to configure the store with; None: somebody else does.
    """

    def __init__(self, folder: Path, capacity_bytes: int, settings: StoreConfig | None = None) -> None:
        self.pid, self.folder = os.getpid(), folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="transfer-queue", daemon=True)
        self._thread.start()
        try:
            self.store, self.settings = self.run(self._connect(capacity_bytes, settings))
        except BaseException:
            self._end_loop()
            raise

    async def _connect(self, capacity_bytes: int, settings: StoreConfig | None) -> tuple[StoreClient, StoreConfig]:
        name = f"client-{self.pid}-{uuid.uuid4().hex[:8]}/0"
        store = await StoreClient.connect(self.folder, name, capacity_bytes=capacity_bytes)
        try:
            if settings is not None:
                return store, await store.configure(settings)
            deadline = self._loop.time() + START_S
            while (known := await store.config()) is None:
                if self._loop.time() > deadline:
                    raise DeadlineExceeded(f"queue {self.folder}", why="whoever started it has not configured it")
                await asyncio.sleep(POLL_S)
            return store, known
        except BaseException:
            await store.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the connection's loop, and block until it is done."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the connection's loop, awaited from any other loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """Leave the queue; arrays that were read stay good."""
        with contextlib.suppress(Unreachable, DeadlineExceeded):
            self.run(self.store.close())
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Process:
    """The connection and the broker of this process."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.broker: BrokerProcess | None = None
        self.broker_pid = 0
        self.own_folder: Path | None = None
        self.lock = threading.Lock()


_process = _Process()


def _mine() -> Connection | None:
    """The connection, unless it was inherited by a fork."""
    known = _process.connection
    if known is not None and known.pid != os.getpid():
        _process.connection, _process.lock = None, threading.Lock()
    return _process.connection


def current(folder: Path | None = None) -> Connection:
    """The connection of this process; made when there is a queue to connect to.

    Raises:
        NotInitialized: there is none.
    """
    connection = _mine()
    if connection is not None:
        return connection
    with _process.lock:
        if (connection := _process.connection) is None:
            folder = folder or config.folder_of(None)
            if folder is None or not is_served(folder):
                raise NotInitialized(
                    "the transfer queue",
                    why="no queue is running here" if folder is None else f"no broker serves {folder}",
                    hint=f"call init() first, or set {config.FOLDER_VARIABLE} to the folder of one that runs",
                )
            connection = _process.connection = Connection(folder, config.capacity_bytes(None))
    return connection


def start(full: dict[str, Any]) -> Connection:
    """Connect to the queue that the configuration or the environment names; start it if nobody has.

    Raises:
        Refused: the broker cannot serve the folder.
    """
    connection = _mine()
    if connection is not None:
        return connection
    settings = config.store_config(full)
    with _process.lock:
        folder = config.folder_of(full)
        if folder is None:
            folder = _process.own_folder = Path(tempfile.mkdtemp(prefix="relax-tq-"))
        mine = not is_served(folder)
        if mine:
            _process.broker = BrokerProcess(folder, int(full["relax"].get("spill_bytes") or 0))
            _process.broker_pid = os.getpid()
            _await_served(folder, _process.broker)
        _process.connection = Connection(folder, config.capacity_bytes(full), settings if mine else None)
        # Processes that this one starts find the queue by it.
        os.environ[config.FOLDER_VARIABLE] = str(folder)
    return _process.connection


def _await_served(folder: Path, broker: BrokerProcess) -> None:
    deadline = time.monotonic() + START_S
    while not is_served(folder):
        if broker.ended and not is_served(folder):
            raise Refused(f"queue {folder}", why="its broker ended at once", hint="its error is on standard error")
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"queue {folder}", why=f"its broker was not there after {START_S} s")
        time.sleep(POLL_S)


def stop() -> None:
    """Leave the queue; end it if this process started it."""
    connection, _process.connection = _mine(), None
    if connection is not None:
        connection.close()
        if os.environ.get(config.FOLDER_VARIABLE) == str(connection.folder) and _process.broker is not None:
            del os.environ[config.FOLDER_VARIABLE]
    broker, _process.broker = _process.broker, None
    if broker is not None and _process.broker_pid == os.getpid():
        broker.stop()
        if _process.own_folder is not None:
            shutil.rmtree(_process.own_folder, ignore_errors=True)
    _process.own_folder = None


atexit.register(stop)
