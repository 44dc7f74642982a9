"""Logging of the runtime's processes: structlog and the standard library's logging, both to stderr."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import TextIO, cast

import structlog


class LossyStream:
    """A stream of log lines that never fails its writer: lines that cannot be written (disk full) are counted in
    `lost`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost = 0

    def write(self, text: str) -> int:
        """Write; returns as if it had succeeded."""
        try:
            self._stream.write(text)
        except (OSError, ValueError):
            self.lost += 1
        return len(text)

    def flush(self) -> None:
        """Flush, ignoring errors."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self.lost += 1


def open_log(path: Path) -> TextIO:
    """A log file to append to, unbuffered, so that nothing is left to write when it is closed."""
    return io.TextIOWrapper(path.open("ab", buffering=0), errors="backslashreplace", write_through=True)


def setup_logging(level: str = "info", stream: TextIO | None = None) -> None:
    """Log lines (time, level, event, key=value) to a stream, stderr if none; libraries' own loggers from warning on.
    Lines that cannot be written are dropped (LossyStream)."""
    stream = cast(TextIO, LossyStream(stream or sys.stderr))
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(
        level=max(number, logging.WARNING),
        stream=stream,
        format="%(asctime)s [%(levelname)-8s] %(name)s: %(message)s",
        force=True,
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
