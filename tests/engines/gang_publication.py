"""A publication beside a gang's next step, and a rank that is struck in the middle of one, with any backend."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gang_harness import Gang, samples

Built = Callable[..., Gang]
"""A gang with a backend that is made with these options."""


def check_overlap(gang: Gang, build: Callable[[], None], folder: Path, dtype: str) -> None:
    """What is published is the version, bit for bit, though its parts leave the ranks after the next step.

    Args:
        build: makes the backend anew.
    """
    build()
    batch = samples(8)
    layout, before = gang.call("export", dtype=dtype)[0]
    whole = gang.call("export")[0][1]
    wanted = gang.call("step", batches=[batch[:3], batch[3:]], count=40.0)[0]
    after = gang.call("export", dtype=dtype)[0][1]
    assert before != after

    build()
    found, *others = gang.call("overlapped", batch=batch, count=40.0, folder=folder, dtype=dtype)
    assert found["empty"], "all of it was gathered before the step"
    assert found["result"].grad_norm == wanted.grad_norm
    assert found["first"] == before
    assert found["second"] == after, "the gang ends when what it publishes is whole"
    assert 0 < sum(other["kept"] for other in others) < layout.nbytes
    # The checkpoint that was taken meanwhile is of before the step too.
    build()
    gang.call("restore", folder=folder)
    assert gang.call("export")[0][1] == whole


def check_thrown_away(gang: Gang, build: Callable[[], None], folder: Path) -> None:
    """A step that is not finite, beside a publication, changes neither it nor the next one."""
    build()
    before, poisoned = gang.call("export")[0][1], samples(8)
    assert poisoned[2].advantages is not None
    poisoned[2].advantages[-1] = np.nan
    found = gang.call("overlapped", batch=poisoned, count=40.0, folder=folder, dtype="float32")[0]
    assert not found["result"].applied and found["first"] == found["second"] == before


def check_struck(gang: Gang, *, seconds: float) -> dict[str, Any]:
    """The last rank is stopped in the middle: rank 0 says which one and where, and waits no longer than it may."""
    found: dict[str, Any] = gang.call_first("struck", how=signal.SIGSTOP, after=2)
    assert found["kind"] == "Unreachable" and "from rank 1: Timed out" in found["why"], found
    assert found["copied"], "rank 0's weights may change: its copy was made"
    assert seconds <= found["seconds"] < 60
    return found


def check_killed(gang: Gang) -> dict[str, Any]:
    """The last rank is killed in the middle."""
    found: dict[str, Any] = gang.call_first("struck", how=signal.SIGKILL, after=2)
    assert found["kind"] == "Unreachable" and "from rank 1" in found["why"] and "Connection " in found["why"], found
    assert found["seconds"] < 20, "nobody waits for the dead"
    return found


def check_no_room(gang: Gang) -> None:
    """The last rank cannot copy its weights: all hear of it."""
    found = gang.call_first("struck", how=None, after=0)
    assert "rank 1 could not copy its weights aside: MemoryError: no room for a copy" in found["why"], found
