"""The process between a role and its inference server: nothing of the server outlives the role, its log is bounded.

``python -m relax_rt.roles.rollout.engines.sglang.guard --lifeline FD [--told FD] --log FILE --log-mib N -- <command>``
starts the command in a session of its own and pumps its output into the log. The lifeline is the reading end of a pipe
whose other end only the role has: when that is closed, by the role or by its death, the server and all its descendants
are killed (the guard is a subreaper). It writes the server's exit status to `--told` as soon as the server has ended,
cleans up, and ends with that status.

Standard library only: it starts in a fraction of a second and is small beside the server.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from relax_rt.process import procfs

GRACE_S = 20.0
TRACKERS_S = 5.0
LOOK_EVERY_S = 3.0
LOOK_AFTER_OUTPUT_S = 0.5
"""A server that says something may just have made shared memory; it may die of itself soon after."""
LOOK_APART_S = 0.2
"""Others on the machine make shared memory, too: looks for that reason are no closer than this."""
SHARED = Path("/dev/shm")
THEIRS = ("sem.mp-", "psm_", "torch_", "sglang")
"""Beginnings of names that multiprocessing, torch and SGLang give; others are nobody's business here."""
PIECE = 1 << 16
IN_CREATE, IN_MOVED_TO = 0x100, 0x80
EVENT = struct.Struct("iIII")
"""Of inotify: watch, what, cookie, length of the name behind it."""


class RotatingLog:
    """A file and its predecessor, each of `limit` bytes at most."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._limit = path, limit
        self._file: BinaryIO = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append; a disk that is full must not end the server."""
        try:
            if self._file.tell() + len(data) > self._limit:
                self._file.close()
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file = self._path.open("ab", buffering=0)
            self._file.write(data)
        except OSError:
            pass

    def close(self) -> None:
        """Nothing more comes."""
        self._file.close()


def main(argv: list[str] | None = None) -> int:
    """Entry point; answers with the exit status to leave with."""
    parser = argparse.ArgumentParser(prog="relax_rt.roles.rollout.engines.sglang.guard")
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--told", type=int, default=-1)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--log-mib", type=int, required=True)
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE of the server's environment")
    parser.add_argument("--unset", action="append", default=[], help="name that the server's environment lacks")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    procfs.become_subreaper()
    # Ctrl-C goes to the whole terminal: it is the role that says when the server ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SGLang's processes send it to their parent when they fail, and orphans of theirs are our children. A handler, not
    # SIG_IGN, which the server would inherit.
    signal.signal(signal.SIGQUIT, lambda *_: None)
    for descriptor in (options.lifeline, options.told):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    environment = {name: value for name, value in os.environ.items() if name not in options.unset}
    environment |= dict(pair.split("=", 1) for pair in options.set)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        preexec_fn=_die_with_guard,
    )
    shared: set[Segment] = set()
    try:
        status, ended = watch(server, options.lifeline, RotatingLog(options.log, options.log_mib << 20), shared)
        if ended and options.told >= 0:
            # Cleaning up takes seconds where a tracker is late.
            with suppress(OSError):
                os.write(options.told, b"%d" % status)
        return status
    finally:
        end_all(shared)


Segment = tuple[int, int]
"""Device and inode of a file in shared memory. A semaphore is made under another name than it gets, and whoever made it
has it mapped under that one, deleted: the inode alone says that it is the same."""


def look(shared: set[Segment]) -> set[int]:
    """Add the shared memory of all descendants; answers with those that work."""
    left = {pid for pid in procfs.descendants(os.getpid()) if not is_tracker(pid)}
    for pid in left:
        shared |= shared_memory(pid)
    return left


