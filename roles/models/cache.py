"""The cache folder of converted models and indices: each entry is built once and visible only when complete."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_rt.transport.rpc.errors import DeadlineExceeded, RelaxError

BUILD_TIMEOUT_S = 900.0
TELL_EVERY_S = 15.0
SHOWN_COMMAND = 80
STAGE_REPEAT_S = 10.0


class CacheUnavailable(RelaxError):
    """The cache folder cannot be created or written."""


def cache_dir() -> Path:
    """`$RELAX_CACHE`, else `$XDG_CACHE_HOME/relax-rt`, else `~/.cache/relax-rt`."""
    if named := os.environ.get("RELAX_CACHE"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "relax-rt"


def say(line: str) -> None:
    """One line of progress on standard error, for work that takes seconds before any screen exists."""
    sys.stderr.write(f"relax-rt: {line}\n")
    sys.stderr.flush()


@contextmanager
def stage(what: str, repeat_s: float = STAGE_REPEAT_S) -> Iterator[None]:
    """Print to standard error what the block does when it starts, and again every `repeat_s` seconds."""
    say(f"{what}…")
    began, over = time.monotonic(), threading.Event()

    def repeat() -> None:
        while not over.wait(repeat_s):
            say(f"{what}… {time.monotonic() - began:.0f} s so far")

    thread = threading.Thread(target=repeat, name="relax-stage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel releases it when the holder dies. The file says who holds it."""
    began = time.monotonic()
    # Opened without truncation: the file names the holder.
    with path.open("a+") as file:
        tell_at = 0.0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
                if waited > timeout_s:
                    raise DeadlineExceeded(
                        f"the lock {path}",
                        why=f"waited {timeout_s:.0f} s for {_holder(path)}",
                        hint="the lock goes when that process ends",
                    ) from None
                if waited >= tell_at:
                    so_far = f" ({waited:.0f} s so far)" if tell_at else ""
                    say(f"waiting for {_holder(path)}, which prepares {path.with_suffix('').name}{so_far}")
                    tell_at += TELL_EVERY_S
                time.sleep(0.1)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}))
        file.flush()
        yield


def _holder(path: Path) -> str:
    """Describe the holder of a lock and since when. The file may still name the previous holder, or none."""
    try:
        holder = json.loads(path.read_text())
        pid, host, since = int(holder["pid"]), str(holder["host"]), float(holder["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
    if host != socket.gethostname():
        # The folder may be on a disk that several machines share.
        return f"process {pid} on {host}{_since(since)}"
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "another process"
    return f"process {pid}{_since(since)} ({' '.join(command.split())[:SHOWN_COMMAND]})"


def _since(since: float) -> str:
    return f", since {time.strftime('%H:%M:%S', time.localtime(since))}"


def build_once(name: str, build: Callable[[Path], None], *, timeout_s: float = BUILD_TIMEOUT_S) -> Path:
    """Return the folder `name` of the cache, made by `build(empty folder)` unless it is there already.

    Two processes that ask at the same time build once; a build that dies leaves nothing that is taken for a model.

    Raises:
        CacheUnavailable: the cache folder cannot be written.
        DeadlineExceeded: another process builds it for longer than timeout_s.
    """
    target = cache_dir() / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.parent / f"{name}.lock"
        lock.touch()
    except OSError as error:
        raise CacheUnavailable(
            f"the cache folder {target.parent}", why=str(error), hint="set RELAX_CACHE to a folder you can write"
        ) from error
    with _locked(lock, timeout_s):
        if target.is_dir():
            return target
        partial = target.parent / f".{name}.partial"
        # Under the lock a leftover can only be that of a builder that died.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            build(partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target
