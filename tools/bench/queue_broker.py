"""The broker of the queue benchmarks: a process of its own, journal on, ended with the block."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

STOPPING_S = 30.0


def stop(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Ask it to end, then make it."""
    process.terminate()
    try:
        process.wait(STOPPING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def broker(tasks: Mapping[str, Sequence[str]], *, capacity_mib: int) -> Iterator[tuple[Path, psutil.Process]]:
    """A broker whose tasks read these fields: its folder, and its process to look at.

    capacity_mib: payload in memory from which on producers wait.
    """
    with tempfile.TemporaryDirectory(prefix="queue-bench-") as name:
        command = [sys.executable, "-m", "relax_rt.transport.queue", name, "--capacity-mib", str(capacity_mib)]
        for task, fields in tasks.items():
            command += ["--task", f"{task}={','.join(fields)}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield Path(name), psutil.Process(process.pid)
        finally:
            stop(process)


def journal_bytes(folder: Path) -> int:
    """Of all segments and snapshots there are now."""
    return sum(path.stat().st_size for pattern in ("segment-*", "snapshot-*") for path in folder.rglob(pattern))
