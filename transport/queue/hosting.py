"""A queue in a folder: its broker, for processes that no supervisor runs, and the way to it."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, TypeVar, cast

import msgspec

from relax_rt.transport.base.journal import SEGMENT_BYTES
from relax_rt.transport.base.watch import node_name
from relax_rt.transport.compat.store.api import StoreApi
from relax_rt.transport.memory.fields import parse_fields
from relax_rt.transport.memory.payload import PayloadServer
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.broker import Broker
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc import rpc
from relax_rt.transport.rpc.address import UNIX_PATH_MAX_BYTES, AddressError, parse_address
from relax_rt.transport.rpc.errors import Corrupt, OutOfSpace, Refused, RelaxError, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.interface import methods_of

RUN_ID = "queue"
"""What peers of a queue without a run greet with; the folder's permissions and keys say who is let in."""
SHM_ROOT = Path("/dev/shm")
SHM_PREFIX = "rlxq-"
BROKER = "broker/0"
OWNER = "folder"
"""File in the memory of a queue that names its folder."""
LOCK, PLACE, KEYS = "lock", "queue.json", "keys.json"
_DISK = "disk"
_REOPEN_S, _REOPEN_MAX_S = 0.2, 5.0

log = logging.getLogger(__name__)

A = TypeVar("A")


class Place(msgspec.Struct, frozen=True):
    """Where a queue is to be found; written to its folder when its broker listens.

    Attributes:
        addresses: of the broker: a unix socket, and a tcp address when it listens to other nodes.
        payloads: of its payload server, empty when it does not listen to other nodes.
        node, pid: of the broker.
        shm_dir: where slabs lie on its node.
    """

    addresses: list[str]
    payloads: str
    node: str
    pid: int
    shm_dir: str


class Keys(msgspec.Struct, frozen=True):
    """Whoever has this file may use the queue from another node."""

    public: str
    secret: str

    def curve(self) -> rpc.CurveKeys:
        """As the message layer takes them."""
        return rpc.CurveKeys(self.public.encode(), self.secret.encode())


def read_keys(path: Path) -> Keys:
    """Raises:
    Corrupt: the file does not hold keys.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Keys)
    except FileNotFoundError as error:
        raise Refused(
            f"keys {path}", why="there is no such file", hint="copy keys.json of the queue's folder"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise Corrupt(f"keys {path}", why=str(error)) from error


def make_keys(folder: Path) -> Keys:
    """The folder's keys, made when they are first needed (0600)."""
    path = folder / KEYS
    if not path.exists():
        made = rpc.CurveKeys.make()
        _write(path, msgspec.json.encode(Keys(made.public.decode(), made.secret.decode())))
    return read_keys(path)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    temporary.rename(path)


