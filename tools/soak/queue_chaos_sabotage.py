"""Safeguards of the broker, switched off in its own process, to see that the checker of queue_chaos.py finds out."""

from __future__ import annotations

import threading
from typing import Any

from relax_rt.transport.base.journal import Journal
from relax_rt.transport.memory.block_table import BlockTable
from relax_rt.transport.queue.ledger.core import Core
from relax_rt.transport.queue.ledger.state import Callers

EXPECTED = {"journal": {"lost"}, "fence": {"fence"}, "pins": {"digest"}}
"""By sabotage: the checks of which at least one must fire."""


def apply(what: str) -> None:
    """Switch off a safeguard in this process."""
    if what == "journal":
        _acknowledge_first()
    elif what == "fence":
        Callers.check = lambda *_: None  # type: ignore[method-assign]
    elif what == "pins":
        BlockTable.pin = lambda *_: None  # type: ignore[method-assign]
        Core.unpin = lambda *_: None  # type: ignore[method-assign]
    elif what:
        raise ValueError(what)


def _acknowledge_first() -> None:
    """Records stay in memory until the next sync."""
    lock = threading.Lock()
    append, sync, rotate = Journal.append, Journal.sync, Journal.rotate
    later: list[tuple[int, bytes]] = []

    def flush(journal: Journal) -> None:
        with lock:
            records, later[:] = list(later), []
            if records:
                journal._n = records[0][0] - 1
            for n, payload in records:
                append(journal, n, payload)

    def append_later(journal: Journal, n: int, payload: bytes) -> None:
        with lock:
            later.append((n, payload))
            journal._n = n

    def flush_and_sync(journal: Journal) -> None:
        flush(journal)
        sync(journal)

    def flush_and_rotate(journal: Journal, snapshot: bytes) -> Any:
        flush(journal)
        return rotate(journal, snapshot)

    for name, patched in (("append", append_later), ("sync", flush_and_sync), ("rotate", flush_and_rotate)):
        setattr(Journal, name, patched)
