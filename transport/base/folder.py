"""A folder that one broker serves: its lock, the shared memory that belongs to it, and where its clients connect.

The queue's host and the store's service serve such a folder; their clients look into it with `find`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

import msgspec

from relax_rt.transport.rpc.channel import UNIX_PATH_MAX_BYTES
from relax_rt.transport.rpc.errors import Corrupt, Refused

RUN_ID = "queue"
"""Run id in the greeting of peers that belong to no run; the folder's permissions and keys decide who may connect."""
SHM_ROOT = Path("/dev/shm")
SHM_PREFIX = "rlxq-"
OWNER = "folder"
"""File in the shared memory of a folder that names the folder."""
LOCK, LOCATION, MEMORY = "lock", "queue.json", "memory"
_DISK = "disk"


class BrokerLocation(msgspec.Struct, frozen=True):
    """Where a folder's broker is; written to the folder when it listens.

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


class ServedFolder:
    """The broker's side of a folder.

    Args:
        path: made if it is not there (0700).
        durable: payloads lie in files of the folder instead of shared memory.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path, self._durable = path.absolute(), durable
        self._lock = self._owner = -1
        self._shm_dir: Path | None = None
        self._published = False

    def lock(self) -> None:
        """Make the folder and become the only one to serve it.

        Raises:
            Refused: another process does.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            self._lock = -1
            raise Refused(
                f"hosting the queue in {self.path}", why="another process does", hint="connect to it instead"
            ) from error

    def open_memory(self) -> tuple[str, Path]:
        """Name and directory of the payloads' memory: that of the broker before, if it is still there, else new.

        Raises:
            Refused: the folder's payloads lie in memory and are to be durable, or the other way round.
        """
        known = self.path / MEMORY
        before = known.read_text().strip() if known.exists() else ""
        if before and (before == _DISK) != self._durable:
            raise Refused(
                f"hosting the queue in {self.path} with durable={self._durable}",
                why=f"its payloads lie in {'files' if before == _DISK else 'shared memory'}",
                hint="begin in a new folder",
            )
        name = _DISK if self._durable else before
        if not name or not (self._durable or (SHM_ROOT / f"{SHM_PREFIX}{name}").is_dir()):
            name = secrets.token_hex(4)
        if name != before:
            write_private(known, name.encode())
        self._shm_dir = self.path / "payloads" if self._durable else SHM_ROOT / f"{SHM_PREFIX}{name}"
        self._shm_dir.mkdir(mode=0o700, exist_ok=True)
        if not self._durable:
            # The lock on this file keeps processes from removing the memory that do not see the folder it names, as
            # those of another container do.
            write_private(self._shm_dir / OWNER, os.fsencode(self.path))
            fd = os.open(self._shm_dir / OWNER, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_SH)
            self._close_owner()
            self._owner = fd
        return name, self._shm_dir

    def publish(self, location: BrokerLocation) -> None:
        """Let clients find the broker."""
        write_private(self.path / LOCATION, msgspec.json.encode(location))
        self._published = True

    def release(self, *, keep_memory: bool = False) -> None:
        """Stop serving; payloads in shared memory end as well, unless they are to be kept."""
        self._close_owner()
        if self._lock < 0:
            return
        if self._published:
            (self.path / LOCATION).unlink(missing_ok=True)
            if not keep_memory and not self._durable and self._shm_dir is not None:
                shutil.rmtree(self._shm_dir, ignore_errors=True)
        else:
            # The broker never listened: the payloads of the one before it stay.
            with suppress(OSError):
                if self._shm_dir is not None and {path.name for path in self._shm_dir.iterdir()} <= {OWNER}:
                    shutil.rmtree(self._shm_dir)
        os.close(self._lock)
        self._lock = -1

    def _close_owner(self) -> None:
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1


def remove_abandoned_memory() -> None:
    """Remove the memory of folders that are gone, or that have other memory by now: their brokers were killed."""
    for directory in SHM_ROOT.glob(f"{SHM_PREFIX}*"):
        try:
            if directory.stat().st_uid != os.getuid():
                continue
            with (directory / OWNER).open("rb") as owner:
                # A broker holds this lock, also where we do not see its folder.
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folder = Path(os.fsdecode(owner.read()))
                known = (folder / MEMORY).read_text().strip() if (folder / MEMORY).exists() else ""
                if f"{SHM_PREFIX}{known}" != directory.name and folder.parent.is_dir():
                    shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            continue


def find(folder: Path, hint: str = "") -> BrokerLocation:
    """Where the broker of a folder is.

    Args:
        hint: how to start one.

    Raises:
        Refused: no broker serves it (yet).
        Corrupt: what it left there cannot be read.
    """
    try:
        return msgspec.json.decode((folder / LOCATION).read_bytes(), type=BrokerLocation)
    except msgspec.DecodeError as error:
        raise Corrupt(f"{folder / LOCATION}", why=str(error)) from error
    except OSError as error:
        raise Refused(f"queue {folder}", why="no broker serves it", hint=hint) from error


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


def write_private(path: Path, data: bytes) -> None:
    """Replace a file as a whole (0600)."""
    temporary = path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    temporary.rename(path)