class Host:
    """The broker of a queue in a folder.

    Args:
        folder: made if it is not there (0700); holds the journal, and with limits.durable the payloads.
        policy, limits: see LedgerPolicy and QueueLimits.
        listen: a tcp address for other nodes, as ``tcp://10.0.0.1:0``; empty: this node only.
        fsync_every_s: how often the journal is forced to disk.
        segment_bytes: size of the journal from which on a snapshot is made.
    """

    def __init__(
        self,
        folder: Path,
        policy: LedgerPolicy,
        limits: QueueLimits,
        *,
        listen: str = "",
        fsync_every_s: float = 1.0,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.folder, self._policy, self._limits, self._listen = folder.absolute(), policy, limits, listen
        self._fsync_every_s, self._segment_bytes = fsync_every_s, segment_bytes
        self._lock = self._owning = -1
        self._shm_dir: Path | None = None
        self._server: rpc.Server | None = None
        self._curve: rpc.CurveKeys | None = None
        self._payload_server: PayloadServer | None = None
        self.broker: Broker | None = None
        self.place: Place | None = None

    async def open(self) -> Place:
        """Recover the ledger and listen.

        Raises:
            Refused: another process hosts the queue, the policy cannot work, or payloads that lie in memory are to be
                durable (or the other way round).
            Corrupt: the journal is damaged, or written by another version.
        """
        self._policy.check()
        parse_fields(self._policy.fields)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._take_lock()
        try:
            return await self._open()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> Place:
        world, shm_dir = self._memory()
        self._shm_dir = shm_dir
        await asyncio.to_thread(_remove_ownerless)
        shm_dir.mkdir(mode=0o700, exist_ok=True)
        if not self._limits.durable:
            self._own(shm_dir)
        spill_dir, node = self.folder / "spill", node_name()
        payloads = ""
        if self._listen:
            address = parse_address(self._listen)
            if address.scheme != "tcp":
                raise Refused(f"listening on {self._listen}", why="other nodes come by tcp", hint="tcp://host:port")
            self._curve = make_keys(self.folder).curve()
            self._payload_server = PayloadServer(shm_dir, spill_dir, keys=self._curve)
            payloads = await self._payload_server.listen(str(dataclasses.replace(address, port=0)))
        self.broker = Broker(
            self.folder / "journal",
            shm_dir,
            run_id=world,
            policy=self._policy,
            limits=self._limits,
            spill_dir=spill_dir,
            node=node,
            payloads=payloads,
            fsync_every_s=self._fsync_every_s,
            segment_bytes=self._segment_bytes,
        )
        await self.broker.open()
        addresses = await self._answer(self.broker, self.broker.store_desk())
        self.place = Place(addresses, payloads, node, os.getpid(), str(shm_dir))
        _write(self.folder / PLACE, msgspec.json.encode(self.place))
        return self.place

    async def _answer(self, queue: QueueApi, store: StoreApi) -> list[str]:
        """Listen; answers with the addresses."""
        hello = rpc.make_hello(RUN_ID, Incarnation(BROKER, 0))
        self._server = rpc.Server(hello, curve=self._curve, max_connections=16_384)
        self._server.offer(QueueApi, queue)
        self._server.offer(StoreApi, store)
        addresses = [await self._server.listen(f"unix://{socket_path(self.folder)}")]
        if self._listen:
            addresses.append(await self._server.listen(self._listen))
            # Whoever knows the address finds us there again.
            self._listen = addresses[-1]
        return addresses

    def _take_lock(self) -> None:
        self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            self._lock = -1
            raise Refused(
                f"hosting the queue in {self.folder}", why="another process does", hint="connect to it instead"
            ) from error

    def _own(self, shm_dir: Path) -> None:
        """Name our folder in the memory, and keep those away who do not see that folder (from another container)."""
        _write(shm_dir / OWNER, os.fsencode(self.folder))
        fd = os.open(shm_dir / OWNER, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)
        self._disown()
        self._owning = fd

    def _disown(self) -> None:
        if self._owning >= 0:
            os.close(self._owning)
            self._owning = -1

    def _memory(self) -> tuple[str, Path]:
        """Name and directory of the payloads' memory: that of a broker before us, if it is still there."""
        known, durable = self.folder / "memory", self._limits.durable
        before = known.read_text().strip() if known.exists() else ""
        if before and (before == _DISK) != durable:
            raise Refused(
                f"hosting the queue in {self.folder} with durable={durable}",
                why=f"its payloads lie in {'files' if before == _DISK else 'shared memory'}",
                hint="begin in a new folder",
            )
        name = _DISK if durable else before
        if not name or not (durable or (SHM_ROOT / f"{SHM_PREFIX}{name}").is_dir()):
            name = secrets.token_hex(4)
        if name != before:
            _write(known, name.encode())
        return name, self.folder / "payloads" if durable else SHM_ROOT / f"{SHM_PREFIX}{name}"

    async def keep(self) -> NoReturn:
        """Begin again from the journal whenever the broker fails (its disk was full, say), until cancelled.

        Raises:
            Exception: what trying again does not mend (Corrupt: the journal is damaged). Clients are told of it, too.
        """
        (error,) = await asyncio.gather(self._keep(), return_exceptions=True)
        await self._give_up(error)
        raise error

    async def _keep(self) -> NoReturn:
        while True:
            assert self.broker is not None
            # Whatever stopped it: what was acknowledged is in the journal.
            (error,) = await asyncio.gather(self.broker.run(), return_exceptions=True)
            if isinstance(error, Corrupt):
                raise error
            log.error("queue %s: its broker failed and begins again: %s", self.folder, error)
            delay_s = _REOPEN_S
            await asyncio.sleep(delay_s)
            while not await self._opened_again():
                delay_s = min(2 * delay_s, _REOPEN_MAX_S)
                await asyncio.sleep(delay_s)

    async def _opened_again(self) -> bool:
        try:
            await self._stop()
            await self._open()
        # Where it listens it has listened before: what keeps it from that passes.
        except (OutOfSpace, Unreachable, AddressError, OSError) as error:
            log.error("queue %s: its broker cannot begin again: %s", self.folder, error)
            return False
        return True

    async def _give_up(self, cause: BaseException) -> None:
        """Whoever asks from now on is told, and waits no more for a broker that nobody starts again."""
        log.error("queue %s: its broker failed for good: %s", self.folder, cause)
        try:
            await self._stop()
            await self._answer(_refusing(QueueApi, cause), _refusing(StoreApi, cause))
        except (RelaxError, OSError) as error:
            log.error("queue %s: its clients cannot be told so: %s", self.folder, error)

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.close()
        if self.broker is not None:
            await self.broker.close()
        if self._payload_server is not None:
            await self._payload_server.close()
        self._server = self._payload_server = None

    async def close(self, *, keep_memory: bool = False) -> None:
        """Stop. Without keep_memory the payloads in shared memory end as well, unless they are durable."""
        await self._stop()
        self._disown()
        if self._lock < 0:
            return
        if self.place is None:
            # It never began: payloads of a broker before us stay.
            with suppress(OSError):
                if self._shm_dir is not None and {path.name for path in self._shm_dir.iterdir()} <= {OWNER}:
                    shutil.rmtree(self._shm_dir)
        else:
            (self.folder / PLACE).unlink(missing_ok=True)
            if not keep_memory and not self._limits.durable:
                if self.broker is not None and (held := self.broker.held):
                    log.warning(
                        "queue %s ends with %d samples that were not consumed: they are lost (durable keeps them)",
                        self.folder,
                        held,
                    )
                await asyncio.to_thread(shutil.rmtree, self.place.shm_dir, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def _refusing(api: type[A], cause: BaseException) -> A:
    """An implementation that refuses everything."""

    async def refuse(*_: object) -> NoReturn:
        raise Refused(
            "call of the queue", why=f"its broker failed for good: {cause}", hint="mend that, and serve the queue again"
        )

    return cast(A, SimpleNamespace(**dict.fromkeys(methods_of(api), refuse)))


def _remove_ownerless() -> None:
    """Memory of queues whose folder is gone, or has other memory by now: their brokers were killed."""
    for directory in SHM_ROOT.glob(f"{SHM_PREFIX}*"):
        try:
            if directory.stat().st_uid != os.getuid():
                continue
            with (directory / OWNER).open("rb") as owner:
                # Whoever hosts it holds this, also where we do not see its folder.
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folder = Path(os.fsdecode(owner.read()))
                known = (folder / "memory").read_text().strip() if (folder / "memory").exists() else ""
                if f"{SHM_PREFIX}{known}" != directory.name and folder.parent.is_dir():
                    shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            continue


def socket_path(folder: Path) -> Path:
    """The broker's unix socket: in the folder, or where its path is short enough for the kernel."""
    path = folder / "queue.sock"
    if len(os.fsencode(path)) <= UNIX_PATH_MAX_BYTES:
        return path
    digest = hashlib.blake2b(os.fsencode(folder), digest_size=8).hexdigest()
    private = Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")) / f"relax-{os.getuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    found = private.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise Refused(f"sockets in {private}", why="it is not a folder that only you can use", hint="remove it")
    return private / f"{digest}.sock"


def find(folder: Path) -> Place:
    """Where the queue of a folder is.

    Raises:
        Refused: no broker serves it (yet).
        Corrupt: what it left there cannot be read.
    """
    try:
        return msgspec.json.decode((folder / PLACE).read_bytes(), type=Place)
    except msgspec.DecodeError as error:
        raise Corrupt(f"{folder / PLACE}", why=str(error)) from error
    except OSError as error:
        raise Refused(
            f"queue {folder}",
            why="no broker serves it",
            hint=f"start one with `python -m relax_rt.transport.queue {folder} --task …`, or TransferQueue.serve",
        ) from error


def tasks_of(tasks: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Tasks with the fields they need, checked.

    Raises:
        Refused: a task names its fields in another way than as a list of names.
    """
    found: dict[str, tuple[str, ...]] = {}
    for task, fields in tasks.items():
        if isinstance(fields, str) or not isinstance(fields, list | tuple | set | frozenset):
            raise Refused(f"task '{task}'", why=f"its fields are {fields!r}", hint="give a list of field names")
        found[task] = tuple(str(field) for field in fields)
    return found
