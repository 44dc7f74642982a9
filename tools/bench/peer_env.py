"""The interpreter of the peers' environment, and running a script of ours in it so that nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
MARK = "RELAX_PEER_RUN"
MISSING = "the peers are not measured: run `make peer-env`, or set RELAX_PEER_PYTHON to a Python that has them"


def interpreter() -> Path | None:
    """RELAX_PEER_PYTHON, else .peers/venv of this checkout; None if there is neither."""
    named = os.environ.get("RELAX_PEER_PYTHON")
    path = Path(named) if named else HERE.parent.parent / ".peers/venv/bin/python"
    return path if path.exists() else None


def run(script: str, arguments: list[str], *, timeout_s: float) -> str | None:
    """Standard output of peers/<script>; None, with the reason on stderr, if it failed or there is no interpreter."""
    python = interpreter()
    if python is None:
        print(MISSING, file=sys.stderr)
        return None
    mark = uuid.uuid4().hex
    # Not this folder: a file of ours in it has the name of a peer's package.
    folder = HERE / "peers"
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(python), str(folder / script), *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, timeout=timeout_s, stdout=subprocess.PIPE, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"peers/{script} was not done after {timeout_s:.0f} s", file=sys.stderr)
        return None
    finally:
        end_marked(mark)
    if done.returncode:
        print(f"peers/{script} failed with {done.returncode}", file=sys.stderr)
        return None
    return done.stdout


def end_marked(mark: str) -> None:
    """End what the peer left running: every process whose environment carries this run's mark."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = marked(mark)
        for process in left:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        deadline = time.monotonic() + 5
        while left and marked(mark) and time.monotonic() < deadline:
            time.sleep(0.05)


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found