def end_all(shared: set[Segment]) -> None:
    """Kill all descendants, and remove the shared memory that only they knew of.

    Args:
        shared: what was seen of it while they lived: one that dies first leaves it to nobody.
    """

    def workers() -> set[int]:
        return look(shared)

    procfs.kill_until_none(workers, reap=True, limit_s=GRACE_S)
    # multiprocessing's own trackers remove semaphores once all who used them are gone, and end.
    end = time.monotonic() + TRACKERS_S
    while procfs.descendants(os.getpid()) and time.monotonic() < end:
        procfs.reap_all()
        time.sleep(0.01)
    procfs.kill_until_none(lambda: procfs.descendants(os.getpid()), reap=True, limit_s=GRACE_S)
    remove(shared)


def told_of_new() -> int:
    """A descriptor that is readable once something is made in shared memory; -1 where the kernel gives none."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor >= 0 and libc.inotify_add_watch(descriptor, os.fsencode(SHARED), IN_CREATE | IN_MOVED_TO) < 0:
        os.close(descriptor)
        return -1
    return descriptor


def new_one(descriptor: int) -> bool:
    """Whether something was made that may be the server's: whoever makes a semaphore has it mapped by then."""
    found, at = False, 0
    with suppress(BlockingIOError):
        events = os.read(descriptor, PIECE)
        while at < len(events):
            length = EVENT.unpack_from(events, at)[3]
            at += EVENT.size + length
            # torch's names come and go by the thousand where anybody loads data, and last no longer than who has them.
            name = os.fsdecode(events[at - length : at].rstrip(b"\0"))
            found = found or (name.startswith(THEIRS) and not name.startswith("torch_"))
    return found


def remove(shared: set[Segment]) -> None:
    """Remove what is left of these under names that are the server's to give."""
    for path in SHARED.iterdir():
        with suppress(OSError):
            found = path.lstat()
            if path.name.startswith(THEIRS) and (found.st_dev, found.st_ino) in shared:
                path.unlink()


def is_tracker(pid: int) -> bool:
    """Whether this is a resource tracker of multiprocessing."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def shared_memory(pid: int) -> set[Segment]:
    """What this process has mapped that lies, or was made, in /dev/shm itself, not in a run's folder."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    found: set[Segment] = set()
    for line in maps.splitlines():
        # address, permissions, offset, device, inode, path
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5].removesuffix(" (deleted)")).parent == SHARED:
            major, minor = fields[3].split(":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return found


def _die_with_guard() -> None:
    procfs.prctl(procfs.PR_SET_PDEATHSIG, signal.SIGKILL)


def watch(server: subprocess.Popen[bytes], lifeline: int, log: RotatingLog, shared: set[Segment]) -> tuple[int, bool]:
    """Pump the log until the server has ended or the role wants it to; the exit status, and whether it has ended."""
    last_look = time.monotonic()
    next_look = last_look + LOOK_EVERY_S
    assert server.stdout is not None
    output = server.stdout.fileno()
    ended, news = os.pidfd_open(server.pid), told_of_new()
    with selectors.DefaultSelector() as selector:
        for descriptor in (output, ended, lifeline, news):
            if descriptor >= 0:
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select(max(0.0, next_look - time.monotonic()))}
            if news in ready and new_one(news):
                next_look = min(next_look, last_look + LOOK_APART_S)
            if time.monotonic() >= next_look:
                look(shared)
                last_look = time.monotonic()
                next_look = last_look + LOOK_EVERY_S
            if output in ready:
                if _pump(output, log):
                    next_look = min(next_look, time.monotonic() + LOOK_AFTER_OUTPUT_S)
                else:
                    selector.unregister(output)
            if ended in ready:
                while _pump(output, log):
                    pass
                return _status(server.wait()), True
            if lifeline in ready:
                # Weights and cache are the role's to write again: there is nothing that the server could save.
                return 0, False


def _pump(output: int, log: RotatingLog) -> bool:
    """Move what is there into the log; False when there is nothing, or nothing more to come."""
    try:
        data = os.read(output, PIECE)
    except BlockingIOError:
        return False
    log.write(data)
    return bool(data)


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
