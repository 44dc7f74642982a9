"""The run's metrics file: one JSON line a record, appended by any process of the run, and followed as it grows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.observe.events import Appender, has_no_writer, parse_line

METRICS = "metrics.jsonl"


def _plain(value: Any) -> Any:
    """Numpy and torch scalars as numbers."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


class MetricsLog:
    """Appends records to ``metrics.jsonl``.

    Args:
        run_dir: the run directory.
        who: written into each record as ``by``.
    """

    def __init__(self, run_dir: Path, who: str) -> None:
        self.who = who
        self._out = Appender(run_dir / METRICS)
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; ``t`` (wall-clock seconds), ``m`` (monotonic seconds) and ``by`` are added."""
        head = {"t": time.time(), "m": time.monotonic(), "by": self.who}
        self._out.append(self._encoder.encode({**head, **record}))

    def close(self) -> None:
        """Release the file."""
        self._out.close()


def read_metrics(run_dir: Path, kind: str = "") -> Iterator[dict[str, Any]]:
    """Records of a run in the order written, all or those of one kind. Torn lines are skipped."""
    try:
        file = (run_dir / METRICS).open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            record = parse_line(line)
            if record is not None and (not kind or record.get("kind") == kind):
                yield record


READ_BYTES = 256 << 10
LINE_BYTES = 1 << 20


class Tail:
    """Follows one file: `poll` returns the records that came since the last poll.

    A file that does not exist yet, is truncated, or is renamed and created anew is followed all the same; the renamed
    file is read to its end first. An unfinished last line waits for its rest.

    Args:
        path: the file.
        start: start at this `position` of an earlier Tail; at the file's start if it is shorter.
        last_bytes: start at most this far before the end of the file at the first poll; None: at its start.
        read_bytes: most bytes read in one poll.
        line_bytes: longest line; longer ones are skipped and counted in `skipped`.
    """

    def __init__(
        self,
        path: Path,
        *,
        start: int = 0,
        last_bytes: int | None = None,
        read_bytes: int = READ_BYTES,
        line_bytes: int = LINE_BYTES,
    ) -> None:
        self.path = path
        self.skipped = 0
        self._last_bytes = last_bytes
        self._read_bytes, self._line_bytes = read_bytes, line_bytes
        self._fd = -1
        self._inode = 0
        self._at = 0
        self._start = start
        self._rest = b""
        self._skipping = False

    @property
    def position(self) -> int:
        """Start of the first line that was not returned yet, in bytes."""
        return self._at - len(self._rest) if self._fd >= 0 else self._start

    def poll(self) -> list[dict[str, Any]]:
        """New records, in the order written; lines that are no JSON object are skipped."""
        if self._fd < 0 and not self._open():
            return []
        data = self._read()
        # Checked before the read: a replaced file without a writer does not grow.
        if not data and self._replaced() and has_no_writer(self._fd) is not False and not (data := self._read()):
            self.close()
            data = self._read() if self._open() else b""
        return self._records(data)

    def close(self) -> None:
        """Release the file. A later poll reads it from its start."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._rest, self._skipping = b"", False

    def _open(self) -> bool:
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._last_bytes, self._start = None, 0
            return False
        stat = os.fstat(self._fd)
        self._inode, self._at = stat.st_ino, self._start if self._start <= stat.st_size else 0
        self._start = 0
        if self._last_bytes is not None and stat.st_size > self._last_bytes:
            # One byte earlier: the first line is complete only if a newline precedes it.
            self._at = stat.st_size - self._last_bytes - 1
            self._skipping = True
        self._last_bytes = None
        return True

    def _read(self) -> bytes:
        if os.fstat(self._fd).st_size < self._at:
            self._at, self._rest, self._skipping = 0, b"", False
        data = os.pread(self._fd, self._read_bytes, self._at)
        self._at += len(data)
        return data

    def _replaced(self) -> bool:
        try:
            return self.path.stat().st_ino != self._inode
        except FileNotFoundError:
            return False

    def _records(self, data: bytes) -> list[dict[str, Any]]:
        if self._skipping:
            _, newline, data = data.partition(b"\n")
            if not newline:
                return []
            self._skipping = False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._line_bytes:
            self._rest, self._skipping = b"", True
            self.skipped += 1
        found = []
        for line in lines:
            if len(line) > self._line_bytes:
                self.skipped += 1
            elif (record := parse_line(line)) is not None:
                found.append(record)
        return found
