"""The cache folder of converted models: made once, seen complete or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_rt.transport.errors import DeadlineExceeded, RelaxError

BUILD_TIMEOUT_S = 900.0


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
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel releases it when the holder dies."""
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    say(f"another process prepares {path.with_suffix('').name}; waiting for it")
                    told = True
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"the lock {path}",
                        why=f"another process has held it for {timeout_s:.0f} s",
                        hint="see who with `fuser`; the lock goes when that process ends",
                    ) from None
                time.sleep(0.1)
        yield


def build_once(name: str, build: Callable[[Path], None], *, timeout_s: float = BUILD_TIMEOUT_S) -> Path:
    """The folder `name` of the cache, made by `build(empty folder)` unless it is there already.

    Two processes that ask at the same time build once; a build that dies leaves nothing that is taken for a model.

    Raises:
        RelaxError: the cache folder cannot be written.
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
        raise RelaxError(
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
