"""The connection of this process: its configuration, its event loop in a thread, and the broker that it started."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Coroutine, Mapping
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from relax_rt.transport.base.folder import find
from relax_rt.transport.base.portal import EventLoopThread
from relax_rt.transport.base.process_stat import start_time
from relax_rt.transport.compat.store.api import StoreConfig, StoreSampler
from relax_rt.transport.compat.store.client import StoreClient
from relax_rt.transport.compat.transfer_queue.errors import NotInitialized, NotOffered
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, Unreachable

FOLDER_VARIABLE = "RELAX_TRANSFER_QUEUE"
"""Folder of the queue that every process of a job uses; `init` sets it for processes started later."""
MEMORY_VARIABLE = "RELAX_TRANSFER_QUEUE_BYTES"
"""Shared memory that one process may put into; default: half of what is free."""
EXPECTED_VARIABLE = "TQ_PRE_ALLOC_SAMPLE_NUM"
DEFAULTS: dict[str, Any] = {
    "metrics": {"enabled": False, "port": 0},
    "controller": {"sampler": "SequentialSampler", "polling_mode": False, "zmq_info": None},
    "backend": {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {"total_storage_size": None, "num_data_storage_units": 2, "zmq_info": None},
    },
    "relax": {"folder": None, "capacity_bytes": None, "spill_bytes": 0},
}


class AttributeDict(dict[str, Any]):
    """A dict whose keys are attributes too, for where OmegaConf is not installed."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def _as_dicts(conf: Any) -> Any:
    """OmegaConf's and other mappings as dicts, without a look at OmegaConf where it is not used."""
    if isinstance(conf, Mapping) or hasattr(conf, "items"):
        return {str(key): _as_dicts(value) for key, value in conf.items()}
    return conf


