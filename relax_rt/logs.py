"""Logging of the runtime's processes: structlog and the standard library's logging, both to stderr."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog


def setup_logging(level: str = "info", stream: TextIO | None = None) -> None:
    """Log lines (time, level, event, key=value) to a stream, stderr if none; libraries' own loggers from warning on."""
    stream = stream or sys.stderr
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
