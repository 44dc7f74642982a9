"""The guard between an owner and its server: nothing of the server outlives the owner, and its log is bounded.

``python -m relax_rt.process.guard --lifeline FD [--status FD] --log FILE --log-mib N -- <command>`` starts the command
in a session of its own and copies its output into the log. The lifeline is the reading end of a pipe whose other end
only the owner has: when that is closed, by the owner or by its death, the server and all its descendants are killed
(the guard is a subreaper). The guard writes the server's exit status to `--status` as soon as the server has ended,
cleans up, and ends with that status.

Servers with multiprocessing or torch leave shared memory behind when they are killed: segments are removed that only
the server's processes had mapped, see `SharedMemory`.

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
from functools import partial
from pathlib import Path
from typing import BinaryIO

from relax_rt.process import procfs

KILL_TIMEOUT_S = 20.0
TRACKERS_TIMEOUT_S = 5.0
SCAN_EVERY_S = 3.0
SCAN_AFTER_OUTPUT_S = 0.5
"""A server that prints something may just have created shared memory; it may die of itself soon after."""
SCAN_APART_S = 0.2
"""Others on the machine create shared memory, too: scans for that reason are no closer than this."""
SHM_ROOT = Path("/dev/shm")
SHM_PREFIXES = ("sem.mp-", "psm_", "torch_")
"""Beginnings of the names that multiprocessing and torch give."""
CHUNK_BYTES = 1 << 16
IN_CREATE, IN_MOVED_TO = 0x100, 0x80
INOTIFY_EVENT = struct.Struct("iIII")
"""Watch, mask, cookie, length of the name behind it."""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="relax_rt.process.guard")
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--status", type=int, default=-1)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--log-mib", type=int, required=True)
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE of the server's environment")
    parser.add_argument("--unset", action="append", default=[], help="name that the server's environment lacks")
    parser.add_argument("--shm-prefix", action="append", default=[], help="of the server's own names in /dev/shm")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    procfs.become_subreaper()
    # Ctrl-C goes to the whole terminal: the owner decides when the server ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SGLang's processes send it to their parent when they fail, and we adopt their orphans. A handler, not SIG_IGN,
    # which the server would inherit.
    signal.signal(signal.SIGQUIT, lambda *_: None)
    for descriptor in (options.lifeline, options.status):
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
        preexec_fn=partial(procfs.prctl, procfs.PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    shared = SharedMemory((*SHM_PREFIXES, *options.shm_prefix))
    try:
        status, ended = watch(server, options.lifeline, RotatingLog(options.log, options.log_mib << 20), shared)
        if ended and options.status >= 0:
            # Before the clean-up, which takes seconds where a resource tracker is late.
            with suppress(OSError):
                os.write(options.status, b"%d" % status)
        return status
    finally:
        end_all(shared)


class RotatingLog:
    """A file and its predecessor, each of `limit` bytes at most. Unlike `child.rotate_log` it is the only writer."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._limit = path, limit
        self._file: BinaryIO = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append; a full disk must not end the server."""
        try:
            if self._file.tell() + len(data) > self._limit:
                self._file.close()
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file = self._path.open("ab", buffering=0)
            self._file.write(data)
        except OSError:
            pass

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def watch(server: subprocess.Popen[bytes], lifeline: int, log: RotatingLog, shared: SharedMemory) -> tuple[int, bool]:
    """Copy the server's output until it ends or the lifeline closes; return the status, and whether it ended."""
    last_scan = time.monotonic()
    next_scan = last_scan + SCAN_EVERY_S
    assert server.stdout is not None
    output = server.stdout.fileno()
    ended = os.pidfd_open(server.pid)
    with selectors.DefaultSelector() as selector:
        for descriptor in (output, ended, lifeline, shared.created):
            if descriptor >= 0:
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select(max(0.0, next_scan - time.monotonic()))}
            if shared.created in ready and shared.read_created():
                next_scan = min(next_scan, last_scan + SCAN_APART_S)
            if time.monotonic() >= next_scan:
                shared.scan()
                last_scan = time.monotonic()
                next_scan = last_scan + SCAN_EVERY_S
            if output in ready:
                if _copy(output, log):
                    next_scan = min(next_scan, time.monotonic() + SCAN_AFTER_OUTPUT_S)
                else:
                    selector.unregister(output)
            if ended in ready:
                while _copy(output, log):
                    pass
                code = server.wait()
                return (code if code >= 0 else 128 - code), True
            if lifeline in ready:
                # The owner holds whatever the server knows: it has nothing to save.
                return 0, False


