"""The run's event log: one JSON line an event, in segments, written by every process of the run and read by many.

Lines go to ``events/current.jsonl`` with one O_APPEND write each, so that writers never wait for one another.
The agent alone renames a full ``current.jsonl`` to ``events-000001.jsonl`` and removes the oldest segments.

A writer may be suspended for any time between its look at ``current.jsonl`` and its write, and the file may be renamed
meanwhile: its line then lands in a closed segment. So a writer holds a shared flock on the file from before that look
until after the write. A reader that gets the exclusive flock on a closed segment knows that it has no writer any
more: who locks it later finds it renamed and opens the new file. Both take the lock without waiting, so that a
suspended process blocks no other.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

CURRENT = "current.jsonl"
MAX_LINE_BYTES = 256 << 10
READ_BYTES = 2 * MAX_LINE_BYTES
POLL_BYTES = 32 << 20
"""Most that one poll of a follower reads."""
OPEN_TRIES = 100
"""Bounds a writer's attempts to open a file that is renamed each time before it is locked."""
_encoder = msgspec.json.Encoder(enc_hook=str)


class Appender:
    """Appends lines to a file that another process may rename; one write() a line. Thread-safe.

    A line that cannot be written (disk full) is counted in `lost`: a failing log must not end the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._fd = -1
        self._inode = 0
        self._torn = False
        self._lock = threading.Lock()

    def append(self, line: bytes) -> bool:
        """Write a line (without its newline). False: it was lost."""
        data = line + b"\n"
        with self._lock:
            try:
                self._open_current()
                try:
                    if self._torn:
                        data = b"\n" + data
                    self._torn = os.write(self._fd, data) != len(data)
                finally:
                    _unlock(self._fd)
            except OSError:
                self.lost += 1
                return False
            if self._torn:
                self.lost += 1
            return not self._torn

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _open_current(self) -> None:
        """Have `_fd` be the file at `path`, with a shared lock."""
        for _ in range(OPEN_TRIES):
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                self._inode = os.fstat(self._fd).st_ino
            # A reader's lock that excludes us is on a closed segment. The path is checked after the lock was taken.
            locked = _lock(self._fd, fcntl.LOCK_SH) is not False
            try:
                if locked and self.path.stat().st_ino == self._inode:
                    return
            except FileNotFoundError:
                pass
            os.close(self._fd)
            self._fd = -1
        raise OSError(f"{self.path} was renamed {OPEN_TRIES} times while it was opened")


def _lock(fd: int, kind: int) -> bool | None:
    """Lock an open file without waiting. False: another process holds the lock. None: no locks on this file system."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def has_no_writer(fd: int) -> bool | None:
    """Whether a renamed file has no Appender left. None: no locks on this file system."""
    locked = _lock(fd, fcntl.LOCK_EX)
    if locked:
        _unlock(fd)
    return locked


def _unlock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:
        return  # it was never locked; see _lock


