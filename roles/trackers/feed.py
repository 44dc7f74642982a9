"""One sink and how far it has come in the metrics file. A mark beside its files lets a resumed run go on there."""

from __future__ import annotations

from pathlib import Path

import msgspec

from relax_rt.observe.metrics import METRICS, Tail
from relax_rt.roles.trackers.scalars import Scalars
from relax_rt.roles.trackers.sinks import Sink

MARK = "relax-mark.json"
READ_BYTES, LINE_BYTES = 1 << 20, 16 << 20
"""Of one turn, and of one record: what is held in memory."""


class Mark(msgspec.Struct, frozen=True):
    """Bytes of the metrics file that were told, and the last step among them."""

    bytes: int = 0
    step: int = 0


class Feed:
    """Moves what is new in the metrics file to a sink.

    Args:
        folder: of the sink's files. Without a mark in it everything is told from the start.
    """

    def __init__(self, run_dir: Path, folder: Path, sink: Sink) -> None:
        self.sink, self._path = sink, folder / MARK
        mark = read_mark(self._path)
        self._tail = Tail(run_dir / METRICS, start=mark.bytes, read_bytes=READ_BYTES, line_bytes=LINE_BYTES)
        self._scalars = Scalars(mark.step)
        self._marked = mark

    @property
    def skipped(self) -> int:
        """Records that were too long."""
        return self._tail.skipped

    def turn(self) -> int:
        """Tell some of what is new; answers with the bytes done, 0 if there is nothing.

        Raises:
            Exception: whatever the sink, or writing the mark, raises.
        """
        points = [point for record in self._tail.poll() if (point := self._scalars.take(record)) is not None]
        if points:
            self.sink.write(points)
        mark = Mark(self._tail.position, self._scalars.step)
        done = mark.bytes - self._marked.bytes
        if mark != self._marked:
            # Points between the sink's write and this one are told again after a crash: the same numbers twice.
            fresh = self._path.with_name(f".{MARK}")
            fresh.write_bytes(msgspec.json.encode(mark))
            fresh.replace(self._path)
            self._marked = mark
        return abs(done)

    def close(self) -> None:
        """Release the files."""
        self._tail.close()
        self.sink.close()


def read_mark(path: Path) -> Mark:
    """What was told before; nothing, if there is no mark or it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Mark)
    except (OSError, msgspec.DecodeError):
        return Mark()