def _copy(output: int, log: RotatingLog) -> bool:
    """Copy what is there into the log; False when there is nothing, or nothing more to come."""
    try:
        data = os.read(output, CHUNK_BYTES)
    except BlockingIOError:
        return False
    log.write(data)
    return bool(data)


def end_all(shared: SharedMemory) -> None:
    """Kill all descendants, and remove the shared memory that only they had mapped."""
    procfs.kill_until_none(shared.scan, reap=True, limit_s=KILL_TIMEOUT_S)
    # multiprocessing's own trackers remove semaphores once all who used them are gone, and end.
    end = time.monotonic() + TRACKERS_TIMEOUT_S
    while procfs.descendants(os.getpid()) and time.monotonic() < end:
        procfs.reap_all()
        time.sleep(0.01)
    procfs.kill_until_none(lambda: procfs.descendants(os.getpid()), reap=True, limit_s=KILL_TIMEOUT_S)
    shared.remove()


class SharedMemory:
    """The shared memory that descendants of this process have mapped, recorded while they live.

    The segments of a process that dies first are mapped by none, so they are looked up in its mappings beforehand. A
    semaphore is created under another name than it gets, and its creator has it mapped under that one, deleted: only
    device and inode identify it.

    Args:
        prefixes: of names that may be removed.
    """

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        self._prefixes = prefixes
        self._segments: set[tuple[int, int]] = set()
        """Device and inode of each."""
        libc = ctypes.CDLL(None, use_errno=True)
        self.created: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        """A descriptor that is readable once a file was created in /dev/shm; -1: the kernel has none to give."""
        mask = IN_CREATE | IN_MOVED_TO
        if self.created >= 0 and libc.inotify_add_watch(self.created, os.fsencode(SHM_ROOT), mask) < 0:
            os.close(self.created)
            self.created = -1

    def scan(self) -> set[int]:
        """Record what all descendants have mapped; return those that are no resource trackers."""
        workers = {pid for pid in procfs.descendants(os.getpid()) if not is_tracker(pid)}
        for pid in workers:
            self._segments |= mapped_segments(pid)
        return workers

    def read_created(self) -> bool:
        """Return whether a file was created that may be the server's: a semaphore's creator has it mapped by then."""
        found, at = False, 0
        with suppress(BlockingIOError):
            events = os.read(self.created, CHUNK_BYTES)
            while at < len(events):
                length = INOTIFY_EVENT.unpack_from(events, at)[3]
                at += INOTIFY_EVENT.size + length
                # torch's files come and go by the thousand where anybody loads data, and end with who has them.
                name = os.fsdecode(events[at - length : at].rstrip(b"\0"))
                found = found or (name.startswith(self._prefixes) and not name.startswith("torch_"))
        return found

    def remove(self) -> None:
        """Remove the recorded segments that are left."""
        for path in SHM_ROOT.iterdir():
            with suppress(OSError):
                found = path.lstat()
                if path.name.startswith(self._prefixes) and (found.st_dev, found.st_ino) in self._segments:
                    path.unlink()


def is_tracker(pid: int) -> bool:
    """Return whether this is a resource tracker of multiprocessing."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def mapped_segments(pid: int) -> set[tuple[int, int]]:
    """Return what this process has mapped that is, or was created, in /dev/shm itself, not in a run's folder."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    found: set[tuple[int, int]] = set()
    for line in maps.splitlines():
        # address, permissions, offset, device, inode, path
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5].removesuffix(" (deleted)")).parent == SHM_ROOT:
            major, minor = fields[3].split(":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return found


if __name__ == "__main__":
    sys.exit(main())