class EventLog:
    """Appends a process's events to the run's event log.

    Args:
        run_dir: the run directory; ``events/`` is made in it.
        who: written into each line as ``by``: ``slot#epoch``, ``agent``, ``keeper``.
        segment_bytes, keep: size of a segment and how many closed ones are kept; used by `rotate`.
    """

    def __init__(self, run_dir: Path, who: str, segment_bytes: int = 16 << 20, keep: int = 64) -> None:
        self.directory = run_dir / "events"
        self.directory.mkdir(parents=True, exist_ok=True)
        self.who = who
        self.segment_bytes, self.keep = segment_bytes, keep
        self._out = Appender(self.directory / CURRENT)

    @property
    def lost(self) -> int:
        """Lines that could not be written."""
        return self._out.lost

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Append one event. Values unknown to JSON are written as strings; an overlong event is reduced to its kind."""
        head = {"t": time.time(), "m": time.monotonic(), "by": self.who, "kind": kind}
        line = _encoder.encode({**fields, **head} if fields.keys() & head.keys() else {**head, **fields})
        if len(line) > MAX_LINE_BYTES:
            line = _encoder.encode({**head, "cut_bytes": len(line)})
        self._out.append(line)

    def rotate(self) -> bool:
        """Close the current segment if it is full and remove the oldest above `keep`. Only the agent calls this."""
        current = self.directory / CURRENT
        try:
            if current.stat().st_size < self.segment_bytes:
                return False
        except FileNotFoundError:
            return False
        closed = segments(self.directory)
        last = int(closed[-1].stem.rpartition("-")[2]) if closed else 0
        current.rename(self.directory / f"events-{last + 1:06d}.jsonl")
        for old in segments(self.directory)[: -self.keep]:
            old.unlink(missing_ok=True)
        return True

    def close(self) -> None:
        """Release the file."""
        self._out.close()


def segments(directory: Path) -> list[Path]:
    """Closed segments of an events directory, oldest first."""
    return sorted(directory.glob("events-*.jsonl"))


def read_events(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Every event of a run that is still kept, in the order written. Torn lines are skipped.

    One line is held at a time, and a rotation in the meantime loses nothing.
    """
    directory = run_dir / "events"
    seen: set[str] = set()
    while True:
        for path in segments(directory):
            if path.name not in seen:
                seen.add(path.name)
                yield from _read_lines(_open(path))
        current = _open(directory / CURRENT)
        if all(path.name in seen for path in segments(directory)):
            yield from _read_lines(current)
            return
        # The file was renamed after the segments were listed: list them again.
        if current is not None:
            current.close()


def _open(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _read_lines(file: BinaryIO | None) -> Iterator[dict[str, Any]]:
    if file is None:
        return
    with file:
        skipping = False
        while line := file.readline(READ_BYTES):
            whole = line.endswith(b"\n")
            event = None if skipping else parse_line(line)
            # A line longer than any event (a block of zeros after a crash of the host) is skipped in parts.
            skipping = not whole and len(line) == READ_BYTES
            if event is not None:
                yield event


def parse_line(line: bytes) -> dict[str, Any] | None:
    """One line as an event; None when it is torn or empty."""
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, dict) else None


class EventFollower:
    """Reads a growing event log from its start, through rotations; `poll` returns what is new.

    A file that is being read stays open, so that no new file can take its inode. A closed segment is read at each poll
    until no writer holds it any more. On a file system without locks it is read once more after it was first seen
    closed, which loses the line of a writer that is suspended for longer.
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / "events"
        self._open: dict[int, BinaryIO] = {}
        self._rest: dict[int, bytes] = {}
        self._closed: set[str] = set()
        self._finished: set[str] = set()

    def poll(self) -> list[dict[str, Any]]:
        """Events written since the last poll; if there are very many, the oldest of them."""
        found: list[dict[str, Any]] = []
        closed = {path.name for path in segments(self._directory)}
        left = POLL_BYTES
        for name in [*sorted(closed - self._finished), CURRENT]:
            inode = self._find(self._directory / name)
            if inode is None:
                continue
            # Checked before the read, so that the read includes all that was written.
            unwritten = name != CURRENT and has_no_writer(self._open[inode].fileno())
            finished = name in self._closed if unwritten is None else unwritten
            data = self._open[inode].read(left)
            found += self._events(inode, data)
            left -= len(data)
            if left <= 0:
                break
            if finished:
                self._finished.add(name)
                self._rest.pop(inode, None)
                self._open.pop(inode).close()
        self._closed = closed
        self._finished &= closed
        return found

    def close(self) -> None:
        """Release the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _find(self, path: Path) -> int | None:
        try:
            inode = path.stat().st_ino
            if inode not in self._open:
                file = path.open("rb")
                inode = os.fstat(file.fileno()).st_ino
                if inode in self._open:
                    file.close()
                else:
                    self._open[inode] = file
        except FileNotFoundError:
            return None
        return inode

    def _events(self, inode: int, data: bytes) -> list[dict[str, Any]]:
        *lines, rest = (self._rest.pop(inode, b"") + data).split(b"\n")
        if rest:
            self._rest[inode] = rest[-MAX_LINE_BYTES:]
        return [event for line in lines if (event := parse_line(line)) is not None]