def _merge(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = deepcopy(base)
    for key, value in more.items():
        known = both.get(key)
        both[key] = _merge(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return both


def merged_config(conf: Any) -> dict[str, Any]:
    """The user's configuration over the defaults.

    Raises:
        NotOffered: it asks for a storage backend that is not here, or for a metrics server.
    """
    full = _merge(DEFAULTS, _as_dicts(conf) if conf is not None else {})
    backend = full["backend"]["storage_backend"]
    if backend != "SimpleStorage":
        raise NotOffered(
            f"storage backend {backend}", why="payloads lie in shared memory here", hint="leave storage_backend out"
        )
    if full["metrics"].get("enabled"):
        raise NotOffered("metrics.enabled", why="there is no metrics server here", hint="leave metrics out")
    return full


def user_config(full: dict[str, Any]) -> Any:
    """The merged configuration in the form in which users know it: a DictConfig where OmegaConf is installed."""
    if find_spec("omegaconf") is None:
        return _attributes(full)
    omega = import_module("omegaconf").OmegaConf
    return omega.merge(omega.create({}, flags={"allow_objects": True}), full)


def _attributes(value: Any) -> Any:
    return AttributeDict({key: _attributes(item) for key, item in value.items()}) if isinstance(value, dict) else value


def store_config(full: dict[str, Any]) -> StoreConfig:
    """The sampler as the broker takes it.

    Raises:
        ValueError, TypeError, NotOffered: the sampler is none of those offered.
    """
    size = full["backend"]["SimpleStorage"].get("total_storage_size")
    return StoreConfig(
        spec_of(full["controller"]["sampler"]),
        expected=max(int(os.environ.get(EXPECTED_VARIABLE, "1")), 0),
        polling=bool(full["controller"]["polling_mode"]),
        max_rows=int(size or 0),
    )


def folder_of(full: dict[str, Any] | None) -> Path | None:
    """The folder that the configuration or the environment names."""
    named = (full or DEFAULTS)["relax"].get("folder") or os.environ.get(FOLDER_VARIABLE)
    return Path(named).absolute() if named else None


def capacity_bytes(full: dict[str, Any] | None) -> int:
    """Shared memory that this process may put into.

    Raises:
        Refused: it is not a positive number.
    """
    given = (full or DEFAULTS)["relax"].get("capacity_bytes") or os.environ.get(MEMORY_VARIABLE)
    if given:
        if not str(given).isdigit() or int(given) < 1 << 20:
            raise Refused(f"capacity of {given!r} bytes", why="it is at least 1 MiB, a whole number of bytes")
        return int(given)
    memory = os.statvfs("/dev/shm")
    return max(memory.f_bavail * memory.f_frsize // 2, 1 << 20)


# --- samplers


class BaseSampler:
    """Base of the samplers. The user's own are not offered: the broker runs no code of its callers."""

    kind = ""
    n_samples_per_prompt = dp_size = 1


class SequentialSampler(BaseSampler):
    """The oldest samples first, each once."""

    kind = "sequential"


class RankAwareSampler(BaseSampler):
    """Each batch of a data-parallel rank is chosen once; all that ask with the same rank and index get the same one."""

    kind = "ranked"


class GRPOGroupNSampler(BaseSampler):
    """Whole groups of `n_samples_per_prompt` samples that were put one after the other."""

    kind = "groups"

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        if n_samples_per_prompt <= 0:
            raise ValueError(f"n_samples_per_prompt must be positive, got {n_samples_per_prompt}")
        self.n_samples_per_prompt = n_samples_per_prompt


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Whole groups, dealt to `dp_size` data-parallel ranks so that the sums of the tag ``total_lengths`` are alike.

    A rank asks for its own share only.
    """

    kind = "balanced"

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        if dp_size <= 0:
            raise ValueError(f"dp_size must be positive, got {dp_size}")
        self.dp_size = dp_size


_BY_NAME: dict[str, type[BaseSampler]] = {
    kind.__name__: kind for kind in (SequentialSampler, RankAwareSampler, GRPOGroupNSampler, SeqlenBalancedSampler)
}


def spec_of(sampler: Any) -> StoreSampler:
    """The broker's form of a sampler, its class, or its name.

    Raises:
        ValueError: there is no sampler of this name.
        TypeError: it is neither of these.
        NotOffered: it is a sampler of the user's own.
    """
    if isinstance(sampler, str):
        if sampler not in _BY_NAME:
            raise ValueError(f"Could not find sampler {sampler}")
        sampler = _BY_NAME[sampler]
    if isinstance(sampler, type) and issubclass(sampler, BaseSampler):
        sampler = sampler()
    if not isinstance(sampler, BaseSampler):
        raise TypeError(f"sampler {sampler!r} is neither a sampler nor the class or name of one")
    if type(sampler) not in _BY_NAME.values():
        raise NotOffered(
            f"sampler {type(sampler).__name__}",
            why="samplers of one's own are not offered",
            hint="SequentialSampler, RankAwareSampler, GRPOGroupNSampler and SeqlenBalancedSampler are",
        )
    return StoreSampler(sampler.kind, sampler.n_samples_per_prompt, sampler.dp_size)


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
        self._command = [sys.executable, "-m", "relax_rt.transport.compat.store.service", str(folder)]
        if spill_bytes:
            self._command += ["--capacity-bytes", str(capacity_bytes(None)), "--spill-bytes", str(spill_bytes)]
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)
        threading.Thread(target=self._restart_when_killed, name="transfer-queue-broker", daemon=True).start()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def _restart_when_killed(self) -> None:
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
                self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)

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
        self._loop = EventLoopThread("transfer-queue")
        try:
            self.store, self.settings = self.run(self._connect(capacity_bytes, settings))
        except BaseException:
            self._loop.stop()
            raise

    async def _connect(self, capacity_bytes: int, settings: StoreConfig | None) -> tuple[StoreClient, StoreConfig]:
        name = f"client-{self.pid}-{uuid.uuid4().hex[:8]}/0"
        store = await StoreClient.connect(self.folder, name, capacity_bytes=capacity_bytes)
        try:
            if settings is not None:
                return store, await store.configure(settings)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + START_S
            while (known := await store.api.config()) is None:
                if loop.time() > deadline:
                    raise DeadlineExceeded(f"queue {self.folder}", why="whoever started it has not configured it")
                await asyncio.sleep(POLL_S)
            return store, known
        except BaseException:
            await store.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the connection's loop, and block until it is done."""
        return self._loop.run(work, math.inf)

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the connection's loop, awaited from any other loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop.loop))

    def close(self) -> None:
        """Leave the queue; arrays that were read stay valid."""
        with contextlib.suppress(Unreachable, DeadlineExceeded):
            self.run(self.store.close())
        self._loop.stop()


class _ProcessState:
    """The connection and the broker of this process."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.broker: BrokerProcess | None = None
        self.broker_pid = 0
        self.own_folder: Path | None = None
        self.lock = threading.Lock()


_process = _ProcessState()


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
            folder = folder or folder_of(None)
            if folder is None or not is_served(folder):
                raise NotInitialized(
                    "the transfer queue",
                    why="no queue is running here" if folder is None else f"no broker serves {folder}",
                    hint=f"call init() first, or set {FOLDER_VARIABLE} to the folder of one that runs",
                )
            connection = _process.connection = Connection(folder, capacity_bytes(None))
    return connection


def start(full: dict[str, Any]) -> Connection:
    """Connect to the queue that the configuration or the environment names; start it if nobody has.

    Raises:
        Refused: the broker cannot serve the folder.
    """
    connection = _mine()
    if connection is not None:
        return connection
    settings = store_config(full)
    with _process.lock:
        folder = folder_of(full)
        if folder is None:
            folder = _process.own_folder = Path(tempfile.mkdtemp(prefix="relax-tq-"))
        mine = not is_served(folder)
        if mine:
            _process.broker = BrokerProcess(folder, int(full["relax"].get("spill_bytes") or 0))
            _process.broker_pid = os.getpid()
            deadline = time.monotonic() + START_S
            while not is_served(folder):
                if _process.broker.ended and not is_served(folder):
                    why, hint = "its broker ended at once", "its error is on standard error"
                    raise Refused(f"queue {folder}", why=why, hint=hint)
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"queue {folder}", why=f"its broker was not there after {START_S} s")
                time.sleep(POLL_S)
        _process.connection = Connection(folder, capacity_bytes(full), settings if mine else None)
        # Processes that this one starts find the queue by it.
        os.environ[FOLDER_VARIABLE] = str(folder)
    return _process.connection


def stop() -> None:
    """Leave the queue; end it if this process started it."""
    connection, _process.connection = _mine(), None
    if connection is not None:
        connection.close()
        if os.environ.get(FOLDER_VARIABLE) == str(connection.folder) and _process.broker is not None:
            del os.environ[FOLDER_VARIABLE]
    broker, _process.broker = _process.broker, None
    if broker is not None and _process.broker_pid == os.getpid():
        broker.stop()
        if _process.own_folder is not None:
            shutil.rmtree(_process.own_folder, ignore_errors=True)
    _process.own_folder = None


atexit.register(stop)
