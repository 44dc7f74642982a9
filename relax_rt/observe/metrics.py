"""The run's metrics file: one JSON line a record, appended with one write each by any process of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.observe.events import Appender, parse_line

METRICS = "metrics.jsonl"


def _plain(value: Any) -> Any:
    """Numpy and torch scalars are written as the numbers they hold."""
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
    """Records of a run in the order written, all or those of one kind. Torn lines are passed over."""
    try:
        file = (run_dir / METRICS).open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            record = parse_line(line)
            if record is not None and (not kind or record.get("kind") == kind):
                yield record
