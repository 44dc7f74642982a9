"""Append-only journal with snapshots, for brokers: a record survives the death of the process at any byte.

Folder layout: ``snapshot-<n>.bin`` holds the state after record n, ``segment-<n>.log`` the records from n on.
A record is length (u32), crc32 (u32), payload. `append` returns after write(), which survives the death of any
process; `sync` forces to disk, which survives the host's, and is called now and then off the event loop.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from relax_rt.transport.rpc.errors import Corrupt, OutOfSpace

_VERSION = 2
MAGIC = b"RLXJ" + _VERSION.to_bytes(4)
MAX_RECORD_BYTES = 256 << 20
"""More than the largest message can become when its defaults are written out."""
_HEADER = struct.Struct("<II")


SEGMENT_BYTES = 4 << 20
SNAPSHOT_RECORDS = 2000
"""A restarted broker replays at most about so many records (0.1 ms each) before it answers; its clients wait."""
SNAPSHOT_SHARE = 4
"""A snapshot of a large state is written only when the segment has this many times its bytes."""


class Recovered(msgspec.Struct, frozen=True):
    """What a journal held.

    Attributes:
        snapshot: newest snapshot, empty if there is none.
        n: sequence number of the last record that the snapshot covers.
        records: number and payload of the records after it, in order.
        torn_bytes: bytes cut off the end: a record whose writing was interrupted, never acknowledged.
    """

    snapshot: bytes
    n: int
    records: list[tuple[int, bytes]]
    torn_bytes: int = 0


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _frame(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def _sync_dir(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Journal:
    """Not thread-safe, except that `sync` and the returned half of `rotate` may run in another thread.

    Args:
        folder: created if it is not there (0700).
        segment_bytes: from this size on, or from SNAPSHOT_RECORDS records on, `wants_snapshot` is true.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder, self._segment_bytes = folder, segment_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = -1
        self._size = 0
        self._n = 0
        self._begins = 1
        """Number of the first record of the present segment."""
        self._rotating = False
        self.snapshots = 0
        """Snapshots made by this process."""
        self.snapshot_bytes = 0
        """Size of the newest one."""

    @property
    def n(self) -> int:
        return self._n

    @property
    def nbytes(self) -> int:
        return self._size

    @property
    def wants_snapshot(self) -> bool:
        """The segment has grown past its bound, and no rotation is under way."""
        if self._rotating:
            return False
        # At least as much journal as snapshot, so that a large state is not written over and over.
        large = self._size >= max(self._segment_bytes, self.snapshot_bytes)
        many = self._n - self._begins + 1 >= SNAPSHOT_RECORDS
        return large or (many and self._size >= SNAPSHOT_SHARE * self.snapshot_bytes)

    def recover(self) -> Recovered:
        """Read everything back, cut off a torn tail, and be ready to append.

        Raises:
            Corrupt: a record in the middle is damaged, or records are missing: acknowledged events are lost.
        """
        for path in self._folder.glob("*.tmp"):
            path.unlink()
        n, snapshot = 0, b""
        if snapshots := sorted(self._folder.glob("snapshot-*.bin"), key=_number):
            data = snapshots[-1].read_bytes()
            n, snapshot = _number(snapshots[-1]), data[_HEADER.size :]
            if len(data) < _HEADER.size or _HEADER.unpack_from(data) != (len(snapshot), zlib.crc32(snapshot)):
                raise Corrupt(f"snapshot {snapshots[-1]}", why="its bytes do not match its checksum")
        records: list[tuple[int, bytes]] = []
        torn = 0
        segments = sorted(self._folder.glob("segment-*.log"), key=_number)
        first = max([_number(path) for path in segments if _number(path) <= n + 1], default=n + 1)
        last = n
        for path in segments:
            if _number(path) < first:
                continue
            if _number(path) > last + 1:
                raise Corrupt(f"journal {self._folder}", why=f"records {last + 1} to {_number(path) - 1} are missing")
            at = _number(path)
            payloads, torn = self._read(path, is_last=path == segments[-1])
            for number, payload in enumerate(payloads, at):
                if number > n:
                    records.append((number, payload))
            last = max(last, at + len(payloads) - 1)
        self._n = last
        self.snapshot_bytes = len(snapshot)
        self._open(segments[-1] if segments else self._segment_path(last + 1))
        _sync_dir(self._folder)
        self._remove_before(first, n)
        return Recovered(snapshot, n, records, torn)

    def _read(self, path: Path, *, is_last: bool) -> tuple[list[bytes], int]:
        data = path.read_bytes()
        if data[: len(MAGIC)] != MAGIC:
            if not is_last or not MAGIC.startswith(data.rstrip(b"\0")):
                is_other = len(data) >= len(MAGIC) and data[:4] == MAGIC[:4]
                version = f"it is of version {int.from_bytes(data[4:8])}, this process reads {_VERSION}"
                raise Corrupt(
                    f"journal segment {path}",
                    why=version if is_other else "it does not begin as one",
                    hint="relax-rt 0.1 wrote version 1: begin in a new run directory" if is_other else "",
                )
            path.write_bytes(MAGIC)
            return [], len(data)
        payloads: list[bytes] = []
        at = len(MAGIC)
        for end, payload in _records(data, at):
            payloads.append(payload)
            at = end
        torn = len(data) - at
        if torn:
            if not is_last or not _is_torn(data, at):
                raise Corrupt(
                    f"journal segment {path}",
                    why=f"the record at byte {at} is damaged and others follow it",
                    hint="acknowledged events are lost; start from a checkpoint with a new run directory",
                )
            os.truncate(path, at)
        return payloads, torn

    def append(self, n: int, payload: bytes) -> None:
        """Add record n, which must follow the last one. When it returns, no process's death loses the record.

        Raises:
            OutOfSpace: it could not be written; the journal must be recovered before it is used again.
        """
        if n != self._n + 1 or self._fd < 0 or len(payload) > MAX_RECORD_BYTES:
            raise Corrupt(
                f"journal record {n} of {len(payload)} bytes", why=f"the last one is {self._n}, open: {self._fd >= 0}"
            )
        frame = _frame(payload)
        try:
            written = os.write(self._fd, frame)
        except OSError as error:
            self._broken()
            raise OutOfSpace(f"journal {self._folder}", why=str(error), hint="make room on its disk") from error
        if written != len(frame):
            self._broken()
            raise OutOfSpace(f"journal {self._folder}", why=f"only {written} of {len(frame)} bytes were written")
        self._n = n
        self._size += len(frame)

    def _broken(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def sync(self) -> None:
        """Force to disk what was appended. Blocks; for a thread."""
        fd = os.dup(self._fd)
        try:
            if os.fstat(fd).st_nlink == 0:
                raise Corrupt(f"journal {self._folder}", why="its file was removed while it was in use")
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def rotate(self, snapshot: bytes) -> Callable[[], None]:
        """Begin a new segment; `snapshot` is the state after the last record.

        The returned half writes the snapshot and then removes what it replaces. It blocks: run it in a thread.
        Until it is done, recovery uses the older snapshot and all segments since.
        """
        n, old = self._n, self._fd
        self._open(self._segment_path(n + 1))
        self._rotating = True

        def finish() -> None:
            try:
                os.fdatasync(old)
                os.close(old)
                temporary = self._folder / f"snapshot-{n}.tmp"
                with temporary.open("wb") as file:
                    file.write(_frame(snapshot))
                    file.flush()
                    os.fsync(file.fileno())
                temporary.rename(self._folder / f"snapshot-{n}.bin")
                _sync_dir(self._folder)
                self._remove_before(n + 1, n)
                self.snapshots += 1
                self.snapshot_bytes = len(snapshot)
            finally:
                self._rotating = False

        return finish

    def _segment_path(self, n: int) -> Path:
        return self._folder / f"segment-{n}.log"

    def _open(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._begins = _number(path)
        self._fd = os.open(path, flags, 0o600)
        self._size = os.fstat(self._fd).st_size
        if self._size == 0:
            self._size = os.write(self._fd, MAGIC)

    def _remove_before(self, segment: int, snapshot: int) -> None:
        for path in self._folder.glob("segment-*.log"):
            if _number(path) < segment:
                with suppress(FileNotFoundError):
                    path.unlink()
        for path in self._folder.glob("snapshot-*.bin"):
            if _number(path) < snapshot:
                with suppress(FileNotFoundError):
                    path.unlink()

    def close(self) -> None:
        if self._fd >= 0:
            os.fdatasync(self._fd)
            os.close(self._fd)
            self._fd = -1


def _records(data: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """Whole records from byte `at` on: where each ends, and its payload."""
    while at + _HEADER.size <= len(data):
        length, crc = _HEADER.unpack_from(data, at)
        end = at + _HEADER.size + length
        if not 0 < length <= MAX_RECORD_BYTES or end > len(data):
            return
        payload = data[at + _HEADER.size : end]
        if zlib.crc32(payload) != crc:
            return
        yield end, payload
        at = end


def _is_torn(data: bytes, at: int) -> bool:
    """Whether what follows byte `at` is the start of one interrupted record, or zeros left by a crash of the host."""
    rest = data[at:]
    if len(rest) < _HEADER.size or not rest.strip(b"\0"):
        return True
    length, _ = _HEADER.unpack_from(rest)
    if not 0 < length <= MAX_RECORD_BYTES:
        return False
    return bool(_HEADER.size + length >= len(rest))
