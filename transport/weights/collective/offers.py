"""Which engines of a node a broadcast serves, and what became of it: files beside the node's weight stage.

An engine keeps memory to receive into and says so in an offer, which stands as long as its process. Whoever commits a
version takes the memories that nobody reads from, and writes down whom it serves, then how that ended. So an engine
that hears of the version knows whether it comes by a broadcast: one whose offer came later, whose memory was being
read, or that was lost is not among them, and takes the version from the stage. Nobody waits for what will not come.

Locks say who is at a memory: exclusive while a broadcast writes it, shared while its engine reads. The kernel drops
those of a dead process. Whatever lies there is held against the version's digests while it is copied out.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from relax_rt.transport.base.process_stat import start_time
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Gone
from relax_rt.transport.weights.collective.communicator import Memory
from relax_rt.transport.weights.manifest import Manifest

GRACE_S = 2.0
"""Beyond a broadcast's own time: for its sender to say how it ended."""
LOOK_EVERY_S = 0.005
_UNREADABLE = (OSError, msgspec.MsgspecError, UnicodeDecodeError)


class Offer(msgspec.Struct, frozen=True):
    """Memory of the engine in a slot, for whole versions of memory.nbytes.

    Attributes:
        pid, started: the engine's process.
        device: what CUDA_VISIBLE_DEVICES of a rank on its device must be; empty: nothing.
    """

    slot: str
    epoch: int
    memory: Memory
    pid: int
    started: int
    device: str = ""

    @property
    def alive(self) -> bool:
        """Whether the engine's process is there."""
        return start_time(self.pid) == self.started


class Served(msgspec.Struct, frozen=True):
    """Whom the broadcast of a version serves.

    Attributes:
        members: epochs by slot.
        pid, started: the sender's process.
        timeout_s: it is over after that time at the latest.
        lost: why, by slot; where it is over, all others have the version in their memories.
    """

    version: int
    digest: str
    members: dict[str, int]
    pid: int
    started: int
    timeout_s: float
    over: bool = False
    lost: dict[str, str] = {}


class Place(Protocol):
    """Memory of this process that a rank can receive into."""

    memory: Memory

    def copy_into(self, manifest: Manifest, into: memoryview) -> None:
        """Copy the version that lies there and verify the copy. Corrupt: it is another, or damaged."""


class MakePlace(Protocol):
    """Makes a place of a size; `path` is a name in shared memory that it may use. Raises OutOfSpace."""

    def __call__(self, path: Path, nbytes: int) -> Place: ...


def _stem(folder: Path, slot: str, epoch: int) -> Path:
    return folder / f"{slot.replace('/', '~')}-{epoch:08d}"


def _put(path: Path, what: Offer | Served) -> None:
    temporary = path.with_suffix(".tmp")
    # For this user alone: it may hold the handle of device memory.
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.msgpack.encode(what))
    temporary.rename(path)


def _forget(stem: Path) -> None:
    """Remove all files of an engine; memory that is still mapped stays with who has it."""
    for path in stem.parent.glob(f"{stem.name}.*"):
        path.unlink(missing_ok=True)


def _lock(path: Path, kind: int) -> int:
    """A descriptor that holds the lock; -1 where another process is at it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    return descriptor


class Receiver:
    """An engine's side. Its calls block; make them in one thread at a time.

    Args:
        folder: of the offers, beside the node's stage.
        make: makes the memory.
        device: see Offer.
    """

    def __init__(self, folder: Path, slot: str, epoch: int, make: MakePlace, device: str = "") -> None:
        self._folder, self._slot, self._epoch, self._make, self._device = folder, slot, epoch, make, device
        self._stem = _stem(folder, slot, epoch)
        self._place: Place | None = None

    def offer(self, nbytes: int) -> None:
        """Let broadcasts of versions of this size be received here from now on.

        Raises:
            OutOfSpace: there is no room for the memory.
        """
        if self._place is not None and self._place.memory.nbytes == nbytes:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.close()
        name = self._slot.replace("/", "~")
        for earlier in self._folder.glob(f"{name}-*.*"):
            earlier.unlink(missing_ok=True)  # of incarnations before this one
        self._place = self._make(self._stem.with_suffix(".mem"), nbytes)
        self._stem.with_suffix(".pin").touch(0o600)
        mine = os.getpid()
        offer = Offer(self._slot, self._epoch, self._place.memory, mine, start_time(mine), self._device)
        _put(self._stem.with_suffix(".offer"), offer)

    def wait(self, record: VersionRecord) -> bool:
        """Whether this version was brought here; waits for a broadcast of it that is under way, while its sender
        lives, and no longer than it may take."""
        deadline = None
        while True:
            served = read_served(self._folder, record)
            if served is None or self._place is None or served.members.get(self._slot) != self._epoch:
                return False
            if served.over:
                return self._slot not in served.lost
            now = time.monotonic()
            deadline = now + served.timeout_s + GRACE_S if deadline is None else deadline
            if now > deadline or start_time(served.pid) != served.started:
                return False
            time.sleep(LOOK_EVERY_S)

    def copy_into(self, manifest: Manifest, into: memoryview) -> None:
        """Copy what lies in the memory, and hold it against the manifest's digests.

        Raises:
            Gone: a broadcast writes there again. Corrupt: it is not that version.
        """
        what = f"policy version {manifest.version} as it was broadcast"
        if self._place is None:
            raise Gone(what, why="no memory was offered")
        if (descriptor := _lock(self._stem.with_suffix(".pin"), fcntl.LOCK_SH)) < 0:
            raise Gone(what, why="a newer one is being received over it")
        try:
            self._place.copy_into(manifest, into)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Take the offer back."""
        _forget(self._stem)
        self._place = None


