"""What hostile code might leave behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from relax_rt.process.sandbox import DIR_PREFIX

DEADLINE_S = 120


def with_word(word: str) -> list[int]:
    """Living processes whose command line or environment has a word."""
    return [pid for pid in _pids() if pid != os.getpid() and word.encode() in _texts(pid)]


def workers(word: str) -> list[int]:
    """Processes among them that call reward functions."""
    return [pid for pid in with_word(word) if b"rewards.worker\0" in _texts(pid)]


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _texts(pid: int) -> bytes:
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            return b""
        return Path(f"/proc/{pid}/cmdline").read_bytes() + b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _sandbox_dirs() -> list[str]:
    return [str(path) for path in Path(DIR_PREFIX).parent.glob(Path(DIR_PREFIX).name + "*")]


def nothing_left(word: str) -> None:
    """Wait until no process has the word any more, and no folder of a box is there."""
    end = time.monotonic() + DEADLINE_S
    while (left := [*with_word(word), *_sandbox_dirs()]) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left


def until_started(word: str) -> None:
    """Wait until a process of a box has the word in its command line: the program itself, or what it is started by."""
    end = time.monotonic() + DEADLINE_S
    while not with_word(word):
        assert time.monotonic() < end, "no program was started"
        time.sleep(0.01)