def _served_path(folder: Path, version: int) -> Path:
    return folder / f"b{version:08d}.served"


def read_served(folder: Path, record: VersionRecord) -> Served | None:
    """Whom the broadcast of a version serves; None: there is none."""
    try:
        served = msgspec.msgpack.decode(_served_path(folder, record.version).read_bytes(), type=Served)
    except _UNREADABLE:
        return None
    return served if served.digest == record.digest else None


class Taken:
    """The memories that a broadcast may write, until it is said how that ended."""

    def __init__(self, folder: Path, served: Served, offers: Mapping[str, Offer], locks: Mapping[str, int]) -> None:
        self._folder, self._served, self._locks = folder, served, dict(locks)
        self.offers = dict(offers)

    def over(self, lost: Mapping[str, str], barred: bool = False) -> None:
        """Say who has not got the version, and why; all others have.

        Args:
            barred: somebody may still write into the memories: they are not let go of, and not used again.
        """
        try:
            with suppress(OSError):  # who reads it no further waits until the time is over
                _put(
                    _served_path(self._folder, self._served.version),
                    msgspec.structs.replace(self._served, over=True, lost=dict(lost)),
                )
        finally:
            if not barred:
                for descriptor in self._locks.values():
                    os.close(descriptor)
            self._locks.clear()


class Offers:
    """The sender's side. Its calls block, for as long as a few small files take."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def standing(self) -> list[Offer]:
        """The offers of the engines that are there."""
        return [offer for _, offer in sorted(self._standing(), key=lambda one: one[0])]

    def take(
        self, version: int, digest: str, nbytes: int, timeout_s: float, among: Collection[str] | None = None
    ) -> Taken | None:
        """Take the memories of the engines that are there, and write down that they will be served. Call it before the
        commit. None: nobody is there, or the memory of all is being read.

        Args:
            nbytes: of what will be sent; memory of another size is left alone.
            among: the slots that can be served; None: all.
        """
        offers: dict[str, Offer] = {}
        locks: dict[str, int] = {}
        for path, offer in sorted(self._standing(), key=lambda one: one[0]):
            if among is not None and offer.slot not in among:
                continue
            if offer.memory.nbytes == nbytes and (lock := _lock(path.with_suffix(".pin"), fcntl.LOCK_EX)) >= 0:
                offers[offer.slot], locks[offer.slot] = offer, lock
        if not offers:
            return None
        mine, members = os.getpid(), {slot: offer.epoch for slot, offer in offers.items()}
        served = Served(version, digest, members, mine, start_time(mine), timeout_s)
        taken = Taken(self._folder, served, offers, locks)
        try:
            _put(_served_path(self._folder, version), served)
        except OSError:
            taken.over({})
            return None
        return taken

    def retire(self, committed: int) -> None:
        """Forget the broadcasts of the versions before the committed one."""
        for path in self._folder.glob("b*.served"):
            if int(path.stem[1:]) < committed:
                path.unlink(missing_ok=True)

    def _standing(self) -> Iterator[tuple[Path, Offer]]:
        for path in self._folder.glob("*.offer"):
            try:
                offer = msgspec.msgpack.decode(path.read_bytes(), type=Offer)
            except _UNREADABLE:
                continue
            if offer.alive:
                yield path, offer
            else:
                _forget(path.with_suffix(""))
